"""Heads that draft from their own output through one decoder layer: EAGLE, EAGLE-3, FastMTP."""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.base import PackedBatch, RecurrentHead, shift_right
from foredraft.heads.layers import DecoderLayer, Rotary
from foredraft.heads.step_attention import at_start, attend_steps
from foredraft.heads.target import Target
from foredraft.heads.target.cache import KVCache


class LayerHead(RecurrentHead):
    """Draft with a layer that takes a hidden state, the target's or its own, and the embedding of the token after it."""

    cache_layers = 1
    config: LlamaConfig
    layer: DecoderLayer
    rotary: Rotary

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
        cos, sin = self.rotary(text.positions, text.tokens.shape[1], self.dtype)
        attention, document_starts = self.layer.self_attn, text.document_starts()
        steps: list[tuple[Tensor, Tensor]] = []
        outs: list[Tensor] = []
        for _ in range(self.depth):
            x, residual = self.inputs(hidden, next_embeddings)
            q, k, v, gate = attention.project(x, cos, sin)
            steps.append(at_start(k, v, len(steps)))
            attended = attention.project_out(attend_steps(q, steps, document_starts), gate)
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
        attended = self.layer.self_attn.attend_cached(x, cos, sin, mask, cache, layer=0)
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
