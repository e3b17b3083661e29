"""DFlash-2: DFlash with short convolutions inside a block, and a selector of candidates (z-lab's blog of 2026; equations as
in NeMo AutoModel's code).

Every attention and every MLP has one convolution over the positions of a block before it and one after it:

    conv(x)_t = k_{t,0} x_t + k_{t,1} x_{t-1}        x_{-1} = 0: a block does not see other blocks

Their kernels are learned, plus a part that depends on the sublayer's input, shared by `conv_group_size` channels.

The selector scores the `selector_top_k` best drafts b of a position after the draft a before it, and excludes all others:

    S(a, b) = logits(b) + <P[a] * (W hidden), Q[b]>
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads.dflash import BlockLayer, DFlashHead
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.embedding import embedding_scale

SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}  # defaults in files
MASKED_LOGIT = -1e4  # of drafts that are not candidates; finite, so that differences of logits are finite


def scales(target: Target) -> dict[str, float | None]:
    """Return what engines must do to this target's rows and logits, which the head gets scaled and capped, by the names of
    the settings. A factor is None if no factor does it."""
    logits = target.scaled
    return dict(zip(SCALES, (embedding_scale(target), logits.multiplier, logits.cap or 0.0), strict=True))


class DynamicConv(nn.Module):
    """Convolve before and after a sublayer, initially with the identity."""

    def __init__(self, width: int, taps: int, group: int, block_size: int):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.ones_(self.base_kernel[:, 0])
        self.taps, self.group, self.block_size = taps, group, block_size

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve the sublayer's input x (batch, blocks * block_size, width). Also return the dynamic kernels of
        `after`."""
        first, second = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).unbind(-3)
        return self.convolve(x, first, self.base_kernel[0]), second

    def after(self, x: Tensor, dynamic: Tensor) -> Tensor:
        return self.convolve(x, dynamic, self.base_kernel[1])

    def convolve(self, x: Tensor, dynamic: Tensor, base: Tensor) -> Tensor:
        """Convolve x with kernels: dynamic (batch, blocks * block_size, taps, groups), base (taps, width)."""
        blocks = x.unflatten(1, (-1, self.block_size))
        out = torch.zeros_like(x)
        for tap in range(self.taps):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, :, : self.block_size].flatten(1, 2)
            out = out + (base[tap] + dynamic[..., tap, :].repeat_interleave(self.group, -1)) * shifted
        return out


class ConvLayer(BlockLayer):
    def __init__(self, config: LlamaConfig, taps: int, group: int, block_size: int):
        super().__init__(config)
        sizes = config.hidden_size, taps, group, block_size
        self.attention_conv, self.mlp_conv = DynamicConv(*sizes), DynamicConv(*sizes)

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention_conv.before(self.input_layernorm(hidden))

    def feed_forward(self, hidden: Tensor, attended: Tensor, kernel: Tensor | None = None) -> Tensor:
        assert kernel is not None
        hidden = hidden + self.attention_conv.after(attended, kernel)
        x, kernel = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(x), kernel)


class CandidateSelector(nn.Module):
    """Score pairs of tokens. Initially it only excludes drafts that are not candidates."""

    def __init__(self, width: int, vocab: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * rank**-0.5)
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)


class DFlash2Head(DFlashHead):
    """Draft like DFlash, with convolutions and a candidate selector. Weights have the names of z-lab and vLLM: DFlash's,
    layers.{i}.{attention,mlp}_conv.*, candidate_selector.*."""

    kind, vocabulary_names = "dflash2", ("candidate_selector.predecessor", "candidate_selector.successor")
    architecture = "DFlash2DraftModel"
    own_defaults = {  # noqa: RUF012
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    }

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        _, group, rank, top_k = self.own.values()
        if self.width % group:
            raise ValueError(f"head.conv_group_size={group} must divide {self.width}")
        self.correction = rank
        self.candidates = self.own["selector_top_k"] = min(top_k, self.draft_vocab)
        self.candidate_selector = CandidateSelector(self.width, self.config.vocab_size, rank)

    def new_layer(self) -> BlockLayer:
        return ConvLayer(self.config, self.own["conv_kernel_size"], self.own["conv_group_size"], self.block_size)

    def masking(self, layer: int) -> tuple[bool, int | None]:
        """Return the masking of DFlash, but sliding layers are bidirectional inside a block, like all others."""
        return bool(self.causal), super().masking(layer)[1]

    @property
    def own_settings(self) -> dict[str, Any]:
        # vLLM's default in sliding layers is true.
        masked = {} if self.window is None else {"causal": bool(self.causal)}
        unusual = {name: value for name, value in scales(self.target).items() if value not in (SCALES[name], None)}
        return self.own | masked | unusual

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        selector = self.candidate_selector
        return selector.predecessor_codebook[tokens] * selector.hidden_projection(hidden), memory

    def select(self, base: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = base.topk(self.candidates)
        named = self.candidate_selector.successor_codebook[self.to_target_ids(ids)]
        scores = values + (named * correction[..., None, :]).sum(-1)
        return scores, ids.expand_as(scores)

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        scores, ids = self.select(base, correction)
        return scores.new_full((*scores.shape[:-1], base.shape[-1]), MASKED_LOGIT).scatter(-1, ids, scores)
