"""Capture a forward on a CPU and replay it from then on: the same operations, without the Python code that chose them.

In a step of a small model, Python and memory that comes and goes take a fifth of the time. A replay calls the operations
alone, and each writes into memory that was assigned once, so it gives the same bits. The first replay of every graph is
compared with the model's own forward, and a graph that differs is not used.

As on a GPU (cuda_graphs.py), a captured forward has fixed shapes. What depends on the length of the texts is `live`: each
replay calls these functions, which write into a cache or attend to it.
"""

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial, wraps
from itertools import chain
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from foredraft.heads.caches.cuda_graphs import CudaGraphs

MAX_GRAPHS = 16  # of one model; the least recently used is dropped first
MAX_TOKENS = 32  # of a forward: products of more take so long that nothing else counts
CALLS = 16  # of a forward with the same shapes before it is captured, which takes as long as five of them
PACKAGES = {"torch", "transformers", "transformers_modules", "foredraft"}  # whose modules have no switches
LISTS_NUMBERS = torch.ops.aten.resolve_neg.default  # the only trace of Tensor.tolist and Tensor.numpy
CURRENT = threading.local()  # `recorder` of the capture in progress in this thread


class NotCapturableError(Exception):
    """Say why a forward cannot be replayed."""


class Value:
    """Stand for what differs between replays: a cache, a mask, or what a live function returns."""

    now: Any = None


class Call(NamedTuple):
    """Hold a call as it was recorded. result: None of an operation that only changes its arguments."""

    function: Any  # an operation of torch, or a live function
    args: Any
    kwargs: dict[str, Any]
    result: Any
    returns_values: bool = False


