"""Tiny block drafters in the layouts that others publish, written key by key, in the sizes of golden.py."""

import itertools
from typing import Any

from torch import Tensor

from tests.support.golden import HD, HEADS, KV, MLP, VD, Golden, H, N, V, eagle3, layer, llama, norm, random, vocabulary

LAYERS, RANK, GRU, EMB = 3, 6, 10, 5


def backbone(taps: int) -> dict[str, Tensor]:
    weights = {"fc.weight": random(H, taps * H), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for i in range(LAYERS):
        name = f"layers.{i}."
        weights |= {
            f"{name}self_attn.q_proj.weight": random(HEADS * HD, H),
            f"{name}self_attn.k_proj.weight": random(KV * HD, H),
            f"{name}self_attn.v_proj.weight": random(KV * HD, H),
            f"{name}self_attn.o_proj.weight": random(H, HEADS * HD),
            f"{name}self_attn.q_norm.weight": norm(HD),
            f"{name}self_attn.k_norm.weight": norm(HD),
            f"{name}mlp.gate_proj.weight": random(MLP, H),
            f"{name}mlp.up_proj.weight": random(MLP, H),
            f"{name}mlp.down_proj.weight": random(H, MLP),
            f"{name}input_layernorm.weight": norm(),
            f"{name}post_attention_layernorm.weight": norm(),
        }
    return weights


def qwen3(**more: Any) -> dict[str, Any]:
    facts = {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": HD,
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": MLP,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV,
        "num_target_layers": N,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": V,
    }
    return facts | more


def zlab() -> Golden:
    """The newest: the block's size inside, sliding layers, a class of its own."""
    own = {"block_size": 4, "mask_token_id": 7, "target_layer_ids": [1, 3, 5]}
    config = qwen3(architectures=["DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"})
    config |= {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 5}
    return config | {"use_sliding_window": True, "dflash_config": own}, backbone(3), "model.safetensors"


def jetspec() -> Golden:
    own = {"mask_token_id": 7, "target_layer_ids": [2], "causal_head": True}
    return qwen3(architectures=["DFlashDraftModel"], block_size=5, dflash_config=own), backbone(1), "model.safetensors"


def markov() -> dict[str, Tensor]:
    return {
        "markov_head.markov_w1.weight": random(V, RANK),
        "markov_head.markov_w2.weight": random(V, RANK),
        "confidence_head.proj.weight": random(1, H + RANK),
        "confidence_head.proj.bias": random(1),
    }


def deepspec(embeddings: Tensor, lm_head: Tensor) -> Golden:
    """Flat settings, and the target's embedding and lm_head along."""
    config = qwen3(architectures=["Qwen3DSparkModel"], block_size=3, markov_rank=RANK, mask_token_id=7)
    config |= {"target_layer_ids": [1, 3], "enable_confidence_head": True, "confidence_head_with_markov": True}
    frozen = {"embed_tokens.weight": embeddings.half(), "lm_head.weight": lm_head.half()}
    return config, backbone(2) | markov() | frozen, "model.safetensors"


def deepspec_dflash() -> Golden:
    """Its DFlash files: the architecture of DSpark with rank 0, anchor first."""
    config = qwen3(architectures=["Qwen3DSparkModel"], block_size=3, markov_rank=0, mask_token_id=7)
    return config | {"target_layer_ids": [1, 3]}, backbone(2), "model.safetensors"


def specforge_dspark() -> Golden:
    own = {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "gated",
        "markov_rank": RANK,
        "mask_token_id": 7,
        "projector_type": "dspark",
        "target_layer_ids": [1, 3],
    }
    gate = {"markov_head.gate_proj.weight": random(RANK, H + RANK), "markov_head.gate_proj.bias": random(RANK)}
    config = qwen3(architectures=["DSparkDraftModel"], block_size=3, dflash_config=own)
    return config, backbone(2) | markov() | gate, "model.safetensors"


def specforge_domino() -> Golden:
    own = {
        "mask_token_id": 7,
        "target_layer_ids": [1, 3],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": EMB,
        "gru_hidden_dim": GRU,
        "shift_label": True,
    }
    weights = {
        "prefix_gru.weight_ih_l0": random(3 * GRU, H),
        "prefix_gru.weight_hh_l0": random(3 * GRU, GRU),
        "embed_proj.0.weight": random(EMB, H + GRU),
        "embed_proj.2.weight": random(V, EMB),
    }
    config = qwen3(architectures=["DominoDraftModel"], block_size=4, dflash_config=own)
    return config, backbone(2) | weights, "model.safetensors"


def zlab_dflash2() -> Golden:
    """The kind stands in the architecture and the settings alone."""
    own = {"block_size": 4, "mask_token_id": 7, "target_layer_ids": [1, 3], "selector_rank": RANK, "selector_top_k": 9}
    config = qwen3(architectures=["DFlash2DraftModel"], is_causal=False)
    config |= {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 5, "use_sliding_window": True}
    selector = "candidate_selector."
    weights = {f"{selector}{which}_codebook": random(V, RANK) for which in ("predecessor", "successor")}
    weights |= {f"{selector}hidden_projection.weight": random(RANK, H)}
    for i, part in itertools.product(range(LAYERS), ("attention", "mlp")):
        name = f"layers.{i}.{part}_conv."
        weights |= {f"{name}base_kernel": random(2, 2, H), f"{name}kernel_projection.weight": random(4 * H // 8, H)}
    config["dflash_config"] = own | {"conv_kernel_size": 2, "conv_group_size": 8}
    return config, backbone(2) | weights, "model.safetensors"


def in_speculators(kind: str, **more: Any) -> dict[str, Any]:
    """Layer ids of hidden states; no flag."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    facts = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 4,
        "draft_vocab_size": V,
        "mask_token_id": 7,
        "max_anchors": 256,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method]},
        "speculators_model_type": kind,
        "speculators_version": "0.7.0.dev0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": qwen3(),
    }
    return facts | more


def speculators_dflash() -> Golden:
    return in_speculators("dflash"), backbone(2), "model.safetensors"


def speculators_dspark() -> Golden:
    config = in_speculators("dspark", markov_rank=RANK, markov_head_type="vanilla", enable_confidence_head=True)
    return config | {"confidence_head_with_markov": True}, backbone(2) | markov(), "model.safetensors"


def p_eagle_weights() -> dict[str, Tensor]:
    further = layer("layers.1", H) | {"layers.1.input_layernorm.weight": norm()}
    own = {"mask_hidden": random(1, 1, 3 * H), "embed_tokens.weight": random(V, H)}
    return eagle3("layers.0") | further | own | vocabulary()


P_EAGLE = {"draft_vocab_size": VD, "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "target_hidden_size": None}


def p_eagle() -> Golden:
    """For vLLM; the mask token under the older of its names."""
    config = llama(architectures=["PeagleLlamaForCausalLM"], num_hidden_layers=2, rope_theta=5000.0, ptd_token_id=7)
    return config | P_EAGLE, p_eagle_weights(), "model.safetensors"


def speculators_p_eagle() -> Golden:
    own = {"architectures": ["PEagleSpeculator"], "embed_requires_grad": True, "norm_before_residual": True}
    shape = llama(num_hidden_layers=2, rope_theta=5000.0)
    config = in_speculators("peagle", transformer_layer_config=shape) | P_EAGLE | own
    return config, p_eagle_weights(), "model.safetensors"
