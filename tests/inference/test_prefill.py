"""Prompts that are read in chunks, or in part not at all since another text began alike: text and drafts are the same."""

import os
from pathlib import Path

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.caches.layers import zeros
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.inference import Engine, Request, SamplingParams
from foredraft.inference import drafters as kinds
from tests.support import nightly_but
from tests.support.architectures import VOCAB, hybrid, pair
from tests.support.batches import prompt

FAMILIES = ["mistral", "gemma3_text", "gpt2", "deepseek_v3"]  # windows, positions that are learned, keys of two widths
SAMPLED = SamplingParams(temperature=1.0)
SLOTS = {"max_num_seqs": 10, "slot_tokens": 256}


def ids(length: int, seed: int) -> list[int]:
    return [1 + token % (VOCAB - 1) for token in prompt(length, seed)[0].tolist()]


def drafter(name: str, target: Target) -> kinds.Drafter | None:
    torch.manual_seed(3)

    def eagle() -> kinds.DynamicTree:
        head = Eagle3Head.for_target(target, ttt_steps=3).eval()
        for parameter in head.layer.parameters():  # it starts as the identity, whatever it has read
            torch.nn.init.normal_(parameter, std=0.3)
        return kinds.DynamicTree(head, target, nodes=8, depth=3, width=2, min_probability=0)

    def chain() -> kinds.DynamicTree:
        return kinds.DynamicTree(
            Eagle3Head.for_target(target, ttt_steps=2).eval(), target, nodes=3, depth=2, min_probability=0
        )

    def model() -> kinds.DraftModel:
        return kinds.DraftModel(target, target, nodes=5, depth=3, width=2, min_probability=0)

    def block() -> kinds.BlockTree:
        head = DFlashHead.for_target(target, block_size=4, num_hidden_layers=2).eval()
        for parameter in head.blocks.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return kinds.BlockTree(head, target, nodes=8)

    return {
        "plain": lambda: None,
        "medusa": lambda: kinds.StaticTree(MedusaHead.for_target(target, num_heads=3).eval(), target, nodes=6),
        "eagle3": eagle,
        "chain": chain,
        "dflash": block,
        "draft model": model,
        "auto": lambda: kinds.AutoTree(eagle(), target),
        "union": lambda: kinds.Union([eagle(), model(), kinds.NgramDrafter()]),
    }[name]()


