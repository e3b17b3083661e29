"""Linear layers whose weights are packed for oneDNN, which makes a forward of a few tokens cheap on a CPU.

torch's `linear` reorders a weight for every product of a few rows, which costs as much as the product of a tree with 8 nodes.
A packed weight is reordered once. It replaces the original, which `weight` reconstructs bit by bit on request. A weight that
an embedding shares also stays there. Gradients reach the input, never the weight.

Layers with the same input, such as queries, keys and values, become one product (`join`).
"""

import copy
import platform
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8  # for which the layout is chosen; a layout for one row does not speed up a tree, this one costs a row nothing
# Smallest packed weight: below it the call costs more than the product. In float32 one row of 512 x 192 takes 24 microseconds
# packed and 12 unpacked, 8 rows 34 and 31; 576 x 576 takes 40 and 31, 72 and 92 (one core, AVX-512).
SMALLEST = {torch.float32: 1 << 17, torch.bfloat16: 1 << 15}
Names = tuple[tuple[str, ...], ...]  # groups of a module's children


class PackedWeight:
    """Hold the weights of layers with the same input, packed as one. The first layer called computes the outputs of all."""

    def __init__(self, linears: Sequence[nn.Linear]):
        """Pack the weights of layers in the order in which they are called."""
        self.sizes, self.dtype = [linear.out_features for linear in linears], linears[0].weight.dtype
        biases: list[Tensor] = [
            linear.weight.new_zeros(n) if linear.bias is None else linear.bias for n, linear in zip(self.sizes, linears)
        ]
        self.bias = None if all(linear.bias is None for linear in linears) else torch.cat(biases).detach()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.cached: tuple[Tensor, Sequence[Tensor]] | None = None  # an input, and the outputs of all layers for it

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedWeight":
        memo.setdefault(id(self.tensor), self.tensor)  # torch cannot copy it, and it is never written to
        twin = memo[id(self)] = PackedWeight.__new__(PackedWeight)
        vars(twin).update(copy.deepcopy(vars(self) | {"cached": None}, memo))
        return twin

    def product(self, x: Tensor, number: int) -> Tensor:
        """Return the output (..., out) of layer `number`."""
        cached = self.cached  # another thread may change it
        if cached is None or cached[0] is not x:
            outputs = packed_linear(x.to(self.dtype), self.tensor, self.bias)
            cached = x, outputs.split(self.sizes, dim=-1)
        self.cached = None if number == len(self.sizes) - 1 else cached
        return cached[1][number]


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """Replace a frozen `nn.Linear`."""

    def __init__(self, linear: nn.Linear, packed: PackedWeight | None = None, number: int = 0):
        """Take over the layer. packed: a weight that it shares with other layers, as `number` of them; None packs its
        own."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.bias, self.packed, self.number = linear.bias, packed or PackedWeight([linear]), number

    @property
    def is_joined(self) -> bool:
        return len(self.packed.sizes) > 1

    @property
    def weight(self) -> Tensor:
        """Return a copy (out, in) of the original weight."""
        return self.packed.tensor.to_dense().split(self.packed.sizes)[self.number].clone()

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name of the argument
        if torch.is_grad_enabled() and input.requires_grad:
            return PackedProduct.apply(input, self)
        return self.packed.product(input, self.number)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return layer.packed.product(x, layer.number)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient @ ctx.layer.weight.to(gradient.dtype)).to(ctx.dtype), None


def pack(module: nn.Module) -> None:
    """Pack the frozen linear layers in `module` on a CPU where products with packed weights are faster."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if is_packable(child):
                setattr(parent, name, PackedLinear(child))  # type: ignore[arg-type]


def join(module: nn.Module, forward: Callable[[], Any]) -> None:
    """Merge sibling linear layers that get the same input into one product, if some are packed. A forward shows which they
    are, and all modules of a type are treated alike. A model on which such a forward fails stays unchanged."""
    if not any(isinstance(one, PackedLinear) for one in module.modules()):
        return
    calls: dict[nn.Module, list[tuple[str, Tensor, int]]] = {}  # by parent: child, input, version of the input
    hooks = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if is_joinable(child):

                def record(_: Any, inputs: Any, parent: nn.Module = parent, name: str = name) -> None:
                    if inputs:  # otherwise it is called by keyword
                        calls.setdefault(parent, []).append((name, inputs[0], inputs[0]._version))

                hooks.append(child.register_forward_pre_hook(record))
    try:
        # Tensors of inference mode do not count writes.
        with torch.inference_mode(False), torch.no_grad():
            forward()
    except Exception:  # from the model's own code, which may not support a text of two tokens
        return
    finally:
        for hook in hooks:
            hook.remove()
    kinds: dict[type, set[Names]] = {}  # by type of parent: the groups of children in each instance
    for parent, made in calls.items():
        kinds.setdefault(type(parent), set()).add(group_by_input(made))
    for parent in list(module.modules()):
        groups = kinds.get(type(parent), set())
        for names in next(iter(groups)) if len(groups) == 1 else ():
            children: list[Any] = [getattr(parent, name, None) for name in names]
            if all(map(is_joinable, children)) and len({dtype_of(child) for child in children}) == 1:
                packed = PackedWeight(children)
                for number, (name, child) in enumerate(zip(names, children, strict=True)):
                    setattr(parent, name, PackedLinear(child, packed, number))


def group_by_input(calls: Sequence[tuple[str, Tensor, int]]) -> Names:
    """Group the names of layers that are called once with the same unmodified input. calls: in their order."""
    names = [name for name, _, _ in calls]
    groups: dict[tuple[int, int], list[str]] = {}
    for name, x, version in calls:
        if names.count(name) == 1:
            groups.setdefault((id(x), version), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def is_joinable(module: Any) -> bool:
    if isinstance(module, PackedLinear):
        return not module.is_joined
    return type(module) is nn.Linear and is_frozen_on_cpu(module) and dtype_of(module) in SMALLEST


def dtype_of(layer: Any) -> torch.dtype:
    return layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype


def is_frozen_on_cpu(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and not any(one.requires_grad for one in linear.parameters())


def is_packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or not is_frozen_on_cpu(module):
        return False
    dtype = dtype_of(module)
    return dtype in SMALLEST and module.weight.numel() >= SMALLEST[dtype] and is_faster(dtype)


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
