"""Decoder layers compiled one by one (`target.compile=`): a dozen kernels where transformers' code runs fifty.

All layers that are made alike share one graph per number of tokens (tracing.py). On a CPU it is compiled in a thread while
steps go on as before, and kept in the project's cache for the next run. Then it runs beside the layers themselves for a few
steps, and takes their place if both give the same and, with `auto`, if it is faster. What cannot be compiled runs as it is.
"""

import contextlib
import inspect
import sys
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, Thread, main_thread
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from foredraft.heads.target.attention import NAME
from foredraft.heads.target.cache import KVCache
from foredraft.heads.target.cuda_graphs import CudaGraphs
from foredraft.heads.target.ragged_cache import RaggedCache
from foredraft.heads.target.tracing import NOW, Call, LayerTrace, Place, Untraceable, places, tensors_in

MODES = ("none", "layers", "auto")
TOKENS = 64  # of a forward, all sequences together; beyond that products take so long that small kernels do not matter
HOT = 4  # forwards of a shape before it is compiled
SHAPES = 16  # for which there are graphs at most
ROUNDS = 3  # forwards in which both run
MARGIN = 1.05  # so much faster must it be with `auto`
# Largest difference, as a share of the greatest number in a layer's output.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass
class Graph:
    """What is compiled for layers of one kind and inputs of one shape."""

    size: str
    seen: int = 0  # calls before it was compiled
    function: Any = None  # once it is
    seconds: float = 0.0  # that it took
    is_used: bool | None = None  # None while that is not known
    # Of each layer: seconds without it and with it.
    trials: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


class LayerCompiler:
    """The graphs of one model."""

    def __init__(self, mode: str, device: torch.device):
        self.mode, self.on_cpu = mode, device.type == "cpu"
        self.graphs: dict[Hashable, Graph] = {}
        self.num_layers: dict[Hashable, int] = {}  # of each kind
        self.compiling = Lock()
        self.paused = False
        self.said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            print(f"target.compile={self.mode}: {text}", file=sys.stderr, flush=True)

    def compile(self, graph: Graph, make_trace: Any) -> None:
        """Sets the graph's function, on a CPU later and by another thread."""
        try:
            trace = make_trace()  # here and now: it copies the layer, which no forward may change meanwhile
        except Exception as error:
            return self.give_up(graph, error)

        def work() -> None:
            with self.compiling:
                if not main_thread().is_alive():
                    return
                started = time.perf_counter()
                try:
                    graph.function = trace.compile()
                except Exception as error:  # whatever of a model's code, of inductor or of the C++ compiler
                    if main_thread().is_alive():  # else it is of a program that ends
                        self.give_up(graph, error)
                graph.seconds = time.perf_counter() - started

        if self.on_cpu:
            Thread(target=work).start()  # the program waits for it at its end: torch cannot be left in it
        else:
            work()

    def give_up(self, graph: Graph, error: Exception) -> None:
        graph.is_used = False
        reason = str(error) if isinstance(error, Untraceable) else f"{type(error).__name__}: {error}"
        self.say(f"layers run as they are: {reason.strip().splitlines()[0][:200]}")

    def judge(self, graph: Graph, num_layers: int) -> None:
        """Whether it is used, once all layers were tried."""
        rounds = ROUNDS if self.on_cpu else 1
        if len(graph.trials) < num_layers or any(len(pairs) < rounds for pairs in graph.trials.values()):
            return
        without, with_it = (sum(min(pair[i] for pair in pairs) for pairs in graph.trials.values()) for i in (0, 1))
        graph.is_used = self.mode == "layers" or without > MARGIN * with_it
        speed = f", {without / with_it:.2f} times as fast" if self.on_cpu else ""
        not_used = "" if graph.is_used else ": not used"
        self.say(f"{num_layers} layers for {graph.size} compiled in {graph.seconds:.1f} s{speed}{not_used}")


