"""An MTP layer as llama.cpp's `--mtp` converts it: the last block of its target's architecture without the others, and
copies of the target's embedding, last norm and lm_head (b11434: src/models/qwen35.cpp, the only layer without experts).

`convert_hf_to_gguf.py FOLDER` of an export with format=mtp makes one file of target and layer, which needs no second one.
"""

from typing import Any

from safetensors import safe_open
from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.formats.gguf.layout import GGUFFormat, Head
from foredraft.heads.formats.gguf.tensors import BLOCK, NEXTN, NEXTN_NAMES, from_nextn
from foredraft.heads.formats.mtp import MTPFormat, shift_norms
from foredraft.heads.mtp import norm_offset
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.files import weight_map

COPIES = {
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
}
SECTIONS = [11, 11, 10, 0]  # of Qwen3.5's rotary positions, if its config omits them; in text all are the same


class NextnFormat(GGUFFormat):
    def __init__(self, dtype: str, target_gguf: str | None = None):
        super().__init__(MTPFormat(), dtype, target_gguf)
        self.arch = NEXTN

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = shift_norms(self.layout.export_weights(head, target), norm_offset(target))
        block = f"{BLOCK}.{target.num_layers}"
        return copies(target) | {f"{block}.{NEXTN_NAMES[name]}": weights[name] for name in sorted(weights)}

    def restored(self, tensors: dict[str, Tensor], head: Head) -> dict[str, Tensor]:
        return from_nextn(tensors)

    def add_settings(self, writer: Any, head: Head, target: Target) -> None:
        config = target.config
        self.add_layer_settings(writer, head, target, target.num_layers + 1)
        writer.add_nextn_predict_layers(1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{NEXTN}.attention.recurrent_layers", [*recurrent, False])
        writer.add_full_attention_interval(config.to_dict().get("full_attention_interval", 4))
        rope = config.rope_parameters
        writer.add_rope_dimension_count(int(head.config.head_dim * rope["partial_rotary_factor"]))
        sections = rope.get("mrope_section", SECTIONS)
        writer.add_rope_dimension_sections([*sections, 0][:4])


def copies(target: Target) -> dict[str, Tensor]:
    """Return the target's own tensors as stored in its files, with complete norms, and without lm_head if it is the
    embedding."""
    tensors: dict[str, Tensor] = {}
    for name, path in sorted(weight_map(target).items()):
        short = name.removeprefix("model.").removeprefix("language_model.")
        if short in COPIES:
            with safe_open(path, framework="pt") as opened:
                tensors[COPIES[short]] = opened.get_tensor(name)
    return shift_norms(tensors, norm_offset(target))