class Run:
    """Decode requests by an engine, step by step."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.engine, self.steps, self.read = engine, list[list[Request]](), list[int]()
        self.texts: dict[Request, list[int]] = {}
        self.drafts: dict[Request, list[list[int]]] = {}
        plain = engine.target.prefill

        def counted(tokens, lengths, cache, layers=()):
            self.read.append(sum(lengths))
            return plain(tokens, lengths, cache, layers)

        monkeypatch.setattr(engine.target, "prefill", counted)

    def add(self, *requests: Request) -> "Run":
        for request in requests:
            self.engine.add(request)
            self.texts[request], self.drafts[request] = [], []
        return self

    def step(self) -> None:
        outputs = self.engine.step()
        self.steps.append([output.request for output in outputs])
        for output in outputs:
            self.texts[output.request] += output.tokens
            if output.trace is not None:
                self.drafts[output.request].append(output.trace.tokens)

    def finish(self) -> "Run":
        while self.engine.has_work:
            self.step()
        return self


def request(prompt: list[int], new: int = 10, params: SamplingParams = SAMPLED) -> Request:
    return Request(prompt, params, new, seed=len(prompt), trace=0)


def alone(name: str, target: Target, asked: Request, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list]:
    """Return its text, decoded without drafts, and what the drafter drafts for it if its prompt is read whole."""
    with monkeypatch.context() as patch:
        text = Run(Engine(target), patch).add(asked).finish().texts[asked]
        run = Run(Engine(target, drafter(name, target)), patch).add(asked).finish()
    assert run.texts[asked] == text
    return text, run.drafts[asked]


DRAFTERS = ["plain", "medusa", "eagle3", "dflash", "draft model", "auto", "union"]


@pytest.mark.parametrize("name", nightly_but(DRAFTERS, "plain", "eagle3", "union"))
def test_a_prompt_in_chunks(target, name, monkeypatch):
    """Check it separately, and next to a text that continues in every other step."""
    short, long = request(ids(5, 1), 30), request(ids(61, 2))
    expected = [alone(name, target, one, monkeypatch) for one in (short, long)]
    run = Run(Engine(target, drafter(name, target), prefill_chunk=16, **SLOTS), monkeypatch).add(short)
    run.step()
    run.step()
    run.add(long)
    begun = len(run.steps)
    run.finish()
    assert run.read == [5, 16, 16, 16, 13]
    while_read = run.steps[begun : begun + 7]
    assert while_read == [[], [short]] * 3 + [[long]]
    assert [run.texts[one] for one in (short, long)] == [text for text, _ in expected]
    if name != "auto":  # what it drafts depends on the time that it takes
        assert run.drafts[long] == expected[1][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_across_windows(family, monkeypatch):
    """Use windows of 4 tokens."""
    model = pair(family, "eager").target
    asked = [request(ids(length, length)) for length in (23, 3, 12)]
    expected = [alone("draft model", model, one, monkeypatch) for one in asked]
    run = Run(Engine(model, drafter("draft model", model), prefill_chunk=7), monkeypatch).add(*asked).finish()
    assert max(run.read) <= 7
    # The root's own step, and 3 drafts and a bonus in each that follows: the draft model is the target, and has read as much.
    assert all(len(run.drafts[one]) <= 1 + -(-9 // 4) for one in asked)
    assert [(run.texts[one], run.drafts[one]) for one in asked] == expected


def test_short_prompts_pass_long_ones(target, monkeypatch):
    long, short = [request(ids(90, seed), 3) for seed in (1, 2)], [request(ids(6, seed), 3) for seed in (3, 4)]
    run = Run(Engine(target, prefill_chunk=16), monkeypatch).add(*long, *short).finish()
    first = {one: next(number for number, step in enumerate(run.steps) if one in step) for one in [*long, *short]}
    assert max(first[one] for one in short) < 6 < min(first[one] for one in long)


@pytest.mark.parametrize("what", ["cancel", "preempt"])
def test_what_happens_while_a_prompt_is_read(target, what, monkeypatch):
    short, long = request(ids(5, 1), 20), request(ids(61, 2))
    expected = [alone("draft model", target, one, monkeypatch)[0] for one in (short, long)]
    engine = Engine(target, drafter("draft model", target), prefill_chunk=16, max_num_seqs=2)
    run = Run(engine, monkeypatch).add(short, long)
    for _ in range(4):
        run.step()
    assert not run.texts[long] and [row.request for row in engine.running()] == [short, long]
    if what == "cancel":
        engine.cancel(long)
        assert [row.request for row in engine.running()] == [short]
        expected[1] = []
    else:
        engine.preempt()
    run.finish()
    assert [run.texts[one] for one in (short, long)] == expected


def test_prompts_of_unlike_lengths_are_padded_little(target, monkeypatch):
    """Check that those like the first come together, and the others after them, the longest at last."""
    monkeypatch.setattr("foredraft.inference.engine.SMALL_PREFILL_TOKENS", 0)
    asked = [request(ids(length, length), 6) for length in (11, 61, 12, 13, 14, 20, 60, 21)]
    expected = [alone("plain", target, one, monkeypatch)[0] for one in asked]
    run = Run(Engine(target), monkeypatch).add(*asked).finish()
    assert run.read == [11 + 12 + 13 + 14, 61 + 60, 20 + 21]
    assert [run.texts[one] for one in asked] == expected


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3", "gpt_neox", "gemma3_text", "mistral"])
def test_prompts_of_unlike_lengths_are_padded(family, monkeypatch):
    """Check that drafts of the target itself are all accepted, so its keys are those of their places."""
    model = pair(family, "sdpa").target
    asked = [request(ids(length, length), 8) for length in (11, 31, 12, 23)]
    expected = [alone("draft model", model, one, monkeypatch) for one in asked]
    run = Run(Engine(model, drafter("draft model", model)), monkeypatch).add(*asked).finish()
    assert run.read == [11 + 31 + 12 + 23]
    assert [(run.texts[one], run.drafts[one]) for one in asked] == expected


@pytest.mark.linux  # /proc
def test_a_long_slot_takes_the_memory_of_its_text():
    """Check that no huge pages are written, which numpy asks for."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    rows, columns = 64, 2**19
    memory, before = zeros((rows, columns), torch.float32, torch.device("cpu")), resident()
    memory[:, 0] = 1
    assert resident() - before < memory.nbytes / 8 and memory.sum() == rows


def shared(seed: int, length: int = 9) -> list[int]:
    """Return a prompt of 40 tokens that all have, and others."""
    return ids(40, 0) + ids(length, seed)


