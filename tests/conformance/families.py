"""A family, every kind of model that transformers writes text with, in its default config, shrunken: does it decode as
transformers does, and drafted as alone?"""

import copy
import dataclasses
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig

from foredraft.heads import Target
from foredraft.inference import generate
from foredraft.inference.evaluation.measure import left_pad
from tests.conformance.checks import check_texts, support
from tests.conformance.shrink import CONTEXT, HIDDEN
from tests.support.decoding import Oracle

# Of the part that reads sound, which no text prompt reaches.
SOUND: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "intermediate_size", "adapter_input_size", "adapter_out_dim"), HIDDEN
)
SOUND |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
SOUND |= {"downsample_hidden_size": 8, "conv_output_size": 128}
# Default configs that transformers makes no causal model of.
NO_TEXT = {
    "gemma4_assistant": "a draft model, which reads its target's keys",
    "gemma4_unified_assistant": "a draft model, which reads its target's keys",
    "musicgen": "it writes sound",
    "musicgen_melody": "it writes sound",
}
INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 24}
INDEXER |= {"indexer_compress_ratio": 4}
# What default configs leave out or shrink must keep, and their models need.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 4]},
    "blt_global_transformer": {"head_dim": 8},
    "blt_local_decoder": {"head_dim": 8, "hidden_size_global": HIDDEN},
    "blt_local_encoder": {"hidden_size_global": HIDDEN},
    "blt_patcher": {"head_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_audio_encoder": SOUND,
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_head": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"num_hidden_layers": 8, "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2},
    "helium": {"head_dim": 8},  # its heads are as wide together as its hidden states
    "hrm_text": {"num_layers_per_stack": 1},  # of 8 cycles
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"num_hidden_layers": 8, "layer_types": ["conv", "conv", "conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8},  # of the rotated part
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 32], "num_buckets": 8, "hash_seed": 0},
    "xlstm": {"qk_dim_factor": 2.0, "v_dim_factor": 2.0},  # its cache rounds up to multiples of 64
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": None, "attention_head_dim": None},  # computed
    "qwen4_exp_text": INDEXER,
}
PROMPTS = (40, 5, 21)  # tokens; with what is written, texts cross every window and chunk


def families() -> dict[str, type[PreTrainedConfig]]:
    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


def default_settings(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return a config's defaults, without what it computes from them, which shrinks otherwise. Raises ValueError if
    transformers cannot make a model of it."""
    if kind.model_type in NO_TEXT:
        raise ValueError(
            f"transformers makes no causal model of {kind.model_type}'s default config: {NO_TEXT[kind.model_type]}"
        )
    said = {"model_type", *(field.name for field in dataclasses.fields(kind))}
    settings = {name: value for name, value in kind().to_dict().items() if name in said}
    settings |= LEFT_OUT.get(kind.model_type, {})
    for part in settings.values():
        if isinstance(part, dict):
            part |= LEFT_OUT.get(part.get("model_type", ""), {})
    for name in {"max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"} & settings.keys():
        settings[name] = max(settings[name] or 0, CONTEXT)  # for all of the text
    if settings.get("is_decoder") is False:  # encoders that can be decoders
        settings["is_decoder"] = True
    return settings


def check_family(target: Target, new_tokens: int) -> list[str]:
    """Return how it is drafted for, and other facts about it."""
    target.model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, target.vocab_size - 8, (n,), generator=generator).tolist() for n in PROMPTS]
    found = [support(target), *as_transformers(target, prompts[1], new_tokens)]
    for temperature in (0.0, 1.0):
        try:
            decode(target, prompts, temperature, new_tokens)
        except RuntimeError as error:
            if not target.capabilities.sparse_indexer:
                raise
            decode(in_float64(target), prompts, temperature, new_tokens)
            found.append(f"in float64; in float32 an indexer picked another key at a near-tie ({error})")
    return found


def as_transformers(target: Target, prompt: list[int], new_tokens: int) -> list[str]:
    """Raise RuntimeError if transformers' `generate` writes another text, with the place where it does so only with its
    cache."""
    ids, model = torch.tensor([prompt]), copy.deepcopy(target.model)
    model.generation_config = GenerationConfig()  # BART's forces a last token
    ours = generate(target, None, ids, max_new_tokens=new_tokens, eos_token_id=-1).new_tokens[0]

    def compare(use_cache: bool) -> None:
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "use_cache": use_cache}
        own = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
        check_texts([ours], [own[ids.shape[1] :]], "plain")

    try:
        compare(use_cache=True)
    except (RuntimeError, AttributeError) as error:  # BLT has no cache; Phi-4-multimodal's loses the text
        compare(use_cache=False)
        return [f"as without a cache; with one {error}"]
    return []


def in_float64(target: Target) -> Target:
    model = copy.deepcopy(target.model).double()
    model.set_experts_implementation("eager")  # torch's grouped products do not support float64
    return Target(model)


def decode(target: Target, prompts: list[list[int]], temperature: float, new_tokens: int) -> None:
    """Check that drafted text is the target's own, in one sequence and in a ragged batch."""
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1, "temperature": temperature}
    alone = [
        generate(target, None, torch.tensor([prompt]), seed=number, **settings).new_tokens[0]
        for number, prompt in enumerate(prompts)
    ]
    texts = [prompt + text for prompt, text in zip(prompts, alone, strict=True)]
    for chosen in ([0], list(range(len(prompts)))):
        batch = left_pad([prompts[number] for number in chosen])
        oracle = Oracle([texts[number] for number in chosen], target.vocab_size)
        for what, drafter in (("drafted", oracle), ("plain", None))[: len(chosen)]:  # one alone was plain above
            found = generate(target, drafter, *batch, seed=chosen, **settings)
            check_texts(found.new_tokens, [alone[number] for number in chosen], f"{what}, {len(chosen)} rows")
