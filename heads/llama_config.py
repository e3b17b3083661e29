"""Handle the Llama config of heads with a decoder layer: what they copy from their target, save, and compare with it.

Rope and context length matter most: a head that was trained with one rope and served with another drafts badly.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import RopeParameters

from foredraft.heads.layers import DecoderLayer
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.config_names import settings_of

ROPES = ("default", "linear", "llama3", "yarn", "longrope")  # those that a head supports
NEEDED = {  # settings of the ropes that a new head can have in place of its target's
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
REQUIRED = ("hidden_size", "num_attention_heads")
COPIED = (*REQUIRED, "intermediate_size", "num_key_value_heads", "rms_norm_eps", "vocab_size")
# Sizes of multi-head latent attention (heads/latent_attention.py), whose head_dim is that of the rotated part.
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OPTIONAL = ("head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id")
HEAD_DIM = 64  # of attention heads, for a target that has none
SPREAD = 1.2  # largest standard deviation over the vocabulary of a new head's logits


class LayerConfig(LlamaConfig):
    """Describe a Llama layer whose hidden size need not be a multiple of its attention heads, since head_dim is set, and
    that may have latent attention. Without a target's start and end tokens it has none: Llama's 1 and 2 are other tokens."""

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    def validate_architecture(self) -> None:
        pass


def shape_of(target: Target) -> dict[str, Any]:
    """Return the sizes of the target's layers under their usual names. Sizes that its config omits get Llama's proportions.
    Raises ValueError for a target without a hidden size."""
    settings = settings_of(target.config)
    if settings.get("hidden_size") is None:
        raise ValueError(
            f"the config of {target.name} has no hidden_size, which determines the shape of a head's layer"
        )
    shape = {name: settings[name] for name in (*COPIED, *OPTIONAL) if settings.get(name) is not None}
    shape.setdefault("num_attention_heads", max(1, target.hidden_size // HEAD_DIM))  # Mamba has none
    shape.setdefault("intermediate_size", 4 * target.hidden_size)
    if isinstance(shape["intermediate_size"], list):  # a size for each layer (Gemma 3n)
        shape["intermediate_size"] = max(shape["intermediate_size"])
    return shape


def settings_like(target: Target, rope: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the config.json settings of one Llama layer of the target's shape. rope: replaces the target's, such as
    {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 2048}; the target's theta stays. Raises ValueError if
    the target's config has no such shape, or for a rope that heads do not support."""
    settings, copied = settings_of(target.config), shape_of(target)
    copied["vocab_size"] = target.vocab_size
    if target.max_positions is not None:  # some configs use another name for it
        copied["max_position_embeddings"] = target.max_positions
    if rope is not None:
        copied["rope_parameters"] = checked_rope(rope, head_rope(settings))
    elif settings.get("rope_parameters"):
        copied["rope_parameters"] = head_rope(settings)
    return to_json(LayerConfig(num_hidden_layers=1, tie_word_embeddings=False, **copied))


def from_json(settings: dict[str, Any]) -> LlamaConfig:
    """Describe the layer of a config.json. Only settings of the layer are used: published files also carry settings of
    their target and of other classes. Raises KeyError for a missing size, TypeError for a rope without numbers."""
    copied = {name: settings[name] for name in (*COPIED, "attention_bias") if name in REQUIRED or name in settings}
    copied |= {name: settings[name] for name in (*OPTIONAL, *LATENT) if settings.get(name) is not None}
    rope = rope_parameters(settings)
    for name in ("rope_theta", "partial_rotary_factor", *NEEDED["llama3"]):
        if name in rope and not (type(rope[name]) in (int, float) and 0 < rope[name] < math.inf):
            raise TypeError(f"{name}={rope[name]!r}, and a number above 0 is needed")
    return LayerConfig(num_hidden_layers=1, tie_word_embeddings=False, rope_parameters=rope, **copied)


