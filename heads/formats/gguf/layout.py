"""A head as one GGUF file. Keys, names and number formats are those that llama.cpp's converter writes and its loaders
`eagle3` and `dflash` read (b11434: convert_hf_to_gguf.py HEAD --target-model-dir TARGET).

Our config.json is next to it, with which the file can be read back here. So the export gate compares the head with the
contents of the file, in llama.cpp's order of rows and with its numbers.
"""

import copy
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import LlamaConfig

from foredraft.heads.base import DraftHead
from foredraft.heads.dflash import SLIDING, DFlashHead
from foredraft.heads.dflash2 import DFlash2Head
from foredraft.heads.dspark import DSparkHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.base import Format, HeadFiles
from foredraft.heads.formats.gguf.tensors import (
    BLOCK,
    DTYPES,
    FILE,
    NEXTN,
    NEXTN_NAMES,
    ROPE_FREQS,
    dequantize,
    package,
    quantize,
    to_gguf,
)
from foredraft.heads.formats.gguf.vocabulary import add_vocabulary
from foredraft.heads.formats.mtp import MTPFormat
from foredraft.heads.mtp import MTPHead, shift_norms
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.embedding import embedding_scale
from foredraft.heads.target_model.files import stored_tensors

Head = Eagle3Head | DFlashHead | MTPHead
COPIES = {
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
}
SECTIONS = [11, 11, 10, 0]  # of Qwen3.5's rotary positions, if its config omits them; in text all are the same


