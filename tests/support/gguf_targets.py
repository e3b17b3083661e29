"""GGUF files of tiny random models, written as llama.cpp's converter names and lays out their tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name in ENDS:
        return f"{ENDS[name]}.weight"
    _, _, number, part = name.split(".", 3)
    return f"blk.{number}.{BLOCK[part]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection as llama.cpp rotates them."""
    rows = weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def write_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    for name, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, pre: str) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer."""
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    merges = [" ".join(merge) for merge in raw["model"]["merges"]]
    special = set(tokenizer.all_special_tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
    }


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    pre: str = "smollm",
    tensors: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> None:
    """Write a Llama in float32. tensors: additional ones. changes: architecture; metadata, where None omits a key."""
    config = model.config
    writer = GGUFWriter(file, changes.pop("architecture", "llama"))
    metadata: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "llama.vocab_size": config.vocab_size,
        **tokenizer_metadata(tokenizer, pre),
    }
    metadata |= changes.get("metadata", {})
    write_metadata(writer, {name: value for name, value in metadata.items() if value is not None})
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = interleaved(weight, heads)
        writer.add_tensor(gguf_name(name), weight.detach().float().numpy())
    for name, more in (tensors or {}).items():
        writer.add_tensor(name, more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
