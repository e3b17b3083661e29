"""xPress: DFlash with a small refiner of low rank r that sees the tokens before each draft (arXiv:2608.02438; equations as in
the authors' code for vLLM and in `speculators`).

    c_j = down_h(hidden_j), down_g(mean of the block's hidden states)
    u_j = in_proj(c_j, w1[token before position j])          position 0 has none, and takes the bonus token, as in vLLM
    x_j = u_j + sum over i <= j of mix.L[:, j, i] * u_i       channel by channel
    logits_j += w2(x_j + MLP(x_j))

Engines start from the drafts of the base logits and refine all positions at once, `xpress_num_passes` times, each time from
the tokens of the pass before (Jacobi iteration): position j is exact after j passes. Here each depth follows the one before,
which gives the result of that iteration for every branch of a tree.

    state   hidden state | c_j (2 r) | in place: c_0 (2 r)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.heads.dflash import DFlashHead
from foredraft.heads.layers import MLP


class Mixer(nn.Module):
    def __init__(self, rank: int, block_size: int):
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, block_size, block_size))  # what lies above the diagonal is not used

    def forward(self, position: int, u: Tensor) -> Tensor:
        """Return x (..., rank) of a position, from u (..., position + 1, rank) of the positions up to it."""
        return u[..., -1, :] + (self.L[:, position, : position + 1].T * u).sum(-2)


class Refiner(nn.Module):
    def __init__(self, hidden: int, block_size: int, vocab: int, draft_vocab: int, rank: int, inner: int):
        super().__init__()
        self.w1, self.w2 = nn.Embedding(vocab, rank), nn.Linear(rank, draft_vocab, bias=False)
        self.down_h, self.down_g = (nn.Linear(hidden, rank, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix, self.mlp = Mixer(rank, block_size), MLP(rank, inner)
        for name, parameter in self.named_parameters():
            if name.endswith("weight"):
                nn.init.normal_(parameter, std=0.02)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Return c (..., block_size, 2 * rank) of a block's hidden states (..., block_size, hidden)."""
        mean = self.down_g(hidden.mean(-2, keepdim=True))
        return torch.cat([self.down_h(hidden), mean.expand(*hidden.shape[:-1], -1)], dim=-1)

    def of_token(self, c: Tensor, tokens: Tensor) -> Tensor:
        """Return u (..., rank) of c (..., 2 * rank) after tokens (...)."""
        return self.in_proj(torch.cat([c, self.w1(tokens).to(c.dtype)], dim=-1))

    def forward(self, position: int, u: Tensor) -> Tensor:
        x = self.mix(position, u)
        return x + self.mlp(x)


class XPressHead(DFlashHead):
    """Draft like DFlash, with a refiner. Weights have the names of the authors' code for vLLM: DFlash's, xpress_head.*."""

    kind, vocabulary_names = "xpress", ("xpress_head.w2.",)
    architecture = "Qwen3XPressModel"
    # xpress_num_passes: how often engines refine. It is not used here.
    own_defaults = {"xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_num_passes": 6}  # noqa: RUF012

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rank, self.inner, self.passes = self.own.values()
        self.correction, self.memory = rank, self.block_size * rank
        sizes = self.width, self.block_size, self.config.vocab_size, self.draft_vocab, rank, self.inner
        self.xpress_head = Refiner(*sizes)
        self.width += (2 if self.sample_from_anchor else 4) * rank

    @property
    def own_settings(self) -> dict[str, Any]:
        return {}  # they are at the top level

    def to_config(self) -> dict:
        layout = {"xpress_block_size": self.block_size, "sample_from_anchor": self.sample_from_anchor}
        return super().to_config() | self.own | layout

    def base_logits(self, hidden: Tensor) -> Tensor:
        return super().base_logits(hidden[..., : self.config.hidden_size])

    def drafts(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        states = torch.cat([hidden, c := self.xpress_head.of_hidden(hidden)], dim=-1)
        if self.sample_from_anchor:
            return states
        return torch.cat([states[..., 1:, :], c[..., :1, :].expand(*c[..., 1:, 0].shape, -1)], dim=-1)

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Refine the draft of this depth. memory: u of the positions before."""
        refiner, rank = self.xpress_head, self.correction
        c = hidden[..., self.config.hidden_size :]
        u = [refiner.of_token(c[..., : 2 * rank], tokens)]
        position = depth - 1 if self.sample_from_anchor else depth
        if position > 0 and depth == 1:
            u.insert(0, refiner.of_token(c[..., 2 * rank :], tokens))
        u_so_far = torch.cat([memory[..., : (position + 1 - len(u)) * rank], *u], dim=-1).unflatten(-1, (-1, rank))
        x = refiner(position, u_so_far)
        return x, F.pad(u_so_far.flatten(-2), (0, self.memory - (position + 1) * rank))

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        return base + self.xpress_head.w2(correction)
