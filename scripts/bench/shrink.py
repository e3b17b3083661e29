"""A published config.json made small: what is a size becomes small, what is structure (layer pattern, rope, windows, experts,
latent attention, wrappers) stays as it is."""

import math
from typing import Any

VOCAB, HIDDEN, LAYERS, CONTEXT = 128, 32, 8, 512
ROTATED = 16  # dimensions of an attention head, unless a part of them is named on its own
# Sizes by the names that configs give them. Windows and chunks are shorter than the texts, so that they matter.
SIZES: dict[str, int] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": HIDDEN,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_latent_size": 16,
    "block_dim": HIDDEN,
    "block_ff_dim": 48,
    "conv_dim": HIDDEN,
    "conv_dim_out": HIDDEN,
    "num_attention_heads": 4,
    "num_heads": 4,
    "head_dim": ROTATED,
    "global_head_dim": 2 * ROTATED,
    "attention_head_dim": ROTATED,
    "max_position_embeddings": CONTEXT,
    "model_max_length": CONTEXT,
    "sliding_window": 24,
    "sliding_window_size": 24,
    "attention_chunk_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "index_topk": 24,
    "index_block_size": 8,
    "index_topk_blocks": 3,
    "index_n_heads": 16,  # fewer, and their scores tie at 0
    "index_head_dim": 16,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "query_pre_attn_scalar": ROTATED,
    "num_hash_layers": 1,
    "first_k_dense_replace": 1,
    "original_max_position_embeddings": 64,
    "num_hidden_layers": LAYERS,
}
# The same in the words of older configs, whose layers are all alike.
SIZES |= dict.fromkeys(("n_embd", "n_embed", "d_model", "emb_dim", "embedding_size", "embedding_dim"), HIDDEN)
SIZES |= dict.fromkeys(("word_embed_proj_dim", "attention_hidden_size", "width", "d_embed"), HIDDEN)
SIZES |= dict.fromkeys(("n_inner", "ffn_dim", "d_ff", "d_inner", "dff", "ffn_hidden_size", "dim_ff"), 48)
SIZES |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
SIZES |= dict.fromkeys(("n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4)
SIZES |= dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4)
SIZES |= dict.fromkeys(("n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2)
SIZES |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_blocks"), 2)
SIZES |= dict.fromkeys(("n_positions", "n_ctx", "max_seq_len", "max_target_positions"), CONTEXT)
SIZES |= dict.fromkeys(("rotary_dim", "d_head", "dim_head", "kv_channels"), HIDDEN // 4)
# Parts that read or write text.
TEXTS = {
    "text_config",
    "llm_config",
    "language_config",
    "patcher_config",
    "encoder_config",
    "decoder_config",
    "global_config",
}
DROPPED = {"_source", "_partial", "quantization_config", "auto_map", "_name_or_path", "_attn_implementation"}
IMAGES: dict[str, Any] = {  # of the part that reads images, which no text prompt reaches
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "hidden_size": HIDDEN,
    "out_hidden_size": HIDDEN,
    "text_hidden_size": HIDDEN,
    "projection_dim": HIDDEN,
    "projector_input_dim": HIDDEN,
    "projector_output_dim": HIDDEN,
    "vision_output_dim": HIDDEN,
    "adapter_in_dim": HIDDEN,
    "adapter_out_dim": HIDDEN,
    "intermediate_size": 48,
    "deepstack_visual_indexes": 0,
    "per_layer_config": {},
}


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The same model, small. Per-layer settings keep their first `LAYERS` entries."""
    full = config.get("num_hidden_layers")
    small = {name: part(name, value, config) for name, value in config.items() if name not in DROPPED}
    # Layers that share the keys of those before need one of every kind on both sides.
    shared = bool(config.get("num_kv_shared_layers"))
    layers = 12 if shared else LAYERS
    if shared:
        small["num_kv_shared_layers"] = layers // 2
    if full is not None:
        small["num_hidden_layers"] = min(layers, full)
        for name, value in small.items():
            by_layer = isinstance(value, list) or (isinstance(value, str) and "pattern" in name)
            if by_layer and full <= len(value) <= full + 1 and name != "architectures":
                small[name] = value[: layers + len(value) - full]
    few = (config.get("num_key_value_heads") or 0) < (config.get("num_attention_heads") or 0)
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if config.get(name):
            small[name] = min(config[name], 2) if few else 4
    if "dtype" in small or "torch_dtype" in small:
        small |= {name: "float32" for name in ("dtype", "torch_dtype") if name in small}
    return small


def part(name: str, value: Any, config: dict[str, Any]) -> Any:
    if name in TEXTS and isinstance(value, dict):
        return shrink(value)
    if name == "vision_config" and isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if key not in DROPPED}
        small = kept | {key: entry for key, entry in IMAGES.items() if key in kept}
        return small | ({"deepstack_visual_indexes": [0]} if "deepstack_visual_indexes" in kept else {})
    if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
        return rope(value, config)
    if name == "per_layer_config" and isinstance(value, dict):
        return {layer: shrink(entry) for layer, entry in value.items() if int(layer) < LAYERS}
    if name == "linear_attn_config" and isinstance(value, dict):
        layers = {key: [n for n in value[key] if n <= LAYERS] for key in ("full_attn_layers", "kda_layers")}
        return value | layers | {"head_dim": 8, "num_heads": 4}
    if name.endswith(("_token_id", "_token_index")) and value is not None:
        return [min(one, VOCAB - 1) for one in value] if isinstance(value, list) else min(value, VOCAB - 1)
    if name in SIZES and isinstance(value, int) and value > 0 and not isinstance(value, bool):
        return min(value, SIZES[name])
    return value


def rope(value: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Rope of a head of `ROTATED` dimensions; what divides them keeps its proportions."""
    if any(isinstance(entry, dict) for entry in value.values()):
        return {name: entry and rope(entry, config) for name, entry in value.items()}
    share = value.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    pairs = math.floor(config_head_dim(config) * share) // 2
    small = {name: SIZES.get(name, entry) for name, entry in value.items() if name != "mrope_section"}
    for name in ("short_factor", "long_factor"):
        if name in value:
            small[name] = value[name][:pairs]
    if "mrope_section" in value:
        rest = pairs - pairs // 2
        small["mrope_section"] = [rest, pairs // 4, pairs // 2 - pairs // 4]
    return small


def config_head_dim(config: dict[str, Any]) -> int:
    """Of the small config."""
    return ROTATED if config.get("head_dim") else HIDDEN // SIZES["num_attention_heads"]
