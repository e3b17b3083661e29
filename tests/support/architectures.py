"""A tiny random model of every family of decoders, and a target from a copy of it."""

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.heads import Target
from tests.support import nightly_but

VOCAB = 48
WINDOW = 4
CONTEXT = 1024
LENGTHS = (21, 13)  # ragged, and both longer than the window
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # at the usual 0.02 all keys look alike and a wrong mask would hardly show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
UNGROUPED = SIZES | {"num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
CAPPED = {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 5, "head_dim": 8}  # logits reach well beyond 2
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}


OPENAI = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": 0.3,
}


def configs() -> dict[str, hf.PreTrainedConfig]:
    return {
        "llama": hf.LlamaConfig(**SIZES),
        "qwen2": hf.Qwen2Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=2),
        # Its config names a window, yet no layer uses it.
        "qwen3": hf.Qwen3Config(**SIZES, head_dim=8, sliding_window=WINDOW, use_sliding_window=True),
        "mistral": hf.MistralConfig(**SIZES, sliding_window=WINDOW),
        "gemma2": hf.Gemma2Config(**SIZES, **MIXED, **CAPPED, attn_logit_softcapping=3.0),
        "gemma3_text": hf.Gemma3TextConfig(**SIZES, **MIXED, **CAPPED),
        "phi3": hf.Phi3Config(**SIZES, sliding_window=WINDOW),
        "gpt_neox": hf.GPTNeoXConfig(**UNGROUPED),
        "gpt2": hf.GPT2Config(**OPENAI, eos_token_id=None),
        "opt": hf.OPTConfig(**UNGROUPED, ffn_dim=48, word_embed_proj_dim=32, init_std=0.3),
        "mixtral": hf.MixtralConfig(**SIZES, **EXPERTS),
        "qwen3_moe": hf.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, sliding_window=WINDOW, use_sliding_window=True),
        "gpt_oss": hf.GptOssConfig(**SIZES, **MIXED, **EXPERTS, head_dim=8),
        # Keys and values of different widths (multi-head latent attention).
        "deepseek_v3": hf.DeepseekV3Config(**UNGROUPED, **LATENT, **ROUTED, first_k_dense_replace=1),
    }


FAMILIES = configs()
CASES = [
    (family, attention)
    for family, config in FAMILIES.items()
    for attention in ("sdpa", "eager")
    if attention == "eager" or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
]
# By day one family of each sort: full attention, windows, windows with sinks and experts, latent keys.
FEW = [("llama", "sdpa"), ("gemma2", "eager"), ("mistral", "sdpa"), ("gpt_oss", "eager"), ("deepseek_v3", "sdpa")]
a_few_families = pytest.mark.parametrize("family, attention", nightly_but(CASES, *FEW))


class Pair(NamedTuple):
    plain: hf.PreTrainedModel
    target: Target


@functools.cache
def pair(family: str, attention: str) -> Pair:
    """Return a model as transformers makes it, and a target from a copy of it."""
    torch.manual_seed(0)
    plain = hf.AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[family]), attn_implementation=attention, dtype=torch.float32
    ).eval()
    for parameter in plain.parameters():
        if parameter.ndim < 2:  # norms, biases, sinks: at their initial 0 or 1 one left out would not show
            parameter.data += 0.3 * torch.randn_like(parameter)
    target = Target(copy.deepcopy(plain))
    # transformers only knows eager attention with sinks and soft caps; older versions said that sdpa had soft caps
    only_eager = family in ("gpt_oss", "gemma2") and not plain._supports_sdpa
    own = "eager" if attention == "eager" and not only_eager else "foredraft"
    assert target.model.config._attn_implementation == own
    assert plain.config._attn_implementation == attention
    return Pair(plain, target)
