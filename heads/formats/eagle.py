"""EAGLE-1 and EAGLE-2, which share their weights: SafeAILab's files, and what vLLM and SGLang make of them.

They differ in `fc.bias` (absent from config.json it is there, in the authors' code; vLLM knows none, SGLang insists on one),
in the name of the architecture, and in whether the target's embeddings are stored along.
"""

from typing import Any, Self

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.eagle import EagleHead
from heads.formats.base import Format, HeadFiles, check_embeddings, check_rope_spellings, expect
from heads.target import Target

NAMES = {"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"}
LAYER = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "quantization_config": None}
EMBEDDINGS = "embed_tokens.weight"


class EagleFormat(Format):
    title = "EAGLE-1 as SafeAILab, vLLM and SGLang read it"
    kind, own = EagleHead, True

    def __init__(self, architecture: str = "LlamaForCausalLMEagle", bias: bool = False, embeddings: bool = False):
        """For writing. bias: always write one, of zeros where the head has none. embeddings: write the target's."""
        self.architecture, self.bias, self.embeddings = architecture, bias, embeddings

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        named = NAMES & set(found.config.get("architectures") or [])
        # SafeAILab's own files say LlamaForCausalLM; no Llama has an fc, and no EAGLE-1 an lm_head.
        shaped = any(name.startswith(("fc.", "layers.0.")) for name in found.weights)
        shaped = shaped and "lm_head.weight" not in found.weights
        return cls() if named or (shaped and found.config.get("model_type") == "llama") else None

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        check_rope_spellings(found, found.config)
        expect(found, found.config, LAYER | {"draft_vocab_size": target.vocab_size})
        return found.config

    def supply(self, found: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        if EMBEDDINGS not in found.weights:
            return found.weights
        check_embeddings(found, EMBEDDINGS, target)
        return {name: tensor for name, tensor in found.weights.items() if name != EMBEDDINGS}

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
        config = head.to_config()
        return config | {"architectures": [self.architecture], "bias": self.bias or config["bias"]}

    def weights_of(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = super().weights_of(head, target)
        if self.bias:
            weights.setdefault("fc.bias", torch.zeros(target.hidden_size, dtype=head.dtype))
        if self.embeddings:
            rows = target.embeddings.detach().cpu()
            weights[EMBEDDINGS] = rows.to(head.dtype, copy=True).contiguous()
        return weights