class GGUFFormat(Format):
    title = "GGUF as llama.cpp reads it"
    weight_files = (FILE,)

    def __init__(self, layout: Format, dtype: str, target_gguf: str | None = None):
        """Set how to write. layout: of our own files, whose names and config.json are converted. dtype: one of DTYPES.
        target_gguf: a file to copy the tokenizer from."""
        self.kind, self.layout, self.dtype, self.target_gguf = layout.kind, layout, dtype, target_gguf
        self.arch = "eagle3" if issubclass(layout.kind, Eagle3Head) else "dflash"

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        """Return None: files.py converts a GGUF file's tensors to the names of our own files, and these are matched."""
        return None

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        return self.layout.head_config(files, target)

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        return self.layout.export_config(head, target)

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        """Return the tensors with llama.cpp's names, in the head's own dtype."""
        assert isinstance(head, Head)
        config = head.config
        heads = config.num_attention_heads, config.num_key_value_heads
        return to_gguf(self.layout.export_weights(head, target), self.arch, *heads)

    def stored(self, head: DraftHead, target: Target) -> DraftHead:
        rounded = copy.deepcopy(head, {id(target): target}).cpu().float()
        for tensor in rounded.state_dict().values():  # each row is quantized alone, so their order does not matter
            tensor.copy_(dequantize(*quantize(tensor, self.dtype)))
        return rounded

    def write_weights(self, weights: dict[str, Tensor], path: Path, head: DraftHead, target: Target) -> None:
        assert isinstance(head, Head)
        gguf = package()
        writer = gguf.GGUFWriter(path, self.arch)
        self.add_settings(writer, head, target)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add_vocabulary(writer, target, self.target_gguf)
        if isinstance(head, DFlashHead):
            writer.add_mask_token_id(head.mask_token_id)
        if head.config.rope_parameters["rope_type"] == "llama3":
            writer.add_tensor(ROPE_FREQS, rope_factors(head).numpy())
        for name, tensor in weights.items():
            data, kind = quantize(tensor, self.dtype)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def add_settings(self, writer: Any, head: Head, target: Target) -> None:
        if isinstance(head, Eagle3Head):
            writer.add_array("eagle3.target_layers", head.layers)
            writer.add_uint32("eagle3.target_hidden_size", target.hidden_size)
            writer.add_bool("eagle3.norm_before_residual", head.flags["norm_before_residual"])
            writer.add_bool("eagle3.norm_before_fc", head.flags["norm_before_fc"])
        self.add_layer_settings(writer, head, target, head.cache_layers)
        if isinstance(head, Eagle3Head):
            writer.add_vocab_size(head.config.vocab_size)
            writer.add_rope_dimension_count(head.config.head_dim)
        elif isinstance(head, DFlashHead):
            add_block_settings(writer, head, target)

    def add_layer_settings(self, writer: Any, head: Head, target: Target, blocks: int) -> None:
        config = head.config
        writer.add_type(package().GGUFType.MODEL)
        writer.add_name(f"{head.kind} for {Path(target.name).name}")
        writer.add_block_count(blocks)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        add_rope(writer, config)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        kind = DTYPES[self.dtype]
        writer.add_file_type(package().LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"])


class NextnFormat(GGUFFormat):
    """Write an MTP layer as llama.cpp's `--mtp` converts it: the last block of its target's architecture without the others,
    and copies of the target's embedding, last norm and lm_head (b11434: src/models/qwen35.cpp, the only layer without
    experts). `convert_hf_to_gguf.py FOLDER` of an export with format=mtp makes one file of target and layer, which needs no
    second one."""

    def __init__(self, layout: Format, dtype: str, target_gguf: str | None = None):
        """Convert the target's names of its MTP layer, in place of those of `layout`."""
        super().__init__(MTPFormat(), dtype, target_gguf)
        self.arch = NEXTN

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        weights = shift_norms(self.layout.export_weights(head, target), target)
        block = f"{BLOCK}.{target.num_layers}"
        return copies(target) | {f"{block}.{NEXTN_NAMES[name]}": weights[name] for name in sorted(weights)}

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


def add_rope(writer: Any, config: LlamaConfig) -> None:
    """Write the scaling and the base of the rope. llama3's scaling is a tensor (`rope_factors`)."""
    rope, types = config.rope_parameters, package().RopeScalingType
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(types[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for name, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(name) is not None:
                add(rope[name])
    writer.add_rope_freq_base(rope["rope_theta"])


def rope_factors(head: Head) -> Tensor:
    """Return (head_dim / 2,) float32: the divisors of the frequencies of the default rope in llama.cpp."""
    dim = head.config.head_dim
    plain = head.config.rope_parameters["rope_theta"] ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return plain / head.rotary.rope.inv_freq.cpu()


def add_block_settings(writer: Any, head: DFlashHead, target: Target) -> None:
    rope, target_rope = head.config.rope_parameters, target.config.to_dict().get("rope_parameters") or {}
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(head.config.head_dim * rope["partial_rotary_factor"]))
    writer.add_uint32("dflash.block_size", head.block_size)
    if isinstance(head, DFlash2Head):
        for name, value in head.own.items():
            writer.add_uint32(f"dflash.{name}", value)
        if target.scaled.multiplier != 1:
            writer.add_logit_scale(target.scaled.multiplier)
        if target.scaled.cap:
            writer.add_final_logit_softcapping(target.scaled.cap)
    scale = embedding_scale(target)
    if scale not in (None, 1):  # Gemma's embeddings are scaled, but stored unscaled
        writer.add_embedding_scale(scale)
    writer.add_array("dflash.target_layers", head.layers)
    if head.window is not None:
        writer.add_sliding_window(head.window)
        writer.add_sliding_window_pattern([kind == SLIDING for kind in head.layer_types])
    if head.causal:
        writer.add_causal_attention(True)
    if "mrope_section" in target_rope:  # in text all sections have the same positions
        writer.add_rope_dimension_sections([head.config.head_dim // 2, 0, 0, 0])
    if isinstance(head, DSparkHead):
        writer.add_bool("dflash.sample_from_anchor", head.sample_from_anchor)
        writer.add_bool("dflash.has_confidence_head", head.confident)


def copies(target: Target) -> dict[str, Tensor]:
    """Return the target's own tensors as stored in its files, with complete norms, and without lm_head if it is the
    embedding."""
    stored = stored_tensors(
        target, lambda name: COPIES.get(name.removeprefix("model.").removeprefix("language_model."))
    )
    return shift_norms(stored, target)