class CompiledLayer:
    """A layer's forward, that of its graph or its own."""

    def __init__(self, layer: nn.Module, index: int, kind: Hashable, compiler: LayerCompiler):
        self.layer, self.index, self.kind, self.compiler = layer, index, kind, compiler
        self.forward = layer.forward
        self.names = list(inspect.signature(layer.forward).parameters)

    @cached_property
    def places(self) -> list[Place]:
        return places(self.layer)  # at the first use, since a drafter that is loaded may pack more of the target

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self.layer)]
        return MethodType(type(copied).forward, copied)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = dict(zip(self.names, args, strict=False)) | kwargs
        mask, hidden = kwargs.get("attention_mask"), kwargs[self.names[0]]
        name = next((name for name, one in kwargs.items() if isinstance(one, KVCache | RaggedCache)), None)
        if (
            name is None
            or not isinstance(mask, Tensor)
            or hidden.shape[:-1].numel() > TOKENS
            or torch.is_grad_enabled()
            or self.compiler.paused
        ):
            return self.forward(**kwargs)
        inputs = {one: value for one, value in kwargs.items() if value is not mask and one != name}
        graph = self.graph(inputs, name)
        if graph is None or graph.function is None or graph.is_used is False:
            return self.forward(**kwargs)
        NOW.call = Call(self.layer, self.index, kwargs[name], mask)
        tensors = [*(table[name] for table, name in self.places), *tensors_in(inputs)]
        if graph.is_used:
            return graph.function(*tensors)
        with _disable_current_modes():  # a capture (cuda_graphs.py) would see that the comparison waits
            return self.compare(graph, tensors, kwargs)

    def graph(self, inputs: dict[str, Any], cache_name: str) -> Graph | None:
        """For inputs of such shapes; None where there are too many."""
        compiler, key = self.compiler, (self.kind, shapes(inputs))
        graph = compiler.graphs.get(key)
        if graph is None:
            if len(compiler.graphs) >= SHAPES:
                return None
            batch, new = inputs[self.names[0]].shape[:2]
            graph = compiler.graphs[key] = Graph("1 token" if batch * new == 1 else f"{batch} x {new} tokens")
        if graph.function is None and graph.is_used is None:
            graph.seen += 1
            if graph.seen == 1 + compiler.on_cpu * HOT * compiler.num_layers[self.kind]:
                compiler.compile(graph, lambda: LayerTrace(self.layer, self.index, inputs, cache_name))
        return graph

    def compare(self, graph: Graph, tensors: list[Tensor], kwargs: dict[str, Any]) -> Any:
        """The layer's own output, beside which the graph's is timed. Both write the same to the cache."""
        pairs = graph.trials.setdefault(self.index, [])
        outputs, seconds = [None, None], [0.0, 0.0]
        for one in (0, 1) if len(pairs) % 2 else (1, 0):
            started = time.perf_counter()
            outputs[one] = graph.function(*tensors) if one else self.forward(**kwargs)
            seconds[one] = time.perf_counter() - started
        CudaGraphs.num_captured += 1  # the step takes longer than those that follow
        own, its = (next(tensors_in(output)) for output in outputs)
        difference = (own - its).abs().max().item() / max(own.abs().max().item(), 1e-30)
        if difference > TOLERANCE[own.dtype]:
            self.compiler.give_up(graph, Untraceable(f"compiled, layer {self.index} differs by {difference:.1g}"))
        pairs.append((seconds[0], seconds[1]))
        if graph.is_used is None:
            self.compiler.judge(graph, self.compiler.num_layers[self.kind])
        return outputs[0]


def shapes(value: Any) -> Hashable:
    """What a graph is made for: of tensors the shapes, of all else the values."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, dict):
        return tuple((name, shapes(one)) for name, one in value.items())
    return tuple(map(shapes, value)) if isinstance(value, tuple | list) else value


def kind_of(layer: nn.Module) -> Hashable:
    """Equal for layers that one graph serves: the same modules with the same settings and shapes of weights."""
    simple = (int, float, str, bool, type(None))
    return tuple(
        (
            name,
            type(module),
            tuple((k, v) for k, v in vars(module).items() if isinstance(v, simple) and k != "layer_idx"),
        )
        for name, module in layer.named_modules()
    ) + tuple((name, table[name].shape, table[name].dtype) for table, name in places(layer))


def compile_layers(model: PreTrainedModel, mode: str) -> None:
    """Let a target's decoder layers be compiled, from its first steps on. mode: none, layers, or auto: on a CPU, and where it
    is faster. Raises ValueError for another word."""
    if mode not in MODES:
        raise ValueError(f"compile={mode} is not one of {', '.join(MODES)}")
    device = model.get_input_embeddings().weight.device
    if mode == "none" or (mode == "auto" and device.type != "cpu"):
        return
    compiler = LayerCompiler(mode, device)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        numbers = {vars(module)["layer_idx"] for module in layer.modules() if "layer_idx" in vars(module)}
        kind = kind_of(layer)
        if len(numbers) == 1 and model.config._attn_implementation == NAME:
            compiler.num_layers[kind] = compiler.num_layers.get(kind, 0) + 1
            layer.forward = CompiledLayer(layer, numbers.pop(), kind, compiler)
    if not compiler.num_layers:
        compiler.say("layers run as they are: their attention takes no mask of ours, or they are of no known kind")


@contextlib.contextmanager
def paused(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers run as they are: their graphs know no hooks."""
    layers = (vars(layer).get("forward") for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
    compilers = {id(one.compiler): one.compiler for one in layers if isinstance(one, CompiledLayer)}
    for compiler in compilers.values():
        compiler.paused = True
    try:
        yield
    finally:
        for compiler in compilers.values():
            compiler.paused = False


def as_they_are(model: PreTrainedModel) -> None:
    """Before its layers are rebuilt: none is compiled from now on."""
    for layer in model.modules():
        if isinstance(vars(layer).get("forward"), CompiledLayer):
            del layer.forward
