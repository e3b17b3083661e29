"""EAGLE-1 and EAGLE-2, which share their weights: SafeAILab's files, and the variants of vLLM and SGLang.

They differ in `fc.bias` (the authors' training always writes it, vLLM has none, SGLang requires one), in the name of the
architecture, and in whether the target's embeddings are stored too.
"""

from typing import Any, Self

import torch
from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.eagle import EagleHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings, drop_copy, drop_embeddings
from foredraft.heads.formats.llama_layer import layer_settings
from foredraft.heads.target_model import Target

ARCHITECTURES = {"LlamaForCausalLMEagle", "EagleLlamaForCausalLM"}


class EagleFormat(Format):
    title = "EAGLE-1 as SafeAILab, vLLM and SGLang read it"
    kind, is_default = EagleHead, True

    def __init__(self, architecture: str = "LlamaForCausalLMEagle", bias: bool = False, embeddings: bool = False):
        """Set how to write. bias: always write one, of zeros if the head has none. embeddings: write the target's."""
        self.architecture, self.bias, self.embeddings = architecture, bias, embeddings

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        named = ARCHITECTURES & set(files.config.get("architectures") or [])
        # SafeAILab's own files have LlamaForCausalLM, with any model_type. No target's weights have these names, and no
        # EAGLE-1 has an lm_head but vLLM's first ones, which repeat the target's.
        by_weights = any(name.startswith(("fc.", "layers.0.")) for name in files.weights)
        by_weights = by_weights and "lm_head.weight" not in files.weights
        return cls() if named or by_weights or files.config.get("model_type") == "eagle" else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        config = files.config.get("model") if files.config.get("model_type") == "eagle" else files.config
        if not isinstance(config, dict):
            raise files.error("config.json has model_type=eagle without the settings under model that belong to it")
        check_settings(files, config, {"draft_vocab_size": target.vocab_size})
        biased = "fc.bias" in files.weights
        if biased and config.get("bias") is False:  # the authors' training writes one whatever their config says
            files.notes.append("config.json has bias=false, but fc.bias is stored")
        elif not biased and config.get("bias") is None:
            files.notes.append("fc.bias is not stored, and config.json does not say whether there is one")
        return layer_settings(files, config, target) | {"bias": biased or bool(config.get("bias"))}

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        if "lm_head.weight" in files.weights:
            files = drop_copy(files, "lm_head.weight", target.model.get_output_embeddings(), target)
        return drop_embeddings(files, target).weights

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        config = head.to_config()
        return config | {"architectures": [self.architecture], "bias": self.bias or config["bias"]}

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = super().export_weights(head, target)
        if self.bias:
            weights.setdefault("fc.bias", torch.zeros(target.hidden_size, dtype=head.dtype))
        return weights
