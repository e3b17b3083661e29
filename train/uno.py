"""UNO's criterion: blocks of noise beside a text that is their teacher in the same forward (arXiv:2609.04010)."""

from typing import Any

from torch import Tensor

from foredraft.heads.base import PackedBatch
from foredraft.heads.uno import UnoHead
from foredraft.train.blocks import BlockDistillation


class UnoDistillation(BlockDistillation):
    head: UnoHead

    def __init__(self, *args: Any, **kwargs: Any):
        """As `BlockDistillation`."""
        super().__init__(*args, **kwargs)
        if not isinstance(self.head, UnoHead):
            raise ValueError(f"criterion=uno is for head=uno, and this is {self.head.kind}: criterion=block")

    def forward_target(self, text: PackedBatch) -> tuple[Tensor, Tensor]:
        """The blocks' states in the place of the aux hidden states."""
        last, states = self.head.read(text)
        return states, last

    def drafts(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        return aux_hidden_states
