"""DFlash and its successors as z-lab, DeepSpec, SpecForge, JetSpec and xPress's authors write them. They share one
backbone, whose settings are in `dflash_config`, or at the top level (DeepSpec, xPress).

Layers are numbered by their outputs, from 0. Which position drafts what (heads/dflash.py) is a setting that most files
omit, and with the wrong one every draft is off by one: then the architecture determines it.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import FULL, SLIDING, DFlashHead
from foredraft.heads.dflash2 import SCALES, DFlash2Head, scales
from foredraft.heads.domino import DominoHead
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.formats.base import Format, HeadFiles, check_settings, draft_vocabulary, drop_copy, drop_embeddings
from foredraft.heads.formats.layer_ids import IDS, note_last
from foredraft.heads.formats.llama_layer import LARGEST_SIZE, layer_settings
from foredraft.heads.target_model import Target
from foredraft.heads.xpress import XPressHead

# Architectures, and whether the anchor drafts in files that do not specify it.
ARCHITECTURES = {
    "DFlashDraftModel": False,
    "QwenDFlashDraftModel": False,
    "DominoDraftModel": False,
    "DFlash2DraftModel": False,
    "Qwen3XPressModel": False,
    "DSparkDraftModel": True,
    "Qwen3DSparkModel": True,
}
PROJECTORS = ("dflash", "dflash2", "dspark", "domino", "xpress")
SHOWN_BY = {  # settings that reveal a kind which files may omit
    "markov_rank": "dspark",
    "selector_rank": "dflash2",
    "xpress_rank": "xpress",
}
LAYOUT = ("sample_from_anchor", "shift_label")  # names of the setting, here and in SpecForge's Domino
KEPT = (  # names of settings in transformers' class
    *(
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("rms_norm_eps", "max_position_embeddings", "rope_parameters", "bos_token_id", "eos_token_id"),
    *("layer_types", "block_size"),
)
MASK_EMBEDDING = "mask_embedding.pt"  # of MiMo, read by vLLM and llama.cpp
CAUSAL = ("causal", "causal_head", "is_causal")  # names of one setting, in vLLM's, JetSpec's and others' files


class DFlashFormat(Format):
    title = "DFlash as z-lab and SpecForge write it (DFlashDraftModel)"
    kind: type[DFlashHead] = DFlashHead
    is_default = True

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        named = ARCHITECTURES.keys() & set(files.config.get("architectures") or [])
        if not (named or "dflash_config" in files.config) or "speculators_model_type" in files.config:
            return None
        return cls() if projector(files, settings_of(files)) == cls.kind.kind else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        block = settings_of(files)
        ids, first = layer_ids(files, block["target_layer_ids"], target, counted_from=0), files.config.get(IDS)
        if first and first != [output + 1 for output in ids]:  # vLLM prefers these
            raise files.error(
                f"config.json has {IDS}={first} (ids of hidden_states) and target_layer_ids={ids} (outputs of layers, one "
                "less), which do not name the same layers"
            )
        return self.shared_config(files, files.config, block | {"target_layer_ids": ids}, target)

    def shared_config(
        self, files: HeadFiles, layer: dict[str, Any], block: dict[str, Any], target: Target
    ) -> dict[str, Any]:
        """Return the config for `from_config`. layer: settings of the decoder layers; block: those of the block."""
        check_settings(files, layer, {"attention_bias": False})
        check_settings(files, block, {"attention_mode": "gqa", "attention_value_scale": 1.0})
        if (files.directory / MASK_EMBEDDING).is_file():
            raise files.error(
                f"{MASK_EMBEDDING} next to it replaces the mask token's embedding, which is not supported"
            )
        settings = layer_settings(files, layer, target, count=layer["num_hidden_layers"])
        anchor_drafts = next((bool(block[name]) for name in LAYOUT if block.get(name) is not None), None)
        files.check_number("mask_token_id", block["mask_token_id"], 0, target.vocab_size - 1)
        causal = {bool(block[name]) for name in CAUSAL if block.get(name) is not None}
        if len(causal) > 1:
            raise files.error(f"config.json has both true and false among {', '.join(CAUSAL)}")
        window = layer.get("sliding_window") if layer.get("use_sliding_window", True) else None
        types = layer.get("layer_types") or [FULL] * layer["num_hidden_layers"]
        if block.get("use_swa") and SLIDING not in types:  # MiMo: all layers are sliding, and none is causal
            types, causal = [SLIDING] * layer["num_hidden_layers"], causal or {False}
            window = layer.get("sliding_window")
        window = block.get("swa_window_size") or window
        block = block | {
            "sample_from_anchor": self.usual_layout(files) if anchor_drafts is None else anchor_drafts,
            "causal": True if True in causal else False if causal and SLIDING in types else None,
        }
        if len(types) != layer["num_hidden_layers"] or not set(types) <= {FULL, SLIDING}:
            raise files.error(
                f"config.json has layer_types={types}: {layer['num_hidden_layers']} of {FULL} and {SLIDING} are needed"
            )
        if SLIDING in types and not window:
            raise files.error(f"config.json has layer_types={types} without an active sliding_window")
        if SLIDING in types:
            files.check_number("sliding_window", window, most=LARGEST_SIZE)
        return settings | {
            "num_hidden_layers": layer["num_hidden_layers"],
            "draft_vocab_size": draft_vocabulary(files, target),
            "block_size": files.check_number("block_size", block["block_size"]),
            "sliding_window": window if SLIDING in types else None,
            "layer_types": types,
            "dflash_config": self.kind_settings(files, block),
        }

    def kind_settings(self, files: HeadFiles, block: dict[str, Any]) -> dict[str, Any]:
        """Return the block's settings with those of this kind, which files may omit."""
        return block

    def usual_layout(self, files: HeadFiles) -> bool:
        """Return `sample_from_anchor` of files that do not specify it."""
        names = files.config.get("architectures") or []
        return next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), False)

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        files = drop_embeddings(files, target)
        if not head.pruned:
            files = drop_copy(files, "lm_head.weight", target.model.get_output_embeddings(), target)
        return files.weights


