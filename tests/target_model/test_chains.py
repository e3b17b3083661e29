"""Promise: a target that reads no trees is drafted for by chains, and writes what it writes alone."""

import copy
import inspect
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.caches import recurrent_ops
from foredraft.heads.caches.stacked_cache import StackedCache, stacks
from foredraft.heads.caches.state_cache import MAX_UNCOMMITTED, StateCache
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.inference import Engine, Request, generate
from foredraft.inference import drafters as kinds
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.drafters.measurements import PLAIN
from foredraft.inference.drafters.ngram import NgramDrafter
from foredraft.inference.evaluation.measure import left_pad
from foredraft.inference.serve.worker import Worker
from foredraft.train.hidden_states.online import forward_target
from tests.conformance.families import check_family, families
from tests.conformance.targets import small_family
from tests.support import architectures, batches, decoding, nightly_but
from tests.support.architectures import HYBRID_WINDOW, HYBRIDS, VOCAB, hybrid
from tests.support.batches import filled, packed
from tests.support.decoding import Oracle, Random

NEW = 2 * HYBRID_WINDOW
PROMPTS = [[random.Random(row).randrange(3, VOCAB) for _ in range(length)] for row, length in enumerate((20, 5, 13))]
READING = [kind for kind in HYBRIDS if kind != "mamba"]


def batch(rows: list[int]) -> tuple[Tensor, Tensor]:
    return left_pad([PROMPTS[row] for row in rows])


CASES = [(kind, 0.0) for kind in HYBRIDS] + [(kind, 1.0) for kind in ("qwen3_5", "lfm2", "deepseek_v32", "mamba")]


@pytest.mark.parametrize("kind, temperature", nightly_but(CASES, ("phi3", 0.0), *CASES[::3], *CASES[-4:]))
def test_a_chain_changes_nothing(kind: str, temperature: float) -> None:
    plain, target = hybrid(kind)
    assert not target.capabilities.trees
    settings = {"max_new_tokens": NEW, "eos_token_id": -1, "temperature": temperature}
    alone = [generate(target, None, *batch([row]), seed=row, **settings).new_tokens[0] for row in range(len(PROMPTS))]
    if temperature == 0:
        for prompt, text in zip(PROMPTS, alone):
            ids = torch.tensor([prompt])
            facts = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
            # Before 5.20, transformers keeps a cache of the other angles when a text passes the boundary of longrope.
            theirs = plain.generate(ids, use_cache=kind != "phi3", **facts)
            assert prompt + text == theirs[0].tolist()
    answers = [prompt + text for prompt, text in zip(PROMPTS, alone)]
    for rows in ([2], [0, 1, 2]):
        drafter = Oracle([answers[row] for row in rows], VOCAB)
        drafted = generate(target, drafter, *batch(rows), seed=rows, **settings)
        assert drafted.new_tokens == [alone[row] for row in rows]
        if target.capabilities.chains:  # else little was accepted, and keeping it was not tested
            assert drafted.acceptance_length > 2


def test_what_does_not_read_several_tokens_right_is_decoded_plainly_and_says_so() -> None:
    _, target = hybrid("mamba")
    assert not target.capabilities.chains and all(hybrid(kind).target.capabilities.chains for kind in READING)
    with pytest.warns(
        UserWarning, match=r"^mamba computes different logits for several tokens at once .* Drafting is disabled"
    ):
        generation = generate(target, NgramDrafter(), *batch([0]), max_new_tokens=4, eos_token_id=-1)
    assert {step.nodes for step in generation.steps} == {1}


@pytest.mark.parametrize("others", [0, 1, 2])
def test_lookahead_is_left_out_where_drafts_cannot_branch(others: int) -> None:
    """Check it alone and in a union: its n-grams would never be verified."""
    _, target = hybrid("lfm2")
    parts = [kinds.Lookahead(), NgramDrafter(), kinds.SuffixDrafter()][: 1 + others]
    message = (
        r"^lookahead learns nothing from chains, and model_type lfm2 .* cannot branch, so it is left out\. Use suffix"
    )
    with pytest.warns(UserWarning, match=message):
        engine = Engine(target, kinds.Union(parts) if others else parts[0])
    rest = [engine.drafter, *engine.drafter.parts, *(some for part in engine.drafter.parts for some in part.parts)]
    assert not any(isinstance(part, kinds.Lookahead) for part in rest)
    assert set(parts[1:]) <= set(rest) and (engine.drafter.nodes == 1) == (others == 0)


