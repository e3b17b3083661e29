"""EAGLE-1: one decoder layer that guesses the target's next last hidden state (arXiv:2401.15077, section 4).

At slot p it reads the target's last hidden state of position p, after the final norm, beside the embedding of token
p + 1; its output stands for the hidden state of position p + 1, and the target's own lm_head makes token p + 2 of it.
Deeper drafts read its own output in the place of features that the target has not made yet. EAGLE-2 is the dynamic
tree (inference/drafters/dynamic.py) over these very weights.

Training at depth 1 is the paper's: noise on the features stands for the errors of later steps. More depths repeat the
step on its own output, as HASS does (arXiv:2408.15766, section 3.2); keys and masks are those of EAGLE-3.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.base import PackedBatch, RecurrentHead, shift_right
from foredraft.heads.layers import DecoderLayer, Rotary
from foredraft.heads.step_attention import at_start, attend_steps
from foredraft.heads.target import Target
from foredraft.heads.target.cache import KVCache


class EagleHead(RecurrentHead):
    """On disk its weights are named as SafeAILab, vLLM and SGLang name them: fc, layers.0.*. The embedding and the lm_head
    are the target's and not saved."""

    kind, cache_layers = "eagle", 1
    format = "EAGLE-1 as SafeAILab and SGLang read it (LlamaForCausalLMEagle)"
    disk_prefixes: ClassVar[dict[str, str]] = {"layer.": "layers.0."}
    target: Target

    def __init__(self, config: LlamaConfig, depth: int = 1, bias: bool = False, noise: float = 0.2):
        super().__init__()
        self.config, self.depth, self.noise = config, depth, noise
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layer = DecoderLayer(config, first_norm=False)
        self.rotary = Rotary(config)

    @classmethod
    def for_target(cls, target: Target, depth: int = 1, bias: bool = False, noise: float = 0.2) -> "EagleHead":
        """A new head that at first hands the hidden state on as it is, so that it starts from the target's own guess.

        depth: steps of training, 1 is EAGLE-1's, 3 are HASS's. noise: width of the uniform noise on features in training,
        at the paper's 512 tokens a row. bias: of fc, which vLLM reads without one.
        """
        head = cls(llama_config.config_like(target, "EAGLE"), depth, bias, noise)
        width = head.config.hidden_size
        with torch.no_grad():
            llama_config.init_near_identity(head.layer.self_attn.o_proj, head.layer.mlp.down_proj)
            head.fc.weight[:, width:].copy_(torch.eye(width))
            if head.fc.bias is not None:
                head.fc.bias.zero_()
        head.attach(target)
        return head.to(target.device)

    def attach(self, target: Target) -> None:
        self.target, self.layers = target, [target.num_layers]

    @classmethod
    def from_config(cls, config: dict) -> "EagleHead":
        depth = config.get("foredraft", {}).get("depth", 1)
        bias = config.get("bias", True)  # absent means true in the authors' code
        return cls(llama_config.from_json(config), depth, bias)

    def to_config(self) -> dict:
        facts = {"architectures": ["LlamaForCausalLMEagle"], "bias": self.fc.bias is not None}
        return llama_config.to_json(self.config) | facts

    def incompatibilities(self, target: Target) -> list[str]:
        return llama_config.incompatibilities(self.config, target)

    def differences(self, target: Target) -> list[str]:
        return llama_config.differences(self.config, target)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    def fuse(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        return self.fc(torch.cat([embeddings.to(self.dtype), hidden.to(self.dtype)], dim=-1))

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        length, attention = text.tokens.shape[1], self.layer.self_attn
        hidden, next_embeddings = aux_hidden_states, embeddings.roll(-1, dims=1)
        if self.training and self.noise:
            hidden = hidden + (torch.rand_like(hidden) - 0.5) * self.noise * 512 / length
        cos, sin = self.rotary(text.positions, length, self.dtype)
        document_starts, outs = text.document_starts(), []
        steps: list[tuple[Tensor, Tensor]] = []
        for _ in range(self.depth):
            fused = self.fuse(hidden, next_embeddings)
            q, k, v = attention.project(fused, cos, sin)
            steps.append(at_start(k, v, len(steps)))
            attended = attention.project_out(attend_steps(q, steps, document_starts))
            outs.append(self.layer.feed_forward(fused, attended))
            hidden = shift_right(outs[-1], 1)
        return outs

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        new = embeddings.shape[1]
        return self.draft_step(aux_hidden_states, embeddings, cache.columns(new), cache.causal_mask(new), cache)

    def draft_step(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        fused = self.fuse(hidden, embeddings)
        cos, sin = self.rotary(positions, cache.capacity, fused.dtype)
        return self.layer.feed_forward(fused, self.layer.self_attn.attend_cached(fused, cos, sin, mask, cache, layer=0))
