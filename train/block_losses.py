"""The losses of a head that drafts in blocks and refines what it drafts: xPress's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foredraft.train.blocks import BlockDistillation, Drafts


class SelfFedDistillation(BlockDistillation):
    """Compute xPress's losses (arXiv:2608.02438, as in `speculators`): behind the text's tokens, behind the head's own
    drafts, as engines refine a block, and of the logits before their correction, which would be forgotten without that
    loss."""

    def __init__(
        self, *args: Any, rounds: int = 3, rounds_weight: float = 0.3, before_weight: float = 0.6, **kwargs: Any
    ):
        """Set rounds and weights. rounds: times that a block is drafted behind the drafts of the time before. The weights are
        of the mean of their losses, and of the loss before the correction."""
        super().__init__(*args, **kwargs)
        if not self.head.correction or self.head.candidates:
            raise ValueError(
                f"this objective is for heads that add to logits what earlier tokens say (xpress, dspark, domino), and "
                f"{self.head.kind} does not: use the objective of its yaml"
            )
        if rounds < 1:
            raise ValueError(f"objective.rounds={rounds} must be at least 1; objective.rounds_weight=0 leaves them out")
        self.rounds, self.rounds_weight, self.before_weight = rounds, rounds_weight, before_weight

    def draft_loss(self, drafts: Drafts, compare: Callable[[Tensor], Tensor]) -> Tensor:
        loss = compare(drafts.logits) + self.before_weight * compare(drafts.base)
        if not self.rounds_weight:
            return loss
        logits, fed = drafts.base, torch.zeros_like(loss)
        for _ in range(self.rounds):
            named = self.head.to_target_ids(logits.max(-1).indices)
            before = torch.cat([drafts.bonus[:, None], named[:, :-1]], dim=1)
            states = self.head.condition_on_text(drafts.hidden, before)
            logits = self.corrected(drafts.base, drafts.hidden, states[..., self.head.width :])
            fed = fed + compare(logits)
        return loss + self.rounds_weight / self.rounds * fed
