"""Domino: DFlash with a GRU over the tokens drafted so far, which corrects the logits of the next (arXiv:2605.29707).

The GRU runs over the target's embeddings of the bonus token and of every token drafted after it. Its state and the hidden
state of a position give a correction of low rank. The first `pure_draft_prefix_len` positions have none.
"""

from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.dflash import DFlashHead


class DominoHead(DFlashHead):
    """Draft like DFlash, with a GRU's correction. Weights have the names of SpecForge: DFlash's, prefix_gru.*,
    embed_proj.{0,2}. So does the architecture: `projector_type` alone tells SGLang that this is a Domino."""

    kind, vocabulary_names = "domino", ("embed_proj.2.",)
    own_defaults = {"emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}  # noqa: RUF012
    own_least = {"pure_draft_prefix_len": 0}  # noqa: RUF012

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        emb_dim, gru_hidden_dim, self.pure = self.own.values()
        self.correction = self.memory = gru_hidden_dim
        self.prefix_gru = nn.GRU(self.width, gru_hidden_dim, bias=False, batch_first=True)
        up = nn.Linear(emb_dim, self.draft_vocab, bias=False)
        self.embed_proj = nn.Sequential(nn.Linear(self.width + gru_hidden_dim, emb_dim, bias=False), nn.SiLU(), up)
        nn.init.zeros_(up.weight)  # no correction at first

    @property
    def own_settings(self) -> dict[str, Any]:
        return self.own | {"shift_label": self.sample_from_anchor}

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        gru, inputs = self.prefix_gru, self.target.embed(tokens).to(hidden.dtype).flatten(0, -2)
        weights: Any = gru.weight_ih_l0, gru.weight_hh_l0
        memory = torch.gru_cell(inputs, memory.flatten(0, -2), *weights).view(memory.shape)
        return memory, memory

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        position = depth - 1 if self.sample_from_anchor else depth  # within the block
        return base if position < self.pure else base + self.embed_proj(torch.cat([hidden, correction], dim=-1))
