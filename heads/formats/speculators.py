"""EAGLE-3 in vLLM's own layout, that of the `speculators` package.

The decoder layer is `layers.0`, its config is in `transformer_layer_config`, and the target's embeddings are stored too.
All flags are written, because engines have different defaults.
"""

from typing import Any, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.eagle3 import FLAGS, WINDOWED, Eagle3Head
from foredraft.heads.formats.base import HeadFiles, check_settings
from foredraft.heads.formats.eagle3 import Eagle3Format, has_qk_norms
from foredraft.heads.formats.layer_ids import IDS
from foredraft.heads.formats.llama_layer import layer_settings
from foredraft.heads.p_eagle import PEagleHead
from foredraft.heads.target_model import Target

ARCHITECTURES = {"Eagle3Speculator", "Eagle3DraftModel"}
EMBEDDINGS = "embed_tokens.weight"
LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # the model that the head's layer belongs to


class SpeculatorsFormat(Eagle3Format):
    title, is_default = "EAGLE-3 in the layout of the speculators package (vLLM)", False

    def __init__(self, layer: str = "layers.0"):
        super().__init__(layer)

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        kind = files.config.get("speculators_model_type")
        if kind is None and not ARCHITECTURES & set(files.config.get("architectures") or []):
            return None
        if kind not in (None, "eagle3"):
            raise files.error(f"speculators_model_type={kind}: of this package's layouts, only eagle3 is supported")
        return cls()

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        config, layer = files.config, files.config["transformer_layer_config"]
        if "norm_before_residual" not in config:
            raise files.error(
                "config.json has no norm_before_residual, whose default is true in vLLM and false in speculators: add it"
            )
        check_settings(
            files, layer, {"attention_bias": False, "model_type": "qwen3" if has_qk_norms(files) else "llama"}
        )
        check_settings(files, config, {"target_hidden_size": layer["hidden_size"]})
        flags = {name: config.get(name) for name in FLAGS}
        record = {"depth": speculative_tokens(files, usual=7)} | config.get("foredraft", {})
        return (
            layer_settings(files, layer, target, windowed=True)
            | self.shared_config(files, flags, target)
            | {"foredraft": record}
        )

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, Eagle3Head)
        if head.fc is None:
            raise ValueError(
                "speculators does not support use_aux_hidden_state=false: export the head with format=vllm"
            )
        return speculators_settings("eagle3", "Eagle3Speculator", head, target)

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        rows = target.embeddings.detach().cpu().to(head.dtype, copy=True)
        return super().export_weights(head, target) | {EMBEDDINGS: rows.contiguous()}


def speculative_tokens(files: HeadFiles, usual: int) -> int:
    """Return the number of drafts that the files recommend."""
    methods = files.config.get("speculators_config", {}).get("proposal_methods") or [{}]
    return files.check_depth("speculative_tokens", methods[0].get("speculative_tokens", usual))


def speculators_settings(algorithm: str, architecture: str, head: DraftHead, target: Target) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 or P-EAGLE head."""
    assert isinstance(head, Eagle3Head | PEagleHead)
    config = head.to_config()
    names = head.config.to_dict().keys() | {*WINDOWED, "sliding_window"}
    layer = {name: value for name, value in config.items() if name in names}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_config": speculators_config(algorithm, head.depth, target),
        "transformer_layer_config": layer | {"architectures": [LAYERS[config["model_type"]]]},
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,  # the head is as wide as the target
        IDS: head.layers,
        "tie_word_embeddings": False,
        **{name: config[name] for name in FLAGS if name in config},
    }


def speculators_config(algorithm: str, depth: int, target: Target) -> dict[str, Any]:
    """Describe how vLLM should draft, and for which target."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": target.name, "architectures": target.config.architectures or []},
    }