@pytest.mark.parametrize("name", nightly_but(DRAFTERS, "plain", "eagle3", "union"))
def test_a_shared_beginning_is_read_once(target, name, monkeypatch):
    kinds = (1, 9, SAMPLED), (2, 7, SAMPLED), (3, 11, SamplingParams())
    asked = [request(shared(seed, length), 8, params) for seed, length, params in kinds]
    expected = [alone(name, target, one, monkeypatch) for one in asked]
    engine = Engine(target, drafter(name, target), **SLOTS, reuse_prefixes=True)
    run = Run(engine, monkeypatch).add(asked[0])
    run.step()
    run.step()
    run.add(*asked[1:]).finish()  # while the first one is written
    assert run.read == [49, 7 + 11 + 2]
    assert [run.texts[one] for one in asked] == [text for text, _ in expected]
    if name != "auto":  # what it drafts depends on the time that it takes
        assert [run.drafts[one] for one in asked] == [drafts for _, drafts in expected]


@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_a_beginning_of_every_family(family, monkeypatch):
    """Check that drafts of the target itself are all accepted, so its keys are those of their places."""
    model = pair(family, "eager").target
    asked = [request(shared(seed), 8) for seed in range(1, 3)]
    expected = [alone("draft model", model, one, monkeypatch) for one in asked]
    engine = Engine(model, drafter("draft model", model), prefill_chunk=16, **SLOTS, reuse_prefixes=True)
    for one in asked:
        Run(engine, monkeypatch).add(one).finish()
    run = Run(engine, monkeypatch).add(*asked).finish()
    assert sum(run.read) <= 2 * 4
    assert [(run.texts[one], run.drafts[one]) for one in asked] == expected


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "plain") for kind in ("qwen3_5", "lfm2", "falcon_h1", "mamba2")),
        ("qwen3_5", "chain"),
        ("falcon_h1", "chain"),
    ],
)
def test_a_conversation_with_a_hybrid(kind, name, monkeypatch):
    """Check that states are used again at the end of a text only: a text that diverges before is prefilled whole. With a
    drafter, check its drafts too: the states are at the end of the text, but the head's entries are not."""
    model, read = hybrid(kind).target, []
    engine, text = Engine(model, drafter(name, model), **SLOTS, reuse_prefixes=True), ids(40, 1)
    for more in (ids(9, 2), ids(5, 3), ids(7, 4)):
        asked, other = request(text + more, 8), request(text[:20] + more, 8)
        answer, drafts = alone(name, model, asked, monkeypatch)
        with monkeypatch.context() as patch:
            run = Run(engine, patch).add(asked, *[other] * (name == "plain")).finish()
        read.append(sum(run.read))
        assert (run.texts[asked], run.drafts[asked]) == (answer, drafts)
        text = text + more + answer
    if name == "plain":
        assert read == [49 + 29, 1 + 5 + 25, 1 + 7 + 27]


@pytest.mark.parametrize("name", ["plain", "eagle3", "draft model"])
def test_a_conversation_goes_on_from_its_answer(target, name, monkeypatch):
    engine = Engine(target, drafter(name, target), **SLOTS, reuse_prefixes=True)
    text = ids(20, 1)
    for turn in range(3):
        asked = request(text, 21)
        answer = alone(name, target, asked, monkeypatch)[0]
        with monkeypatch.context() as patch:
            run = Run(engine, patch).add(asked).finish()
        assert run.texts[asked] == answer
        # Not read again: all but the new tokens and, at the end, what fills no block and what the drafter had not read yet.
        assert turn == 0 or run.read[0] < 5 + 2 * 8
        text = text + answer + ids(5, turn)


def test_a_prompt_and_a_miss_are_read_together(target, monkeypatch):
    """Let the miss be longer than what is left of the hit, and follow it."""
    monkeypatch.setattr("foredraft.inference.engine.SMALL_PREFILL_TOKENS", 300)
    asked = [request(shared(1)), request(ids(70, 5)), request(shared(1)[:48]), request(ids(1, 1))]
    expected = [alone("draft model", target, one, monkeypatch) for one in asked]
    engine = Engine(target, drafter("draft model", target), **SLOTS, reuse_prefixes=True)
    Run(engine, monkeypatch).add(request(shared(1))).finish()
    run = Run(engine, monkeypatch).add(*asked).finish()
    assert run.read == [1 + 70 + 1 + 1]
    assert [(run.texts[one], run.drafts[one]) for one in asked] == expected


def test_the_slot_that_was_taken_the_longest_time_ago_goes_first(target, monkeypatch):
    engine = Engine(target, max_num_seqs=2, slot_tokens=100, reuse_prefixes=True)

    def read(prompt: list[int]) -> int:
        with monkeypatch.context() as patch:
            return sum(Run(engine, patch).add(request(prompt, 1)).finish().read)

    assert read(ids(16, 1)) == 16 and read(ids(16, 2)) == 16
    assert read(ids(16, 1)) == 1  # used again
    assert read(ids(24, 3)) == 24  # needs a slot: the second text goes
    assert read(ids(16, 1)) == 1 and read(ids(16, 2)) == 16
    assert read(ids(80, 4)) == 80 and read(ids(80, 4)[:40]) == 1


