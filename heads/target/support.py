"""Which models can be targets, and which of them support trees: asked of their configs and classes, not of their names."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

# The layer types, as transformers names them, that remember keys and values alone and whose masks we know how to cut.
BRANCHING = {"full_attention", "sliding_attention"}
# What models call their cache. transformers 5.24 renamed the next two to the first; models with their own code keep them.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config's settings. Those that its family calls by a name of its own (GPT-2's n_embd, MPT's d_model) have their
    usual name too, which `to_dict` leaves out."""
    settings = config.to_dict()
    return {usual: settings[own] for usual, own in config.attribute_map.items() if own in settings} | settings


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError for models that write no text, or whose text would change with what follows it."""
    config = model.config.get_text_config()
    # `is_decoder` alone says nothing (GPT-NeoX's is False too), and a decoder may have an image encoder beside it.
    causal = {getattr(part, "is_causal", None) for part in model.modules()} - {None}
    if getattr(config, "is_decoder", None) is False and causal == {False}:
        raise ValueError(
            f"model_type {config.model_type} is an encoder, whose tokens see what comes after them: a draft would "
            "change the text before it; choose a decoder (or is_decoder=True in its config, if it was trained as one)"
        )
    # Gemma 4 says "vision": among the tokens of an image only, and here there are none.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ValueError(
            f"model_type {config.model_type} has use_bidirectional_attention: a draft would change the text before it; "
            "choose a target without"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"model_type {config.model_type} writes no tokens: choose a text model")


def why_no_drafts(model: PreTrainedModel) -> str | None:
    """Why each token is found by the steps of transformers' own generate, in words; None where it has a cache to go on
    from."""
    config = model.config.get_text_config()
    if getattr(config, "causal", None) is False or "target_mapping" in inspect.signature(model.forward).parameters:
        return f"model_type {config.model_type} writes a token in the place of a mask, so nothing can be drafted"
    if not has_cache(config):
        return f"model_type {config.model_type} has no num_hidden_layers, so transformers makes no cache for it"
    parameters = inspect.signature(model.forward).parameters
    own = [name for name in parameters if name.startswith("past_") and name not in CACHE_NAMES]
    if own:  # Reformer's buckets
        return (
            f"model_type {config.model_type} keeps {own[0]}, which only transformers' own steps know how to go on from"
        )
    return None


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the name of the argument by which the model's forward takes its cache, None if it takes none (OpenAI's first
    GPT)."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def has_cache(config: PreTrainedConfig) -> bool:
    """Can transformers make a cache for it? Not for BLT, of several transformers one in the other."""
    return getattr(config, "num_hidden_layers", None) is not None


def why_no_trees(model: PreTrainedModel, context: int | None) -> str | None:
    """Why one forward cannot verify the branches of a tree, in words; None where it can. Such a model would
    run, and give wrong logits. context: most tokens of a text."""
    config = model.config.get_text_config()
    if why := why_no_drafts(model):
        return why
    # GPT-Neo calls them attention_layers, and cuts its local ones by column, not by position.
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    kinds = sorted(set(types) - BRANCHING)
    if kinds or model._is_stateful:  # some recurrent models (RWKV, xLSTM) name no layer types
        return (
            f"model_type {config.model_type} has {', '.join(kinds) or 'recurrent'} layers, where drafts cannot branch"
        )
    if (getattr(config, "n_recurrent_loops", None) or 1) > 1:  # Dory
        return (
            f"model_type {config.model_type} runs its layers several times, and keeps keys of each time, so drafts "
            "cannot branch"
        )
    if getattr(config, "alibi", None):
        return f"model_type {config.model_type} has alibi, which places keys by their column, so drafts cannot branch"
    boundary = longrope_boundary(config, context)
    if boundary is not None:
        return (
            f"model_type {config.model_type} has longrope, which rotates a text longer than {boundary} otherwise from its "
            f"beginning on, so drafts cannot branch unless texts stay below (target.context={boundary})"
        )
    takes = {"position_ids": "position_ids" in inspect.signature(model.forward).parameters, "cache": cache_name(model)}
    missing = [name for name, present in takes.items() if not present]
    if missing:
        return f"model_type {config.model_type} takes no {' and no '.join(missing)}, so drafts cannot branch"
    return None


def longrope_boundary(config: PreTrainedConfig, context: int | None) -> int | None:
    """The length beyond which longrope takes its other factors; None for other ropes, and where texts end before."""
    rope = getattr(config, "rope_parameters", None) or {}
    boundary = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return None if boundary is None or (context is not None and context <= boundary) else boundary


def picks_keys(config: PreTrainedConfig) -> bool:
    """Does it look at those keys alone that an indexer scores highest (DeepSeek-V3.2, GLM-5, MiniMax-M3)? The rounding of a
    score depends on how many tokens are in a forward, so at a near-tie the pick does too."""
    names = ("index_topk", "index_topk_blocks", "indexer_budget")
    return any(getattr(config, name, None) is not None for name in names)


@torch.no_grad()
def mixes_rows(model: PreTrainedModel) -> bool:
    """Does what a quantised model makes of a text depend on what is forwarded beside it? It does where one scale serves the
    activations of a whole forward. Measured on a few random tokens, in forwards of one shape, so of the same kernels."""
    if getattr(model.config, "quantization_config", None) is None:
        return False
    embedding, generator = model.get_input_embeddings(), torch.Generator().manual_seed(0)
    tokens = torch.randint(embedding.num_embeddings, (4, 8), generator=generator).to(embedding.weight.device)
    alone, beside = (model(input_ids=rows).logits[0].float() for rows in (tokens[:1].expand(4, -1), tokens))
    # Experts take what is theirs of all rows in one product, whose kernel depends on how much that is.
    rounding = 0.02 if any("experts" in name for name, _ in model.named_modules()) else 1e-5
    return bool((alone - beside).abs().max() > rounding * alone.abs().max())
