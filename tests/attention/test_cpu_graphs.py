"""Captured forwards on a CPU: the same bits as the model's own, or none."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foredraft import Target
from foredraft.heads.caches import cpu_graphs
from foredraft.heads.caches.cpu_graphs import CpuGraph, CpuGraphs
from foredraft.inference import Engine, Request, generate
from tests.support.architectures import VOCAB, a_few_families, pair
from tests.support.batches import prompt
from tests.support.decoding import Random, run

pytestmark = pytest.mark.filterwarnings("error::UserWarning")
CAPTURED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2", "opt")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture the third forward of the same shapes."""
    monkeypatch.setattr(cpu_graphs, "CALLS", 2)


def kinds(target: Target) -> Counter[str]:
    """Count graphs in use, graphs that are not compared yet, and shapes that are not captured."""
    counts = Counter[str]()
    for graph in target.graphs.graphs.values():
        if isinstance(graph, CpuGraph):
            counts["in use" if graph.is_checked else "new"] += 1
        else:
            counts["none" if graph is None else "counting"] += 1
    return counts


@a_few_families
def test_forwards_of_every_family_have_the_bits_of_the_model(family: str, attention: str):
    target = copy.deepcopy(pair(family, attention).target)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for batch, nodes in ((1, 1), (1, 4), (2, 3)):
            plain, captured = (target.new_cache(batch, 64, nodes, capture) for capture in (False, True))
            for _ in range(8):
                tokens = torch.randint(3, VOCAB, (batch, nodes), generator=generator)
                outputs = []
                for cache in (plain, captured):
                    mask = cache.mask(torch.ones(1, nodes, nodes).bool().tril())
                    positions = cache.seq_lens + torch.arange(nodes)[None]
                    outputs.append(target.forward_tree(tokens, positions, mask, cache, (1,)))
                    cache.commit([[*range(nodes)]] * batch)
                assert all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    wanted = "in use" if family in CAPTURED and target.capabilities.packed_rows | (family == "gemma2") else "none"
    assert kinds(target) == {wanted: 3}


def test_texts_are_the_same_with_trees_and_in_batches(fresh):
    asked = [Request(prompt(5 + 3 * i, i)[0].tolist(), max_new_tokens=40, seed=i) for i in range(2)]
    plain = [generate(copy.deepcopy(fresh), None, prompt(5 + 3 * i, i), max_new_tokens=40, seed=i) for i in range(2)]
    texts = [output.sequences[0, 5 + 3 * i :].tolist() for i, output in enumerate(plain)]
    assert run(Engine(fresh, Random()), asked)[0] == run(Engine(fresh, Random()), asked)[0] == texts
    assert kinds(fresh)["in use"] == 1 and not kinds(fresh)["none"]


