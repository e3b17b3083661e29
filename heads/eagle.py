"""EAGLE-1: one decoder layer that predicts the target's next last hidden state (arXiv:2401.15077, section 4).

At label position p it takes the target's last hidden state of position p, after the final norm, and the embedding of token
p + 1. Its output stands for the hidden state of position p + 1, which the target's own lm_head turns into token p + 2.
Deeper drafts use its own output instead of hidden states that the target has not computed yet. EAGLE-2 is the dynamic tree
(inference/drafters/dynamic.py) with the same weights.

Training at depth 1 is the paper's: noise on the hidden states imitates the errors of later steps. More depths repeat the
step on its own output, as HASS does (arXiv:2408.15766, section 3.2). Keys and masks are those of EAGLE-3.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.base import PackedBatch
from foredraft.heads.layer_head import HiddenStateHead
from foredraft.heads.layers import DecoderLayer, Rotary
from foredraft.heads.target import Target


class EagleHead(HiddenStateHead):
    """Draft the target's next last hidden state with one decoder layer. Weights on disk have the names of SafeAILab, vLLM
    and SGLang: fc, layers.0.*. The embedding and the lm_head belong to the target and are not saved."""

    kind = "eagle"
    format = "EAGLE-1 as SafeAILab and SGLang read it (LlamaForCausalLMEagle)"
    disk_prefixes: ClassVar[dict[str, str]] = {"layer.": "layers.0."}

    def __init__(self, config: LlamaConfig, depth: int = 1, bias: bool = False, noise: float = 0.2):
        super().__init__()
        self.config, self.depth, self.noise = config, depth, noise
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layer = DecoderLayer(config, first_norm=False)
        self.rotary = Rotary(config)

    @classmethod
    def for_target(cls, target: Target, ttt_steps: int = 1, bias: bool = False, noise: float = 0.2) -> "EagleHead":
        """Make a new head that passes the hidden state through, so that its first drafts are the target's own prediction.
        ttt_steps: 1 for EAGLE-1 and 3 for HASS. noise: width of the uniform noise on hidden states in training, for the
        paper's sequences of 512 tokens. bias: of fc; vLLM loads heads without one."""
        head = cls(llama_config.config_like(target), ttt_steps, bias, noise)
        head.init_passthrough()
        if bias:
            nn.init.zeros_(head.fc.bias)
        head.attach(target)
        return head.to(target.device)

    @classmethod
    def from_config(cls, config: dict) -> "EagleHead":
        depth = config.get("foredraft", {}).get("depth", 1)
        bias = config.get("bias", True)  # absent means true in the authors' code
        return cls(llama_config.from_json(config), depth, bias)

    def to_config(self) -> dict:
        settings = {"architectures": ["LlamaForCausalLMEagle"], "bias": self.fc.bias is not None}
        return llama_config.to_json(self.config) | settings

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(torch.cat([embeddings.to(self.dtype), hidden.to(self.dtype)], dim=-1))
        return fused, fused

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        if self.training and self.noise:
            noise = (torch.rand_like(aux_hidden_states) - 0.5) * self.noise * 512 / text.tokens.shape[1]
            aux_hidden_states = aux_hidden_states + noise
        return super().forward(aux_hidden_states, embeddings, text)
