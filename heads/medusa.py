"""Medusa-1: one independent head per depth on the target's last hidden state (arXiv:2401.10774, section 2.1).

Head i (from 0) reads the hidden state of position t and drafts token t + 2 + i. It sees the text, never the other
heads' drafts, so all depths cost one small product each, and the tree is static.
"""

import torch
from torch import Tensor, nn

from heads.base import DraftHead, Text, later
from heads.cache import KVCache
from heads.layers import ResidualBlock
from heads.target import Target


class MedusaHead(DraftHead):
    """Weights are named as FasterDecoding, TGI and vLLM (to 0.32) name them: {i}.{j}.linear.*, {i}.{blocks}.weight."""

    kind, recurrent = "medusa", False
    format = "Medusa-1 as FasterDecoding names its weights, in safetensors"

    def __init__(self, hidden: int, vocab: int, last_layer: int, depth: int = 4, blocks: int = 1, target: str = ""):
        super().__init__()
        self.hidden, self.vocab, self.depth, self.blocks, self.target_name = hidden, vocab, depth, blocks, target
        self.layers = [last_layer]
        for i in range(depth):
            residual = [ResidualBlock(hidden) for _ in range(blocks)]
            self.add_module(str(i), nn.Sequential(*residual, nn.Linear(hidden, vocab, bias=False)))

    @classmethod
    def for_target(cls, target: Target, depth: int = 4, blocks: int = 1) -> "MedusaHead":
        """A new head whose projections start as the target's lm_head, so that it starts from the target's own guess."""
        head = cls(target.hidden_size, target.vocab_size, target.num_layers, depth, blocks, target.name)
        rows = target.model.get_output_embeddings().weight
        if rows.is_floating_point() and rows.shape == (target.vocab_size, target.hidden_size):
            for block in head.stacks:
                projection = block[-1]
                assert isinstance(projection, nn.Linear)
                projection.weight.data.copy_(rows)
        return head.to(target.device)

    @property
    def stacks(self) -> list[nn.Sequential]:
        return [self.get_submodule(str(i)) for i in range(self.depth)]  # type: ignore[misc]

    @classmethod
    def describes(cls, config: dict) -> bool:
        return "medusa_num_heads" in config

    @classmethod
    def from_config(cls, config: dict) -> "MedusaHead":
        own = config["foretoken"]
        return cls(
            own["hidden_size"],
            own["vocab_size"],
            own["layers"][0],
            depth=config["medusa_num_heads"],
            blocks=config["medusa_num_layers"],
            target=config["base_model_name_or_path"],
        )

    def to_config(self) -> dict:
        return {
            "base_model_name_or_path": self.target_name,
            "medusa_num_heads": self.depth,
            "medusa_num_layers": self.blocks,
            "foretoken": {"hidden_size": self.hidden, "vocab_size": self.vocab, "layers": self.layers},
        }

    def forward(self, features: Tensor, embeddings: Tensor, text: Text) -> list[Tensor]:
        features = features.to(self.dtype)
        return [later(stack[:-1](features), i) for i, stack in enumerate(self.stacks)]

    def read(self, features: Tensor, embeddings: Tensor, cache: KVCache | None) -> Tensor:
        return features.to(self.dtype)

    def drafts(self, features: Tensor) -> Tensor:
        features = features.to(self.dtype)
        return torch.stack([self.logits(stack[:-1](features), i) for i, stack in enumerate(self.stacks, 1)], dim=1)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.stacks[depth - 1][-1](hidden)