def to_json(config: LlamaConfig) -> dict[str, Any]:
    """Return the config.json settings of the layer. Llama's defaults are included, because engines differ on defaults."""
    names = (*COPIED, *OPTIONAL, "rope_parameters")
    settings = config.to_diff_dict() | {name: getattr(config, name) for name in names}
    settings = {name: value for name, value in settings.items() if name not in LATENT or value is not None}
    rope = dict(config.rope_parameters)
    settings["rope_theta"] = rope.pop("rope_theta")  # for engines on transformers 4, without rope_parameters
    if rope.get("rope_type", "default") != "default":
        settings["rope_scaling"] = rope
    if "partial_rotary_factor" in rope:
        settings["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = "deepseek_v3" if "kv_lora_rank" in settings else "llama"
    return settings | {"model_type": kind, "num_hidden_layers": 1, "tie_word_embeddings": False}


def rope_parameters(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the rope of a config.json in the form of transformers 5. Published configs write it flat (`rope_theta`), in
    `rope_scaling` or in `rope_parameters`, and the type as `type` or `rope_type`. A target with a rope per kind of layer
    (Gemma 3) yields that of full attention. mrope gives all its sections the same positions in text, so it is the default
    rope here."""
    rope = dict(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    if "full_attention" in rope:  # Beam has no rope there, only in its sliding layers
        rope = dict(rope["full_attention"] or next(filter(None, rope.values()), {}))
    older_name = rope.pop("type", None)
    kind = rope.get("rope_type") or older_name or "default"
    if kind in ("default", "mrope"):
        kind, rope = "default", {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    rope |= {"rope_type": kind, "rope_theta": rope.get("rope_theta") or settings.get("rope_theta") or 10000.0}
    if settings.get("partial_rotary_factor"):
        rope.setdefault("partial_rotary_factor", settings["partial_rotary_factor"])
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    return {name: value for name, value in rope.items() if value is not None}


def head_rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the rope of a new head for this target config: the target's own if heads support it, otherwise the default one
    with its theta (Gemma 4's proportional, dynamic)."""
    rope = rope_parameters(settings)
    return rope if rope["rope_type"] in ROPES else {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def checked_rope(rope: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """Return the rope of a new head that a user describes, with what it takes from the target's. Raises ValueError for one
    that heads do not support."""
    if rope.get("rope_type") not in NEEDED:
        raise ValueError(f"head.rope.rope_type={rope.get('rope_type')} is not one of {', '.join(NEEDED)}")
    if unknown := sorted(rope.keys() - RopeParameters.__annotations__.keys()):
        raise ValueError(f"head.rope.{unknown[0]} is not one of {', '.join(RopeParameters.__annotations__)}")
    for name, value in rope.items():
        least = 1 if name == "factor" else 0
        if name in ("factor", "rope_theta", *NEEDED["llama3"]) and not (type(value) in (int, float) and value >= least):
            raise ValueError(f"head.rope.{name}={value!r} must be a number of at least {least}")
    if missing := [name for name in NEEDED[rope["rope_type"]] if rope.get(name) is None]:
        raise ValueError(f"head.rope has rope_type={rope['rope_type']}, which also needs {' and '.join(missing)}")
    return {name: targets[name] for name in ("rope_theta", "partial_rotary_factor") if name in targets} | rope


def differences(config: LlamaConfig, target: Target, own_rope: bool = False) -> list[str]:
    """Return descriptions of how the layer's rope or context length differ from the target's. Such a head may still draft
    well. own_rope: was another rope chosen for the head?"""
    settings, texts = settings_of(target.config), []
    if target.max_positions not in (None, config.max_position_embeddings):
        texts.append(
            f"max_position_embeddings: the head has {config.max_position_embeddings}, the target {target.max_positions}"
        )
    ours, theirs = rope_parameters({"rope_parameters": config.rope_parameters}), head_rope(settings)
    if settings.get("rope_parameters") and ours != theirs and not own_rope:
        texts.append(f"rope_parameters: the head has {ours}, the target {theirs}")
    return texts


@torch.no_grad()
def probe(target: Target, layers: list[int]) -> Tensor:
    """Return these hidden states of some tokens, (tokens, len(layers) * hidden) float32, to measure their size."""
    return target.forward(probe_tokens(target), layers=layers, keep_logits=1).aux_hidden_states.float()[0]


def probe_tokens(target: Target) -> Tensor:
    """Return token ids (1, tokens) int64."""
    count = min(256, target.vocab_size, target.context or 256)  # a learned table of positions ends at the context
    return torch.arange(count, device=target.device)[None]


def aux_sizes(layers: list[int], target: Target) -> Tensor:
    """Return (len(layers) * hidden,) float32: the root mean square of each hidden state's layer, rounded to a power of
    two."""
    sizes = probe(target, layers).unflatten(-1, (len(layers), -1)).pow(2).mean((0, 2)).sqrt()
    return sizes.log2().round().exp2().repeat_interleave(target.hidden_size)


@torch.no_grad()
def init_like(head: Any, target: Target) -> None:
    """Initialize a new head with fused hidden states (`fc`), decoder layers and a last norm (`norm`) so that the inputs and
    outputs of the layers have the target's sizes. The layers add little to their residual.

    The norm is scaled so that the lm_head gets inputs of its usual proportions and logits spread by `SPREAD`. With the
    target's own size a new head is certain of random tokens (SmolLM2: spread 4.7, loss 18 where ln(vocabulary) is 9), and its
    first twenty steps only shrink the lm_head."""
    for fc in head.scaled_layers:
        fc.weight.div_(aux_sizes(head.layers, target).to(fc.weight.device))
    init_near_identity(*(layer for layer in head.modules() if isinstance(layer, DecoderLayer)))
    sizes = probe(target, [target.num_layers]).pow(2).mean(0).sqrt()
    directions = torch.randn(8, target.hidden_size, generator=torch.Generator().manual_seed(0), device="cpu")
    spread = target.logits((directions.to(sizes.device) * sizes).to(target.dtype)).float().std(-1).mean()
    if head.projections:  # copies of the lm_head's rows: logits are not multiplied as the target's (Granite, Cohere)
        spread = spread / target.scaled.multiplier
    head.norm.weight.copy_(sizes * (SPREAD / spread).clamp(max=1.0))


def init_near_identity(*layers: DecoderLayer) -> None:
    """Initialize layers to add little to their residual, as layers of trained models do."""
    for layer in layers:
        nn.init.normal_(layer.self_attn.o_proj.weight, std=0.02)
        nn.init.normal_(layer.mlp.down_proj.weight, std=0.02)
