"""A decoder layer as one compiled function of its weights and inputs.

Writing to the cache and attention stay outside of the graph, as one operator, so a graph is made for a number of new tokens
and serves any length of text:

    norm, q k v, rope | write to the cache, attend over it | out, norm, mlp

Any layer of transformers that hands new keys to its cache and what comes back to its attention can be traced so, unchanged.
"""

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Tracer
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface, Cache, PreTrainedConfig

from foredraft.heads.cache_directory import cache_directory
from foredraft.heads.packing import PackedLinear, packed_linear
from foredraft.heads.target.attention import EXTRAS, NAME, grouped_sdpa

TRACED = f"{NAME}_traced"  # how a layer that is traced attends
OPTIONS = {
    "compile_threads": 1,  # more would be processes, of which every one loads torch
    "force_pointwise_cat": True,  # rope is one kernel then, not three
    "emulate_precision_casts": True,  # bfloat16 rounds where the layer itself does
    "size_asserts": False,  # packed weights have no strides
    "alignment_asserts": False,
}
Place = tuple[dict[str, Any], str]


class Call(NamedTuple):
    """One call of a layer's forward, as its attention needs it."""

    layer: nn.Module
    number: int  # of the layer in the cache
    cache: Cache
    mask: Tensor


class Untraceable(Exception):
    """A layer that cannot be compiled here, and why."""


FX = threading.Lock()
NOW = threading.local()  # call: that runs in this thread; traced: the cache of the layer that is traced in it


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """(batch, rows, heads, dim) of query (batch, heads, rows, dim) over the cache, with the new key and value written."""
    call: Call = NOW.call
    keys, values = call.cache.update(key, value, call.number)
    return grouped_sdpa(call.layer, query, keys, values, call.mask, scaling=scale)[0]


