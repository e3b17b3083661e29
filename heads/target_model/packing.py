"""Linear layers whose weights are packed for oneDNN, which makes a forward of a few tokens cheap on a CPU.

torch's `linear` reorders a weight for every product of a few rows, which costs as much as the product of a tree with 8 nodes.
A packed weight is reordered once. It replaces the original, which `weight` reconstructs bit by bit on request. A weight that
an embedding shares also stays there. Gradients reach the input, never the weight.

Queries, keys and values are one product, gate and up another: preparing a product takes oneDNN up to 60 µs, as long as a row
of SmolLM2's queries.
"""

import copy
import platform
import time
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.caches.device import FEWEST_ROWS
from foredraft.heads.target_model.activations import wrap_activations

ROWS = 8  # for which the layout is chosen; a layout for one row does not speed up a tree, this one costs a row nothing
DTYPES = torch.float32, torch.bfloat16  # torch has no packed product in float16
JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers of one input, in the order of their calls
PROBE = 1 << 25  # weights whose products are timed: more than a core's caches hold


class PackedWeight:
    """Hold the weights of a layer, or of several with the same input: the first that is called multiplies for all. Nothing
    may write into the input between their calls."""

    def __init__(self, linears: Sequence[nn.Linear]):
        self.sizes, self.dtype = [linear.out_features for linear in linears], linears[0].weight.dtype
        biases: list[Tensor] = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in linears]
        self.bias = None if all(linear.bias is None for linear in linears) else torch.cat(biases).detach()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.multiply = torch.ops.mkldnn._linear_pointwise.default  # found once: each time it takes 10 µs
        self.newest: tuple[Tensor, Sequence[Tensor]] | None = None  # an input, and the outputs of all layers for it

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedWeight":
        memo.setdefault(id(self.tensor), self.tensor)  # torch cannot copy it, and it is never written to
        twin = memo[id(self)] = PackedWeight.__new__(PackedWeight)
        vars(twin).update(copy.deepcopy(vars(self) | {"newest": None}, memo))
        return twin

    def product(self, x: Tensor, number: int) -> Tensor:
        """Return the output (..., out) of layer `number`."""
        newest = self.newest  # another thread may change it
        if number == 0 or newest is None or newest[0] is not x:
            states = x if x.dtype == self.dtype else x.to(self.dtype)
            newest = x, self.multiply(states, self.tensor, self.bias, "none", [], "").split(self.sizes, dim=-1)
        self.newest = None if number == len(self.sizes) - 1 else newest
        return newest[1][number]


class PackedLinear(nn.Module):
    """Replace a frozen `nn.Linear`."""

    def __init__(self, linear: nn.Linear, packed: PackedWeight | None = None, number: int = 0):
        """Replace a layer. packed: the weights of several, of which this is `number`; None packs it alone."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.bias, self.packed, self.number = linear.bias, packed or PackedWeight([linear]), number

    @property
    def weight(self) -> Tensor:
        """Return a copy (out, in) of the original weight."""
        return self.packed.tensor.to_dense().split(self.packed.sizes)[self.number].clone()

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def product(self, x: Tensor) -> Tensor:
        return self.packed.product(x, self.number)

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name of the argument
        if torch.is_grad_enabled() and input.requires_grad:
            return PackedProduct.apply(input, self)
        return self.product(input)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient @ ctx.layer.weight.to(gradient.dtype)).to(ctx.dtype), None


def pack(module: nn.Module) -> None:
    """Pack the frozen linear layers in `module` on a CPU where products with packed weights are faster. Then its activations
    keep their bits for any number of rows, as packed products do."""
    for parent in list(module.modules()):
        for names in [*JOINED, *((name,) for name, _ in parent.named_children())]:
            linears: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(is_packable, linears)) and len({(each.in_features, each.weight.dtype) for each in linears}) == 1:
                packed = PackedWeight(linears)
                for number, name in enumerate(names):
                    setattr(parent, name, PackedLinear(linears[number], packed, number))
    if any(isinstance(each, PackedLinear) for each in module.modules()):
        wrap_activations(module)


def packed_weights(module: nn.Module) -> list[Tensor]:
    """Return each packed weight of a module, once."""
    packed = {layer.packed: layer.packed.tensor for layer in module.modules() if isinstance(layer, PackedLinear)}
    return [*packed.values()]


def first_weight(module: nn.Module) -> Tensor:
    """Return one of a module's weights, all of which may be packed."""
    return next(chain(module.parameters(), packed_weights(module)))


