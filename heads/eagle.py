"""EAGLE-1: one decoder layer that predicts the target's next last hidden state (arXiv:2401.15077, section 4).

At label position p it takes the target's last hidden state of position p, after the final norm, and the embedding of token
p + 1. Its output stands for the hidden state of position p + 1, which the target's own lm_head turns into token p + 2.
Deeper drafts use its own output instead of hidden states that the target has not computed yet. EAGLE-2 is the dynamic tree
(inference/drafters/dynamic.py) with the same weights.

Training at depth 1 is the paper's: noise on the hidden states imitates the errors of later steps. More depths repeat the
step on its own output, as HASS does (arXiv:2408.15766, section 3.2). Keys and masks are those of EAGLE-3.

`LayerHead` is what EAGLE, EAGLE-3 and MTP have in common.
"""

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.attention.masks import within_window
from foredraft.heads.attention.step_attention import at_start, attend_steps
from foredraft.heads.base import PackedBatch, RecurrentHead, shift_right
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.layers import DecoderLayer, Rotary
from foredraft.heads.target_model import Target


class LayerHead(RecurrentHead):
    """Draft with a layer that takes a hidden state, the target's or its own, and the embedding of the token after it."""

    cache_layers = 1
    config: LlamaConfig
    layer: DecoderLayer
    rotary: Rotary
    window: int | None = None  # positions that the layer looks back, a query's own included

    def training_window(self, text: PackedBatch) -> int | None:
        """Return the window, or None where the rows are not longer."""
        return None if self.window is None or self.window >= text.row_length else self.window

    @abstractmethod
    def inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention and the residual, from hidden and embeddings (batch, n, hidden)."""

    def first_hidden(self, aux_hidden_states: Tensor) -> Tensor:
        """Return the hidden states (batch, n, hidden) of the first step."""
        return aux_hidden_states

    def feed_back(self, out: Tensor) -> Tensor:
        """Turn the hidden states of a draft into the input of the next step."""
        return out

    def finish(self, out: Tensor) -> Tensor:
        """Turn the layer's output into the hidden states of a draft."""
        return out

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        hidden, next_embeddings = self.first_hidden(aux_hidden_states), embeddings.roll(-1, dims=1)
        cos, sin = self.rotary(text.positions, text.row_length, self.dtype)
        attention, document_starts, window = self.layer.self_attn, text.document_starts(), self.training_window(text)
        steps: list[tuple[Tensor, Tensor]] = []
        outs: list[Tensor] = []
        for _ in range(self.depth):
            x, residual = self.inputs(hidden, next_embeddings)
            q, k, v, gate = attention.project(x, cos, sin)
            steps.append(at_start(k, v, len(steps), text))
            attended = attention.project_out(attend_steps(q, steps, document_starts, text.parts, window), gate)
            outs.append(self.finish(self.layer.feed_forward(residual, attended)))
            hidden = shift_right(self.feed_back(outs[-1]), 1)
        return outs

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        new, hidden = embeddings.shape[1], self.first_hidden(aux_hidden_states)
        return self.draft(hidden, embeddings, cache.columns(new), cache.causal_mask(new), cache)

    def draft_step(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        return self.draft(self.feed_back(hidden), embeddings, positions, mask, cache)

    def draft(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        x, residual = self.inputs(hidden, embeddings)
        cos, sin = self.rotary(positions, cache.capacity, x.dtype)
        mask = None if mask is None else within_window(mask, positions, self.window)
        attended = self.layer.self_attn.attend_cached(x, cos, sin, mask, cache, layer=0, window=self.window)
        return self.finish(self.layer.feed_forward(residual, attended))


class HiddenStateHead(LayerHead):
    """Draft the target's next last hidden state, which the target's own lm_head turns into a token (EAGLE, FastMTP)."""

    target: Target
    fc: nn.Linear

    def attach(self, target: Target) -> None:
        self.target, self.layers = target, [target.num_layers]

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    @torch.no_grad()
    def init_passthrough(self) -> None:
        """Pass the hidden state, the second half of fc's input, through: the first drafts are the target's own prediction."""
        llama_config.init_near_identity(self.layer)
        self.fc.weight[:, self.config.hidden_size :].copy_(torch.eye(self.config.hidden_size))


class EagleHead(HiddenStateHead):
    """Draft the target's next last hidden state with one decoder layer. Weights on disk have the names of SafeAILab, vLLM
    and SGLang: fc, layers.0.*. The embedding and the lm_head belong to the target and are not saved."""

    kind = "eagle"
    disk_prefixes: ClassVar[dict[str, str]] = {"layer.": "layers.0."}

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config, self.depth = llama_config.from_json(config), config.get("foredraft", {}).get("depth", 1)
        self.noise = 0.2
        bias = config.get("bias", True)  # absent means true in the authors' code
        self.fc = nn.Linear(2 * self.config.hidden_size, self.config.hidden_size, bias=bias)
        self.layer = DecoderLayer(self.config, first_norm=False)
        self.rotary = Rotary(self.config)

    @classmethod
    def for_target(cls, target: Target, ttt_steps: int = 1, bias: bool = False, noise: float = 0.2) -> "EagleHead":
        """Make a new head that passes the hidden state through, so that its first drafts are the target's own prediction.
        ttt_steps: 1 for EAGLE-1 and 3 for HASS. noise: width of the uniform noise on hidden states in training, for the
        paper's sequences of 512 tokens. bias: of fc; vLLM loads heads without one."""
        head = cls(llama_config.settings_like(target) | {"bias": bias, "foredraft": {"depth": ttt_steps}})
        head.noise = noise
        head.init_passthrough()
        if bias:
            nn.init.zeros_(head.fc.bias)
        head.attach(target)
        return head.to(target.device)

    def to_config(self) -> dict:
        settings = {"architectures": ["LlamaForCausalLMEagle"], "bias": self.fc.bias is not None}
        return llama_config.to_json(self.config) | settings

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat([embeddings.to(self.dtype), hidden.to(self.dtype)], dim=-1))
        return fused, fused

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        if self.training and self.noise:
            noise = (torch.rand_like(aux_hidden_states) - 0.5) * self.noise * 512 / text.row_length
            aux_hidden_states = aux_hidden_states + noise
        return super().forward(aux_hidden_states, embeddings, text)
