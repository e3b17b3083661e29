"""Compiled decoder layers (heads/target/compiled.py): the same text, or the layers as they are."""

import copy
from collections.abc import Callable
from threading import Event, Thread

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from transformers import LlamaForCausalLM

from foredraft.heads import Target, packing
from foredraft.heads.target import compiled, tracing
from foredraft.heads.target.compiled import CompiledLayer, Graph, as_they_are, compile_layers
from foredraft.inference import generate
from tests.support.architectures import CASES, FAMILIES, pair
from tests.support.small_targets import eagle
from tests.support.tiny import tiny_config

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 7, 9, 11, 2]])
MASK = (IDS > 0).long()
# Their attention is not the masked one, or their layers ask the device (which expert?).
AS_THEY_ARE = {"gemma2", "gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"}


class Now:
    """A thread that is done when it has started."""

    def __init__(self, target: Callable[[], None]):
        self.start = target


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled at the first call, with all that leads to inductor but without it, which takes seconds."""
    monkeypatch.setattr(compiled, "HOT", 0)
    monkeypatch.setattr(compiled, "ROUNDS", 1)
    monkeypatch.setattr(compiled, "Thread", Now)
    monkeypatch.setattr(tracing, "inductor", lambda graph, examples: graph)
    monkeypatch.setattr(packing, "SMALLEST", dict.fromkeys(packing.SMALLEST, 1))
    monkeypatch.setattr(packing, "is_faster", lambda dtype: True)


def compiled_copy(target: Target, mode: str = "layers") -> Target:
    model = copy.deepcopy(target.model)
    packing.pack(model)
    packing.join(model, lambda: model(input_ids=IDS))
    compile_layers(model, mode)
    return Target(model)


def graphs(target: Target) -> list[Graph]:
    forwards = [vars(module).get("forward") for module in target.model.modules()]
    return [graph for one in forwards if isinstance(one, CompiledLayer) for graph in one.compiler.graphs.values()]


def text(target: Target, drafter: object = None, **settings: object) -> list[list[int]]:
    return generate(target, drafter, IDS, MASK, max_new_tokens=12, eos_token_id=-1, **settings).new_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_the_same(at_once, capfd, family):
    plain = pair(family, "sdpa" if (family, "sdpa") in CASES else "eager").target
    target = compiled_copy(plain)
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        assert text(target, **settings) == text(plain, **settings)
    assert any(graph.is_used for graph in graphs(target)) == (family not in AS_THEY_ARE)
    assert capfd.readouterr().err.count("run as they are") <= 1


def test_trees_and_single_tokens_have_a_graph_each_for_all_layers(at_once):
    plain = Target(LlamaForCausalLM(tiny_config(num_hidden_layers=3)))
    target = compiled_copy(plain)
    drafter = eagle(target)
    assert text(target) == text(plain) == text(target, drafter)
    used = {graph.size: sorted(graph.trials) for graph in graphs(target) if graph.is_used}
    assert {"2 x 1 tokens", "2 x 10 tokens"} <= set(used) and set(map(tuple, used.values())) == {(0, 1, 2)}
    as_they_are(target.model)
    assert not graphs(target) and text(target) == text(plain)


def test_what_differs_is_not_used(at_once, capfd, monkeypatch):
    plain = Target(LlamaForCausalLM(tiny_config()))
    monkeypatch.setattr(tracing, "inductor", lambda graph, examples: lambda *tensors: (2 * graph(*tensors)[0],))
    target = compiled_copy(plain)
    assert text(target) == text(plain)
    assert not any(graph.is_used for graph in graphs(target)) and "differs by" in capfd.readouterr().err


def test_auto_uses_what_is_faster_alone(at_once, capfd, monkeypatch):
    plain = Target(LlamaForCausalLM(tiny_config()))
    for margin, used in ((0.0, True), (1e9, False)):
        monkeypatch.setattr(compiled, "MARGIN", margin)
        target = compiled_copy(plain, "auto")
        assert text(target) == text(plain) and {graph.is_used for graph in graphs(target)} == {used}
        assert ("not used" in capfd.readouterr().err) == (not used)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="compile=all is not one of none, layers, auto"):
        compile_layers(LlamaForCausalLM(tiny_config()), "all")


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - AS_THEY_ARE))
def test_every_family_writes_the_same_through_inductor(at_once, monkeypatch, family):
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "HOT", 0)
    monkeypatch.setattr(compiled, "Thread", Now)
    plain = pair(family, "sdpa").target
    target = compiled_copy(plain)
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        assert text(target, **settings) == text(plain, **settings)
    assert any(graph.is_used for graph in graphs(target))


def test_a_forward_goes_on_while_another_thread_traces():
    """torch.fx changes nn.Module for all threads."""
    started, goes_on, traced = Event(), Event(), []

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            started.set()
            assert goes_on.wait(60)
            return self.inner(x)

    def trace() -> None:
        with tracing.other_threads_go_on():
            traced.append(symbolic_trace(Waits()))

    thread, linear = Thread(target=trace), nn.Linear(3, 3)
    wanted = linear(torch.ones(1, 3))
    thread.start()
    try:
        assert started.wait(60)
        assert torch.equal(linear(torch.ones(1, 3)), wanted)
    finally:
        goes_on.set()
        thread.join(60)
    assert [node.op for node in traced[0].graph.nodes] == ["placeholder", "call_module", "output"]