def live(returns_values: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that each replay calls. returns_values: are its results tensors whose memory or shape differs from
    call to call, and that only live functions use?"""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = getattr(CURRENT, "recorder", None)
            if recorder is None or recorder.paused:
                return function(*args, **kwargs)
            return recorder.call_live(function, args, kwargs, returns_values)

        return call

    return decorate


class Recorder(TorchDispatchMode):
    """Record the calls of a forward with these inputs and values."""

    def __init__(self, inputs: Sequence[Tensor], values: Sequence[Any]):
        super().__init__()
        self.calls, self.paused = list[Call](), False
        self.inputs = {memory_of(x) for x in inputs}
        self.made = set[int]()  # memory of results
        self.values = {id(x): Value() for x in tree_leaves(values)}
        self.kept: list[Any] = [inputs, values]  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.paused:
            return result
        used, results = tensors((args, kwargs)), tensors(result)
        self.kept += [used, result]
        if any(id(x) in self.values for x in used):
            raise NotCapturableError(f"{func} reads what depends on the length of the texts")
        is_read = len(results) != len(tree_leaves(result)) or func is LISTS_NUMBERS
        if is_read or torch.Tag.dynamic_output_shape in func.tags:
            raise NotCapturableError(f"{func} decides by numbers")
        written = {memory_of(x) for x in written_by(func, args, kwargs)}
        if not written <= self.made | self.inputs:
            raise NotCapturableError(f"{func} changes the model")
        is_new = not {memory_of(x) for x in results} & {memory_of(x) for x in used}
        if is_new:
            self.made |= {memory_of(x) for x in results}
        if (is_new or written) and not func.name().startswith("aten::empty"):
            self.calls.append(Call(func, args, kwargs, result if is_new else None))
        return result

    def call_live(self, function: Callable[..., Any], args: Any, kwargs: Any, returns_values: bool) -> Any:
        self.paused = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.paused = False
        self.kept += [args, kwargs, result]
        self.calls.append(Call(function, args, kwargs, result, returns_values))
        if returns_values:
            self.values |= {id(x): Value() for x in tensors(result)}
        else:
            self.made |= {memory_of(x) for x in tensors(result)}
        return result


class CpuGraph:
    """Hold a captured forward."""

    is_checked = False

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor], values: Sequence[Any]):
        """Run and record function(*inputs, *values), with this `result`. The last value is a KVCache. Raises
        NotCapturableError."""
        self.inputs, self.lengths = [x.clone() for x in inputs], list(values[-1].lengths)
        recorder = CURRENT.recorder = Recorder(self.inputs, values)
        try:
            with recorder:
                self.result = function(*self.inputs, *values)
        finally:
            del CURRENT.recorder
        self.values = [recorder.values[id(x)] for x in tree_leaves(values)]
        self.all_values = [*recorder.values.values()]
        memory = assign_memory(recorder, tensors(self.result))

        def place(x: Any) -> Any:
            """Return what stands for something recorded in a replay."""
            if id(x) in recorder.values:
                return recorder.values[id(x)]
            if not isinstance(x, Tensor) or memory_of(x) not in memory:
                return x
            return x.new_empty(0).set_(memory[memory_of(x)], x.storage_offset(), x.shape, x.stride())

        self.steps = [
            as_step(call._replace(**tree_map(place, {"args": call.args, "kwargs": call.kwargs, "result": call.result})))
            for call in recorder.calls
        ]
        self.outputs = tree_map(place, self.result)

    def replay(self, inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
        for ours, new in zip(self.inputs, inputs, strict=True):
            ours.copy_(new)
        for value, now in zip(self.values, tree_leaves(values), strict=True):
            value.now = now
        for step in self.steps:
            step()
        for value in self.all_values:
            value.now = None  # the cache goes with its engine
        return tree_map(Tensor.clone, self.outputs)


def assign_memory(recorder: Recorder, outputs: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the memory of each result in replays. Results that are not needed at the same time share it."""
    uses = [tensors((call.args, call.kwargs, call.result)) for call in recorder.calls]
    uses = [[x for x in used if memory_of(x) in recorder.made] for used in [*uses, outputs]]
    last = {memory_of(x): number for number, used in enumerate(uses) for x in used}
    memory, free = dict[int, torch.UntypedStorage](), defaultdict[int, list[torch.UntypedStorage]](list)
    for number, used in enumerate(uses):
        for key, x in {memory_of(x): x for x in used}.items():
            size = x.untyped_storage().nbytes()
            if key not in memory:
                memory[key] = free[size].pop() if free[size] else torch.UntypedStorage(size)
        for key in {memory_of(x) for x in used if last[memory_of(x)] == number}:
            free[memory[key].nbytes()].append(memory[key])
    return memory


def as_step(call: Call) -> Callable[[], Any]:
    """Return what a replay does for a call with the memory of replays."""
    function, args, kwargs, result, returns_values = call

    def run_live() -> None:
        new = function(*[current(x) for x in args], **{name: current(x) for name, x in kwargs.items()})
        for ours, x in zip(result, new, strict=True):
            if returns_values:
                ours.now = x
            elif ours is not None:
                ours.copy_(x)

    if not isinstance(function, torch._ops.OpOverload):
        return run_live
    if result is None:
        return partial(function._op, *args, **kwargs)
    out = out_variant(function) if isinstance(result, Tensor) else None
    if out is not None:
        *names, name = (argument.name for argument in out._schema.arguments)
        known = {name: x for name, x in kwargs.items() if name in names}
        return partial(out._op, *args, **known, **{name: result})
    return partial(copy_result, result, partial(function._op, *args, **kwargs))


def copy_result(result: Any, operation: Callable[[], Any]) -> None:
    for ours, new in zip(tensors(result), tensors(operation()), strict=True):
        ours.copy_(new)


def current(x: Any) -> Any:
    return x.now if isinstance(x, Value) else x


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def memory_of(x: Tensor) -> int:
    """Return a number that a tensor shares with its views. Packed weights have no storage."""
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes."""
    arguments = func._schema.arguments
    named = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return tensors([named.get(each.name) for each in arguments if is_written(each)])


def is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@cache
def out_variant(func: Any) -> Any:
    """Return the variant of an operation that writes its result into a last argument; None without one."""
    ours = {each.name: str(each.type) for each in func._schema.arguments}
    for overload in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, overload)
        *others, last = variant._schema.arguments or [None]
        theirs = {each.name: str(each.type) for each in others}
        if last is None or not is_written(last) or any(map(is_written, others)):
            continue
        if theirs.items() <= ours.items() and ours.keys() - theirs <= {"dtype", "layout", "device", "pin_memory"}:
            return variant
    return None


class CpuGraphs:
    """Hold the captured forwards of one model, by shapes of their inputs."""

    def __init__(self, model: nn.Module):
        # A number counts the calls so far, None is a forward that cannot be replayed.
        self.graphs: OrderedDict[Hashable, int | CpuGraph | None] = OrderedDict()
        self.model, self.lock = model, threading.Lock()
        self.state, self.is_plain = list[Any](), False  # of the model
        self.cache: Any = lambda: None  # a weak reference to the newest

    def __reduce__(self) -> Any:
        return CpuGraphs, (self.model,)  # a copy has other memory

    def look_at_model(self) -> None:
        """Drop all graphs if tensors or forwards of the model were replaced. A model with hooks, or with modules of other
        packages, which may have switches (peft), is not captured."""
        modules, weights = [*self.model.modules()], [*self.model.parameters(), *self.model.buffers()]
        hooks = chain.from_iterable((*x._forward_hooks.values(), *x._forward_pre_hooks.values()) for x in modules)
        # Hooks of transformers return hidden states, when these are asked for.
        names = [*(type(x).__module__ for x in modules), *(getattr(hook, "__module__", "") for hook in hooks)]
        self.is_plain = {name.partition(".")[0] for name in names} <= PACKAGES
        self.is_plain &= {type(x) for x in weights} <= {Tensor, nn.Parameter, nn.Buffer}
        state: list[Any] = [(id(x), id(vars(x).get("forward"))) for x in modules]
        state += [(id(x), x.data_ptr(), x.dtype) for x in weights] if self.is_plain else []
        if state != self.state:
            self.graphs.clear()
        self.state = state

    def __call__(
        self,
        forward: Callable[..., Any],
        tokens: Tensor,
        positions: Tensor,
        mask: Any,
        cache: Any,
        layers: Sequence[int],
        keep_logits: int,
    ) -> Any:
        """Return forward(tokens, positions, mask, cache, layers, keep_logits), replayed if it is one of a KVCache that may be
        captured, and its inputs had these shapes before."""
        run = partial(forward, layers=layers, keep_logits=keep_logits)
        fits = mask is not None and tokens.device.type == "cpu" and tokens.numel() <= MAX_TOKENS
        may = getattr(cache, "capture", False) and not cache.graphs.active and cache.new_counts is None
        if not (fits and may and torch.is_inference_mode_enabled() and self.lock.acquire(blocking=False)):
            return run(tokens, positions, mask, cache)
        try:
            if self.cache() is not cache:  # of another text or server
                self.look_at_model()
                self.cache = weakref.ref(cache)
            if not self.is_plain:
                return run(tokens, positions, mask, cache)
            kind = getattr(forward, "__func__", forward), torch.is_autocast_enabled("cpu")
            key = *kind, tokens.shape, *layers, keep_logits
            return self.run(key, run, (tokens, positions), (mask, cache))
        finally:
            self.lock.release()

    def run(self, key: Hashable, function: Callable[..., Any], inputs: Sequence[Tensor], values: Sequence[Any]) -> Any:
        graph = self.graphs.setdefault(key, 0)
        self.graphs.move_to_end(key)
        if len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)
        if isinstance(graph, CpuGraph) and graph.is_checked:
            return graph.replay(inputs, values)
        if isinstance(graph, int):
            self.graphs[key] = graph + 1
            if graph < CALLS:
                return function(*inputs, *values)
            CudaGraphs.num_captured += 1
            try:
                self.graphs[key] = graph = CpuGraph(function, inputs, values)
                return vars(graph).pop("result")
            except (NotCapturableError, RuntimeError):
                self.graphs[key] = None
        if not isinstance(graph, CpuGraph) or any(map(eq, graph.lengths, values[-1].lengths)):
            return function(*inputs, *values)
        CudaGraphs.num_captured += 1
        replayed = graph.replay(inputs, values)
        result = function(*inputs, *values)  # as the last, so that the cache has the model's entries
        same = zip(tensors(replayed), tensors(result), strict=True)
        graph.is_checked = all(torch.equal(ours, theirs) for ours, theirs in same)
        self.graphs[key] = graph if graph.is_checked else None
        return result
