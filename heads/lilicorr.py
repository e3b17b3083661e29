"""LiLiCorr: DFlash that scores the best drafts of all depths together before it chooses (arXiv:2608.20530; equations as in
ModelOpt's code).

The `lilicorr_candidate_topk` best drafts of each depth are the nodes of a lattice. A small bidirectional transformer gives
each node a vector for the draft before it and one for the draft after it. The potential of a draft b after a draft a is their
cosine:

    potential(a, b) = logit_scale * cos(out(a), in(b))        out(bonus token) comes from the text's newest hidden state

It replaces the logits, and all other drafts are excluded. A path is chosen from the first depth on, since an early draft
matters more than a late one.

    state   hidden state | potentials (k, k), by the draft before and the draft | ids of the drafts before (k) | ids (k)

Ids are stored as floats, so a state is float32, which represents them exactly up to 2^24.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foredraft.heads.dflash import BlockLayer, DFlashHead
from foredraft.heads.dflash2 import MASKED_LOGIT, ConvLayer
from foredraft.heads.layers import RMSNorm

FEATURES = 5  # of a candidate: log-probability, probability, distance to the best, rank, is it the best?
SIZES = ("candidate_topk", "hidden_size", "num_layers", "num_heads", "mlp_ratio", "factor_dim")
CONVOLUTIONS = ("conv_kernel_size", "conv_group_size")
BLOCKS = 32  # scored at a time in training; their logits are recomputed in the backward pass


class BiasedMLP(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj, self.heads = nn.Linear(width, width), heads

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Attend among nodes. x: (n, nodes, width). bias: (heads, nodes, nodes), added to scores."""
        products = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = products.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype)).transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, eps: float):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.attn, self.mlp = LatticeAttention(width, heads), BiasedMLP(width, inner, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class Lattice(nn.Module):
    def __init__(self, hidden: int, block_size: int, eps: float, settings: dict[str, Any]):
        """Build the modules. hidden: width of the target. settings: the head's lilicorr_* settings."""
        super().__init__()
        width, heads, top_k = settings["hidden_size"] or hidden, settings["num_heads"], settings["candidate_topk"]
        self.scale, self.vector_eps, self.block_size = settings["logit_scale"], settings["vector_eps"], block_size
        self.token_proj = nn.Identity() if width == hidden else nn.Linear(hidden, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(FEATURES), BiasedMLP(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, block_size - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, top_k, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        inner = int(width * settings["mlp_ratio"])
        self.layers = nn.ModuleList(LatticeLayer(width, heads, inner, eps) for _ in range(settings["num_layers"]))
        self.output_norm, self.anchor_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, settings["factor_dim"]) for _ in range(3))
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "head.weight", "in_proj_weight")):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(("proj.bias", "head.bias")):
                nn.init.zeros_(parameter)

    def forward(self, embeddings: Tensor, log_probs: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        """Return potentials (n, depth, k, k) of each draft after each draft before it; at depth 1 all rows are equal.
        embeddings: (n, depth, k, hidden) of the candidates. log_probs: (n, depth, k). hidden: (n, depth, hidden). context:
        (n, hidden)."""
        depth, top_k = log_probs.shape[1:]
        x = self.token_proj(embeddings) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features(log_probs).to(x.dtype)))
        x = (x + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        slots = torch.arange(depth, device=x.device).repeat_interleave(top_k)
        back = slots[:, None] - slots
        bias = self.relative_slot_bias[:, back + self.block_size - 1] + self.same_slot_bias[:, None, None] * (back == 0)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (depth, top_k))
        anchor = self.anchor_norm(self.context_proj(context))
        anchors = anchor[:, None, None].expand_as(x)
        x = F.silu(self.factor_input_proj(torch.cat([x, anchors, x * anchors], dim=-1)))
        first = self.l2_normalize(self.anchor_out_head(anchor))[:, None, None].expand(-1, 1, top_k, -1)
        before = torch.cat([first, self.l2_normalize(self.out_head(x))[:, :-1]], dim=1)
        return self.scale * (before @ self.l2_normalize(self.in_head(x)).transpose(-1, -2)).float()

    def l2_normalize(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.vector_eps)


def features(log_probs: Tensor) -> Tensor:
    """Return features (..., k, FEATURES) of candidates with log_probs (..., k), best first."""
    ranks = torch.arange(log_probs.shape[-1], device=log_probs.device).expand_as(log_probs)
    parts = log_probs, log_probs.exp(), log_probs - log_probs[..., :1], ranks / (log_probs.shape[-1] - 1), ranks == 0
    return torch.stack([part.to(log_probs.dtype) for part in parts], dim=-1)


