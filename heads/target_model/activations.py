"""Activations of a model on a CPU whose bits do not depend on how many numbers are computed together.

torch computes SiLU, GELU and sigmoid by vectors, and what is left at the end of a thread's share by other code, whose exp
rounds differently:

    numbers          0 .................................. n
    three threads    [ vectors    | rest ][ vectors    | rest ][ vectors    | rest ]

So the same row has other bits where it meets a rest. Padding makes each share a multiple of the vectors, so no rest remains.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARE = 1 << 15  # a thread gets at least as many numbers (at::internal::GRAIN_SIZE)
GELU_SHARED = 1 << 14  # more numbers of GELU are shared by all threads
VECTORS = 64  # a multiple of what torch computes in one turn: two vectors of AVX-512, 64 numbers in half precision
ELEMENTWISE = nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh


class BatchInvariantActivation(nn.Module):
    """Wrap an activation of single numbers."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Tensor:  # nn.SiLU's name of the argument
        missing = padded(input.numel(), torch.get_num_threads()) - input.numel()
        if missing == 0 and input.is_contiguous():
            return self.inner(input)
        return self.inner(F.pad(input.reshape(-1), (0, missing)))[: input.numel()].view(input.shape)


@lru_cache(maxsize=4096)
def padded(count: int, threads: int) -> int:
    """Return a number from `count` on whose shares, one for each thread that works, are whole vectors."""
    unit, whole = VECTORS, 0
    while whole % unit or whole < count:
        whole = -(-count // unit) * unit
        working = min(threads, -(-whole // SHARE)), threads if whole > GELU_SHARED else 1
        unit = math.lcm(unit, *(VECTORS * max(1, some) for some in working))
    return whole


def wrap_activations(model: nn.Module) -> None:
    """Wrap the activations in `model`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_activation(child) and not isinstance(parent, BatchInvariantActivation):
                setattr(parent, name, BatchInvariantActivation(child))


def is_activation(module: nn.Module) -> bool:
    """Return whether a module computes each number for itself. Those of transformers all do; one has weights, whose names
    stay."""
    known = type(module) in ELEMENTWISE or type(module).__module__ == "transformers.activations"
    return known and not module.state_dict()
