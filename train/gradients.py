"""Gradients of a loss over more logits than fit in memory, taken while it is computed.

    loss = sum of scale * part(states[rows])        scale is known before any part is

Logits are too many to be kept for the backward pass, and to make them once more there would cost a third of all work on
them, the target's own among it. So the gradients of a part are taken at once, and only they are kept (the fused linear
cross-entropy of Liger-Kernel, arXiv:2410.10989).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class PartialGradients:
    """Sum the gradients of parts, which autograd would visit from the last to the first: given in this order, the sums are
    autograd's to the last digit."""

    def __init__(self, module: nn.Module, states: Sequence[Tensor], recompute: bool):
        """Prepare the sums. module: whose parameters the parts use. states: what they read, (n, ...) each. recompute: leave
        the gradients to the backward pass, and compute the parts there once more."""
        self.states, self.parameters = states, [p for p in module.parameters() if p.requires_grad]
        self.recompute, self.learns = recompute, torch.is_grad_enabled() and not recompute
        self.of_states = [torch.zeros_like(state) for state in states] if self.learns else []
        self.of_parameters: list[Tensor | None] = [None] * len(self.parameters)

    def part(self, compute: Callable[[Tensor], Tensor], number: int, rows: Tensor, scale: Tensor) -> Tensor:
        """Return what `compute` makes of states[number][rows], where rows (k,) int64 are in no other part; each number of it
        counts `scale` in the loss."""
        if not self.learns:
            state = self.states[number][rows]
            return checkpoint(compute, state, use_reentrant=False) if self.recompute else compute(state)
        state = self.states[number].detach()[rows].requires_grad_()
        out = compute(state.view_as(state))  # no leaf: torch's FlopCounterMode cannot follow those into a module
        of_state, *found = torch.autograd.grad(out, [state, *self.parameters], scale, allow_unused=True)
        self.of_states[number].index_copy_(0, rows, of_state)
        for place, (gradient, before) in enumerate(zip(found, self.of_parameters, strict=True)):
            if gradient is not None:
                self.of_parameters[place] = gradient.clone() if before is None else before.add_(gradient)
        return out.detach()

    def attach(self, loss: Tensor) -> Tensor:
        """Attach these gradients to `loss`, the sum of all parts with their scales."""
        if not self.learns:
            return loss
        used = [(p, g) for p, g in zip(self.parameters, self.of_parameters, strict=True) if g is not None]
        pairs = [*zip(self.states, self.of_states, strict=True), *used]
        return KnownGradients.apply(loss, [gradient for _, gradient in pairs], *(tensor for tensor, _ in pairs))


class KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, []  # in place: they may be as large as the lm_head, and are used once
        return None, None, *(known.mul_(gradient) for known in found)
