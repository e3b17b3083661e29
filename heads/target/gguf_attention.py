"""Attention of a model from a GGUF file where transformers takes another's: rotation of positions, windows, scales."""

from pathlib import Path
from typing import Any

import torch


def check(right: bool, file: Path, what: str) -> None:
    if not right:
        raise ValueError(
            f"target {file}: {what}: it cannot be read as it was meant; give the model as a directory or Hub id"
        )


def check_rope(file: Path, metadata: dict[str, Any], tensors: Any, config: Any) -> None:
    """Rotation of positions as the file says it, of which transformers takes the base alone."""
    name = metadata["general.architecture"]
    width = metadata.get(f"{name}.rope.dimension_count")
    has = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    check(width in (None, int(has * partial)), file, f"it rotates {width} of the {has} numbers of a head")
    long = [tensor.name for tensor in tensors if tensor.name.startswith("rope_factors")]
    check(not long, file, f"its rope factors ({', '.join(long)}) are not read here")
    kind, scaling = metadata.get(f"{name}.rope.scaling.type"), f"{name}.rope.scaling."
    if kind not in (None, "none"):
        check(kind in ("linear", "yarn"), file, f"its rope scaling {kind} is not read here")
        found = {"rope_type": kind, "factor": metadata.get(f"{scaling}factor", 1.0)}
        if kind == "yarn":
            original = metadata.get(f"{scaling}original_context_length")
            found["original_max_position_embeddings"] = original or config.max_position_embeddings
        # Gemma 3 has two kinds of rope, and scales that of full attention.
        config.rope_parameters.get("full_attention", config.rope_parameters).update(found)
    factors = next((tensor.data for tensor in tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        config.rope_parameters = config.rope_parameters | llama3_scaling(file, torch.tensor(factors.copy()), config)


def set_attention(file: Path, metadata: dict[str, Any], config: Any) -> None:
    """Windows and scales of attention where transformers leaves a default of the architecture's."""
    name = metadata["general.architecture"]
    window = metadata.get(f"{name}.attention.sliding_window")
    if name == "phi3":
        config.sliding_window = window or None
    if name == "gemma3":
        check(bool(window), file, "it says no sliding window")
    if name in ("gemma2", "gemma3"):
        # Of 27B, which llama.cpp tells by its layers too: the file does not say it.
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[name]
        heads = config.num_attention_heads
        config.query_pre_attn_scalar = config.hidden_size // heads if largest else config.head_dim


def llama3_scaling(file: Path, factors: torch.Tensor, config: Any) -> dict[str, Any]:
    """The rope scaling of Llama 3.1 and later, which a GGUF file keeps as one factor per frequency."""
    has = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    wave = 2 * torch.pi * config.rope_parameters["rope_theta"] ** (torch.arange(0, has, 2) / has)
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    smooth = ((original / wave - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    check(
        factors.shape == expected.shape and torch.allclose(factors.float(), expected.float(), rtol=1e-3),
        file,
        "its factors of rope are none of Llama 3's",
    )
    numbers = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **numbers}
