"""Convert tensors of a head to llama.cpp's names and back, in any number format that the package gguf writes.

Names are those of llama.cpp's converter and of its loaders `eagle3` and `dflash`. llama.cpp rotates neighboring dimensions
of EAGLE-3's queries and keys, transformers the two halves of a head, so their rows are interleaved in the file. `dflash`
also rotates halves.
"""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # of weights -> llama.cpp's names
DTYPES |= {name: name.upper() for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}
FILE = "head.gguf"
BLOCK, LAYER = "blk", r"(?:midlayer|layers\.(\d+))\.(.+)"
LAYER_NAMES = {
    "hidden_norm.weight": "attn_norm_2.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
SHARED_NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
}
NAMES = {  # by llama.cpp's architecture
    "eagle3": SHARED_NAMES | {"input_norm.weight": "enc.output_norm.weight"},
    "dflash": SHARED_NAMES
    | {
        "hidden_norm.weight": "enc.output_norm.weight",
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        "confidence_head.proj.weight": "conf_proj.weight",
        "confidence_head.proj.bias": "conf_proj.bias",
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    },
}
# An MTP layer is a block of its target's architecture, after the last one, with the same kind of norms.
NEXTN, NEXTN_NAMES = (
    "qwen35",
    {f"mtp.layers.0.{ours}": theirs for ours, theirs in LAYER_NAMES.items()}
    | {
        "mtp.layers.0.post_attention_layernorm.weight": "post_attention_norm.weight",
        "mtp.fc.weight": "nextn.eh_proj.weight",
        "mtp.norm.weight": "nextn.shared_head_norm.weight",
        "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    },
)
ROPE_FREQS = "rope_freqs.weight"  # follows from config.json


def package() -> ModuleType:
    """Return the package gguf. Raises ValueError if it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise ValueError("GGUF files need the package gguf: pip install 'foredraft[gguf]'") from None
    return gguf


def from_gguf_name(name: str, arch: str) -> str | None:
    """Return our name of llama.cpp's tensor `name`; None if it is not part of a head."""
    layer = re.fullmatch(rf"{BLOCK}\.(\d+)\.(.+)", name)
    if layer is None:
        return next((ours for ours, theirs in NAMES[arch].items() if theirs == name), None)
    rest = next((ours for ours, theirs in LAYER_NAMES.items() if theirs == layer[2]), None)
    return None if rest is None else ("midlayer." if arch == "eagle3" else f"layers.{layer[1]}.") + rest


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a projection (heads * dim, in) so that the halves of every head are interleaved."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_gguf(weights: dict[str, Tensor], arch: str, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Return `weights` with llama.cpp's names and order of rows, ids in place of offsets in d2t, and without t2d."""
    out: dict[str, Tensor] = {}
    for name in sorted(weights.keys() - {"d2t", "t2d"}):
        tensor = weights[name]
        if arch == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleave(tensor, heads if name.endswith("q_proj.weight") else kv_heads)
        layer = re.fullmatch(LAYER, name)
        out[f"{BLOCK}.{layer[1] or 0}.{LAYER_NAMES[layer[2]]}" if layer else NAMES[arch][name]] = tensor
    if "d2t" in weights:
        out["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))
    return out


def from_gguf(tensors: dict[str, Tensor], arch: str, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Apply the inverse of `to_gguf`, without t2d. An unknown name is retained, for the layout to refuse."""
    out: dict[str, Tensor] = {}
    for theirs, tensor in tensors.items():
        name = from_gguf_name(theirs, arch) or theirs
        if arch == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.unflatten(0, (heads if name.endswith("q_proj.weight") else kv_heads, -1, 2))
            tensor = tensor.transpose(1, 2).flatten(0, 2)  # the inverse of `interleave`
        out[name] = tensor - torch.arange(len(tensor)) if name == "d2t" else tensor
    return out


def from_nextn(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an MTP layer with the names of our files, without the target's own. Norms in our files are
    differences from 1, like the target's."""
    ours = {theirs: name for name, theirs in NEXTN_NAMES.items()}
    blocks = {re.sub(rf"^{BLOCK}\.\d+\.", "", name): name for name in tensors if name.startswith(f"{BLOCK}.")}
    layer = {ours.get(short, name): tensors[name] for short, name in blocks.items()}
    return {name: tensor - 1 if "norm" in name else tensor for name, tensor in layer.items()}


def quantize(tensor: Tensor, dtype: str) -> tuple[np.ndarray, int]:
    """Return the bytes of a tensor and their number format: `dtype` for matrices, but float32 for what llama.cpp keeps in it
    (norms, biases, kernels), and float16 for rows that `dtype` cannot divide into its blocks."""
    gguf = package()
    if not tensor.is_floating_point():
        return tensor.contiguous().numpy(), gguf.GGMLQuantizationType.I64
    data = tensor.float().contiguous().numpy()
    kind = gguf.GGMLQuantizationType[DTYPES[dtype] if data.ndim == 2 else "F32"]
    try:
        return gguf.quants.quantize(data, kind), kind
    except gguf.QuantError:
        kind = gguf.GGMLQuantizationType.F16
        return gguf.quants.quantize(data, kind), kind


def dequantize(data: np.ndarray, kind: int) -> Tensor:
    """Return a copy in float32, or int64 for ids."""
    gguf = package()
    if kind == gguf.GGMLQuantizationType.I64:
        return torch.from_numpy(data.astype(np.int64))
    return torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), dtype=np.float32))


def open_gguf(path: Path) -> Any:
    """Return gguf's reader of a file. Raises ValueError if the file is damaged or another one."""
    try:
        return package().GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is damaged or not a GGUF file: {error}") from None


def read_gguf(path: Path) -> dict[str, Tensor]:
    """Read a head's tensors with the names of our own files, in float32. Raises ValueError for another file."""
    reader = open_gguf(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    arch = fields.get("general.architecture")
    if arch not in NAMES and f"{arch}.nextn_predict_layers" not in fields:
        raise ValueError(
            f"{path} is not a head but a model of architecture {arch}: one of {', '.join((*NAMES, NEXTN))} is needed"
        )
    try:
        tensors = {t.name: dequantize(t.data, t.tensor_type) for t in reader.tensors if t.name != ROPE_FREQS}
    except NotImplementedError as error:
        raise ValueError(f"{path} contains numbers that cannot be read: {error}") from None
    if arch not in NAMES:
        return from_nextn(tensors)
    return from_gguf(tensors, arch, fields[f"{arch}.attention.head_count"], fields[f"{arch}.attention.head_count_kv"])
