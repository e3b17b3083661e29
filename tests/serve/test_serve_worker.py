"""The thread that owns the engine, and text out of tokens as they come."""

import asyncio
import resource
import threading
import time
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foredraft.heads import Target
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.inference import Engine, Request, SamplingParams, load_drafter
from foredraft.inference.drafters import DraftModel, NgramDrafter
from foredraft.inference.drafters.base import NoDrafter
from foredraft.inference.drafters.measurements import Case
from foredraft.inference.serve.accepted_log import AcceptedLog
from foredraft.inference.serve.cache_budget import slot_limits
from foredraft.inference.serve.errors import ApiError
from foredraft.inference.serve.metrics import Metrics
from foredraft.inference.serve.stop_strings import find_partial_mark, without_stop
from foredraft.inference.serve.worker import GOOD_STEPS, BatchLimit, Job, Worker
from foredraft.inference.slots import RequestOutput, Slots
from foredraft.inference.text import Detokenizer
from tests.support.batches import prompt


def requests(count: int = 5) -> list[Request]:
    params = SamplingParams(temperature=1.0)
    return [Request(prompt(4 + i, i)[0].tolist(), params, 10 + i, seed=i) for i in range(count)]


def ask(worker: Worker, asked: list[Request]) -> list[list[int] | ApiError]:
    """Return what became of each of them, submitted at once."""

    async def read() -> dict[Job, list[int] | ApiError]:
        found: dict[Job, list[int] | ApiError] = {}
        with worker.reserved(len(asked)):
            jobs, ended = worker.submit(asked), 0
        texts: dict[Job, list[int]] = {job: [] for job in jobs}
        worker.start()
        while ended < len(jobs):
            job, output = await asyncio.wait_for(jobs[0].outputs.get(), 120)
            if isinstance(output, ApiError):
                found[job], ended = output, ended + 1
                continue
            texts[job] += output.tokens
            if output.finish_reason is not None:
                found[job], ended = texts[job], ended + 1
        return {job: found[job] for job in jobs}

    found = asyncio.run(read())
    worker.stop()
    assert worker.open == 0 and not worker.is_alive() and not worker.jobs
    return list(found.values())


@pytest.fixture(scope="module")
def plain(target: Target) -> list:
    return ask(Worker(target, None), requests())


def test_out_of_memory_is_survived(target, plain, monkeypatch):
    """Let memory suffice for two sequences."""
    step = Engine.step

    def small(engine: Engine):
        outputs = step(engine)
        if len(engine.slots.sequences) > 2:
            raise torch.OutOfMemoryError("no memory for three rows")
        return outputs

    monkeypatch.setattr(Engine, "step", small)
    texts = ask(Worker(target, NgramDrafter(), max_num_seqs=3), requests())
    assert texts == plain  # what a step gave before it ran out is told once

    prefill = Engine.prefill

    def before(engine: Engine):
        if len(engine.running()) > 2:
            raise torch.OutOfMemoryError("no memory for three rows")
        return prefill(engine)

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(Engine, "prefill", before)
    assert ask(Worker(target, NgramDrafter()), requests()) == plain


def test_memory_that_slots_lack_loses_no_request(target, plain, monkeypatch):
    """Let memory suffice for one slot, and for none."""
    allocate = Slots.allocate

    def small(slots: Slots, count: int, capacity: int, most: int):
        if count > most:
            raise torch.OutOfMemoryError("no memory for the slots")
        return allocate(slots, count, capacity)

    monkeypatch.setattr(Slots, "allocate", partialmethod(small, most=1))
    assert ask(Worker(target, NgramDrafter()), requests()) == plain
    monkeypatch.setattr(Slots, "allocate", partialmethod(small, most=0))
    assert all(isinstance(text, ApiError) for text in ask(Worker(target, None), requests(2)))


def test_a_request_that_breaks_the_step_fails_alone(target, plain, monkeypatch):
    asked, prefill = requests(), Engine.prefill
    bad = asked[2]

    def checked(engine: Engine):
        if any(row.request is bad for row in engine.running()):
            raise RuntimeError("a bug")
        return prefill(engine)

    monkeypatch.setattr(Engine, "prefill", checked)
    texts = ask(Worker(target, NgramDrafter()), asked)
    assert isinstance(texts[2], ApiError) and texts[2].status_code == 500
    assert [*texts[:2], *texts[3:]] == [*plain[:2], *plain[3:]]


