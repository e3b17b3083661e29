"""UNO: the target's own layers draft, in rows of noise that nothing else sees (heads/uno.py)."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import DynamicCache

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.target import cuda_graphs
from foredraft.heads.target.compiled import CompiledLayer, compile_layers
from foredraft.heads.uno import UnoHead
from foredraft.inference import Engine, Request, generate
from foredraft.inference.drafters import AutoTree, Drafter, NgramDrafter, SuffixDrafter, Switch, Union, UnoTree
from foredraft.inference.generation import tokens_per_forward
from foredraft.train import parity_gate
from tests.support.architectures import CASES, FAMILIES, VOCAB, pair
from tests.support.batches import PROMPT
from tests.support.head_factory import make_head
from tests.support.hybrids import pair as hybrid
from tests.support.small_targets import prompt, random_model
from tests.support.tape import Tape


@pytest.fixture
def uno(fresh: Target) -> UnoHead:
    head = make_head("uno", fresh)
    assert isinstance(head, UnoHead)
    return head


@torch.no_grad()
def test_its_files_are_an_adapter_with_which_peft_drafts_the_same(fresh, uno, tmp_path):
    save_head(uno, tmp_path, fresh)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    attention, mlp = (f"self_attn.{one}_proj" for one in "qkvo"), (f"mlp.{one}_proj" for one in ("gate", "up", "down"))
    names = [f"base_model.model.model.layers.{i}.{part}" for part in (*attention, *mlp) for i in range(6)]
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert weights.keys() == {f"{name}.lora_{one}.weight" for name in names for one in "AB"}
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")
    assert settings["target_modules"] == sorted({name.rpartition(".")[2] for name in names})
    # The bonus token by the target itself, noise by an adapted copy of it, over the same keys.
    adapted, cache = PeftModel.from_pretrained(copy.deepcopy(fresh.model), tmp_path), DynamicCache()
    text = [*PROMPT[:12], 7]
    expected = [fresh.model(torch.tensor([text]), past_key_values=cache).logits[0, -1:]]
    noise = uno.noise(torch.tensor([7]), torch.tensor([12]), 3)
    expected.append(adapted(input_ids=noise, past_key_values=cache).logits[0])
    drafted = parity_gate.drafted_logits(load_head(tmp_path, fresh), fresh, text[:-1], 7)[1]
    torch.testing.assert_close(torch.stack(drafted), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_an_adapter_alone_is_read_as_its_authors_publish_it(fresh, uno, tmp_path):
    save_head(uno, tmp_path, fresh)
    (tmp_path / "config.json").unlink()
    head = load_head(tmp_path, fresh)
    assert isinstance(head, UnoHead) and (head.depth, head.rank, head.alpha, head.imported) == (8, 4, 8, True)
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in uno.state_dict().items())
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ValueError, match="use_dora=True; only False can be drafted with"):
        load_head(tmp_path, fresh)


def test_noise_is_of_the_whole_vocabulary_and_the_same_again(uno):
    places = torch.arange(400)
    noise = uno.noise(places % 9, places, 7)
    assert noise.shape == (400, 7) and torch.equal(noise, uno.noise(places % 9, places, 7))
    counts = noise.flatten().bincount(minlength=320)  # 8.75 of each on average
    assert len(counts) == 320 and counts.min() > 0 and counts.max() < 25


def test_nothing_of_a_block_stays_in_the_cache(fresh, uno):
    """After every step of a ragged batch the keys and values of the text are those of the target alone."""
    engine = Engine(fresh, UnoTree(uno, fresh, nodes=8))
    rows = [PROMPT[:5], PROMPT[3:20], PROMPT[:11]]
    for row in rows:
        engine.add(Request(row, max_new_tokens=12))
    steps = 0
    while engine.has_work:
        outputs = engine.step()
        cache = engine.batch.open_cache()
        for slot, sequence in enumerate(engine.batch.sequences):
            if not all(output.accepted is None for output in outputs) and sequence.finish_reason is None:
                steps += 1
                alone = fresh.new_cache(1, 64)
                length = cache.lengths[slot]
                fresh.prefill(torch.tensor([sequence.text[:length]]), [length], alone)
                alone.set_lengths([length])
                ours, plain = cache.copy_out(slot, 0, length), alone.copy_out(0, 0, length)
                for mine, theirs in zip(ours.values(), plain.values(), strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert steps > 9


def switch(tree: UnoTree, target: Target) -> Drafter:
    return Switch(SuffixDrafter(), AutoTree(tree, target))


WAYS: dict[str, Callable[[UnoTree, Target], Drafter]] = {
    "fixed": lambda tree, target: tree,
    "auto": AutoTree,
    "union": lambda tree, target: Union([tree, NgramDrafter()]),
    "switch": switch,
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_per_forward_count_every_forward_of_the_target(fresh, uno, way, monkeypatch):
    drafter, calls, forward = WAYS[way](UnoTree(uno, fresh, nodes=8), fresh), [], fresh.model.forward
    monkeypatch.setattr(fresh.model, "forward", lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1])
    out = generate(fresh, drafter, torch.tensor([PROMPT]), max_new_tokens=41, eos_token_id=-1)
    used = sum(step.forwards for step in out.steps)
    assert len(calls) == 1 + used and {step.forwards for step in out.steps} <= {1, 2}  # the first is the prompt's
    assert out.acceptance_length == tokens_per_forward([out]) == 40 / used
    if way == "fixed":
        assert {step.forwards for step in out.steps} == {2} and min(step.accepted[0] for step in out.steps[:-1]) == 1


def test_two_of_them_that_draft_in_turn_draft_with_their_own_head(fresh, uno, monkeypatch):
    """Also where steps are captured: the target's cache, and the graphs over it, pass from one engine to the next."""
    torch.manual_seed(5)
    other = make_head("uno", fresh)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

    def proposed() -> list[list[list[int]]]:
        target, trees = Target(fresh.model, fresh.tokenizer, fresh.name), list[list[list[int]]]()
        # The chain of the first has as many nodes and levels as its tree, and less width.
        for head, options in ((uno, {}), (other, {}), (uno, {"width": 1})):
            tree = UnoTree(head, target, nodes=4, depth=3, **options)
            propose = tree.propose

            def note(*args, propose=propose):
                tree = propose(*args)
                trees.append(tree.tokens.tolist())
                return tree

            monkeypatch.setattr(tree, "propose", note)
            generate(target, tree, torch.tensor([PROMPT]), max_new_tokens=12, eos_token_id=-1)
        return trees

    kernel_by_kernel = proposed()
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    assert proposed() == kernel_by_kernel


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_every_architecture_drafts_for_itself(family):
    """Windows, experts, joined projections, latent attention: in training as in drafting, and the text is the target's."""
    target = pair(family, "sdpa" if (family, "sdpa") in CASES else "eager").target
    head = make_head("uno", target)
    text = [token % VOCAB for token in PROMPT[:14]]
    assert parity_gate.check(head, target, text) < 1e-3
    ids, settings = torch.tensor([text]), {"max_new_tokens": 12, "eos_token_id": -1, "temperature": 1.0, "seed": 1}
    plain = generate(target, None, ids, **settings).new_tokens
    assert generate(target, UnoTree(head, target, nodes=6), ids, **settings).new_tokens == plain


