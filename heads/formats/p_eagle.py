"""P-EAGLE as vLLM reads it: EAGLE-3's tensors with further layers, the head's own embedding, and `mask_hidden`. Drafts after
the first take the token `pard_token` (`ptd_token_id` in older files, `mask_token_id` in speculators)."""

from typing import Any, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import EMBEDDINGS, HeadFiles, check_settings
from foredraft.heads.formats.eagle3 import Eagle3Format
from foredraft.heads.formats.llama_layer import layer_settings
from foredraft.heads.p_eagle import PEagleHead
from foredraft.heads.target_model import Target

ARCHITECTURES = {"PeagleLlamaForCausalLM", "PEagleDraftModel"}
TOKEN = ("pard_token", "ptd_token_id", "mask_token_id")  # names of one setting
FLAGS = ("norm_before_residual", "norm_before_fc")


class PEagleFormat(Eagle3Format):
    title = "P-EAGLE as vLLM reads it (LlamaForCausalLMEagle3 with mask_hidden)"
    kind, first_layer, usual_layer = PEagleHead, "blocks.0.", "layers.0"

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        named = ARCHITECTURES & set(files.config.get("architectures") or [])
        if not (named or "mask_hidden" in files.weights) or "speculators_model_type" in files.config:
            return None
        return cls("midlayer" if any(name.startswith("midlayer.") for name in files.weights) else "")

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        return self.settings(files, files.config, target)

    def settings(self, files: HeadFiles, layer: dict[str, Any], target: Target) -> dict[str, Any]:
        """Return the config for `from_config`. layer: settings of the decoder layers."""
        config, count = files.config, layer["num_hidden_layers"]
        check_settings(files, layer, {"attention_bias": False, "model_type": "llama"})
        check_settings(
            files, config, {"target_hidden_size": layer["hidden_size"], "fc_norm": False, "norm_output": False}
        )
        token = next((config[name] for name in TOKEN if config.get(name) is not None), None)
        if token is None:
            raise files.error(
                f"config.json has no {TOKEN[0]}, the token at positions without text: add it (SpecForge trains with its "
                "--mask-token-id, otherwise with the tokenizer's padding token)"
            )
        files.check_number(TOKEN[0], token, 0, target.vocab_size - 1)
        # This is how far an engine should draft. The head is the same at all depths, and drafts at least two tokens.
        record = {"depth": max(2, files.speculative_tokens(usual=8))} | config.get("foredraft", {})
        shared = self.shared_config(files, {name: config.get(name) for name in FLAGS}, target)
        own_settings = {"num_hidden_layers": count, "pard_token": token, "foredraft": record}
        return layer_settings(files, layer, target, count) | shared | own_settings

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = dict(files.weights)
        rows = weights.pop(EMBEDDINGS, None)
        if rows is None:
            files.notes.append(f"no embedding is stored, so that of {target.name} is used")
            rows = target.embeddings.detach().cpu()
        weights = super().complete_weights(files._replace(weights=weights), head, target)
        return weights | {EMBEDDINGS: rows}

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return head.to_config()