def test_a_failed_step_loses_no_log_probabilities(target, plain, monkeypatch):
    step, send, failed, sent = Engine.step, Worker.send, list[bool](), list[RequestOutput]()

    def sometimes(engine: Engine):
        outputs = step(engine)
        if len(engine.slots.sequences) == 3:
            failed.append(True)
            raise torch.OutOfMemoryError("no memory for three rows")
        return outputs

    monkeypatch.setattr(Engine, "step", sometimes)
    monkeypatch.setattr(Worker, "send", lambda worker, job, one: sent.append(one) or send(worker, job, one))
    asked = [replace(request, trace=1) for request in requests()]
    assert ask(Worker(target, NgramDrafter(), max_num_seqs=3), asked) == plain and failed
    assert all(output.trace is not None for output in sent)


def test_a_client_that_goes_while_the_engine_ends_keeps_no_other_waiting(target, monkeypatch):
    worker, told = Worker(target, None), list[bool]()
    worker.on_death = lambda: told.append(True)

    def fail(engine: Engine):
        worker.cancel(next(iter(worker.jobs.values())))
        raise SystemExit("the device is unusable")

    async def read() -> Any:
        with worker.reserved(2):
            jobs = worker.submit(requests(2))
        worker.start()
        return await asyncio.wait_for(jobs[0].outputs.get(), 60)

    monkeypatch.setattr(Engine, "step", fail)
    monkeypatch.setattr(Engine, "cancel", fail)
    (_, error) = asyncio.run(read())
    worker.join(60)
    assert error.status_code == 503 and told


def test_a_worker_stops_after_its_step(target, monkeypatch):
    worker, computing = Worker(target, None), threading.Event()

    def slow(engine: Engine):
        computing.set()
        time.sleep(1)
        return []

    async def submit() -> None:
        with worker.reserved(1):
            worker.submit(requests(1))

    monkeypatch.setattr(Engine, "step", slow)
    asyncio.run(submit())
    worker.start()
    computing.wait()
    worker.stop()
    assert not worker.is_alive()


def test_a_worker_that_stops_leaves_what_its_drafter_measured(target, tiny_path, tmp_path, monkeypatch):
    """SIGTERM ends a server without the functions that Python calls at exit."""
    monkeypatch.setenv("FOREDRAFT_REMEMBER", "1")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    drafter = load_drafter(f"draft:{tiny_path}", target)
    for _ in range(9):
        drafter.memory.costs_of(Case(1, True)).add("head", 1, 1.0)
    worker = Worker(target, drafter)
    worker.start()
    assert not (tmp_path / "drafting").exists()
    worker.stop()
    assert len(list((tmp_path / "drafting").iterdir())) == 1


@pytest.mark.parametrize("what", ["one out-of-memory", "a poison request"])
def test_the_batch_grows_again_while_others_wait(target, what, monkeypatch):
    """Keep a queue, as a full server always has."""
    monkeypatch.setattr("foredraft.inference.serve.worker.GOOD_STEPS", 2)
    asked = [Request(prompt(5, i)[0].tolist(), max_new_tokens=8, seed=i) for i in range(24)]
    step, sizes, failed = Engine.step, list[tuple[int, int]](), list[int]()

    def faulty(engine: Engine):
        running = [row.request for row in engine.running()]
        if asked[2] in running if what == "a poison request" else len(running) == 4 and not failed:
            failed.append(len(running))
            raise RuntimeError("a bug")
        outputs = step(engine)
        sizes.append((len(failed), len(engine.slots.unfinished()) * bool(engine.waiting)))
        return outputs

    monkeypatch.setattr(Engine, "step", faulty)
    texts = ask(Worker(target, None, max_num_seqs=4), asked)
    assert [number for number, text in enumerate(texts) if isinstance(text, ApiError)] == [2] * (
        what != "one out-of-memory"
    )
    assert failed and max(size for count, size in sizes if count == len(failed)) == 4


def test_a_batch_that_fails_again_and_again_is_tried_less_and_less_often():
    limit, steps = BatchLimit(16), list[int]()
    for _ in range(12):
        assert limit.on_failure(16) == 8
        count = 1
        while limit.on_success() < 16:
            count += 1
        steps.append(count)
    assert steps[:3] == [32, 64, 128] and steps[-1] == 1024
    for _ in range(1024):
        limit.on_success()
    assert limit.on_failure(16) == 8 and limit.required == 2 * GOOD_STEPS
    assert limit.on_failure(1) == 16  # that one was to blame


def test_a_drafter_of_larger_trees_takes_over_only_where_it_fits(target):
    worker = Worker(target, NgramDrafter(depth=2), max_num_seqs=1, cache_gib=3e-4)
    engine, most = worker.engines[0], worker.context()
    request = Request([5] * 3, max_new_tokens=most - 3)
    engine.add(request)
    with pytest.raises(ValueError, match="trees of 61 nodes"):
        engine.swap(NgramDrafter(depth=60))
    assert engine.drafter.nodes == 3 and engine.slots.drafter is engine.drafter
    while engine.has_work:
        engine.step()
    engine.swap(NgramDrafter(depth=60))
    (text,) = ask_unchecked(worker, request)
    assert isinstance(text, ApiError) and text.status_code == 400 and "exceeds the cache" in str(text)


