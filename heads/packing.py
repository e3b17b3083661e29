"""Linear layers whose weights are packed for oneDNN: what makes a forward of a few tokens cheap on a CPU.

torch's `linear` lays a weight out anew for every product of a few rows, which for a tree of 8 nodes costs as much as the
product itself. A packed weight is laid out once. It takes the place of the original, which `weight` rebuilds bit by bit for
whoever asks; a weight that an embedding shares stays there as well. Gradients reach the input and never the weight.
"""

import copy
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8  # that the layout is chosen for: one for a single row makes a tree's product no cheaper, this one costs no row more
# Entries of a weight that is packed: of smaller ones the call costs more than the product. In float32 a single row of 512 x
# 192 takes 24 microseconds packed and 12 as it is, 8 rows 34 and 31; 576 x 576 40 and 31, 72 and 92 (one core, AVX-512).
SMALLEST = {torch.float32: 1 << 17, torch.bfloat16: 1 << 15}
PROBE = (1536, 576)  # shape of the weight that is timed


class PackedLinear(nn.Module):
    """A frozen `nn.Linear`."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), ROWS)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedLinear":
        memo.setdefault(id(self.packed), self.packed)  # torch cannot copy it, and nothing ever writes into it
        twin = memo[id(self)] = PackedLinear.__new__(PackedLinear)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @property
    def weight(self) -> Tensor:
        """A copy (out, in) of the weight as it was."""
        return self.packed.to_dense()

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return PackedProduct.apply(x, self)
        return product(x, self)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def product(x: Tensor, layer: PackedLinear) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.to(layer.dtype), layer.packed, layer.bias, "none", [], "")


class PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return product(x, layer)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient @ ctx.layer.weight.to(gradient.dtype)).to(ctx.dtype), None


def pack(module: nn.Module) -> None:
    """Pack the frozen linear layers in `module` that lie on a CPU where products with packed weights are faster."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if is_packable(child):
                setattr(parent, name, PackedLinear(child))  # type: ignore[arg-type]


def is_packable(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module.weight.device.type != "cpu":
        return False
    if any(parameter.requires_grad for parameter in module.parameters()):
        return False
    dtype = module.weight.dtype
    return dtype in SMALLEST and module.weight.numel() >= SMALLEST[dtype] and is_faster(dtype)


def unpack(module: nn.Module) -> None:
    """Linear layers again, for what needs a parameter: an adapter, or a copy that is trained."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PackedLinear):
                linear = nn.Linear(child.in_features, child.out_features, bias=False, device="meta", dtype=child.dtype)
                linear.weight = nn.Parameter(child.weight, requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)


@cache
def is_faster(dtype: torch.dtype) -> bool:
    """Are products of a few rows with a packed weight faster on this CPU? Timed once, in a few milliseconds."""
    if not torch.backends.mkldnn.is_available():
        return False
    # Made of ones: what is random here would change the numbers that a head begins with.
    linear = nn.Linear(PROBE[1], PROBE[0], bias=False, device="meta", dtype=dtype).requires_grad_(False)
    linear.weight = nn.Parameter(torch.ones(PROBE, dtype=dtype), requires_grad=False)
    x = torch.ones(ROWS, PROBE[1], dtype=dtype)
    try:
        return best_seconds(PackedLinear(linear), x) < best_seconds(linear, x)
    except (RuntimeError, NotImplementedError):  # a build of torch, or a CPU, that oneDNN has no kernel for
        return False


@torch.inference_mode()
def best_seconds(layer: nn.Module, x: Tensor, repeats: int = 20) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        layer(x)
        best = min(best, time.perf_counter() - start)
    return best
