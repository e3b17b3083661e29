"""RMS norms of a frozen model, as one operation each.

transformers writes them as seven. On a GPU each is a kernel, and a decoding step of Qwen3-8B has 145 norms. torch's
`rms_norm` is one kernel there from torch 2.9 on.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fuse_norms(model: nn.Module) -> None:
    """Compute the norms of `model` by torch's `rms_norm`. A norm that computes something else is not touched (Gemma adds one
    to its weights)."""
    for module in model.modules():
        if is_rms_norm(module):
            module.forward = FusedForward(fused, module)


def epsilon(module: Any) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def fused(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:
        return type(self).forward(self, hidden_states)
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, epsilon(self))


class FusedForward(partial[Tensor]):
    """Act as a method, which could not be pickled under another name. compressed-tensors wraps `forward.__func__`."""

    __func__ = staticmethod(fused)


@torch.no_grad()
def is_rms_norm(module: Any) -> bool:
    """Return whether a module computes what `fused` computes, measured with a few random numbers and weights, and whether
    nothing has replaced its forward (accelerate does, to move states between devices)."""
    weight: Any = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or [*dict(module.named_parameters())] != ["weight"]:
        return False
    if weight.ndim != 1 or weight.device.type == "meta" or epsilon(module) is None or "forward" in vars(module):
        return False
    probe, generator = copy.deepcopy(module).to("cpu", torch.float32), torch.Generator().manual_seed(0)
    probe.weight.copy_(torch.randn(len(weight), generator=generator))
    x = torch.randn(2, len(weight), generator=generator)
    try:
        return torch.allclose(fused(probe, x), probe(x), rtol=1e-4, atol=1e-5)
    except TypeError:  # a gated norm takes the gate, too
        return False