@torch.no_grad()
def test_compiled_layers_stand_aside_for_the_lora_and_for_nothing_else(fresh, uno, monkeypatch):
    compile_layers(fresh.model, "layers")
    monkeypatch.setattr(CompiledLayer, "graph", lambda self, *args: pytest.fail("a graph would know no LoRA"))
    cache = fresh.new_cache(1, 32)
    cache.set_lengths([1])
    with uno.acting_from(0):
        fresh.forward_tree(torch.tensor([[7]]), torch.tensor([[1]]), cache.causal_mask(1), cache)
    with pytest.raises(pytest.fail.Exception):
        fresh.forward_tree(torch.tensor([[7]]), torch.tensor([[1]]), cache.causal_mask(1), cache)


def test_targets_that_it_cannot_act_in_are_said(tiny_path):
    with pytest.raises(
        ValueError, match="head=uno drafts beside the target's text, and model_type qwen3_5_text has linear"
    ):
        UnoHead.for_target(hybrid("qwen3_5").target)
    with pytest.raises(ValueError, match="stored features leave out: take features=online"):
        UnoHead.for_target(Target.from_pretrained(tiny_path, dtype="float32", device="cpu", ends_only=True))
    with pytest.raises(ValueError, match=r"head\.depth=1 must be at least 2"):
        UnoHead.for_target(random_model(1), depth=1)


def test_a_path_is_no_longer_than_the_rows_that_its_tree_writes_over(uno, fresh):
    assert UnoTree(uno, fresh, nodes=3).depth == 2 and UnoTree(uno, fresh, nodes=9).depth == uno.depth
    deeper = UnoTree(uno, fresh, nodes=9, depth=7)  # than it was trained for
    ids = torch.tensor([prompt(9)])
    plain = generate(fresh, None, ids, max_new_tokens=20, eos_token_id=-1)
    assert deeper.depth == 7
    assert generate(fresh, deeper, ids, max_new_tokens=20, eos_token_id=-1).new_tokens == plain.new_tokens
