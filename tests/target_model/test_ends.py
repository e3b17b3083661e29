"""A target of which only embedding, final norm and lm_head are loaded: they are those of the whole one, and it trains."""

import copy
import re
from pathlib import Path

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.target_model import ends, packing
from foredraft.train.checks import check_saving
from foredraft.train.data.documents import Document
from foredraft.train.hidden_states.probe import final_norm
from tests.support import nightly_but
from tests.support.architectures import FAMILIES, VOCAB, pair
from tests.support.head_factory import new_head
from tests.support.processes import ONE, SMALL_EAGLE3, complaint, losses, succeeded
from tests.support.tiny import random_model, without_layers


def said_of(target: Target) -> tuple:
    """Return all that a head asks of a target before it sees a state."""
    shape = target.num_layers, target.hidden_size, target.vocab_size, target.context, target.dtype, target.device
    return (*shape, target.capabilities.why, target.masks, target.layer_types, target.eos_token_ids, target.scaled)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_every_family(family: str, tmp_path: Path):
    whole = Target(copy.deepcopy(pair(family, "eager").plain))
    whole.model.save_pretrained(tmp_path)
    alone = Target.from_pretrained(tmp_path, dtype="float32", device="cpu", embeddings_only=True)
    assert said_of(alone) == said_of(whole)
    tokens, states = torch.arange(VOCAB), torch.randn(5, 32)
    assert torch.equal(alone.embed(tokens), whole.embed(tokens)) and torch.equal(
        alone.logits(states), whole.logits(states)
    )
    assert torch.equal(final_norm(alone)(states), final_norm(whole)(states))
    layers = [name for name, weight in alone.model.named_parameters() if not weight.is_meta and ends.in_layer(name)]
    assert not layers
    with pytest.raises(
        ValueError, match=r"only the ends of the target are loaded.*hidden_states\.load_full_target=true"
    ):
        alone.forward(tokens[None])


def test_ends_in_half_precision_are_not_measured(tiny_path: Path):
    alone = Target.from_pretrained(tiny_path, dtype="bfloat16", device="cpu", embeddings_only=True)
    assert not alone.capabilities.prefers_chains
    check_saving(new_head("medusa", alone), alone, [Document([*range(1, 60)], [True] * 59)])


class Copying(dict):
    """Copy what is assigned, as the dictionaries do that compressed-tensors gives to modules."""

    def __setitem__(self, name, value):
        self[name].copy_(value)


def test_dropped_layers_are_freed_whatever_holds_their_weights(monkeypatch):
    monkeypatch.setattr(packing, "is_faster", lambda dtype: True)
    target, states = random_model(0, hidden_size=256, vocab_size=320), torch.randn(5, 256)
    packing.pack(target.model)
    first, expected = target.model.model.layers[0], target.logits(states)
    assert isinstance(first.self_attn.q_proj, packing.PackedLinear)
    assert isinstance(target.model.lm_head, packing.PackedLinear)
    first.input_layernorm._parameters = Copying(first.input_layernorm._parameters)
    ends.drop_layers(target)
    assert not [name for name, module in target.model.model.named_modules() if "packed" in vars(module)]
    assert first.input_layernorm.weight.is_meta and torch.equal(target.logits(states), expected)


def test_a_file_of_the_ends_that_is_missing_is_named(target: Target, tmp_path: Path):
    path = without_layers(target, tmp_path)
    for file in path.glob("model-*"):
        file.unlink()
    with pytest.raises(
        ValueError, match=r"the ends of .* cannot be loaded without its layers \(model-.*safetensors is missing there\)"
    ):
        Target.from_pretrained(path, embeddings_only=True)


@pytest.mark.parametrize("head", nightly_but(["eagle3", "hydra"]))
def test_a_run_on_stored_states_needs_no_layers(
    head: str, target: Target, tiny_path: Path, folder: Path, here, tmp_path
):
    """Check that the run which stores them frees the layers, and the next one finds none."""
    size = SMALL_EAGLE3[1:2] * (head == "eagle3")
    given = [f"head={head}", *size, *SMALL_EAGLE3[2:], ONE, f"data.path={folder}", "trainer.max_steps=4"]
    stored = ["hidden_states=offline", "hidden_states.path=states", "hidden_states.dtype=float32"]
    path = without_layers(target, tmp_path / "ends")
    runs = {
        "online": [f"target.path={tiny_path}"],
        "first": [f"target.path={tiny_path}", *stored],
        "again": [f"target.path={path}", *stored],
    }
    for name, own in runs.items():
        ended = succeeded(here(*given, *own, f"output_dir={name}"))
        assert ("foredraft evaluate target=" in ended.out) == (name != "online")
        torch.testing.assert_close(*map(torch.tensor, (losses(tmp_path / name), losses(tmp_path / "online"))))
    ended = here(*given, *runs["again"], "seed=1", "data_seed=0", "output_dir=other")
    assert ended.code == 0 and losses(tmp_path / "other")[0] != losses(tmp_path / "again")[0], ended.err
    said = complaint(here(*given, *runs["again"], "seed=1", "output_dir=more"))
    assert "states are of another run (data_hash is " in said
    said = complaint(here(*given, *runs["again"], "self_generated_tokens=64", "output_dir=more"))
    assert said.startswith("only the ends of the target are loaded, and this needs its layers")
    if head == "eagle3":
        said = complaint(here(*given, *runs["again"], "head.target_layer_ids=[1,2]", "output_dir=more"))
        assert re.match(
            r"hidden_states.path=states has hidden states .*, and this head reads \d too: set another", said
        )


def test_what_is_spread_over_devices_is_the_layers(here, tiny_path: Path, folder: Path):
    given = [
        *SMALL_EAGLE3,
        f"target.path={tiny_path}",
        f"data.path={folder}",
        "hidden_states=server",
        "target.sharding=layers",
    ]
    assert complaint(here(*given, "output_dir=out")).startswith("target.sharding=layers is for a target's layers")
