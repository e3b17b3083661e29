"""A published config.json made small: what is a size becomes small, what is structure (layer pattern, rope, windows, experts,
latent attention, wrappers) stays unchanged."""

import math
from typing import Any

VOCAB, HIDDEN, LAYERS, CONTEXT = 128, 32, 8, 512
ROTATED = 16  # dimensions of an attention head, unless a part of them is named on its own
# The sizes, by the names that configs give them. Windows and chunks are shorter than the texts, so that they matter; with
# fewer than 16 heads of an indexer their scores tie at 0. The last lines are the words of older configs, whose layers are
# all alike.
NAMES = (
    (VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (HIDDEN, "hidden_size block_dim conv_dim conv_dim_out"),
    (CONTEXT, "max_position_embeddings model_max_length"),
    (LAYERS, "num_hidden_layers"),
    (48, "intermediate_size intermediate_size_mlp block_ff_dim"),
    (16, "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size moe_latent_size"),
    (8, "hidden_size_per_layer_input"),
    (4, "num_attention_heads num_heads"),
    (ROTATED, "head_dim attention_head_dim query_pre_attn_scalar"),
    (2 * ROTATED, "global_head_dim"),
    (24, "sliding_window sliding_window_size attention_chunk_size"),
    (64, "original_max_position_embeddings"),
    (8, "num_experts num_local_experts n_routed_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk top_k_experts n_group"),
    (1, "topk_group num_hash_layers first_k_dense_replace"),
    (16, "q_lora_rank kv_lora_rank qk_head_dim"),
    (8, "o_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    (2, "o_groups"),
    (24, "index_topk"),
    (8, "index_block_size"),
    (3, "index_topk_blocks"),
    (16, "index_n_heads index_head_dim"),
    (8, "linear_head_dim linear_key_head_dim linear_value_head_dim"),
    (4, "linear_num_heads linear_num_value_heads"),
    (2, "linear_num_key_heads n_groups"),
    (4, "mamba_num_heads mamba_n_heads"),
    (16, "mamba_head_dim mamba_d_head mamba_chunk_size chunk_size"),
    (8, "ssm_state_size mamba_d_state"),
    (64, "mamba_d_ssm"),
    (HIDDEN, "n_embd n_embed d_model emb_dim embedding_size embedding_dim"),
    (HIDDEN, "word_embed_proj_dim attention_hidden_size width d_embed"),
    (48, "n_inner ffn_dim d_ff d_inner dff ffn_hidden_size dim_ff encoder_ffn_dim decoder_ffn_dim"),
    (4, "n_head n_heads encoder_attention_heads decoder_attention_heads"),
    (4, "num_encoder_attention_heads num_decoder_attention_heads"),
    (2, "n_layer n_layers num_layers encoder_layers decoder_layers"),
    (2, "num_encoder_layers num_decoder_layers num_blocks n_input_layers n_output_layers"),
    (4, "n_recurrent_layers loop_layer_index_end"),
    (2, "n_layers_per_attn_res_block loop_layer_index_start"),
    (CONTEXT, "n_positions n_ctx max_seq_len max_target_positions"),
    (HIDDEN // 4, "rotary_dim d_head dim_head kv_channels"),
)
SIZES = {name: size for size, names in NAMES for name in names.split()}
# Parts that read or write text.
TEXTS = {f"{part}_config" for part in ("text", "llm", "language", "patcher", "encoder", "decoder", "global")}
DROPPED = {"_source", "_partial", "quantization_config", "auto_map", "_name_or_path", "_attn_implementation"}
# Of the part that reads images, which no text prompt reaches.
IMAGES: dict[str, Any] = {"depth": 1, "num_hidden_layers": 1, "num_heads": 4, "num_attention_heads": 4}
IMAGES |= {"image_size": 28, "patch_size": 14, "intermediate_size": 48}
IMAGES |= {"deepstack_visual_indexes": [0], "per_layer_config": {}}
IMAGES |= dict.fromkeys(("hidden_size", "out_hidden_size", "text_hidden_size", "projection_dim"), HIDDEN)
IMAGES |= dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), HIDDEN)
IMAGES |= dict.fromkeys(("adapter_in_dim", "adapter_out_dim"), HIDDEN)


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Shrink a model's config. Per-layer settings keep their first `LAYERS` entries."""
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
        return kept | {key: entry for key, entry in IMAGES.items() if key in kept}
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
    """Return the rope of a head with `ROTATED` dimensions; its divisors keep their proportions."""
    if any(isinstance(entry, dict) for entry in value.values()):
        return {name: entry and rope(entry, config) for name, entry in value.items()}
    share = value.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    pairs = math.floor((ROTATED if config.get("head_dim") else HIDDEN // SIZES["num_attention_heads"]) * share) // 2
    small = {name: SIZES.get(name, entry) for name, entry in value.items() if name != "mrope_section"}
    for name in ("short_factor", "long_factor"):
        if name in value:
            small[name] = value[name][:pairs]
    if "mrope_section" in value:
        rest = pairs - pairs // 2
        small["mrope_section"] = [rest, pairs // 4, pairs // 2 - pairs // 4]
    return small
