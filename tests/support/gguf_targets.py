"""GGUF files of tiny random models, written as llama.cpp's converter names and lays out their tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFValueType, GGUFWriter, get_tensor_name_map
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection as llama.cpp rotates them."""
    rows = weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)


def write_file(
    file: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], architecture: str = "llama"
) -> Path:
    writer = GGUFWriter(file, architecture)
    for name, value in metadata.items():
        kind = GGUFValueType.get_type(value)
        writer.add_key_value(name, value, GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_target(file: Path, tokens: int, pre: str = "default") -> Path:
    """Write a GGUF file with this number of tokens and without tensors."""
    words = [f"t{number}" for number in range(tokens)]
    return write_file(file, {"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": words}, {})


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, pre: str) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer."""
    raw = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in raw["model"]["merges"]],
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
    metadata |= changes.pop("metadata", {})
    names, found = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers), {}
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = interleaved(weight, heads)
        found[names.get_name(name, (".weight",))] = weight.detach().float().numpy()
    given = {name: value for name, value in metadata.items() if value is not None}
    write_file(file, given, found | (tensors or {}), **changes)