def test_a_busy_slot_gives_a_copy(target, monkeypatch):
    """Check also that a text which continues another one takes its slot, and one that does not leaves it."""
    asked = [request(shared(seed), 8) for seed in range(3)]
    expected = [alone("draft model", target, one, monkeypatch) for one in asked]
    engine = Engine(target, drafter("draft model", target), **SLOTS, reuse_prefixes=True)
    run = Run(engine, monkeypatch).add(asked[0])
    run.step()
    run.add(asked[1]).step()
    run.finish()

    def kept() -> list[list[int]]:
        return sorted(slot.text[:49] for slot in engine.slots.slots if slot.text)

    assert run.read == [49, 10] and kept() == sorted([shared(0), shared(1)])
    run.add(asked[2]).finish()
    assert run.read[2:] == [10] and kept() == sorted(map(shared, range(3)))
    assert [(run.texts[one], run.drafts[one]) for one in asked] == expected
    longer = request(asked[2].prompt + run.texts[asked[2]] + [5], 3)
    run.add(longer).finish()
    assert len(kept()) == 3


def test_a_text_is_never_that_of_others(target, monkeypatch):
    """Check that the same tokens after other ones are not used again; an engine finds only its own texts."""
    engine = Engine(target, **SLOTS, reuse_prefixes=True)
    first, second, third = ids(4, 1), ids(4, 2), ids(4, 3)
    Run(engine, monkeypatch).add(request(first + second + third)).finish()
    asked = [request(prompt) for prompt in (second + third, third + second + first, first + third + second)]
    expected = [alone("plain", target, one, monkeypatch)[0] for one in asked]
    run = Run(engine, monkeypatch).add(*asked).finish()
    assert [run.texts[one] for one in asked] == expected and run.read == [8 + 12 + 9]
    other = Run(Engine(target, reuse_prefixes=True), monkeypatch).add(request(first + second + third)).finish()
    assert other.read == [12]


@pytest.mark.parametrize("chunk", [None, 5])
def test_logits_that_are_not_numbers_are_not_kept(target, chunk, monkeypatch):
    engine, asked = Engine(target, prefill_chunk=chunk, reuse_prefixes=True), request(ids(12, 1))
    expected, _ = alone("plain", target, asked, monkeypatch)
    with monkeypatch.context() as patch:
        read = type(target).forward
        poisoned = lambda self, *args, **kwargs: (lambda r: r._replace(logits=r.logits * float("nan")))(  # noqa: E731
            read(self, *args, **kwargs)
        )
        patch.setattr(type(target), "forward", poisoned)
        run = Run(engine, patch).add(asked).finish()
    assert run.texts[asked] == []
    again = Run(engine, monkeypatch).add(asked).finish()
    assert again.texts[asked] == expected and sum(again.read) == 12 and engine.slots.hits == 0


def test_the_lm_head_takes_the_last_position_of_each_prompt_alone(target):
    shapes: list = []
    note = target.model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: shapes.append(inputs[0].shape)
    )
    engine = Engine(target)
    for length in (3, 9, 4, 7):
        engine.add(Request(prompt(length)[0].tolist(), max_new_tokens=1))
    engine.step()
    note.remove()
    assert [shape[:2] for shape in shapes] == [(4, 1)]


@pytest.mark.parametrize("chunk", nightly_but([None, 16], 16))
@pytest.mark.parametrize("name", nightly_but(["plain", "draft model"], "plain"))
def test_texts_of_one_prompt_prefill_it_once(target, name, chunk, monkeypatch):
    """Add another one with the same prefix, and one without it, which need not wait."""
    common, other = ids(61, 1), ids(30, 2)
    asked = [Request(common, SAMPLED, 6, seed, trace=0) for seed in range(8)]
    asked += [request(common[:40] + other), request(other)]
    expected = [alone(name, target, one, monkeypatch)[0] for one in asked]
    engine = Engine(target, drafter(name, target), prefill_chunk=chunk, **SLOTS, reuse_prefixes=True)
    run = Run(engine, monkeypatch).add(*asked).finish()
    assert [run.texts[one] for one in asked] == expected
    # The last token is read again.
    assert sum(run.read) == 61 + 7 * 1 + (70 - 39) + 30


def test_a_short_prompt_does_not_wait_for_a_long_one_with_a_common_beginning(target, monkeypatch):
    long, short = request(ids(200, 1), 4), request(ids(200, 1)[:10] + ids(9, 2), 4)
    engine = Engine(target, prefill_chunk=16, **SLOTS, reuse_prefixes=True)
    run = Run(engine, monkeypatch).add(long, short)
    while not run.texts[short]:
        run.step()
    assert not run.texts[long]
