"""Decoding by recordings, as on a GPU: the same text, and nothing in a step waits for the device. The recorder is
tests/support/modes.py, which keeps a CUDA graph's rules on a CPU."""

import contextlib
import gc
import random
import warnings

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.caches import cuda_graphs
from foredraft.inference import Engine, Request, SamplingParams, generate
from foredraft.inference.drafters import drafter_for
from foredraft.inference.verify import Validity, to_host
from tests.support import nightly_but
from tests.support.architectures import VOCAB, a_few_families, pair
from tests.support.batches import prompt
from tests.support.decoding import SETTINGS, Random, drafters, with_trees
from tests.support.head_factory import make_head
from tests.support.modes import Tape

LIMITS = {"max_new_tokens": 12, "eos_token_id": -1, "seed": 7}


@pytest.fixture
def taped(monkeypatch) -> list[Tape]:
    """Return every recording that is made."""
    tapes: list[Tape] = []

    def record(*args) -> Tape:
        tapes.append(Tape(*args))
        return tapes[-1]

    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", record)
    return tapes


def again(target: Target) -> Target:
    """Return the same model, without the cache that the last generation released, to be decoded as on a GPU."""
    return with_trees(Target(target.model, target.tokenizer, target.name))


def test_a_recording_does_what_the_function_did(taped):
    memory = torch.zeros(3)

    def work(x, y):
        memory.add_(x)
        return memory * 2, None if y is None else x @ y

    graphs = cuda_graphs.CudaGraphs(torch.device("cpu"))
    for number, y in enumerate([None, None, torch.ones(3), 2 * torch.ones(3)], start=1):
        twice, product = graphs("work", work, torch.ones(3), y)
        assert twice.tolist() == [2.0 * number] * 3  # once a call: recording runs no kernel
        assert (product is None) == (y is None) and (y is None or product == y.sum())
    assert len(taped) == 2 and memory.tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "waiting", [lambda x: x * x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0, 2.0])]
)
def test_what_waits_for_the_device_is_not_recorded(monkeypatch, waiting):
    """Check that it is found before a capture is tried: one that fails leaves a GPU's stream and allocator in the middle of
    it."""
    tried: list = []
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", lambda *args: tried.append(args))
    graphs = cuda_graphs.CudaGraphs(torch.device("cpu"))
    with pytest.warns(UserWarning, match="cannot be captured"):
        first = graphs("waiting", waiting, torch.ones(2))
    assert torch.equal(graphs("waiting", waiting, torch.ones(2)), first) and not tried


def test_the_least_recently_used_one_goes(monkeypatch, taped):
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    graphs = cuda_graphs.CudaGraphs(torch.device("cpu"))
    for key in (1, 2, 1, 3, 1, 2):
        graphs(key, torch.neg, torch.ones(2))
    assert len(taped) == 4 and [key for key, *_ in graphs.graphs] == [1, 2]


class Repeated:
    """Run the function again where a CUDA graph would replay it."""

    def __init__(self, function, inputs) -> None:
        self.function, self.inputs, self.outputs = function, inputs, None

    def replay(self) -> None:
        self.outputs = self.function(*self.inputs)


def serve_requests(engine: Engine, count: int, longest: int, rng: random.Random) -> None:
    """Let requests of random prompts and budgets join, end and be canceled, greedy and sampled ones together."""
    waiting = [
        Request(
            [rng.randrange(engine.target.vocab_size) for _ in range(rng.randint(1, longest))],
            SamplingParams(temperature=rng.choice([0.0, 1.0])),
            max_new_tokens=rng.randint(1, longest),
            seed=rng.randrange(100),
        )
        for _ in range(count)
    ]
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            engine.add(waiting.pop())
        if engine.has_work:
            engine.step()
        if engine.running() and rng.random() < 0.02:
            engine.cancel(rng.choice(engine.running()).request)


@pytest.mark.parametrize("name", ["plain", "medusa"])
def test_joins_and_leaves_for_long_capture_few_steps(target, name, monkeypatch):
    """Check that only few numbers of slots, of columns and of settings ever occur."""
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Repeated)
    monkeypatch.setattr("foredraft.heads.caches.kv_cache.MIN_BUCKET", 16)
    target, before = again(target), cuda_graphs.CudaGraphs.num_captured
    engine = Engine(target, drafters(target).get(name), max_num_seqs=4)
    serve_requests(engine, 30, 20, random.Random(0))
    slots, buckets, settings = 3, 3, 2  # 1, 2, 4; 16, 32, 64 columns; greedy, or not
    most = slots * (buckets + settings + 1)
    assert len(engine.slots.cache.graphs.graphs) <= most
    assert cuda_graphs.CudaGraphs.num_captured - before <= 4 * most  # memory grew a few times, and never anew


