"""Medusa-1: one independent head per depth on the target's last hidden state (arXiv:2401.10774, section 2.1).

Head i (from 0) takes the hidden state of position t and drafts token t + 2 + i. It sees only the text, never the drafts of
other heads, so every depth costs one small product and the tree is static.
"""

from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.base import PackedBatch, ParallelHead, shift_right
from foredraft.heads.layers import ResidualBlock
from foredraft.heads.target_model import Target


class MedusaHead(ParallelHead):
    """Draft each depth with its own residual blocks and projection. Weights have the names of FasterDecoding and TGI:
    {i}.{j}.linear.*, {i}.{blocks}.weight."""

    kind, depth_key = "medusa", "num_heads"

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        record, self.depth, self.blocks = config["foredraft"], config["medusa_num_heads"], config["medusa_num_layers"]
        self.hidden, self.vocab = record["hidden_size"], record["vocab_size"]
        drafts_from = self.prune_vocabulary(record.get("draft_vocab_size"), self.vocab)
        for i in range(self.depth):
            residual = [ResidualBlock(self.hidden) for _ in range(self.blocks)]
            self.add_module(str(i), nn.Sequential(*residual, nn.Linear(self.hidden, drafts_from, bias=False)))

    @classmethod
    def for_target(
        cls,
        target: Target,
        num_heads: int = 4,
        blocks: int = 1,
        draft_vocab_size: int | None = None,
        counts: Tensor | None = None,
    ) -> "MedusaHead":
        """Make a new head whose projections are copies of the target's lm_head, so that its first drafts are the target's
        own prediction. draft_vocab_size, counts: as in EAGLE-3."""
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        record = sizes | {"draft_vocab_size": draft_vocab_size}
        head = cls({"medusa_num_heads": num_heads, "medusa_num_layers": blocks, "foredraft": record})
        head.attach(target)
        head.init_projections(target, counts)
        return head.to(target.device)

    def init_projections(self, target: Target, counts: Tensor | None, lm_head: str = "trained") -> None:
        super().init_projections(target, counts, lm_head)
        for projection in self.projections:
            projection.weight.data.mul_(target.scaled.multiplier)

    def attach(self, target: Target) -> None:
        self.layers = [target.num_layers]

    @property
    def stacks(self) -> list[nn.Sequential]:
        return [self.get_submodule(str(i)) for i in range(self.depth)]  # type: ignore[misc]

    @property
    def projections(self) -> list[nn.Linear]:
        return [stack[-1] for stack in self.stacks]  # type: ignore[misc]

    def to_config(self) -> dict:
        pruned = {} if self.draft_ids is None else {"draft_vocab_size": len(self.draft_ids)}
        return {
            "medusa_num_heads": self.depth,
            "medusa_num_layers": self.blocks,
            "foredraft": {"hidden_size": self.hidden, "vocab_size": self.vocab} | pruned,
        }

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        aux_hidden_states = aux_hidden_states.to(self.dtype)
        return [shift_right(stack[:-1](aux_hidden_states), i) for i, stack in enumerate(self.stacks)]

    def draft_all(self, aux_hidden_states: Tensor) -> Tensor:
        aux_hidden_states = aux_hidden_states.to(self.dtype)
        return torch.stack(
            [self.logits(stack[:-1](aux_hidden_states), i) for i, stack in enumerate(self.stacks, 1)], dim=1
        )

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.stacks[depth - 1][-1](hidden)