def ask_unchecked(worker: Worker, request: Request) -> list[list[int] | ApiError]:
    """Submit a request as if the drafter had changed after the request was checked."""
    checked = Engine.check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "check", lambda *_: None)
        patch.setattr(Engine, "add", lambda engine, one: engine.waiting.append(checked(engine, one)))
        return ask(worker, [request])


def test_a_late_request_fails(target):
    (late,) = ask(Worker(target, None, timeout=1e-6), requests(1))
    assert isinstance(late, ApiError) and late.status_code == 504


def test_a_full_queue_takes_all_of_a_request_or_nothing(target):
    worker = Worker(target, None, max_num_seqs=1, max_waiting=2)

    with worker.reserved(2):
        with pytest.raises(ApiError, match="429"), worker.reserved(2):
            pass
        with pytest.raises(ValueError, match="4 texts exceed the limit of 3"), worker.reserved(4):
            pass
        with pytest.raises(ValueError, match="a bad prompt"), worker.reserved(1):
            assert worker.open == 3
            raise ValueError("a bad prompt")
        assert worker.open == 2


def test_memory_of_both_caches_is_counted(target):
    """Count 6 layers of 2 heads of 8 numbers, keys and values; a draft model of the same size with entries for its tree in
    addition; and an engine without drafts. The number of slots falls before the length of texts does."""
    entry, model, context = 2 * 6 * 2 * 8 * 4, DraftModel(target, target), target.context
    tree, long, longer = model.cache_entries(0), context + 2, context + 2 * model.nodes
    for drafter, entries, slots in (
        (None, 2 * 3 * long, (3, long)),
        (None, 2 * 3 * long - 1, (2, long)),
        (None, 2 * long, (1, long)),
        (None, 2 * 200, (1, 200)),
        (model, 3 * (3 * longer + tree), (3, longer)),
        (model, 2 * (3 * longer + tree) - 1, (1, longer)),
        (model, 3 * 100 + tree, (1, 100)),
    ):
        worker = Worker(target, drafter, max_num_seqs=3, cache_gib=entries * entry / 2**30)
        assert [(engine.max_num_seqs, engine.slot_tokens) for engine in worker.engines] == [slots] * 2
        assert worker.context() == min(context, slots[1] - 2 * (drafter or NoDrafter()).nodes)
    with pytest.raises(ValueError, match="cache_gib=1e-06 is too small for 1 texts in 2 engines"):
        Worker(target, None, cache_gib=1e-6)


def test_slots_of_a_gpu_are_a_power_of_two(target, monkeypatch):
    entry, long = 2 * 6 * 2 * 8 * 4, target.context + 2
    monkeypatch.setattr(Capabilities, "captures", True)
    for room, most, count in ((16, 12, 12), (15, 12, 8), (8, 8, 8), (7, 8, 4), (3, 8, 2), (1, 8, 1)):
        assert slot_limits(target, [None, None], most, 2 * room * long * entry / 2**30) == (count, long)


def test_a_long_context_is_shortened_before_less_than_four_texts_are_decoded(target, monkeypatch):
    entry = 2 * 6 * 2 * 8 * 4
    monkeypatch.setattr("foredraft.inference.serve.cache_budget.TOKENS", 100)
    for room, most, slots in ((600, 16, (4, 150)), (600, 3, (3, 200)), (306, 16, (3, 102)), (4000, 16, (15, 258))):
        assert slot_limits(target, [None, None], most, 2 * room * entry / 2**30) == slots


def test_a_small_cache_is_reported(target, caplog):
    slot_limits(target, [None], 3, 0.0005)
    assert "room for 2 texts of 256 tokens at a time, not for max_num_seqs=3" in caplog.text


def test_how_often_beginnings_were_known_is_told(target):
    prompt = torch.randint(1, 300, (70,)).tolist()
    worker = Worker(target, NgramDrafter(), max_num_seqs=1)
    page = Metrics(worker)
    first, again = ask(worker, [Request(prompt, max_new_tokens=5) for _ in range(2)])
    assert first == again
    shown = dict(line.rsplit(" ", 1) for line in page.page().decode().splitlines() if not line.startswith("#"))
    assert float(shown["foredraft_prefix_cache_hit_rate"]) == 69 / 140


class Asked:  # what a metric reads of a job
    def __init__(self, engine: Engine):
        self.engine = engine


