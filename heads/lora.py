"""LoRA (arXiv:2106.09685): a trained head is adapted to other text by a small addition to every matrix, learned alone.

W becomes W + SCALE * up @ down, of rank r. Whoever asks a layer for its weight gets the sum, so no head knows of it, and what
is saved are plain weights in the head's own layout.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from foredraft.heads.base import DraftHead

SCALE = 2.0
LINEAR = (nn.Linear, Conv1D)  # GPT-2 has the latter


class LowRank(nn.Module):
    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        outputs, inputs = weight.shape
        self.down = nn.Parameter(torch.randn(rank, inputs, device=weight.device) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + SCALE * (self.up @ self.down)


def add(module: nn.Module, rank: int) -> None:
    """Add low-rank additions, zero at first, to the linear layers of a head or a model. From now on only these learn."""
    if rank < 1:
        raise ValueError(f"lora_r={rank} is the rank of what is learned, at least 1; null trains all weights")
    frozen = module.projections if isinstance(module, DraftHead) and module.lm_head_is_targets else []
    layers = [part for part in module.modules() if isinstance(part, LINEAR) and part not in frozen]
    if any(parametrize.is_parametrized(layer) for layer in layers):
        raise ValueError(f"lora_r={rank} and head.lora_r tune the same layers: set one of them")
    module.requires_grad_(False)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))


def merge(module: nn.Module) -> None:
    """Merge the additions into plain weights, for saving and decoding."""
    for layer in list(module.modules()):
        if isinstance(layer, LINEAR) and parametrize.is_parametrized(layer, "weight"):
            weight = layer.weight.detach()
            # Not `remove_parametrizations`: it takes away what other copies of the head still use, their class.
            layer.__class__ = parametrize.type_before_parametrizations(layer)
            del layer.parametrizations
            layer.weight = nn.Parameter(weight)
