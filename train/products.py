"""Products of training on a CPU, by oneDNN where torch's are slower.

torch multiplies matrices in float32 by MKL, which uses AVX2 alone on AMD's processors. With AVX-512 oneDNN is more than twice
as fast there (docs/results/training-speed.md).
"""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.heads.caches.device import device_name

FEWEST = 32  # rows; oneDNN copies the weights in every product
torch_linear = F.linear


@contextlib.contextmanager
def faster_products(device: torch.device) -> Iterator[None]:
    """Compute `F.linear`, which all linear layers call, and its gradients by oneDNN if that is faster."""
    if device.type != "cpu" or not is_faster():
        yield
        return
    before, F.linear = F.linear, linear
    try:
        yield
    finally:
        F.linear = before


@cache
def is_faster() -> bool:
    """Return whether oneDNN multiplies in float32 faster than torch on this CPU."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return has_both and torch.cpu._is_avx512_supported() and is_amd()


def is_amd() -> bool:
    return "AMD" in device_name(torch.device("cpu"))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # F.linear's name of the argument
    single = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    plain = type(input) is Tensor and type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided
    usual = bias is None or (bias.dtype, bias.shape) == (weight.dtype, weight.shape[:1])
    fits = usual and weight.numel() and weight.shape[1:] == input.shape[-1:]  # torch broadcasts, or names the sizes
    # torch.func would need other rules for autograd.
    transformed = torch._C._are_functorch_transforms_active()
    if single and plain and fits and not transformed and input.numel() >= FEWEST * input.shape[-1]:
        return Product.apply(input, weight, bias)
    return torch_linear(input, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    x, weight = (each if is_dense(each) else each.contiguous() for each in (x, weight))
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores its stride
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def is_dense(x: Tensor) -> bool:
    """Return whether a tensor, or its transpose, is contiguous. oneDNN takes hundreds of times as long for others."""
    return x.is_contiguous() or (x.ndim == 2 and x.t().is_contiguous())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        rows = gradient.contiguous().flatten(0, -2)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            Product.apply(rows, weight.t(), None).view(x.shape) if of_x else None,
            Product.apply(rows.t(), x.flatten(0, -2).t(), None) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