@pytest.mark.parametrize("family", ["xlm", "xlnet", "reformer"])
def test_what_cannot_continue_from_a_cache_writes_as_transformers_does(family: str) -> None:
    target = small_family(families()[family])
    for weight in target.model.parameters():
        weight.data.normal_(std=0.5)  # so that texts differ
    assert not target.capabilities.caching and check_family(target, new_tokens=8) == ["decoded plainly"]


def test_transformers_own_steps_continue_from_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Llama, of which nothing was measured, write as the families above do."""
    target, read = Target(copy.deepcopy(architectures.pair("llama", "sdpa").plain)), []
    target.capabilities.why, vars(target.capabilities)["_continues"] = "nothing was measured", None
    assert not target.capabilities.caching
    facts = {"max_new_tokens": 6, "eos_token_id": -1}
    theirs = target.model.generate(torch.tensor([PROMPTS[0]]), do_sample=False, **facts)[0, len(PROMPTS[0]) :].tolist()
    forward = target.model.forward
    monkeypatch.setattr(
        target.model,
        "forward",
        lambda input_ids, **kwargs: read.append(input_ids.shape[1]) or forward(input_ids, **kwargs),
    )
    assert generate(target, None, *batch([0]), **facts).new_tokens == [theirs]
    assert read == [len(PROMPTS[0]), 1, 1, 1, 1, 1]
    cache = StateCache(1, "cpu")
    output = target.prefill(torch.tensor([PROMPTS[0]]), [len(PROMPTS[0])], cache)
    assert output.logits.shape == (1, 1, VOCAB) and output.aux_hidden_states.shape == (1, len(PROMPTS[0]), 0)


@torch.no_grad()
def test_an_erased_slot_computes_nothing_more() -> None:
    """Erase the text whose logits were no numbers. The other one goes on."""
    _, target = hybrid("mamba")
    cache, tokens = StateCache(2, "cpu"), torch.tensor([[7], [8]])
    target.prefill(torch.tensor([PROMPTS[1], PROMPTS[1][::-1]]), [5, 5], cache)
    cache.set_lengths([5, 5])
    cache.erase(0)
    logits = target.forward_tree(tokens, None, None, cache).logits
    expected = target.forward(torch.tensor([[*PROMPTS[1][::-1], 8]])).logits[0, -1]
    assert not logits[0].any() and cache.slots[0].state is None
    torch.testing.assert_close(logits[1, 0], expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "llama4"])
def test_a_slot_has_the_hidden_states_of_its_text(kind: str) -> None:
    """Check prompts of two lengths and drafts after them, and that a slot whose text has ended computes nothing more."""
    target, prompts, chains = hybrid(kind).target, [PROMPTS[0], PROMPTS[1]], [[7, 8], [9, 10]]
    cache, padding = StateCache(2, "cpu"), [0] * 15
    states = target.prefill(torch.tensor([prompts[0], prompts[1] + padding]), [20, 5], cache, [1]).aux_hidden_states
    cache.set_lengths([20, 5])
    drafted = target.forward_tree(torch.tensor(chains), None, None, cache, [1]).aux_hidden_states
    for row, (prompt, chain) in enumerate(zip(prompts, chains, strict=True)):
        whole = target.forward(torch.tensor([prompt + chain]), layers=[1]).aux_hidden_states[0]
        torch.testing.assert_close(states[row, : len(prompt)], whole[:-2], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(drafted[row], whole[-2:], rtol=1e-3, atol=1e-3)
    cache.commit([[], [0]])
    ended = cache.slots[0].text
    output = target.forward_tree(torch.tensor(chains), None, None, cache, [1])
    assert not output.logits[0].any() and not output.aux_hidden_states[0].any() and output.logits[1].any()
    assert output.logits.shape == (2, 2, VOCAB) and output.aux_hidden_states.shape == drafted.shape
    cache.commit([[], [0, 1]])
    assert cache.lengths == [20, 8] and cache.slots[0].text is ended and cache.slots[1].text.shape == (1, 8)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "llama4", "openai-gpt"])
def test_a_rejected_draft_of_two_leaves_no_trace(kind: str) -> None:
    target, text, cache = hybrid(kind).target, list(PROMPTS[1]), StateCache(1, "cpu")
    target.prefill(torch.tensor([text]), [len(text)], cache)
    cache.set_lengths([len(text)])
    for step in range(4):
        chain = [7 + step, 20 + step]
        logits = target.forward_tree(torch.tensor([chain]), None, None, cache).logits[0]
        whole = target.forward(torch.tensor([text + chain])).logits[0, -2:]
        torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)
        cache.commit([[0]])
        text.append(chain[0])


@torch.no_grad()
def test_a_chain_ends_where_the_context_does() -> None:
    """Draft four tokens where two have positions, with a model that computes the whole text in each forward."""
    target = hybrid("openai-gpt").target
    assert target.context is not None
    cache, text, chain = StateCache(1, "cpu"), [number % 40 + 3 for number in range(target.context - 2)], [7, 8, 9, 10]
    target.prefill(torch.tensor([text]), [len(text)], cache)
    cache.set_lengths([len(text)])
    logits = target.forward_tree(torch.tensor([chain]), None, None, cache).logits[0]
    whole = target.forward(torch.tensor([text + chain[:2]])).logits[0, -2:]
    torch.testing.assert_close(logits[:2], whole, rtol=1e-3, atol=1e-3)
    assert logits.shape == (4, VOCAB) and not logits[2:].any()


def test_where_rounding_may_pick_another_key_it_is_said_before_anything_is_drafted() -> None:
    target = hybrid("deepseek_v32").target
    with pytest.warns(UserWarning, match="^deepseek_v32 attends only to the keys with the highest indexer scores"):
        Engine(target, NgramDrafter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine(target)  # plainly
        Engine(hybrid("qwen3_5").target, NgramDrafter())


@pytest.mark.parametrize("kind, temperature", [("qwen3_5", 1.0), ("lfm2", 0.0)])
def test_every_drafter_drafts_a_chain(kind: str, temperature: float) -> None:
    target = hybrid(kind).target
    head, medusa = Eagle3Head.for_target(target, ttt_steps=4).eval(), MedusaHead.for_target(target, num_heads=3).eval()
    drafters = {
        "ngram": NgramDrafter(),
        "suffix": kinds.SuffixDrafter(),
        "lookahead": kinds.Likeliest(kinds.Lookahead()),
        "lookahead and ngram": kinds.Likeliest(kinds.Union([kinds.Lookahead(), NgramDrafter()])),
        "random": Random(),
        "eagle3": kinds.DynamicTree(head, target, depth=4, min_probability=0),
        "eagle3 auto": kinds.AutoTree(kinds.DynamicTree(head, target, depth=3, min_probability=0), target),
        "medusa": kinds.StaticTree(medusa, target),
        "union": kinds.Union([NgramDrafter(), kinds.DynamicTree(head, target, depth=4)]),
        "draft model": kinds.DraftModel(smaller(), target, depth=3, min_probability=0),
    }
    settings = {"max_new_tokens": 16, "eos_token_id": -1, "temperature": temperature, "seed": 3}
    alone = generate(target, None, *batch([0, 1, 2]), **settings)
    for name, drafter in drafters.items():
        drafted = generate(target, drafter, *batch([0, 1, 2]), **settings)
        assert drafted.new_tokens == alone.new_tokens, name
        # tree=auto decides by measured times, which other work on the machine changes.
        assert name == "eagle3 auto" or max(step.nodes for step in drafted.steps) > 1, name
    assert [drafters[name].nodes for name in ("eagle3", "medusa", "draft model")] == [5, 4, 4]


def smaller() -> Target:
    return architectures.pair("llama", "sdpa").target


def test_a_tree_wider_than_a_chain_says_why_not() -> None:
    target = hybrid("qwen3_5").target
    head = Eagle3Head.for_target(target, ttt_steps=2)
    with pytest.raises(ValueError, match=r"^width=3 asks for a tree, and model_type qwen3_5_text has linear_attention"):
        kinds.DynamicTree(head, target, width=3)


def test_what_a_drafter_proposed_last_does_not_say_what_is_supported() -> None:
    """Check that a tree=auto that drafted nothing before drafts trees again."""
    target = hybrid("qwen3_5").target
    drafter = kinds.AutoTree(kinds.DynamicTree(Eagle3Head.for_target(target, ttt_steps=3), target), target)
    drafter.plan = PLAIN
    assert drafter.depth == 0 and drafter.nodes > 1


def test_a_chain_is_the_deepest_branch_and_its_drafter_observes_it() -> None:
    observed = []

    class Recorded(Random):
        def observe(self, paths: list[list[int]], choices: Tensor) -> None:
            observed.append((paths, choices))

    drafter = kinds.Chain(Recorded())
    accepted = Accepted(torch.tensor([[5]]), torch.zeros(1, 1, 0), [1], [[5]])
    drafter.begin(1, 10, None)
    tree = drafter.propose(accepted, None)
    # Random's parents are 0 0 0 1 1 3 3 5 5: the first of the deepest is node 7, below 5, 3, 1 and the root.
    assert drafter.positions[0, :5].tolist() == [0, 1, 3, 5, 7] and tree.depths.tolist() == [[0, 1, 2, 3, 4]]
    drafter.observe([[0, 1]], torch.tensor([[11, 12, 13, 14, 15]]))
    paths, choices = observed[0]
    assert paths == [[0, 1]] and choices.tolist() == [[11, 12, -1, 13, -1, 14, -1, 15, -1]]


@torch.no_grad()
def test_pending_tokens_are_committed_when_they_are_many() -> None:
    """Accept the root and one of two drafts in each step; nothing but pending ever grows, up to the bound."""
    _, target = hybrid("qwen3_5")
    cache, text = StateCache(1, "cpu"), PROMPTS[0]
    target.prefill(torch.tensor([text]), [len(text)], cache)
    cache.set_lengths([len(text)])
    luck, seen = random.Random(4), []
    for _ in range(30):
        chain = [luck.randrange(3, VOCAB) for _ in range(3)]
        reading = target.forward_tree(torch.tensor([chain]), None, None, cache)
        whole = target.forward(torch.tensor([text + chain])).logits
        assert (reading.logits - whole[:, -3:]).abs().max() < 2e-3
        cache.commit([[0, 1]])
        text = text + chain[:2]
        seen.append(len(text) - cache.slots[0].num_computed_tokens)
    assert cache.lengths == [len(text)] and cache.slots[0].text.shape[1] == len(text)
    assert max(seen) == MAX_UNCOMMITTED + 2 and min(seen) == 2


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "granite_h"])
def test_a_short_read_is_no_padded_chunk(kind: str, monkeypatch) -> None:
    """Check what the model's own recurrence is asked for, and that the result is the same."""
    target, asked = hybrid(kind).target, []
    run = recurrent_ops.Call.__call__

    def spy(call: recurrent_ops.Call) -> Any:
        asked.append(call.kwargs["chunk_size"])
        return run(call)

    monkeypatch.setattr(recurrent_ops.Call, "__call__", spy)
    tokens = torch.tensor([PROMPTS[0] * 4])
    long, state = target.forward_from(tokens, 0, None)
    first, after = target.forward_from(tokens[:, :20], 0, None)
    second, _ = target.forward_from(tokens[:, 20:27], 20, after)
    target.forward_from(tokens[:, :1], tokens.shape[1], state)
    assert asked == {"qwen3_5": [64, 20, 7], "granite_h": [8, 8, 7]}[kind]
    short = torch.cat([first.logits, second.logits], 1)
    assert (long.logits[:, :27] - short).abs().max() < 1e-5 * long.logits.abs().max()


