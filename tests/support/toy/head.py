"""A head of a new kind, as somebody outside this project would write it: this file and conf/head/toy.yaml, nothing else."""

import torch
from torch import Tensor, nn

from foredraft.heads.base import PackedBatch, ParallelHead, shift_right
from foredraft.heads.target_model import Target


class ToyHead(ParallelHead):
    """Draft with one matrix per depth on the last hidden state; the target's lm_head turns the result into a token."""

    kind = "toy"
    target: Target

    def __init__(self, config: dict):
        super().__init__()
        self.hidden, self.depth = config["hidden"], config["foredraft"]["depth"]
        self.maps = nn.ModuleList([nn.Linear(self.hidden, self.hidden) for _ in range(self.depth)])

    @classmethod
    def for_target(cls, target: Target, depth: int = 2) -> "ToyHead":
        head = cls({"hidden": target.hidden_size, "foredraft": {"depth": depth}})
        head.attach(target)
        return head.to(target.device)

    def attach(self, target: Target) -> None:
        self.target, self.layers = target, [target.num_layers]

    def to_config(self) -> dict:
        return {"hidden": self.hidden}

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        return [shift_right(layer(aux_hidden_states.to(self.dtype)), i) for i, layer in enumerate(self.maps)]

    def draft_all(self, aux_hidden_states: Tensor) -> Tensor:
        return torch.stack(
            [self.logits(layer(aux_hidden_states.to(self.dtype)), i) for i, layer in enumerate(self.maps, 1)], 1
        )

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)
