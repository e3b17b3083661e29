"""Drafts go through the target's own rows: they do not train, files record that, and `lm_head=trained` lets them learn."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM

from foredraft.heads import Target
from foredraft.heads.checkpoint import read_head, save_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.vocab import most_frequent
from foredraft.train.publish import stage
from foredraft.train.start import init_from
from tests.support.batches import batch, packed
from tests.support.head_factory import build_head, criterion

PROJECTING = ["dflash pruned", "eagle3", "eagle3_1", "hydra", "hydra_pp", "p_eagle"]
SMALL = {"dflash pruned": {"kind": "dflash", "num_hidden_layers": 1}, "p_eagle": {"num_hidden_layers": 2}}


def new_head(kind, target, **overrides):
    return build_head(target=target, **{"kind": kind, "draft_vocab_size": 200} | SMALL.get(kind, {}) | overrides)


@pytest.mark.parametrize("kind", PROJECTING)
def test_rows_of_the_target_do_not_train(fresh, kind, tmp_path):
    torch.manual_seed(0)
    head = new_head(kind, fresh)
    rows = fresh.lm_head_rows[most_frequent(torch.arange(fresh.vocab_size), 200)]
    head.on_train_begin(fresh)
    criterion(kind.split()[0], head, fresh)(*batch(20, 12)).loss.backward()
    assert head.lm_head_is_targets and head.projections
    for projection in head.projections:
        assert torch.equal(projection.weight, rows)
        assert all(parameter.grad is None for parameter in projection.parameters())
    learned = [name for name, parameter in head.named_parameters() if parameter.grad is not None]
    assert learned == [name for name, parameter in head.named_parameters() if parameter.requires_grad] != []
    head.on_train_end()
    save_head(head, tmp_path, fresh)
    assert json.loads((tmp_path / "config.json").read_text())["foredraft"]["lm_head"] == "target"
    continued = init_from(str(tmp_path), head, fresh)
    assert not any(p.requires_grad for projection in continued.projections for p in projection.parameters())


@pytest.mark.parametrize("kind", [*PROJECTING, "medusa"])
def test_a_new_head_is_as_certain_whatever_a_target_makes_of_its_logits(kind: str):
    """Give the head rows of a target that divides their products by 16."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    target = Target(GraniteForCausalLM(GraniteConfig(**sizes, **heads, logits_scaling=16.0, initializer_range=0.3)))
    with torch.no_grad():
        target.model.lm_head.weight.mul_(40)
    head = new_head(kind, target).eval()
    text = packed((40,))
    states = target.forward(text.tokens, layers=[*head.layers, target.num_layers]).aux_hidden_states.detach()
    with torch.no_grad():
        outs = head(states[..., :-32], target.embed(text.tokens), text)
        spread = head.logits(outs[0], 1).std(-1).mean()
    least, most = (1.0, 1.6) if hasattr(head, "norm") else (3.0, 6.0)  # SPREAD, or the target's
    assert least < spread < most


def test_a_target_without_rows_to_copy_leaves_the_new_ones(fresh, monkeypatch):
    monkeypatch.setattr(type(fresh), "lm_head_rows", None)
    head = new_head("eagle3", fresh)
    assert not head.lm_head_is_targets and all(projection.weight.requires_grad for projection in head.projections)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_rows_in_fp8_are_not_copied_without_their_scales(dtype: torch.dtype):
    """Check that FP8, which torch counts as floating point, is treated as other quantized numbers are."""
    config = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    target = Target(GraniteForCausalLM(GraniteConfig(**config, num_attention_heads=2, num_key_value_heads=1)))
    assert target.lm_head_rows is not None
    quantized = target.model.get_output_embeddings().weight.detach().to(dtype)
    target.model.get_output_embeddings().weight = torch.nn.Parameter(quantized, requires_grad=False)
    assert target.lm_head_rows is None and target.vocab_size == 64


@pytest.mark.parametrize("kind", PROJECTING)
def test_files_may_leave_out_the_rows_of_the_target(fresh, kind, tmp_path, tmp_path_factory):
    whole = new_head(kind, fresh)
    save_head(whole, tmp_path, fresh)
    rows = {id(projection.weight) for projection in whole.projections}
    names = [name for name, weight in whole.named_parameters() if id(weight) in rows]
    stage(tmp_path, tmp_path_factory.mktemp("staged"), "org/name", fresh, None)
    file = tmp_path / "model.safetensors"
    few = {name: tensor for name, tensor in load_file(file).items() if name not in names}
    save_file(few, file)
    read = read_head(tmp_path, fresh)
    assert len(few) + len(names) == len(read.state_dict())
    for name, weight in whole.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    with pytest.raises(ValueError, match="leaves out the rows of the target's lm_head"):
        stage(tmp_path, tmp_path_factory.mktemp("staged"), "org/name", fresh, None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["foredraft"].pop("lm_head")  # then they are missing
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{names[0]} is missing"):
        read_head(tmp_path, fresh)


@pytest.mark.parametrize("kind", PROJECTING)
def test_rows_learn_by_one_word(fresh, kind, tmp_path):
    head = new_head(kind, fresh, lm_head="trained")
    criterion(kind.split()[0], head, fresh)(*batch(20, 12)).loss.backward()
    assert all(projection.weight.grad.any() for projection in head.projections)
    save_head(head, tmp_path, fresh)
    assert not read_head(tmp_path, fresh).lm_head_is_targets
    assert all(parameter.requires_grad for parameter in init_from(str(tmp_path), head, fresh).parameters())


def test_another_word_is_refused(fresh):
    with pytest.raises(ValueError, match=r"head\.lm_head=own is not one of target, trained"):
        Eagle3Head.for_target(fresh, lm_head="own")