STACKED = ["qwen3_5", "lfm2", "falcon_h1", "granite_h", "mamba2", "kimi"]


def read(target: Target, cache: StackedCache, chains: list[list[int]]) -> Tensor:
    nodes = torch.arange(len(chains[0]))
    mask = cache.mask((nodes[:, None] >= nodes)[None])
    return target.forward_tree(torch.tensor(chains), cache.seq_lens + nodes, mask, cache).logits


@torch.no_grad()
@pytest.mark.parametrize("kind", STACKED)
def test_texts_of_a_batch_are_read_together(kind: str) -> None:
    """Check that no token is read twice in texts whose drafts are accepted at different rates."""
    target, texts, luck = hybrid(kind).target, [list(prompt) for prompt in PROMPTS], random.Random(5)
    cache = filled(target, texts, 300)
    assert isinstance(cache, StackedCache)
    for _ in range(12):
        chains = [[luck.randrange(3, VOCAB) for _ in range(4)] for _ in texts]
        logits, counts = read(target, cache, chains), [1, luck.choice([3, 4]), luck.choice([0, 2, 4])]
        for row, (text, chain, count) in enumerate(zip(texts, chains, counts, strict=True)):
            whole = target.forward(torch.tensor([text + chain])).logits
            assert (logits[row] - whole[0, -4:]).abs().max() < 1e-3 * whole.abs().max()
            texts[row] = text + chain[:count]
        cache.commit([list(range(count)) for count in counts])
        assert cache.lengths == [len(text) for text in texts]