class LiLiCorrHead(DFlashHead):
    """Draft like DFlash, with a lattice over the best drafts. Weights have the names of SGLang and vLLM: DFlash's,
    optionally DFlash-2's convolutions, lilicorr.*."""

    kind = projector = "lilicorr"
    architecture = "LiLiCorrDraftModel"
    own_names = tuple(f"lilicorr_{name}" for name in (*SIZES, "vector_eps", "logit_scale"))

    def __init__(
        self,
        *args: Any,
        lilicorr_candidate_topk: int = 8,
        lilicorr_hidden_size: int = 1024,
        lilicorr_num_layers: int = 2,
        lilicorr_num_heads: int = 8,
        lilicorr_mlp_ratio: float = 2.0,
        lilicorr_factor_dim: int = 1024,
        lilicorr_vector_eps: float = 1e-4,
        lilicorr_logit_scale: float = 8.0,
        conv_kernel_size: int | None = None,
        conv_group_size: int | None = None,
        **kwargs: Any,
    ):
        """Build the modules. lilicorr_hidden_size: 0 for the target's. conv_kernel_size, conv_group_size: of DFlash-2's
        convolutions."""
        self.taps, self.group = conv_kernel_size, conv_group_size
        super().__init__(*args, **kwargs)
        arguments = {name: value for name, value in locals().items() if name.startswith("lilicorr_")}
        self.settings = {name.removeprefix("lilicorr_"): value for name, value in arguments.items()}
        self.check_settings()
        self.lilicorr = Lattice(self.width, self.block_size, self.config.rms_norm_eps, self.settings)
        self.top_k = lilicorr_candidate_topk
        self.correction = 2 * self.top_k
        self.width += self.top_k * (self.top_k + 2)

    def check_settings(self) -> None:
        """Raise ValueError for settings that neither engines nor a lattice support."""
        width, top_k = self.settings["hidden_size"] or self.width, self.settings["candidate_topk"]
        if self.pruned:
            raise ValueError("head=lilicorr drafts from the target's whole vocabulary: set head.draft_vocab_size=null")
        if self.sample_from_anchor:
            raise ValueError("head=lilicorr drafts in place: set head.sample_from_anchor=false")
        if top_k not in (2, 4, 8, 16) or width % self.settings["num_heads"]:
            raise ValueError(
                f"head.lilicorr_candidate_topk={top_k} must be 2, 4, 8 or 16, and head.lilicorr_num_heads="
                f"{self.settings['num_heads']} must divide {width}"
            )
        if (self.taps is None) != (self.group is None) or self.width % (self.group or 1):
            raise ValueError(
                f"head.conv_kernel_size={self.taps} and head.conv_group_size={self.group} must be set together or not at all,"
                f" and the second must divide {self.width}"
            )

    def new_layer(self) -> BlockLayer:
        if self.taps is None or self.group is None:
            return BlockLayer(self.config)
        return ConvLayer(self.config, self.taps, self.group, self.block_size)

    @classmethod
    def own_arguments(cls, config: dict) -> dict[str, Any]:
        return super().own_arguments(config) | {name: config.get(name) for name in CONVOLUTIONS}

    @property
    def own_settings(self) -> dict[str, Any]:
        convolutions = {} if self.taps is None else dict(zip(CONVOLUTIONS, (self.taps, self.group), strict=True))
        return {
            "lilicorr_enabled": True,
            **{f"lilicorr_{key}": value for key, value in self.settings.items()},
            **convolutions,
        }

    def build_context(self, embeddings: Tensor, context: Tensor) -> Tensor:
        return torch.cat([embeddings.to(context.dtype), context], dim=-1)

    def base_logits(self, hidden: Tensor) -> Tensor:
        return super().base_logits(hidden[..., : self.config.hidden_size].to(self.fc.weight.dtype))

    def drafts(self, hidden: Tensor, context: Tensor) -> Tensor:
        hidden = super().drafts(hidden, context)
        pairs = zip(hidden.flatten(0, -3).split(BLOCKS), context.flatten(0, -2).split(BLOCKS), strict=True)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            parts = [
                checkpoint(self.score_pairs, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs
            ]
        else:
            parts = [self.score_pairs(*pair) for pair in pairs]
        return torch.cat(parts).view(*hidden.shape[:-1], self.width)

    def score_pairs(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Return states (n, depth, width) of hidden states (n, depth, hidden) after texts with context (n, hidden)."""
        logits = self.base_logits(hidden).float()
        best, ids = logits.topk(self.top_k)
        log_probs, embeddings = best - logits.logsumexp(-1, keepdim=True), self.target.embed(ids).to(hidden.dtype)
        potentials = self.lilicorr(embeddings, log_probs, hidden, context.to(hidden.dtype))
        before = F.pad(ids, (0, 0, 1, -1), value=-1)
        return torch.cat([hidden.float(), potentials.flatten(-2), before.float(), ids.float()], dim=-1)

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return potentials and ids of the candidates after each of `tokens`. A token that was not a candidate counts as
        the best."""
        k = self.top_k
        potentials, before, ids = hidden[..., -k * (k + 2) :].split([k * k, k, k], dim=-1)
        place = (before == tokens[..., None]).int().argmax(-1)[..., None, None]
        row = potentials.unflatten(-1, (k, k)).gather(-2, place.expand(*place.shape[:-1], k))[..., 0, :]
        return torch.cat([row, ids], dim=-1), memory

    def select(self, base: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        scores, ids = correction.chunk(2, dim=-1)
        return scores, ids.long()

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        scores, ids = self.select(base, correction)
        return scores.new_full((*scores.shape[:-1], base.shape[-1]), MASKED_LOGIT).scatter(-1, ids, scores)