def num_weights(module: nn.Module) -> int:
    """Return the number of a module's weights, packed ones included."""
    return sum(weight.numel() for weight in chain(module.parameters(), packed_weights(module)))


def is_packed(model: nn.Module) -> bool:
    """Return whether a model multiplies with packed weights alone. torch's other products in float32 sum by the numbers of
    rows and of threads."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    tensors = [*model.parameters(), *model.buffers()]
    others = any(tensor.dim() > 1 and id(tensor) not in looked_up for tensor in tensors)
    plain = any(isinstance(module, nn.Linear) for module in model.modules())  # one may share the embedding's weight
    return not (others or plain)


def fewest_rows(model: nn.Module) -> int:
    """Return how many rows the products of a forward have at least on a CPU, so that a row has the same bits next to any
    number of others: FEWEST_ROWS, but fewer where every product is packed, by kernels that are known. Only a single row is
    rounded differently with AVX-512, and in float32 with AVX2 not even that. Nobody has measured bfloat16 with AMX."""
    if not is_packed(model):
        return FEWEST_ROWS
    single = is_float32(model)
    if torch.cpu._is_avx512_supported():
        return 2 if single or not torch.cpu._is_amx_tile_supported() else FEWEST_ROWS
    return 1 if single and torch.cpu._is_avx2_supported() else FEWEST_ROWS


@torch.inference_mode()
def fastest_rows(model: nn.Module) -> int:
    """Return the number of rows, from `fewest_rows` to FEWEST_ROWS, with which packed products are fastest on this machine,
    or the smallest within 5 % of it. All of them give the same bits. The memory decides: the products of SmolLM2 in float32
    took 50 ms with two rows and 36 with four on one AMD EPYC, and on another one two rows were faster."""
    rows, layers, weights = range(fewest_rows(model), FEWEST_ROWS + 1), list[PackedLinear](), 0
    for module in model.modules():
        if isinstance(module, PackedLinear) and weights < PROBE:
            layers.append(module)
            weights += module.in_features * module.out_features
    seconds = dict.fromkeys(rows, float("inf"))
    for count in [*rows] * 5 if len(rows) > 1 else []:
        inputs = {layer.in_features: torch.ones(count, layer.in_features, dtype=layer.dtype) for layer in layers}
        start = time.perf_counter()
        for layer in layers:
            layer.product(inputs[layer.in_features])
        seconds[count] = min(seconds[count], time.perf_counter() - start)
    return next(count for count in rows if seconds[count] <= 1.05 * min(seconds.values()))


def is_float32(model: nn.Module) -> bool:
    tensors = chain(model.parameters(), model.buffers())
    return all(tensor.dtype == torch.float32 for tensor in tensors if tensor.is_floating_point())


def is_packable(module: Any) -> bool:
    """Return whether a layer is packed: small ones, too, whose unpacked products would round by the number of rows."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or module.weight.dtype not in DTYPES:
        return False
    if any(parameter.requires_grad for parameter in module.parameters()):
        return False
    return is_faster(module.weight.dtype)


@cache
def is_faster(dtype: torch.dtype) -> bool:
    """Return whether products of a few rows with a packed weight are faster on this CPU. This is decided by the abilities
    of the CPU and of this build of torch: measurements vary between runs, and near-ties of the target's text would vary
    with them."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if platform.machine().lower() in ("x86_64", "amd64"):
        return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX")
    return torch.ops.mkldnn._is_mkldnn_acl_supported()