@torch.no_grad()
@pytest.mark.parametrize("kind", STACKED)
def test_states_are_taken_as_they_are_and_go_back_by_text(kind: str) -> None:
    """Check that a forward of drafts copies no states; those of a text without accepted drafts are unchanged."""
    target = hybrid(kind).target
    cache = filled(target, PROMPTS, 300)
    before = {name: states[key] for name, states, key in cache.tensors()}
    kept = {name: state.clone() for name, state in before.items()}
    read(target, cache, [[3, 4, 5]] * 3)
    for number, layer in enumerate(cache.states):
        for key, call in layer.calls.items():
            assert call is not None and any(value is before[number, 1, key] for value in call.kwargs.values())
    cache.commit([[0], [], [0, 1, 2]])
    for name, states, key in cache.tensors():
        assert torch.equal(states[key][1], kept[name][1]) and not torch.equal(states[key][2], kept[name][2])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "lfm2", "falcon_h1"])
def test_states_go_with_their_texts(kind: str) -> None:
    """Decode slots in any order, swap two, copy one to another, start one anew, and erase two."""
    target, texts = hybrid(kind).target, [list(prompt) for prompt in PROMPTS]
    cache = filled(target, texts, 300)

    def check(rows: list[int]) -> None:
        cache.use(rows)
        chains = [[3 + row, 4, 5] for row in rows]
        logits = read(target, cache, chains)
        for number, row in enumerate(rows):
            whole = target.forward(torch.tensor([texts[row] + chains[number]])).logits[0, -3:]
            torch.testing.assert_close(logits[number], whole, rtol=1e-3, atol=1e-3)
            texts[row] += chains[number][:2]
        cache.commit([[0, 1]] * len(rows))

    check([2, 0])
    cache.swap(0, 1)
    texts[:2] = texts[1::-1]
    check([1])
    check([0, 1, 2])
    cache.copy(2, 0, len(texts[2]))
    texts[0] = list(texts[2])
    check([0, 2])
    cache.truncate(1, 0)
    texts[1] = list(PROMPTS[1])
    cache.use([1])
    target.prefill(torch.tensor([texts[1]]), [len(texts[1])], cache)
    cache.set_lengths([len(texts[1])])
    check([1, 2])
    cache.use([0, 1])
    cache.erase(1)
    cache.erase(2)
    cache.store()
    for states in (*cache.stored.values(), *batches.states_of(cache)):
        assert states[0].any() and not states[1:].any()


