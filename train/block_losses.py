"""Losses of heads that draft in blocks and choose, or refine, what they draft: LiLiCorr's and xPress's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.lilicorr import LiLiCorrHead
from foredraft.train.blocks import BlockDistillation, Drafts
from foredraft.train.losses import to_float32


class LatticeDistillation(BlockDistillation):
    """Compute LiLiCorr's losses (arXiv:2608.20530, as in ModelOpt's code): of the logits before the choice, and of the choice
    after the text's own tokens, up to the first that is none of its candidates. There is no right choice from there on."""

    def __init__(
        self,
        *args: Any,
        candidates_weight: float = 0.25,
        margin_weight: float = 0.0,
        margin: float = 2.0,
        regret_weight: float = 0.25,
        **kwargs: Any,
    ):
        """Set the weights of three losses, and the width of a hinge; conf/head/lilicorr.yaml."""
        super().__init__(*args, **kwargs)
        if not isinstance(self.head, LiLiCorrHead):
            raise ValueError(
                f"this objective is for head=lilicorr, and this is {self.head.kind}: use the objective of its yaml"
            )
        self.candidates_weight, self.margin_weight, self.margin = candidates_weight, margin_weight, margin
        self.regret_weight = regret_weight

    def draft_loss(self, drafts: Drafts, compare: Callable[[Tensor], Tensor]) -> Tensor:
        scores, ids = self.head.select(drafts.base, drafts.correction)
        named = ids == drafts.tokens[..., None]
        right = named.int().argmax(-1, keepdim=True)  # the best candidate's, where it is none; not counted
        theirs = to_float32(drafts.teacher.gather(-1, ids))
        regret = (to_float32(scores).softmax(-1) * (theirs.gather(-1, right) - theirs).relu()).sum(-1)
        others = scores.scatter(-1, right, -torch.inf).max(-1).values
        hinge = (self.margin - scores.gather(-1, right)[..., 0] + others).relu()
        choice = self.candidates_weight * self.candidates_loss(scores, ids, drafts)
        choice = choice + self.margin_weight * hinge + self.regret_weight * regret
        reached = (named.any(-1) & drafts.counted).int().cumprod(1) > 0
        return compare(drafts.base) + torch.where(reached, choice, 0.0)


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
        if not self.head.correction or self.head.candidates or isinstance(self.head, LiLiCorrHead):
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