def test_acceptance_is_told_by_depth_and_by_answer(target):
    worker = Worker(target, NgramDrafter(), max_num_seqs=1)
    page, job = Metrics(worker), Asked(worker.engines[0])
    choice = SimpleNamespace(accepted=[0, 2, 1], emitted=6)
    answer: Any = SimpleNamespace(prompt_tokens=3, completion_tokens=6, failure=None, first_token=0.1)
    answer.choices = {job: choice}
    page.observe(answer, 1.0)
    shown = dict(line.rsplit(" ", 1) for line in page.page().decode().splitlines() if not line.startswith("#"))
    depths = {name: float(count) for name, count in shown.items() if "accepted_at_depth_total" in name}
    assert sorted(depths.values()) == [1, 2]
    assert [float(count) for name, count in shown.items() if name.startswith("foredraft_acceptance_length_sum")] == [2]


def test_half_a_line_on_a_full_disk_is_taken_back(tmp_path):
    log, path = AcceptedLog(tmp_path / "log"), tmp_path / "log"
    choice = SimpleNamespace(index=0, accepted=[1], drafted=[2])
    answer: Any = SimpleNamespace(request=SimpleNamespace(speculative=True), choices={0: choice}, id="a", created=1)
    log.write(answer)
    whole = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
    try:
        with pytest.raises(OSError):
            log.write(answer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write(answer)
    assert path.read_text() == 2 * whole


TEXTS = ["", "plain", "häß 日本語 🧪🧪 \u200d👩", " spaces  and\n\nlines ", "é" * 30]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_in_whole_characters(target, text):
    """Use the tiny tokenizer, which only has bytes: most characters are several tokens."""
    tokens = target.text_tokenizer(text).input_ids
    detokenizer = Detokenizer(target.text_tokenizer)
    parts = [detokenizer.push(token) for token in tokens]
    assert "".join(parts) == text and all("�" not in part for part in parts) and detokenizer.end() == ""
    for cut in range(len(tokens)):
        detokenizer = Detokenizer(target.text_tokenizer)
        shown = "".join(map(detokenizer.push, tokens[:cut])) + detokenizer.end()
        assert text.startswith(shown) and len(shown.encode()) > len(target.text_tokenizer.decode(tokens[:cut])) - 4


def test_bytes_that_are_no_text_come_as_they_are_decoded_at_once(target):
    tokens = [*torch.randint(1, 257, (300,), generator=torch.Generator().manual_seed(1)).tolist(), 66]
    detokenizer = Detokenizer(target.text_tokenizer)
    assert "".join(map(detokenizer.push, tokens)) + detokenizer.end() == target.text_tokenizer.decode(tokens)


def test_the_detokenizer_is_linear(target):
    """Check also bytes that are not text, and end tokens, which are empty: each is decoded a bounded number of times."""
    for tokens in ([131] * 2000, [target.eos_token_ids[0]] * 2000):
        detokenizer, decoded = Detokenizer(target.text_tokenizer), []
        decode = detokenizer.decode
        detokenizer.decode = lambda ids, decode=decode, decoded=decoded: decoded.append(len(ids)) or decode(ids)
        shown = "".join(map(detokenizer.push, tokens)) + detokenizer.end()
        assert sum(decoded) < 100 * len(tokens)
        assert abs(len(shown) - len(decode(tokens))) < 40


def test_characters_of_byte_tokens_in_a_row_are_shown(target):
    """Check incomplete bytes, which decode to as many signs as they have bytes (SentencePiece's byte fallback)."""
    text = "🧪👩" * 9
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [piece for byte in text.encode() if (piece := detokenizer.push(byte + 1))] == list(text)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "text, stops, expected",
    [
        ("one two three", ["two"], "one "),
        ("one twa three", ["two", "xyz"], "one twa three"),
        ("ababac!", ["abac"], "ab"),
        ("abcdef", ["def", "cd"], "ab"),
        ("abc", ["cd"], "abc"),
    ],
)
def test_nothing_of_a_stop_string_is_shown(text, stops, expected, size):
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    end = len(parts) - 1
    if expected != text:  # the engine ends the text with the part that completes a stop string
        end = next(n for n in range(len(parts)) if any(stop in "".join(parts[: n + 1]) for stop in stops))
    for number in range(end):
        shown = "".join(parts[:number])
        assert expected.startswith(shown[: find_partial_mark(shown, stops)])
    whole = "".join(parts[: end + 1])
    assert without_stop(whole, stops, parts[end]) == expected
    stop = next((stop for stop in stops if text.startswith(expected + stop)), "")
    assert without_stop(whole, stops, parts[end], include=True) == expected + stop


def test_a_stop_string_before_the_last_token_ends_nothing():
    """Check that the engine passed over it: too few tokens came before."""
    assert without_stop("0ab1ab2x", ["ab", "xyz"], "x") == "0ab1ab2x"
    assert without_stop("0ab1ab2ab!", ["ab", "xyz"], "ab!") == "0ab1ab2"
