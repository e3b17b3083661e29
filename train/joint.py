"""Train Medusa-2: the heads first, then heads and target together (arXiv:2401.10774, sections 2.2.2 and 2.3.2).

    loss = KL(target as it was, adapted target) + head_weight * the heads' loss

The adapted target is its own teacher with the adapter switched off ("self-distillation"): no other text is needed, and it
drifts no further than the heads gain by it.
"""

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from foredraft.heads import adapter
from foredraft.heads.base import DraftHead, PackedBatch, draft_loss_mask
from foredraft.heads.target import Target
from foredraft.train.losses import to_float32
from foredraft.train.module import DistillationModel, Loss, Outcome


class JointDistillation(DistillationModel):
    def __init__(
        self,
        head: DraftHead,
        target: Target,
        loss: Loss,
        depth_decay: float = 0.8,
        heads_only: float = 0.4,
        head_weight: float = 1.0,
    ):
        """Set the weights. heads_only: share of the training in which only the heads learn. Their loss counts fully there."""
        super().__init__(head, target, loss, depth_decay)
        self.heads_only, self.head_weight = heads_only, head_weight
        self.adapter = adapter.lora_layers(target)  # here they are saved, optimized and synchronized like the head
        if not len(self.adapter):
            raise ValueError(
                f"this objective trains the target's adapter, and head={head.kind} puts none on it: set head=medusa2"
            )

    def learn(self, text: PackedBatch, stored: dict[str, Tensor]) -> Outcome:
        assert not stored, "check_hidden_states"
        if self.progress < self.heads_only:
            with torch.no_grad(), record_function("target"):
                aux_hidden_states, last = self.forward_target(text)
            outcome = self.compute_loss(text, aux_hidden_states, last)
            # DDP waits for a gradient of every parameter; this one is zero.
            silent = sum(parameter.sum() for parameter in self.adapter.parameters()) * 0.0
            return outcome._replace(loss=outcome.loss + silent)
        with record_function("target"):
            with torch.no_grad(), adapter.disabled(self.target):
                _, before = self.forward_target(text)
            aux_hidden_states, last = self.forward_target(text)
        outcome = self.compute_loss(text, aux_hidden_states, last)
        positions = draft_loss_mask(text, 1).roll(1, dims=1)  # the teacher of label position p is the target at p + 1
        return outcome._replace(loss=self.drift(before[positions], last[positions]) + self.head_weight * outcome.loss)

    def drift(self, before: Tensor, now: Tensor) -> Tensor:
        """Return the mean KL(before, now) of the target's distributions, from its last hidden states (n, hidden)."""
        total = now.new_zeros((), dtype=torch.float32)
        for start in range(0, len(now), self.chunk):
            part = slice(start, start + self.chunk)
            total = total + checkpoint(self.divergence, before[part], now[part], use_reentrant=False)
        return total / (max(1, len(now)) if self.num_items is None else self.num_items[0].clamp(min=1))

    def divergence(self, before: Tensor, now: Tensor) -> Tensor:
        p, q = (to_float32(self.target.logits(states)).log_softmax(-1) for states in (before, now))
        return (p.exp() * (p - q)).sum()
