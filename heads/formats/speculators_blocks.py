"""DFlash, DSpark and xPress in vLLM's own layout, that of the `speculators` package: the decoder layers' config is
separate, the block's settings are at the top level, and layers are numbered as hidden states, one more than their
outputs."""

from typing import Any, ClassVar, Self

from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import SLIDING, DFlashHead
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.formats.base import HeadFiles, check_settings
from foredraft.heads.formats.dflash import DFlashFormat, layer_ids, markov_settings
from foredraft.heads.formats.speculators import speculators_config
from foredraft.heads.target_model import Target
from foredraft.heads.xpress import XPressHead

IDS = "aux_hidden_state_layer_ids"
NAMES = ("block_size", "mask_token_id", "sample_from_anchor")
MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


class SpeculatorsDFlash(DFlashFormat):
    title, is_default = "DFlash in the layout of the speculators package (vLLM)", False

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        return cls() if files.config.get("speculators_model_type") == cls.kind.projector else None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        config, layer = files.config, files.config["transformer_layer_config"] or {}
        check_settings(files, config, {"target_hidden_size": layer["hidden_size"]})
        ids = layer_ids(files, config[IDS], target, counted_from=1)
        shared = self.shared_config(files, layer, config | {"target_layer_ids": ids}, target)
        if SLIDING in shared["layer_types"]:
            check_settings(files, config, {"sliding_window_non_causal": False})
        return shared

    def usual_layout(self, files: HeadFiles) -> bool:
        return self.kind is DSparkHead

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        assert isinstance(head, DFlashHead)
        config = head.to_config()
        block = config | config["dflash_config"]
        layer = {name: value for name, value in config.items() if name in head.config.to_dict()}
        layer |= {name: block[name] for name in ("layer_types", "sliding_window", "use_sliding_window")}
        return {
            "architectures": config["architectures"],
            "speculators_model_type": head.projector,
            "speculators_config": speculators_config(head.projector, head.depth, target),
            "transformer_layer_config": layer | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
            "draft_vocab_size": head.draft_vocab,
            "target_hidden_size": None,  # the head is as wide as the target
            IDS: head.layers,
            "causal": head.causal,
            # For sliding layers in speculators, for all in vLLM, which does not read `causal`; see engines.speculators.
            "sliding_window_non_causal": not head.causal and head.window is None,
            "tie_word_embeddings": False,
            **{name: block[name] for name in (*NAMES, *MARKOV) if name in block},
        }


class SpeculatorsDSpark(SpeculatorsDFlash):
    title = "DSpark in the layout of the speculators package (vLLM)"
    kind = DSparkHead

    def kind_settings(self, files: HeadFiles, block: dict[str, Any]) -> dict[str, Any]:
        return markov_settings(files, block)


class SpeculatorsXPress(SpeculatorsDFlash):
    title = "xPress in the layout of the speculators package"
    kind = XPressHead
    names: ClassVar[dict[str, str]] = {
        "w1.": "token_embed.",
        "w2.": "readout.",
        "mix.L": "mix_l",
        "mlp.gate_proj.": "mlp_gate.",
        "mlp.up_proj.": "mlp_up.",
        "mlp.down_proj.": "mlp_down.",
    }

    def disk_name(self, name: str) -> str:
        part = name.removeprefix("xpress_head.")
        if part == name:
            return super().disk_name(name)
        return "refiner_head." + next(
            (part.replace(*pair) for pair in self.names.items() if part.startswith(pair[0])), part
        )

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
