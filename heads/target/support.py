"""Decide which models can be targets, and which support trees, from their configs and classes, not from their names."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# The layer types, as transformers names them, that only keep keys and values and whose masks we can make.
BRANCHING = {"full_attention", "sliding_attention"}
# Names of the cache argument. transformers 5.24 renamed the next two to the first; models with their own code keep them.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config's settings. Those with another name in its family (GPT-2's n_embd, MPT's d_model) also have their
    usual name, which `to_dict` omits."""
    settings = config.to_dict()
    return {usual: settings[name] for usual, name in config.attribute_map.items() if name in settings} | settings


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError for models that do not write text, or whose text would change with the tokens that follow it."""
    config = model.config.get_text_config()
    # `is_decoder` is not sufficient (GPT-NeoX's is False too), and a decoder may come with an image encoder.
    causal = {getattr(part, "is_causal", None) for part in model.modules()} - {None}
    if getattr(config, "is_decoder", None) is False and causal == {False}:
        raise ValueError(
            f"model_type {config.model_type} is an encoder, whose tokens attend to later ones: a draft would "
            "change the text before it; choose a decoder (or set is_decoder=True in its config, if it was trained as one)"
        )
    # Gemma 4 has "vision": only among the tokens of an image, and here there are none.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ValueError(
            f"model_type {config.model_type} has use_bidirectional_attention: a draft would change the text before it; "
            "choose a target without it"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"model_type {config.model_type} does not write tokens: choose a text model")


def why_no_drafts(model: PreTrainedModel) -> str | None:
    """Return the reason why each token is found by the steps of transformers' own generate; None if the model can continue
    from a cache."""
    config = model.config.get_text_config()
    if getattr(config, "causal", None) is False or "target_mapping" in inspect.signature(model.forward).parameters:
        return f"model_type {config.model_type} writes a token in the place of a mask, so drafts are not possible"
    if not has_cache(config):
        return f"model_type {config.model_type} has no num_hidden_layers, so transformers cannot make a cache for it"
    parameters = inspect.signature(model.forward).parameters
    past_names = [name for name in parameters if name.startswith("past_") and name not in CACHE_NAMES]
    if past_names:  # Reformer's buckets
        return f"model_type {config.model_type} keeps {past_names[0]}, from which only transformers' own steps can continue"
    return None


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the name of the cache argument of the model's forward, or None without one (OpenAI's first GPT)."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def has_cache(config: PreTrainedConfig) -> bool:
    """Return whether transformers can make a cache for it. It cannot for BLT, which nests several transformers."""
    return getattr(config, "num_hidden_layers", None) is not None


def why_no_trees(model: PreTrainedModel, context: int | None) -> str | None:
    """Return the reason why one forward cannot verify the branches of a tree; None if it can. Without this check such a
    model would run and give wrong logits. context: largest number of tokens of a text."""
    config = model.config.get_text_config()
    if why := why_no_drafts(model):
        return why
    # GPT-Neo calls them attention_layers, and cuts its local ones by column instead of position.
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    kinds = sorted(set(types) - BRANCHING)
    if kinds or model._is_stateful:  # some recurrent models (RWKV, xLSTM) have no layer types
        return f"model_type {config.model_type} has {', '.join(kinds) or 'recurrent'} layers, in which drafts cannot branch"
    if (getattr(config, "n_recurrent_loops", None) or 1) > 1:  # Dory
        return (
            f"model_type {config.model_type} runs its layers several times and keeps the keys of each time, so drafts "
            "cannot branch"
        )
    if getattr(config, "alibi", None):
        return f"model_type {config.model_type} has alibi, which uses the columns of keys, so drafts cannot branch"
    boundary = longrope_boundary(config, context)
    if boundary is not None:
        return (
            f"model_type {config.model_type} has longrope, which rotates a text longer than {boundary} differently from its "
            f"start on, so drafts cannot branch unless texts stay shorter (target.context={boundary})"
        )
    takes = {"position_ids": "position_ids" in inspect.signature(model.forward).parameters, "cache": cache_name(model)}
    missing = [name for name, present in takes.items() if not present]
    if missing:
        return f"model_type {config.model_type} does not take {' and '.join(missing)}, so drafts cannot branch"
    return None


def longrope_boundary(config: PreTrainedConfig, context: int | None) -> int | None:
    """Return the length beyond which longrope uses its other factors; None for other ropes and for shorter contexts."""
    rope = getattr(config, "rope_parameters", None) or {}
    boundary = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return None if boundary is None or (context is not None and context <= boundary) else boundary


def uses_sparse_indexer(config: PreTrainedConfig) -> bool:
    """Return whether attention only uses the keys that an indexer scores highest (DeepSeek-V3.2, GLM-5, MiniMax-M3). The
    rounding of a score depends on the number of tokens in a forward, so at a near-tie the choice does too."""
    names = ("index_topk", "index_topk_blocks", "indexer_budget")
    return any(getattr(config, name, None) is not None for name in names)


@torch.no_grad()
def is_batch_variant(model: PreTrainedModel) -> bool:
    """Return whether the output for a text of a quantized model depends on other texts in the forward, because one scale
    covers the activations of the whole forward. Measured on a few random tokens, in forwards of one shape and so with the
    same kernels."""
    if getattr(model.config, "quantization_config", None) is None:
        return False
    embedding, generator = model.get_input_embeddings(), torch.Generator().manual_seed(0)
    tokens = torch.randint(embedding.num_embeddings, (4, 8), generator=generator).to(embedding.weight.device)
    alone, mixed = (model(input_ids=rows).logits[0].float() for rows in (tokens[:1].expand(4, -1), tokens))
    # Experts process their part of all rows in one product, whose kernel depends on its size.
    rounding = 0.02 if any("experts" in name for name, _ in model.named_modules()) else 1e-5
    return bool((alone - mixed).abs().max() > rounding * alone.abs().max())
