"""Attention of a GGUF model where transformers assumes another one: rotary positions, windows, scales."""

from pathlib import Path
from typing import Any

import torch


def check(right: bool, file: Path, what: str) -> None:
    if not right:
        raise ValueError(
            f"target {file}: {what}, so it cannot be read as intended; give the model as a directory or Hub id"
        )


def check_rope(file: Path, metadata: dict[str, Any], tensors: Any, config: Any) -> None:
    """Set the file's rotary positions, of which transformers only reads the base. Raises ValueError if they are not
    supported."""
    name = metadata["general.architecture"]
    width = metadata.get(f"{name}.rope.dimension_count")
    has = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    check(width in (None, int(has * partial)), file, f"it rotates {width} of the {has} dimensions of a head")
    long = [tensor.name for tensor in tensors if tensor.name.startswith("rope_factors")]
    check(not long, file, f"its rope factors ({', '.join(long)}) are not supported")
    kind, scaling = metadata.get(f"{name}.rope.scaling.type"), f"{name}.rope.scaling."
    if kind not in (None, "none"):
        check(kind in ("linear", "yarn"), file, f"its rope scaling {kind} is not supported")
        settings = {"rope_type": kind, "factor": metadata.get(f"{scaling}factor", 1.0)}
        if kind == "yarn":
            original = metadata.get(f"{scaling}original_context_length")
            settings["original_max_position_embeddings"] = original or config.max_position_embeddings
        # Gemma 3 has two kinds of rope, and scales only that of full attention.
        config.rope_parameters.get("full_attention", config.rope_parameters).update(settings)
    factors = next((tensor.data for tensor in tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        config.rope_parameters = config.rope_parameters | llama3_scaling(file, torch.tensor(factors.copy()), config)


def set_attention(file: Path, metadata: dict[str, Any], config: Any) -> None:
    """Set windows and scales of attention for which transformers uses a default of the architecture."""
    name = metadata["general.architecture"]
    window = metadata.get(f"{name}.attention.sliding_window")
    if name == "phi3":
        config.sliding_window = window or None
    if name == "gemma3":
        check(bool(window), file, "it has no sliding window")
    if name in ("gemma2", "gemma3"):
        # The 27B model, which llama.cpp also recognizes by its number of layers: the file does not state it.
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[name]
        heads = config.num_attention_heads
        config.query_pre_attn_scalar = config.hidden_size // heads if largest else config.head_dim


def llama3_scaling(file: Path, factors: torch.Tensor, config: Any) -> dict[str, Any]:
    """Return the rope scaling of Llama 3.1 and later, which a GGUF file stores as one factor per frequency."""
    has = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    wave = 2 * torch.pi * config.rope_parameters["rope_theta"] ** (torch.arange(0, has, 2) / has)
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    smooth = ((original / wave - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    check(
        factors.shape == expected.shape and torch.allclose(factors.float(), expected.float(), rtol=1e-3),
        file,
        "its rope factors are not those of Llama 3",
    )
    numbers = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **numbers}