@torch.inference_mode()
def test_trees_of_two_and_three_levels_are_verified_by_one_graph(target, taped):
    target = again(target)
    for depth in (2, 3):
        drafter = drafter_for(make_head("eagle3", target), target, nodes=6, depth=depth, min_probability=0)
        generate(target, drafter, prompt(9), temperature=1.0, **LIMITS)
    keys = [key for key, *_ in target.acquire_cache(1, 64).graphs.graphs]
    assert {depth for kind, *_, depth in keys if kind == "verify"} - {0} == {3}


@pytest.mark.parametrize("name", nightly_but(["greedy", "top-p", "penalty"], "greedy", "penalty"))
def test_the_text_is_the_same(target, name, monkeypatch, taped):
    """Try every drafter with top-p, and one of each cache with the other settings."""
    settings = SETTINGS[name] | LIMITS
    plain = generate(target, None, prompt(9), **settings)
    recorded = again(target)
    known = drafters(recorded)
    if name == "top-p":
        for kind in ("eagle", "hydra_pp", "mtp", "p_eagle", "dflash2", "dspark", "jetspec", "domino", "xpress"):
            known[kind] = drafter_for(make_head(kind, recorded), recorded, nodes=8, min_probability=0)
    else:
        known = {kind: known[kind] for kind in ("random", "medusa", "eagle3", "dflash")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of ours may be left to run kernel by kernel
        for drafter in (None, *known.values()):
            assert generate(recorded, drafter, prompt(9), **settings).new_tokens == plain.new_tokens
    assert taped


def test_top_p_that_needs_more_tokens_than_it_considers_is_verified_again(target, monkeypatch, taped):
    settings = SETTINGS["top-p"] | LIMITS
    plain, outcomes = generate(target, None, prompt(9), **settings), []
    monkeypatch.setattr("foredraft.inference.target_sampler.TOP_P_CANDIDATES", 2)

    def note(*args):
        outcomes.append(to_host(*args))
        return outcomes[-1]

    monkeypatch.setattr("foredraft.inference.target_sampler.to_host", note)
    recorded = again(target)
    for drafter in (None, drafters(recorded)["eagle3"]):
        assert generate(recorded, drafter, prompt(9), **settings).new_tokens == plain.new_tokens
    valid = [one for outcome in outcomes for one in outcome.valid]
    assert {Validity.TOO_FEW, Validity.VALID} == set(valid)


@pytest.mark.parametrize("name", nightly_but(["eagle3", "medusa", "draft model"], "eagle3"))
def test_drafts_are_those_of_running_it_kernel_by_kernel(target, name, monkeypatch):
    """Check greedy, sampled, sampled otherwise, a text that outgrows its columns, and a smaller tree; with an oracle's
    help, since none of such a head's drafts is accepted."""
    monkeypatch.setattr("foredraft.heads.caches.kv_cache.MIN_BUCKET", 48)
    rows = torch.cat([prompt(21), prompt(21, seed=1)])

    def proposed(target: Target) -> list:
        torch.manual_seed(3)
        drafter, trees = drafters(target)[name], []
        propose = type(drafter).propose

        def note(accepted, gumbel):
            tree = propose(drafter, accepted, gumbel)
            trees.append((tree.tokens.tolist(), tree.parents.tolist()))
            whole = [next(text for text in known if text[:21] == message[:21]) for message in accepted.text]
            texts = [text[len(message) - 1 :][:3] for text, message in zip(whole, accepted.text, strict=True)]
            for row, coming in enumerate(texts):  # what its first branch names becomes right in every other step
                right = len(accepted.text[0]) % 2 and len(coming) == 3 and tree.parents[row, 2] == 1
                tree.tokens[row, 1 : 3 if right else 1] = torch.tensor(coming[1:3] if right else [])
            return tree

        monkeypatch.setattr(drafter, "propose", note)
        for settings in ({}, {"temperature": 1.0}, {"temperature": 0.5}, {"max_new_tokens": 36}, {"small": True}):
            if settings.pop("small", False):
                drafter.resize(6, 3)
            known = generate(target, None, rows, **LIMITS | settings).sequences.tolist()
            out = generate(target, drafter, rows, **LIMITS | settings)
            assert out.sequences.tolist() == known
        return trees

    plain = proposed(target)
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    assert proposed(again(target)) == plain and len(plain) > 40


@a_few_families
def test_every_architecture(family, attention, monkeypatch):
    target = again(pair(family, attention).target)
    ids, facts = prompt(21) % VOCAB, {"max_new_tokens": 6, "eos_token_id": -1}
    plain = generate(target, None, ids, **facts).new_tokens
    monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    monkeypatch.setattr("foredraft.heads.caches.layers.SLACK", 0)  # texts are longer than what sliding layers keep
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        for drafter in (None, Random()):
            assert generate(again(target), drafter, ids, **facts).new_tokens == plain
    assert not any("cannot be captured" in str(warning.message) for warning in message)


def test_a_full_device_is_captured_on_at_the_next_call(monkeypatch, taped):
    record = cuda_graphs.CAPTURES["cpu"]

    def full(*args):
        raise torch.OutOfMemoryError("full")

    graphs = cuda_graphs.CudaGraphs(torch.device("cpu"))
    for capture in (full, record):
        monkeypatch.setattr(graphs, "capture", capture)
        assert graphs("negated", torch.neg, torch.ones(2)).tolist() == [-1.0, -1.0]
    assert len(taped) == 1


class FakeCuda:
    """Replace torch.cuda, as far as captures use it: record which stream and which pool each of them took."""

    def __init__(self) -> None:
        self.streams, self.captures, self.cleared, self.current = 0, [], 0, "the caller's stream"
        self.started = 0

    def make_stream(self) -> int:
        self.streams += 1
        return self.streams

    @contextlib.contextmanager
    def capture(self, graph, pool, stream, capture_error_mode):
        assert self.cleared == 2 * self.started + 1, "cuBLAS keeps a workspace in the pool"
        assert not gc.isenabled(), "an older graph may be freed in a capture"
        self.started += 1
        self.current = stream
        yield
        self.captures.append((pool, stream))

    def clear(self) -> None:
        self.cleared += 1

    def set_stream(self, stream) -> None:
        self.current = stream


@pytest.fixture
def fake_cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    parts = {
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda: fake.current,
        "set_stream": fake.set_stream,
        "Stream": fake.make_stream,
        "CUDAGraph": object,
        "graph": fake.capture,
        "graph_pool_handle": object,
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", fake.clear, raising=False)
    cuda_graphs.graph_memory.cache_clear()
    yield fake
    cuda_graphs.graph_memory.cache_clear()


def test_all_graphs_of_a_device_share_one_stream_and_a_pool_that_stays(fake_cuda):
    """Check the streams: torch shares the memory of a pool only among captures on the same stream."""
    graphs = [cuda_graphs.CudaGraph(torch.neg, (torch.ones(size),)) for size in (2, 3, 4)]
    assert fake_cuda.streams == 1
    assert len(set(fake_cuda.captures)) == 1 and len(fake_cuda.captures) == len(graphs) + 1  # and the keeper's
    assert fake_cuda.cleared == 2 * len(fake_cuda.captures)
    assert fake_cuda.current == "the caller's stream"


def test_a_graph_keeps_what_its_function_uses_and_did_not_make(fake_cuda):
    weight, x = torch.ones(2), torch.ones(2)
    kept = cuda_graphs.CudaGraph(lambda x: (x + weight).neg(), (x,)).references
    assert {id(tensor) for tensor in kept} == {id(x), id(weight)}


def test_captures_after_a_failed_one_take_new_memory(fake_cuda):
    """Check that its pool is left alone: torch still records into it, and refuses every later capture there."""
    cuda_graphs.CudaGraph(torch.neg, (torch.ones(2),))
    with pytest.raises(ZeroDivisionError):
        cuda_graphs.CudaGraph(lambda x: 1 / 0, (torch.ones(2),))
    assert fake_cuda.current == "the caller's stream" and gc.isenabled()
    cuda_graphs.CudaGraph(torch.neg, (torch.ones(2),))
    assert fake_cuda.captures[0] == fake_cuda.captures[1] != fake_cuda.captures[-1] and fake_cuda.streams == 2
