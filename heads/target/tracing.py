"""A decoder layer as one compiled function of its weights and inputs.

Writing to the cache and attention stay outside of the graph, as one operator, so a graph is made for a number of new tokens
and serves any length of text:

    norm, q k v, rope | write to the cache, attend over it | out, norm, mlp

Any layer of transformers that hands new keys to its cache and what comes back to its attention can be traced so, unchanged.
"""

import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AttentionInterface, PreTrainedConfig

from foredraft.heads.cache_directory import cache_directory
from foredraft.heads.packing import PackedLinear
from foredraft.heads.target.attention import EXTRAS, NAME, grouped_sdpa
from foredraft.heads.target.cache import KVCache

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
    index: int  # of the layer in the cache
    cache: KVCache
    mask: Tensor


class Untraceable(Exception):
    """A layer that cannot be compiled here, and why."""


NOW = threading.local()  # call: that runs in this thread; traced: the cache of the layer that is traced in it


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """(batch, rows, heads, dim) of query (batch, heads, rows, dim) over the cache, with the new key and value written."""
    call: Call = NOW.call
    keys, values = call.cache.update(key, value, call.index)
    return grouped_sdpa(call.layer, query, keys, values, call.mask, scaling=scale)[0]


def attended(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


OPERATORS = torch.library.Library(NAME, "DEF")
OPERATORS.define("attend(Tensor query, Tensor key, Tensor value, float? scale) -> Tensor")
OPERATORS.impl("attend", attend, "CompositeExplicitAutograd")
OPERATORS.impl("attend", attended, "Meta")
# A product with a packed weight. Inductor has one for weights that are constants of the graph, not inputs.
OPERATORS.define("linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
OPERATORS.impl("linear", lambda x, packed, bias: x.new_empty(*x.shape[:-1], packed.shape[0]), "Meta")


class TracedCache:
    """The cache, as a layer that is traced sees it. A layer that asks it for more cannot be traced."""

    def __init__(self, index: int):
        self.index, self.mask = index, object()
        self.states: tuple[Tensor, ...] = ()

    def update(self, keys: Tensor, values: Tensor, index: int, *args: Any) -> tuple[Tensor, Tensor]:
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
    if attention_mask is not cache.mask or any(kwargs.get(name) is not None for name in EXTRAS):
        raise Untraceable("its attention is more than a masked one")
    return torch.ops.foredraft.attend(query, key, value, scaling), None


AttentionInterface.register(TRACED, traced_attention)


def places(layer: nn.Module) -> list[Place]:
    """Where a layer's weights and buffers are."""
    found: list[Place] = []
    for module in layer.modules():
        for table in (module._parameters, module._buffers):
            found += [(table, name) for name, tensor in table.items() if tensor is not None]
        if isinstance(module, PackedLinear):
            found.append((vars(module), "packed"))
    return found


class LayerTrace:
    """A copy of a layer, without its weights, and inputs like those of a call: what can be compiled in another thread."""

    def __init__(self, layer: nn.Module, index: int, args: tuple, kwargs: dict[str, Any]):
        """args, kwargs: of the call, None in place of its cache and mask."""
        self.index, self.args, self.kwargs = index, args, kwargs
        with torch.inference_mode(False), FakeTensorMode():
            tensors = [table[name] for table, name in places(layer)]
            stand_ins = [stand_in(tensor) for tensor in tensors]
            # `memo` is what is not copied.
            memo: dict[int, Any] = {id(tensor): other for tensor, other in zip(tensors, stand_ins, strict=True)}
            self.layer = copy.deepcopy(layer, memo)
            self.examples = [*stand_ins, *(stand_in(tensor) for tensor in tensors_in((args, kwargs)))]
        for module in self.layer.modules():
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                config._attn_implementation = TRACED

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The layer's forward with these weights and inputs."""
        mine, given = places(self.layer), iter(tensors)
        for table, name in mine:
            table[name] = next(given)
        NOW.traced = cache = TracedCache(self.index)
        args, kwargs = with_tensors((self.args, self.kwargs), given)
        out = self.layer(*args, **kwargs | {"attention_mask": cache.mask, "past_key_values": cache})
        self.is_tuple = isinstance(out, tuple)
        out, *others = out if isinstance(out, tuple) else (out,)
        if not isinstance(out, Tensor) or any(other is not None for other in others):
            raise Untraceable("it returns more than hidden states")
        return (out,)

    def compile(self) -> Callable[..., Any]:
        """A function of weights and inputs that returns what the layer does. Raises what tracing or inductor raises."""
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "inductor"))
        from torch._inductor import standalone_compile

        register_lowering()
        with torch.no_grad():
            graph = make_fx(self)(*self.examples)
        for node in graph.graph.nodes:
            if node.target == torch.ops.mkldnn._linear_pointwise.default:
                node.target, node.args = torch.ops.foredraft.linear.default, node.args[:3]
        graph.recompile()
        if sum(node.target == torch.ops.foredraft.attend.default for node in graph.graph.nodes) != 1:
            raise Untraceable("it does not attend once")
        on_cpu = self.examples[0].device.type == "cpu"
        options = {"config_patches": OPTIONS | {"cpp_wrapper": on_cpu}}
        function = standalone_compile(graph, self.examples, dynamic_shapes="from_graph", options=options)
        if self.is_tuple:
            return lambda *tensors: (*function(*tensors), None)
        return lambda *tensors: function(*tensors)[0]


def stand_in(tensor: Tensor) -> Tensor:
    """Of the same shape; it holds nothing under FakeTensorMode."""
    strides = torch.empty(tensor.shape, device="meta").stride() if tensor.is_mkldnn else tensor.stride()
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


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


@functools.cache
def register_lowering() -> None:
    """Tell inductor to call oneDNN for `foredraft::linear`."""
    from torch._inductor import ir, lowering, mkldnn_ir

    def lower(x: Any, packed: Any, bias: Any) -> Any:
        return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(x, packed, bias, "none", [], ""))

    lowering.register_lowering(torch.ops.foredraft.linear.default, type_promotion_kind=None)(lower)