@pytest.mark.parametrize("kind", READING)
def test_long_prompts_come_in_chunks(kind: str) -> None:
    """Check that text and drafts are the same. longrope, and a target without chains, read a text whole."""
    target, seen, prefills = hybrid(kind).target, [], []
    torch.manual_seed(1)
    drafter: Any = NgramDrafter()
    if kind not in ("mamba2", "bloom", "openai-gpt"):  # which shape no layer of a head
        head = Eagle3Head.for_target(target, ttt_steps=2).eval()
        drafter = kinds.DynamicTree(head, target, nodes=3, depth=2, min_probability=0)
    for chunk in (None, 6):
        engine = Engine(target, drafter, prefill_chunk=chunk)
        asked = [Request(text, max_new_tokens=9, trace=0) for text in PROMPTS]
        written: dict[Request, list] = {request: [] for request in asked}
        for request in asked:
            engine.add(request)
        prefills.append(0)
        while engine.has_work:
            for output in engine.step():
                written[output.request] += [output.tokens, output.trace and output.trace.tokens]
            prefills[-1] += engine.last_was_prefill
        seen.append(list(written.values()))
    assert seen[0] == seen[1] and (prefills[1] > 3) == target.capabilities.chunks and prefills[0] == 1


def test_a_batch_costs_one_forward_a_step(monkeypatch) -> None:
    target, calls = hybrid("qwen3_5").target, []
    forward = target.model.forward
    monkeypatch.setattr(target.model, "forward", lambda *args, **facts: calls.append(0) or forward(*args, **facts))
    assert target.capabilities.state is not None
    calls.clear()
    steps = generate(target, None, *batch([0, 1, 2]), max_new_tokens=10, eos_token_id=-1).steps
    assert len(calls) == 1 + len(steps)


