"""EAGLE-1: one decoder layer that guesses the target's next last hidden state (arXiv:2401.15077, section 4).

At label position p it takes the target's last hidden state of position p, after the final norm, beside the embedding of
token p + 1; its output stands for the hidden state of position p + 1, and the target's own lm_head makes token p + 2 of it.
Deeper drafts take its own output in the place of hidden states that the target has not computed yet. EAGLE-2 is the dynamic
tree (inference/drafters/dynamic.py) over these very weights.

Training at depth 1 is the paper's: noise on the hidden states stands for the errors of later steps. More depths repeat the
step on its own output, as HASS does (arXiv:2408.15766, section 3.2); keys and masks are those of EAGLE-3.
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
    """On disk its weights are named as SafeAILab, vLLM and SGLang name them: fc, layers.0.*. The embedding and the lm_head
    are the target's and not saved."""

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
        """A new head that at first hands the hidden state on as it is, so that it starts from the target's own guess.

        ttt_steps: steps of training, 1 is EAGLE-1's, 3 are HASS's. noise: width of the uniform noise on the hidden
        states in training, at the paper's 512 tokens a row. bias: of fc, which vLLM loads without one.
        """
        head = cls(llama_config.config_like(target), ttt_steps, bias, noise)
        head.hand_on()
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
