"""Medusa-2: Medusa's heads, trained together with a LoRA adapter on the target (arXiv:2401.10774, section 2.2.2).

The target is trained to be easier to draft for: gradients of the heads reach it through its last hidden state, while
train/joint.py keeps its distribution close to the original. Its text changes, so decoding is lossless only against the
*adapted* target.
"""

from torch import Tensor

from foredraft.heads import adapter
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target import Target


class Medusa2Head(MedusaHead):
    kind = "medusa2"
    format = "Medusa-1's as FasterDecoding names its weights, with the target's adapter as peft reads it"

    @classmethod
    def for_target(
        cls,
        target: Target,
        num_heads: int = 4,
        blocks: int = 1,
        draft_vocab_size: int | None = None,
        counts: Tensor | None = None,
        lora_r: int = 32,
        lora_alpha: int = 16,
    ) -> "Medusa2Head":
        """Make Medusa-1's heads and an adapter of rank `lora_r` on the target, scaled by lora_alpha / lora_r."""
        head = super().for_target(target, num_heads, blocks, draft_vocab_size, counts)
        assert isinstance(head, Medusa2Head)
        adapter.add(target, lora_r, lora_alpha)
        return head