@pytest.mark.parametrize("change", ["hook", "weight", "forward"])
def test_a_changed_model_is_captured_anew(change: str, fresh):
    def text() -> list[int]:
        return generate(fresh, None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences[0].tolist()

    before, seen = text(), list[int]()
    assert kinds(fresh)["in use"] == 1 and text() == before
    layer = fresh.model.get_decoder().layers[0].mlp
    if change == "hook":
        layer.register_forward_hook(lambda *_: seen.append(1))
        assert text() == text() == before and len(seen) > 40
    elif change == "weight":
        layer.down_proj.weight = nn.Parameter(-3 * layer.down_proj.weight, requires_grad=False)
        assert (
            text()
            == generate(Target(fresh.model), None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences[0].tolist()
        )
        assert text() != before
    else:
        layer.forward = torch.zeros_like
        assert text() != before


class Adapted(nn.Module):
    """Add to a layer what can be switched off, as peft does."""

    __module__ = "peft.tuners.lora.layer"
    on = True

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return -3 * self.inner(x) if self.on else self.inner(x)


def test_adapters_are_not_captured_since_they_can_be_switched(fresh):
    def text() -> list[int]:
        return generate(fresh, None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences[0].tolist()

    plain, mlp = text(), next(iter(fresh.model.get_decoder().layers)).mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    adapted = text()
    mlp.down_proj.on = False
    assert text() == plain != adapted and not fresh.graphs.graphs


def test_a_model_converted_in_place_is_captured_anew(fresh):
    text = [generate(fresh, None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences for _ in range(2)]
    fresh.model.to(torch.float64).to(torch.float32)  # the same parameters in other memory
    next(iter(fresh.model.get_decoder().layers)).mlp.down_proj.weight.data *= -3
    again = generate(fresh, None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences
    other = generate(Target(fresh.model), None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences
    assert torch.equal(*text) and torch.equal(again, other) and not torch.equal(again, text[0])


def test_a_cache_goes_with_its_engine(fresh):
    caches = list[Any]()
    made = type(fresh).new_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "new_cache", lambda *given: [caches.append(weakref.ref(x := made(*given))), x][1])
        generate(fresh, None, prompt(7), max_new_tokens=24, eos_token_id=-1)
    gc.collect()
    assert kinds(fresh)["in use"] == 1 and caches and not any(cache() for cache in caches)


def test_copies_of_a_target_have_graphs_of_their_own(fresh):
    text = generate(fresh, None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences
    for twin in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh))):
        assert not twin.graphs.graphs and twin.graphs.model is twin.model
        assert torch.equal(generate(twin, None, prompt(7), max_new_tokens=24, eos_token_id=-1).sequences, text)


class Cache(SimpleNamespace):
    """Stand for a cache whose texts have these lengths."""

    capture, new_counts, graphs = True, None, SimpleNamespace(active=False)

    @cpu_graphs.live(returns_values=True)
    def read(self, x: Tensor) -> tuple[Tensor]:
        return (x.new_full((self.lengths[0],), 2.0),)


@cpu_graphs.live(returns_values=False)
def total(values: Tensor, mask: Tensor) -> tuple[Tensor]:
    return ((values.sum() * mask.sum()).reshape(1),)


MODEL = nn.Linear(3, 3)


def longhand(tokens: Tensor, positions: Tensor, mask: Any, cache: Any, **_: Any) -> tuple[Tensor, Tensor]:
    x = tokens.float()
    (values,) = cache.read(x)
    (added,) = total(values, mask["full"])
    parts = (x * 2).split(1, dim=1)
    return torch.cat(parts, 1) + added + positions, x.topk(2).indices


def by_length(tokens: Tensor, positions: Tensor, mask: Any, cache: Any, **_: Any) -> Tensor:
    return tokens + torch.arange(cache.lengths[0], cache.lengths[0] + 1)


FORWARDS = {
    "reads numbers": lambda tokens, *_, **__: tokens * int(tokens.max()),
    "reads a list": lambda tokens, *_, **__: tokens * max(tokens[0].tolist()),
    "reads an array": lambda tokens, *_, **__: tokens * int(tokens.numpy().max()),
    "finds a shape": lambda tokens, *_, **__: tokens[tokens > 1],
    "reads a live value": lambda tokens, positions, mask, cache, **__: tokens + cache.read(tokens.float())[0].mean(),
    "reads the mask": lambda tokens, positions, mask, cache, **__: tokens + mask["full"].sum(),
    "writes into the model": lambda tokens, *_, **__: MODEL.weight.data.mul_(1.0) + tokens,
}


def calls(forward: Any, lengths: list[int]) -> tuple[CpuGraphs, list[Any]]:
    graphs, outputs = CpuGraphs(MODEL), []
    cache = Cache(lengths=[0])
    with torch.inference_mode():
        for number, length in enumerate(lengths):
            cache.lengths, mask = [length], {"full": torch.ones(length)}
            inputs = torch.tensor([[number, 3, 1]]), torch.full((1, 3), length)
            outputs.append((graphs(forward, *inputs, mask, cache, (), 0), forward(*inputs, mask, cache)))
    return graphs, outputs


def test_a_replay_calls_live_functions_with_new_values():
    graphs, outputs = calls(longhand, [4, 5, 6, 7, 8, 20, 3])
    (graph,) = graphs.graphs.values()
    assert isinstance(graph, CpuGraph) and graph.is_checked
    for ours, theirs in outputs:
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_numbers_of_the_host_are_noticed():
    """Check that a forward whose operations depend on the length of a text is not replayed. No comparison at the same length
    decides this."""
    graphs, outputs = calls(by_length, [4, 4, 4, 4, 4])
    (graph,) = graphs.graphs.values()
    assert isinstance(graph, CpuGraph) and not graph.is_checked
    graphs, outputs = calls(by_length, [4, 5, 6, 7, 8, 9])
    assert [*graphs.graphs.values()] == [None] and all(torch.equal(*both) for both in outputs)


def test_a_graph_that_differs_leaves_nothing_in_the_cache():
    written: list[float] = []

    @cpu_graphs.live(returns_values=True)
    def write(x: Tensor) -> tuple[Tensor]:
        written.append(x.item())
        return (torch.zeros(1),)

    def forward(tokens: Tensor, positions: Tensor, mask: Any, cache: Any, **_: Any) -> Tensor:
        write(torch.full((), float(cache.lengths[0])))
        return tokens + torch.full((), cache.lengths[0])

    graphs, _ = calls(forward, [4, 5, 6, 7, 8])
    # Every length twice, by `graphs` and by `calls`. At 7 the graph of 6 was compared before.
    assert [*graphs.graphs.values()] == [None] and written == [4, 4, 5, 5, 6, 6, 6, 7, 7, 8, 8]


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_what_cannot_be_replayed_runs_as_before(forward: Any):
    graphs, outputs = calls(forward, [4, 5, 6, 7, 8])
    assert [*graphs.graphs.values()] == [None] and all(torch.equal(*both) for both in outputs)


def test_another_thread_does_not_wait_and_few_graphs_are_kept(monkeypatch):
    monkeypatch.setattr(cpu_graphs, "MAX_GRAPHS", 2)
    graphs, cache = CpuGraphs(MODEL), Cache(lengths=[1])
    with torch.inference_mode():
        for width in (1, 2, 3):
            graphs(by_length, torch.ones(1, width), torch.ones(1, width), {}, cache, (), 0)
        assert [key[2] for key in graphs.graphs] == [(1, 2), (1, 3)]
        with graphs.lock:
            for _ in range(9):
                graphs(by_length, torch.ones(1, 3), torch.ones(1, 3), {}, cache, (), 0)
    assert [*graphs.graphs.values()] == [1, 1]