@pytest.mark.parametrize("kind", ["llama4", "bloom", "deepseek_v32", "phi3"])
def test_what_masks_otherwise_is_read_row_by_row(kind: str) -> None:
    assert not hybrid(kind).target.capabilities.state is not None


def test_a_prompt_that_ends_at_the_boundary_of_longrope_is_read_anew() -> None:
    plain, target = hybrid("phi3")
    ids = torch.tensor([[*PROMPTS[0], *PROMPTS[1] * 2]])
    assert ids.shape[1] == target.capabilities.rope_boundary
    facts = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, "use_cache": False}
    theirs = plain.generate(ids, **facts)[0].tolist()
    for drafter in (None, Oracle([theirs], VOCAB)):
        assert (
            ids[0].tolist() + generate(target, drafter, ids, max_new_tokens=8, eos_token_id=-1).new_tokens[0] == theirs
        )


@torch.no_grad()
def test_logits_of_chains_across_the_boundary_of_longrope_are_those_of_whole_texts() -> None:
    """Draft chains of 1 to 4 tokens, of which one or two are accepted, until the boundary is far behind."""
    _, target = hybrid("phi3")
    cache, text, boundary = StateCache(1, "cpu"), list(PROMPTS[0]), target.capabilities.rope_boundary
    target.prefill(torch.tensor([text]), [len(text)], cache)
    cache.set_lengths([len(text)])
    for nodes in (4, 3, 2, 4, 1, 4, 4, 3, 1, 4):
        chain = [(len(text) * 7 + node) % (VOCAB - 3) + 3 for node in range(nodes)]
        logits = target.forward_tree(torch.tensor([chain]), None, None, cache).logits[0]
        for node, row in enumerate(logits, start=1):  # the length of its text decides the angles
            expected = target.forward(torch.tensor([text + chain[:node]])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)
        kept = min(nodes, 2)
        cache.commit([list(range(kept))])
        text += chain[:kept]
    assert boundary is not None and len(PROMPTS[0]) < boundary < len(text) - 5


def test_what_transformers_does_not_keep_in_a_cache_is_not_stacked() -> None:
    assert not stacks(None, hybrid("qwen3_5").target)


def test_texts_below_the_boundary_of_longrope_are_drafted_for_by_trees() -> None:
    whole = hybrid("phi3").target
    assert whole.capabilities.rope_boundary == 30 and "unless texts stay shorter (target.context=30)" in str(
        whole.capabilities.why
    )
    short = Target(copy.deepcopy(whole.model), name="short", context=30)
    assert short.capabilities.trees and short.context == 30 and short.max_positions == whole.context
    head = Eagle3Head.for_target(short, ttt_steps=3).eval()
    settings = {"max_new_tokens": NEW, "eos_token_id": -1}
    alone = generate(whole, None, *batch([1, 2]), **settings).new_tokens
    for drafter in (kinds.DynamicTree(head, short, depth=3, width=3, nodes=8, min_probability=0), Random()):
        drafted = generate(short, drafter, *batch([1, 2]), **settings)
        assert drafted.new_tokens == [text[: 30 - len(PROMPTS[row])] for row, text in zip((1, 2), alone, strict=True)]
        assert max(step.nodes for step in drafted.steps) > 4
    with pytest.raises(ValueError, match=r"^context=31000000 is not a whole number from 1 to \d+, the limit of short$"):
        Target(short.model, name="short", context=31000000)


