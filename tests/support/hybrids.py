"""A tiny random model of every kind that reads no trees, and a target from a copy of it."""

import copy
import functools
from typing import Any

import pytest
import torch
import transformers as hf

from foredraft.heads import Target
from tests.support import architectures
from tests.support.architectures import LATENT, ROUTED, VOCAB, Pair

SIZES = architectures.SIZES | {"num_hidden_layers": 2}
WINDOW = 12  # also the chunk and the number of keys that sparse attention picks
LINEAR: dict[str, Any] = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
# Many index heads: with few, their scores tie at exactly 0, and a tie is broken otherwise in a longer read.
INDEXED: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": WINDOW, "q_lora_rank": 16}
MAMBA: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
GROUPS: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}


CHUNKED: dict[str, Any] = {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, "num_local_experts": 4}
KIMI: dict[str, Any] = {"linear_head_dim": 8, "linear_num_heads": 4, "mlp_layer_types": ["dense", "dense"]}
OLD: dict[str, Any] = {"vocab_size": VOCAB, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
# Texts longer than 30 are rotated otherwise; transformers' generate reads them anew there.
LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONG |= {"short_factor": [1.0, 1.5, 1.2], "long_factor": [2.0, 5.0, 9.0], "original_max_position_embeddings": 30}
# A padding token's embedding is all zeros, and keys made of it tie.
SPARSE: dict[str, Any] = {"pad_token_id": None, "num_key_value_heads": 4, "first_k_dense_replace": 1}


def mixed(*kinds: str) -> dict[str, Any]:
    return SIZES | {"layer_types": [*kinds]}


CONFIGS: dict[str, hf.PreTrainedConfig | None] = {
    "qwen3_5": hf.Qwen3_5TextConfig(**mixed("linear_attention", "full_attention"), **LINEAR),
    "lfm2": hf.Lfm2Config(**mixed("conv", "full_attention")),
    "falcon_h1": hf.FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_groups=1, **GROUPS | {"mamba_n_heads": 4}),
    "granite_h": hf.GraniteMoeHybridConfig(
        **mixed("mamba", "attention"), shared_intermediate_size=32, num_local_experts=0, **GROUPS
    ),
    "mamba2": hf.Mamba2Config(**MAMBA, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8),
    "kimi": None,
    "llama4": hf.Llama4TextConfig(**mixed("chunked_attention", "full_attention"), **CHUNKED, head_dim=8),
    "deepseek_v32": hf.DeepseekV32Config(**SIZES | SPARSE, **LATENT | INDEXED, **ROUTED),
    "bloom": hf.BloomConfig(hidden_size=32, **OLD),
    # Its states are next to the layers of its cache.
    "minimax": hf.MiniMaxConfig(
        **mixed("full_attention", "linear_attention"), head_dim=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "openai-gpt": hf.OpenAIGPTConfig(n_embd=32, **OLD),
    "phi3": hf.Phi3Config(**SIZES, original_max_position_embeddings=30, rope_parameters=LONG),
    # It reads several tokens as if the text before them were not there (transformers 5.23).
    "mamba": hf.MambaConfig(**MAMBA, state_size=8),
}
if hasattr(hf, "KimiLinearConfig"):  # not in every version of transformers
    sizes = mixed("linear_attention", "full_attention") | {"num_key_value_heads": 4}
    CONFIGS["kimi"] = hf.KimiLinearConfig(**sizes, **LATENT, **KIMI)


@functools.cache
def pair(kind: str) -> Pair:
    """Return a model as transformers makes it, and a target from a copy of it."""
    if CONFIGS[kind] is None:
        pytest.skip(f"transformers {hf.__version__} has no {kind}")
    torch.manual_seed(0)
    plain = hf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind]), dtype=torch.float32).eval()
    plain.generation_config.eos_token_id = None
    return Pair(plain, Target(copy.deepcopy(plain), name=kind))
