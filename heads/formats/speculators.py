"""vLLM's own layout, that of the `speculators` package: EAGLE-3, P-EAGLE, DFlash, DFlash-2, DSpark and xPress.

The config of the decoder layers is in `transformer_layer_config`, and other settings are at the top level. All flags are
written, because engines have different defaults. Hidden states have our numbers, one more than those of layers' outputs.
"""

from collections.abc import Mapping
from typing import Any, Self

from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.eagle3 import FLAGS, SLIDING, WINDOWED, Eagle3Head
from foredraft.heads.formats.base import HeadFiles, check_settings, embeds_rows
from foredraft.heads.formats.dflash import DFlash2Format, DFlashFormat, DSparkFormat, layer_ids
from foredraft.heads.formats.eagle3 import Eagle3Format, has_qk_norms
from foredraft.heads.formats.layer_ids import IDS
from foredraft.heads.formats.llama_layer import LARGEST_SIZE, layer_settings
from foredraft.heads.formats.p_eagle import PEagleFormat
from foredraft.heads.p_eagle import PEagleHead
from foredraft.heads.target_model import Target
from foredraft.heads.xpress import XPressHead

ARCHITECTURES = {"Eagle3Speculator", "Eagle3DraftModel"}
BLOCK_IDS = "aux_hidden_state_layer_ids"  # of heads that draft blocks
NAMES = ("block_size", "mask_token_id", "sample_from_anchor")
MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # the model that the head's layer belongs to


class SpeculatorsFormat(Eagle3Format):
    title, is_default = "EAGLE-3 in the layout of the speculators package (vLLM)", False
    embeddings, usual_layer = True, "layers.0"

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
        if (size := config.get("target_hidden_size")) is not None:
            files.check_number("target_hidden_size", size, most=LARGEST_SIZE)
        flags = {name: config.get(name) for name in FLAGS}
        record = {"depth": files.speculative_tokens(usual=7)} | config.get("foredraft", {})
        return (
            layer_settings(files, layer, target, windowed=True)
            | self.shared_config(files, flags, target)
            | {"foredraft": record, "target_hidden_size": size}
        )

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, Eagle3Head)
        if head.fc is None:
            raise ValueError(
                "speculators does not support use_aux_hidden_state=false: export the head with format=vllm"
            )
        return speculators_settings("eagle3", "Eagle3Speculator", head, target)


class SpeculatorsPEagle(PEagleFormat):
    title, is_default = "P-EAGLE in the layout of the speculators package (vLLM)", False

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if files.config.get("speculators_model_type") == "peagle" else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        return self.settings(files, files.config["transformer_layer_config"] or {}, target)

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, PEagleHead)
        shared = speculators_settings("peagle", "PEagleDraftModel", head, target)
        return shared | {"mask_token_id": head.mask_token_id, "embed_requires_grad": True}


class SpeculatorsDFlash(DFlashFormat):
    title, is_default = "DFlash in the layout of the speculators package (vLLM)", False

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if files.config.get("speculators_model_type") == cls.kind.kind else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        config, layer = files.config, files.config["transformer_layer_config"] or {}
        check_settings(files, config, {"target_hidden_size": layer["hidden_size"]})
        ids = layer_ids(files, config[BLOCK_IDS], target, counted_from=1)
        if not embeds_rows(target):
            files.notes.append(
                f"it was trained on rows of an embedding that {target.name} scales: few drafts may be right"
            )
        stated = {"sliding_window_non_causal", "causal"} & config.keys() or layer.get("is_causal") is not None
        if self.kind is DFlashHead and SLIDING in (layer.get("layer_types") or ()) and not stated:
            raise files.error(
                "config.json has no sliding_window_non_causal, whose default is true in vLLM and false in speculators: add it"
            )
        bidirectional = config.get("sliding_window_non_causal", self.kind is DFlash2Head)  # that kind's default
        causal = config.get("causal") or (False if bidirectional else None)
        causal = causal if layer.get("is_causal") is None else layer["is_causal"]  # as vLLM does
        return self.shared_config(files, layer, config | {"target_layer_ids": ids, "causal": causal}, target)

    def usual_layout(self, files: HeadFiles) -> bool:
        return files.trained_here and self.kind is DSparkHead  # the package's default is false, also for DSpark

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, DFlashHead)
        config = head.to_config()
        block = config | config["dflash_config"]
        layer = {name: value for name, value in config.items() if name in head.config.to_dict()}
        layer |= {name: block[name] for name in ("layer_types", "sliding_window", "use_sliding_window")}
        layer |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        # vLLM's DSpark reads only this; without it, its sliding layers are causal and all others are not.
        layer |= {} if head.causal is None else {"is_causal": head.causal}
        return package_config(head.kind, config["architectures"], head, layer, target) | {
            BLOCK_IDS: head.layers,
            "causal": bool(head.causal),
            # For sliding layers in speculators, for all in vLLM, which does not read `causal`; see engines.py.
            "sliding_window_non_causal": not head.causal and (head.window is None or head.causal is False),
            **{name: block[name] for name in (*NAMES, *MARKOV) if name in block},
        }


