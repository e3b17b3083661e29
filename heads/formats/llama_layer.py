"""The decoder layer of an imported EAGLE head: which of its settings are supported, and which are refused."""

import re
from typing import Any

from foredraft.heads import llama_config
from foredraft.heads.eagle3 import SLIDING
from foredraft.heads.formats.base import HeadFiles, check_settings
from foredraft.heads.target_model import Target

# The only values that our decoder layer supports.
LAYER = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None, "is_neox_style": True}
LAYER |= {"rope_is_neox_style": True, "use_gemma_norm": False}  # SGLang's names
LATENT_WEIGHT = "self_attn.kv_a_proj_with_mqa.weight"  # reveals such a layer; config.json may only repeat its target's
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "target_hidden_size",
)
LARGEST_SIZE = 2**30  # of a layer or a window: a config with more is damaged


def checked_window(files: HeadFiles, settings: dict[str, Any], applied: bool, single: bool) -> dict[str, Any]:
    """Return the settings, without a window that is not applied. applied: does this kind look back through a window? single:
    does it have one layer?"""
    sliding, window = settings.get("layer_types") == [SLIDING], settings.get("sliding_window")
    if sliding and applied:
        depth = settings.get("foredraft", {}).get("depth", 7)
        if type(window) is not int or window <= depth:
            raise files.error(f"config.json has sliding_window={window!r}, and a number above {depth} is needed")
    elif single and window and (sliding or settings.get("use_sliding_window")):
        files.notes.append(f"sliding_window={window} is not applied, drafts see the whole text")
        return settings | {"layer_types": None}
    return settings


def with_one_rope(files: HeadFiles, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with one rope, of a config that has one per kind of layer: that of the kinds in use, or in files of
    the speculators package the one with a window, with which it trains all layers. Raises ValueError if these differ."""
    given = settings.get("rope_parameters")
    ropes = {kind: rope for kind, rope in given.items() if isinstance(rope, dict)} if isinstance(given, dict) else {}
    kinds = [SLIDING] if "speculators_model_type" in files.config else settings.get("layer_types") or ()
    used = [ropes[kind] for kind in kinds if kind in ropes] or list(ropes.values())
    if any(rope != used[0] for rope in used):
        raise files.error(f"config.json has the ropes {ropes}: write the one that the head has as rope_parameters")
    if not used:
        return settings
    theta = used[0].get("rope_theta") or settings.get("rope_theta")
    return settings | {"rope_parameters": used[0]} | ({"rope_theta": theta} if theta else {})


def layer_settings(
    files: HeadFiles,
    settings: dict[str, Any],
    target: Target,
    count: int | None = None,
    latent: bool = False,
    windowed: bool = False,
) -> dict[str, Any]:
    """Return `settings` with missing ones filled in. Unusual ones that are used go to `files.notes`: the weights determine
    the number of layers and biases, and rope and context length are the head's own. latent: may it have multi-head latent
    attention? windowed: may it look back through a window? Raises ValueError for an unsupported layer."""
    if count is not None:
        files.check_count("num_hidden_layers", count)
    elif other := sorted(name for name in files.weights if re.match(r"layers\.[1-9]", name)):
        raise files.error(f"{other[0]} belongs to a second decoder layer; only heads with one are supported")
    check_settings(files, settings, LAYER)
    settings = with_one_rope(files, settings)
    shown = any(name.endswith(LATENT_WEIGHT) for name in files.weights)
    settings = {name: value for name, value in settings.items() if shown or name not in llama_config.LATENT}
    for name in (*SIZES, *llama_config.LATENT):
        if settings.get(name) is not None:
            files.check_number(name, settings[name], most=LARGEST_SIZE)
    if shown:
        settings["head_dim"] = rotated_dim(files, settings, latent)
    heads = settings["num_attention_heads"]
    if heads % (settings.get("num_key_value_heads") or heads):
        raise files.error(f"{heads} attention heads cannot share {settings['num_key_value_heads']} key/value heads")
    if count is None and (stated := settings.get("num_hidden_layers", 1)) != 1:
        files.notes.append(f"config.json has num_hidden_layers={stated}, but the weights are of one layer")
    settings = checked_window(files, settings, windowed and not shown, count is None)
    new = settings.get("rope_parameters") or {}
    theta = settings.get("rope_theta")  # null means absent
    if theta is not None and new.get("rope_theta", theta) != theta:
        raise files.error(f"config.json has rope_theta={theta} and rope_parameters={new}")
    if width := (new or settings.get("rope_scaling") or {}).get("rope_dim"):  # vLLM prefers it, and SGLang for DFlash
        dim = settings.get("head_dim") or settings["hidden_size"] // heads
        old = new or {"rope_theta": settings.get("rope_theta")} | settings["rope_scaling"]
        settings["rope_parameters"] = old | {"rope_dim": None, "partial_rotary_factor": width / dim}
        settings["partial_rotary_factor"] = None
    rope = llama_config.rope_parameters(settings)
    if rope["rope_type"] == "dynamic":
        files.notes.append(
            f"a dynamic rope equals the default one up to max_position_embeddings, which is used: {rope}"
        )
        default = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        settings["rope_parameters"] = {"rope_type": "default"} | default
    elif rope["rope_type"] not in llama_config.ROPES:
        raise files.error(
            f"config.json has a rope of type {rope['rope_type']}, which is not supported: one of "
            f"{', '.join(llama_config.ROPES)} is; choose a head with one of these"
        )
    if not settings.get("max_position_embeddings"):  # max_sequence_length in the first EAGLE
        settings["max_position_embeddings"] = settings.get("max_sequence_length") or target.max_positions or 2048
    if any(name.endswith("self_attn.q_proj.bias") for name in files.weights):
        settings.setdefault("attention_bias", True)
    settings.setdefault("vocab_size", target.vocab_size)
    return settings


def rotated_dim(files: HeadFiles, settings: dict[str, Any], latent: bool) -> int:
    """Return the size of the rotated part of a key in multi-head latent attention. Raises ValueError if the layer is not
    supported. latent: can the head have such a layer?"""
    if not latent:
        raise files.error("its multi-head latent attention is only supported in EAGLE-3 heads: choose another")
    check_settings(files, settings, {"rope_interleave": True})  # which neighbors are rotated together
    values, keys = settings["v_head_dim"], settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    if values > keys:
        raise files.error(f"config.json has v_head_dim={values}, wider than its keys of {keys}, which is not supported")
    return settings["qk_rope_head_dim"]