def attended(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


OPERATORS = torch.library.Library(NAME, "DEF")
OPERATORS.define("attend(Tensor query, Tensor key, Tensor value, float? scale) -> Tensor")
OPERATORS.impl("attend", attend, "CompositeExplicitAutograd")
OPERATORS.impl("attend", attended, "Meta")


# A product with a packed weight that is an input: inductor takes oneDNN's own operator for constants of a graph only.
OPERATORS.define("linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
OPERATORS.impl("linear", packed_linear, "CompositeExplicitAutograd")
OPERATORS.impl("linear", lambda x, packed, bias: x.new_empty(*x.shape[:-1], packed.shape[0]), "Meta")
LINEAR = torch.ops.foredraft.linear.default


class TracedCache:
    """The cache, as a layer that is traced sees it. A layer that asks it for more cannot be traced."""

    def __init__(self, index: int):
        self.index, self.mask = index, object()
        self.states: tuple[Tensor, ...] = ()

    def update(self, keys: Tensor, values: Tensor, index: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.states or index != self.index:
            raise Untraceable("it writes to its cache in a way of its own")
        self.states = keys, values
        return keys, values


def traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    cache: TracedCache = NOW.traced
    if [id(key), id(value)] != [id(states) for states in cache.states]:
        raise Untraceable("its attention takes other keys and values than its cache gives")
    if attention_mask is not cache.mask or any(kwargs.get(name) is not None for name in (*EXTRAS, "s_aux")):
        raise Untraceable("its attention is more than a masked one")
    return torch.ops.foredraft.attend(query, key, value, scaling), None


AttentionInterface.register(TRACED, traced_attention)


def places(layer: nn.Module) -> list[Place]:
    """Where a layer's weights and buffers are."""
    found: list[Place] = []
    for module in layer.modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        found += [(table, name) for table in tables for name, tensor in table.items() if tensor is not None]
        if isinstance(module, PackedLinear) and module.number == 0:
            packed = vars(module.packed)
            found += [(packed, name) for name in ("tensor", "bias") if packed[name] is not None]
    return found


@contextlib.contextmanager
def other_threads_go_on() -> Iterator[None]:
    """torch.fx, which inductor traces with too, puts a function of its own in the place of nn.Module's calls, of all threads:
    in a forward of another one it does not find the module in what it traces, and raises. Here that forward goes on. One
    thread at a time."""
    with FX:
        mine, call_module = threading.get_ident(), Tracer.call_module

        def call(tracer: Tracer, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if threading.get_ident() != mine:
                return forward(*args, **kwargs)
            return call_module(tracer, module, forward, args, kwargs)

        Tracer.call_module = call  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Tracer.call_module = call_module  # type: ignore[method-assign]


class LayerTrace:
    """A copy of a layer, without its weights, and inputs like those of a call: what can be compiled in another thread."""

    def __init__(self, layer: nn.Module, index: int, inputs: dict[str, Any], cache_name: str):
        """inputs: the call's arguments but for its mask and its cache, which is called `cache_name`."""
        self.index, self.inputs, self.cache_name = index, inputs, cache_name
        tensors = [table[name] for table, name in places(layer)]
        self.device = tensors[0].device
        # What is not copied:
        memo: dict[int, Any] = {id(tensor): as_meta(tensor) for tensor in tensors}
        self.layer = copy.deepcopy(layer, memo)
        self.examples = [as_meta(tensor) for tensor in (*tensors, *tensors_in(inputs))]
        for module in self.layer.modules():
            module._forward_hooks.clear()  # transformers' collect hidden states, and would collect those of the trace
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                config._attn_implementation = TRACED

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The layer's forward with these weights and inputs."""
        mine, given = places(self.layer), iter(tensors)
        for table, name in mine:
            table[name] = next(given)
        NOW.traced = cache = TracedCache(self.index)
        inputs = with_tensors(self.inputs, given) | {"attention_mask": cache.mask, self.cache_name: cache}
        out = self.layer(**inputs)
        self.is_tuple = isinstance(out, tuple)
        out, *others = out if isinstance(out, tuple) else (out,)
        if not isinstance(out, Tensor) or any(other is not None for other in others):
            raise Untraceable("it returns more than hidden states")
        return (out,)

    def compile(self) -> Callable[..., Any]:
        """A function of weights and inputs that returns what the layer does. Raises what tracing or inductor raises."""
        with other_threads_go_on():
            return self.compiled()

    def compiled(self) -> Callable[..., Any]:
        with FakeTensorMode():
            fake = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device) for x in self.examples]
        with torch.no_grad():
            graph = make_fx(self)(*fake)
        for node in graph.graph.nodes:
            if node.target == torch.ops.mkldnn._linear_pointwise.default:
                node.target, node.args = LINEAR, node.args[:3]
        graph.recompile()
        if sum(node.target == torch.ops.foredraft.attend.default for node in graph.graph.nodes) != 1:
            raise Untraceable("it does not attend once")
        function = inductor(graph, fake)
        if self.is_tuple:
            return lambda *tensors: (*function(*tensors), None)
        return lambda *tensors: function(*tensors)[0]


def inductor(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """The graph, compiled: found in the project's cache, or made and kept there."""
    from torch._inductor import ir, lowering, mkldnn_ir, standalone_compile
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Torch sets this when it is imported: what a user set is kept, what vanishes with /tmp is not.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_directory() / "inductor")

    def lower(x: Any, packed: Any, bias: Any) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, packed, bias, "none", [], ""))

    if LINEAR not in lowering.lowerings:
        lowering.register_lowering(LINEAR, type_promotion_kind=None)(lower)
    patches = OPTIONS | {"cpp_wrapper": examples[0].device.type == "cpu"}
    return standalone_compile(graph, examples, dynamic_shapes="from_graph", options={"config_patches": patches})


def as_meta(tensor: Tensor) -> Tensor:
    """Of the same shape, and without storage."""
    if tensor.is_mkldnn:  # which has no strides
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Of a call's arguments, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same arguments with others in place of the tensors that `tensors_in` gives."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: with_tensors(one, tensors) for name, one in value.items()}
    return type(value)(with_tensors(one, tensors) for one in value) if isinstance(value, tuple | list) else value