@pytest.mark.parametrize("kind, reuse", [("qwen3_5", False), ("qwen3_5", True), ("falcon_h1", False), ("llama4", True)])
def test_requests_join_a_batch_and_leave_it(kind: str, reuse: bool) -> None:
    """The last prompt is the beginning of the first one, whose state cannot go back to it."""
    target, prompts = hybrid(kind).target, [*PROMPTS, PROMPTS[0][:9]]
    budgets = [30, 6, 17, 12]
    requests = [Request(prompt, max_new_tokens=budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    engine = Engine(target, NgramDrafter(), max_num_seqs=2, reuse_prefixes=reuse)
    texts, _ = decoding.run(engine, requests, lambda step: step and engine.slots.drop_finished())
    assert texts == decoding.alone(target, requests)


@torch.no_grad()
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_packed_document_has_the_features_that_it_has_alone(kind: str) -> None:
    plain, target = hybrid(kind)
    text = packed((5, 11, 8), (3, 14), low=3, high=VOCAB)
    aux_hidden_states, last = forward_target(target, text, [1])
    for row, document in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        where = text.documents[row] == document
        alone = plain(text.tokens[row : row + 1, where], output_hidden_states=True, use_cache=False).hidden_states
        for ours, theirs in ((aux_hidden_states, alone[1]), (last, alone[-1])):
            assert (ours[row, where] - theirs).abs().max() < 1e-5 * theirs.abs().max().clamp(min=1)
    assert not last[1, 17:].any()


@pytest.mark.parametrize("kind, entry, state", [("qwen3_5", 128, 2048), ("mamba2", 0, 7168)])
def test_a_limit_of_memory_counts_the_states_of_texts(kind: str, entry: int, state: int) -> None:
    """Count four states for each text (its slot's, before drafts, after them, and rolled back to) in addition to keys, which
    Mamba does not keep."""
    target = Target(copy.deepcopy(hybrid(kind).target.model), name=kind, context=len(PROMPTS[0]) + 6)
    requests = [Request(PROMPTS[0], max_new_tokens=6, seed=number) for number in range(5)]
    expected, together = decoding.alone(target, requests), set[int]()
    both = 2 * 4 * state + max(1, 2 * entry) * (len(PROMPTS[0]) + 6 + 2)  # as much for what is decoded without drafts
    worker = Worker(target, None, max_num_seqs=2, cache_gib=(2 * both + 1) / 2**30)
    engine = worker.engines[0]
    texts, _ = decoding.run(engine, requests, lambda step: together.add(len(engine.running())))
    assert texts == expected and max(together) == 2 and engine.slot_tokens == len(PROMPTS[0]) + 6 + 2
    with pytest.raises(ValueError, match="is too small for 1 texts in 2 engines"):
        Worker(target, None, max_num_seqs=2, cache_gib=2 * 4 * state / 2**30)


def test_other_programs_may_compile_the_functions_that_are_watched() -> None:
    """Check that they stay replaced in transformers' module, that their context is thread-local, and that they are
    transformers' own after a forward that was watched."""
    rule = recurrent_ops.RecurrentOp(lambda x, factor=2: x * factor)
    compiled = torch.compile(lambda x: rule(x, factor=3) + 1, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    with recurrent_ops.watched(torch.ones(1, 1), records=True):
        pass
    assert rule(torch.ones(1, 2)).tolist() == [[2.0, 2.0]]


def test_the_functions_of_a_model_are_replaced_once() -> None:
    model = hybrid("granite_h").target.model
    recurrent_ops.patch_recurrent_ops(model)
    sources = {inspect.getmodule(type(part)) for part in model.modules()}
    found = [vars(source)[name] for source in sources for name in recurrent_ops.FUNCTIONS if name in vars(source)]
    assert found and not any(isinstance(function.original, recurrent_ops.RecurrentOp) for function in found)