class TransformersDFlash(DFlashFormat):
    """DFlash for transformers' own `generate(assistant_model=head, speculation_type="dflash")`, whose class for it is named
    after the first model that used it."""

    title, is_default = "DFlash in the layout of transformers (MuseGlimmerAssistantModel)", False
    names: Mapping[str, str] = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if files.config.get("model_type") == "muse_glimmer_assistant" else None

    def shared_config(
        self, files: HeadFiles, layer: dict[str, Any], block: dict[str, Any], target: Target
    ) -> dict[str, Any]:
        if hasattr(target.model.get_input_embeddings(), "embed_norm"):  # Muse-Glimmer's, which transformers leaves out
            files.notes.append(f"it was trained without the norm of {target.name}'s embedding: few drafts may be right")
        layer = layer | {"layer_types": layer.get("layer_types") or [SLIDING] * layer["num_hidden_layers"]}
        if SLIDING in layer["layer_types"]:  # a query's own position is not counted in this window
            layer |= {"sliding_window": layer["sliding_window"] + 1}
        return super().shared_config(files, layer, block | {"causal": False}, target)

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, DFlashHead)
        config = head.to_config()
        window = {} if head.window is None else {"sliding_window": head.window - 1}
        return (
            {name: config[name] for name in KEPT}
            | window
            | {
                "architectures": ["MuseGlimmerAssistantModel"],
                "model_type": "muse_glimmer_assistant",
                "target_layer_ids": config["dflash_config"]["target_layer_ids"],
                "mask_token_id": head.mask_token_id,
            }
        )


class DSparkFormat(DFlashFormat):
    title = "DSpark as DeepSpec and SpecForge write it (Qwen3DSparkModel, DSparkDraftModel)"
    kind = DSparkHead

    def kind_settings(self, files: HeadFiles, block: dict[str, Any]) -> dict[str, Any]:
        """Return DSpark's settings; the weights determine omitted ones."""
        check_settings(files, block, {"dspark_draft_topk": None})
        rated = "confidence_head.proj.weight" in files.weights
        if block.get("enable_confidence_head", rated):
            check_settings(files, block, {"confidence_head_with_markov": True})
        return {"markov_head_type": "vanilla", "enable_confidence_head": rated} | block


class DominoFormat(DFlashFormat):
    title = "Domino as SpecForge writes it (DominoDraftModel)"
    kind = DominoHead


class DFlash2Format(DFlashFormat):
    title = "DFlash-2 as z-lab writes it (DFlash2DraftModel)"
    kind = DFlash2Head

    def shared_config(
        self, files: HeadFiles, layer: dict[str, Any], block: dict[str, Any], target: Target
    ) -> dict[str, Any]:
        for name, ours in scales(target).items():
            theirs = block.get(name, ours if files.trained_here else SCALES[name])
            if not (theirs is None if ours is None else math.isclose(theirs or 0.0, ours, rel_tol=1e-2)):
                raise files.error(f"config.json has {name}={theirs}, and {target.name} has {ours}")
        config = super().shared_config(files, layer, block, target)
        if config["dflash_config"]["causal"] is None and SLIDING in config["layer_types"] and not files.trained_here:
            raise files.error(
                "config.json has no dflash_config.causal, which in sliding layers is true by default in vLLM and false in "
                "NeMo AutoModel: add it"
            )
        return config


class XPressFormat(DFlashFormat):
    title = "xPress as its authors write it for vLLM (Qwen3XPressModel)"
    kind = XPressHead

    def kind_settings(self, files: HeadFiles, block: dict[str, Any]) -> dict[str, Any]:
        check_settings(files, block, {"xpress_block_size": block["block_size"]})
        return {"xpress_num_passes": 6} | block


def settings_of(files: HeadFiles) -> dict[str, Any]:
    """Return the block's settings: those in `dflash_config` or `dspark_config`, otherwise those at the top level."""
    settings = dict(files.config)
    for name in ("dflash_config", "dspark_config"):  # the second wins, as in SGLang and TensorRT
        inside = files.config.get(name) or {}
        if not isinstance(inside, dict):
            raise files.error(f"config.json has {name}={inside!r}, which contains no settings")
        settings |= inside
    return settings


def projector(files: HeadFiles, block: dict[str, Any]) -> str:
    """Return the kind of these files. Raises ValueError for an unsupported one."""
    shown = next((kind for name, kind in SHOWN_BY.items() if block.get(name)), "dflash")
    named = block.get("projector_type") or shown
    if named not in PROJECTORS:
        raise files.error(f"config.json has projector_type={named!r}, which is not one of {', '.join(PROJECTORS)}")
    return named


def layer_ids(files: HeadFiles, ids: Any, target: Target, counted_from: int) -> list[int]:
    """Return outputs of layers, counted from 0. Raises ValueError unless they ascend within the target's."""
    outputs = [layer - counted_from for layer in ids]
    if sorted(set(outputs)) != outputs or not outputs or not all(-1 <= k < target.num_layers for k in outputs):
        raise files.error(
            f"config.json has layers {ids}, which must ascend within the {target.num_layers} layers of {target.name}"
        )
    note_last(files, [output + 1 for output in outputs], target.num_layers)
    return outputs