class SpeculatorsDFlash2(SpeculatorsDFlash, DFlash2Format):
    """Read only: vLLM 0.33 is the first to load it, and earlier ones load our own files."""

    title = "DFlash-2 in the layout of the speculators package (vLLM)"


class SpeculatorsDSpark(SpeculatorsDFlash, DSparkFormat):
    title = "DSpark in the layout of the speculators package (vLLM)"


class SpeculatorsXPress(SpeculatorsDFlash):
    title = "xPress in the layout of the speculators package"
    kind = XPressHead
    names: Mapping[str, str] = {
        "xpress_head.w1.": "refiner_head.token_embed.",
        "xpress_head.w2.": "refiner_head.readout.",
        "xpress_head.mix.L": "refiner_head.mix_l",
        "xpress_head.mlp.gate_proj.": "refiner_head.mlp_gate.",
        "xpress_head.mlp.up_proj.": "refiner_head.mlp_up.",
        "xpress_head.mlp.down_proj.": "refiner_head.mlp_down.",
        "xpress_head.": "refiner_head.",
    }

    def kind_settings(self, files: HeadFiles, block: dict[str, Any]) -> dict[str, Any]:
        rank, ratio = block["xpress_rank"], block.get("xpress_mlp_ratio", 2)
        return block | {"xpress_mlp_hidden": rank * ratio, "xpress_num_passes": block.get("num_jacobi_passes", 6)}

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, XPressHead)
        return super().export_config(head, target) | {
            "architectures": ["XPressSpeculator"],
            "xpress_rank": head.correction,
            "xpress_mlp_ratio": head.inner // head.correction,
            "num_jacobi_passes": head.passes,
        }


def speculators_settings(algorithm: str, architecture: str, head: DraftHead, target: Target) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 or P-EAGLE head."""
    assert isinstance(head, Eagle3Head | PEagleHead)
    config = head.to_config()
    names = head.config.to_dict().keys() | {*WINDOWED, "sliding_window"}
    layer = {name: value for name, value in config.items() if name in names}
    layer |= {"architectures": [LAYERS[config["model_type"]]]}
    flags = {name: config[name] for name in FLAGS if name in config}
    size = None if config["target_hidden_size"] == config["hidden_size"] else config["target_hidden_size"]
    shared = package_config(algorithm, [architecture], head, layer, target)
    return shared | {IDS: head.layers, "target_hidden_size": size} | flags


def package_config(
    algorithm: str, architectures: list[str], head: DraftHead, layer: dict[str, Any], target: Target
) -> dict[str, Any]:
    """Return what config.json has for each kind of head: its layers, how vLLM should draft, and for which target."""
    return {
        "architectures": architectures,
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.depth, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.checkpoint, "architectures": target.config.architectures or []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": head.to_config()["draft_vocab_size"],
        "target_hidden_size": None,  # it is as wide as the target
        "tie_word_embeddings": False,
    }
