"""EAGLE-3 as SafeAILab, SpecForge, ModelOpt, AngelSlim, SGLang and vLLM write and read it: `LlamaForCausalLMEagle3`.

The fused layers have two places in config.json and two numberings (heads/formats/layer_ids.py).
"""

from typing import Any, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.eagle3 import FLAGS, Eagle3Head
from foredraft.heads.formats.base import (
    EMBEDDINGS,
    Format,
    HeadFiles,
    check_settings,
    draft_vocabulary,
    drop_embeddings,
    shared_rows,
)
from foredraft.heads.formats.layer_ids import IDS, for_sglang, resolve_layer_ids
from foredraft.heads.formats.llama_layer import layer_settings
from foredraft.heads.target_model import Target

ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "CosyVoice3Eagle3LlamaForCausalLM"}
ARCHITECTURES |= {"Eagle3Qwen3ForCausalLM"}  # has norms on queries and keys
LATENT_ARCHITECTURES = {"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"}
# Flags that the weights reveal if config.json omits them.
SHOWN_BY = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
# ModelOpt and TensorRT-LLM write their options into eagle_config: the only values that our layer supports, and our flags.
OPTIONS = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
AUX, PARALLEL = "use_aux_hidden_state", "parallel_draft_heads_num_layers"  # of heads that one step does not have
ALIASES = {name: name for name in FLAGS} | {"return_hidden_post_norm": "norm_output"}


class Eagle3Format(Format):
    title = "EAGLE-3 as SafeAILab, vLLM and SGLang read it (LlamaForCausalLMEagle3)"
    kind: type[DraftHead] = Eagle3Head
    is_default = True
    first_layer, usual_layer = "layer.", "midlayer"  # here, and in most files

    def __init__(self, layer: str = ""):
        # ModelOpt, and some of SpecForge's heads, call it layers.0.
        self.names = {self.first_layer: f"{layer or self.usual_layer}."}

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        named = (ARCHITECTURES | LATENT_ARCHITECTURES) & set(files.config.get("architectures") or [])
        prefixes = (name for name in ("midlayer", "layers.0") if any(k.startswith(f"{name}.") for k in files.weights))
        layer = next(prefixes, "")
        # SafeAILab's own files have LlamaForCausalLM; these conditions distinguish them from EAGLE-1.
        is_eagle3 = layer == "midlayer" or f"{layer}.hidden_norm.weight" in files.weights
        return cls(layer) if named or is_eagle3 or (layer and "draft_vocab_size" in files.config) else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        config = files.config
        settings = layer_settings(files, config, target, latent=True, windowed=True)
        check_settings(files, config, {"bias": False})
        flags = {name: config.get(name) for name in FLAGS} | eagle_flags(files)
        fused = (config.get("eagle_config") or {}).get(AUX) is not False
        if not fused:
            check_settings(files, config, {"target_hidden_size": config["hidden_size"]})
        shared = self.shared_config(files, flags, target, None if fused else [target.num_layers])
        return settings | shared | {AUX: fused, "foredraft": config.get("foredraft", {})}

    def shared_config(
        self, files: HeadFiles, flags: dict[str, Any], target: Target, layers: list[int] | None = None
    ) -> dict[str, Any]:
        """Return what both layouts of EAGLE-3 store in different places: the draft vocabulary, the fused layers (unless
        `layers` are given) and the flags."""
        declared = {name: on for name, on in flags.items() if on is not None}
        if declared.get("embed_requires_grad"):  # it may have been trained, but not saved, or not changed
            declared["embed_requires_grad"] = has_own_embedding(files, target)
        shown = {name: True for name, weight in SHOWN_BY.items() if weight in files.weights}
        shown |= {"qk_norm": True} if has_qk_norms(files) else {}
        return (
            {"draft_vocab_size": draft_vocabulary(files, target), IDS: layers or resolve_layer_ids(files, target)}
            | shown
            | declared
        )

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        own = EMBEDDINGS in head.state_dict()
        weights = dict(files.weights) if own else drop_embeddings(files, target).weights
        if "lm_head.weight" not in weights and not head.pruned and not files.trained_here:
            weights["lm_head.weight"] = shared_rows(files, target)
            files.notes.append(f"no lm_head is stored, so that of {target.name} is used")
        return weights

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, Eagle3Head)
        eagle = {IDS: [] if head.fc is None else for_sglang(head.layers, target), AUX: head.fc is not None}
        return head.to_config() | {"eagle_config": eagle}


def has_own_embedding(files: HeadFiles, target: Target) -> bool:
    """Return whether the files have an embedding that is not the target's."""
    alone = files._replace(notes=[])
    try:
        drop_embeddings(alone, target)
    except ValueError:
        return True
    return bool(alone.notes)


def has_qk_norms(files: HeadFiles) -> bool:
    return any(name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")) for name in files.weights)


def eagle_flags(files: HeadFiles) -> dict[str, bool]:
    """Return the flags in eagle_config with our names. Raises ValueError for a setting that is unknown or not supported."""
    eagle = files.config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise files.error(f"config.json has eagle_config={eagle!r}, which contains no settings")
    check_settings(files, eagle, OPTIONS)
    repeated = {name for name, value in eagle.items() if name in files.config and files.config[name] == value}
    unknown = sorted(eagle.keys() - OPTIONS.keys() - ALIASES.keys() - {IDS, AUX, PARALLEL} - repeated)
    if unknown:
        raise files.error(
            f"eagle_config has {unknown[0]}={eagle[unknown[0]]!r}, which is not supported and may change what the layer "
            "computes: remove it if it does not"
        )
    flags: dict[str, bool] = {}
    for name, flag in ALIASES.items():
        top = files.config.get(flag)
        if eagle.get(name) is not None:
            if top is not None and bool(top) != bool(eagle[name]):
                raise files.error(f"config.json has {flag}={top} and eagle_config.{name}={eagle[name]}")
            flags[flag] = flags.get(flag, False) or bool(eagle[name])
    return flags
