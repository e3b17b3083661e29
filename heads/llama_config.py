"""The Llama config of heads that hold a decoder layer: what they copy from their target, save, and compare with it.

Rope and context length above all: a head that was trained with one rope_theta and served with another drafts badly, and
one with max_position_embeddings 2048 fails beyond it.
"""

from torch import nn
from transformers import LlamaConfig

from heads.target import Target

NEEDED = ("hidden_size", "num_attention_heads")
COPIED = (*NEEDED, "intermediate_size", "num_key_value_heads", "rms_norm_eps", "vocab_size")
COPIED_IF_THERE = ("head_dim", "rope_parameters", "max_position_embeddings", "bos_token_id", "eos_token_id")


def config_like(target: Target, kind: str) -> LlamaConfig:
    """One Llama layer of the target's shape. Raises ValueError where the target's config has no such shape."""
    facts = target.config.to_dict()
    missing = [name for name in NEEDED if name not in facts]
    if missing:
        raise ValueError(f"the config of {target.name} has no {', '.join(missing)}: an {kind} layer is shaped by it")
    copied = {name: facts[name] for name in (*COPIED, *COPIED_IF_THERE) if facts.get(name) is not None}
    copied.setdefault("intermediate_size", 4 * facts["hidden_size"])
    copied["vocab_size"] = target.vocab_size
    return LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **copied)


def saved(config: LlamaConfig) -> dict:
    """What a saved head says of its layer. Written out also where it is Llama's default: engines differ on defaults."""
    names = (*COPIED, "head_dim", "max_position_embeddings", "rope_parameters")
    facts = config.to_diff_dict() | {name: getattr(config, name) for name in names}
    rope = dict(config.rope_parameters)
    facts["rope_theta"] = rope.pop("rope_theta")  # and so for engines on transformers 4, which know no rope_parameters
    if rope.get("rope_type", "default") != "default":
        facts["rope_scaling"] = rope
    return facts | {"model_type": "llama", "num_hidden_layers": 1, "tie_word_embeddings": False}


def incompatibilities(config: LlamaConfig, target: Target) -> list[str]:
    """Where this config and the target's disagree, in words."""
    facts, problems = target.config.to_dict(), []
    for name in ("hidden_size", "vocab_size", "max_position_embeddings", "rope_parameters"):
        ours, theirs = getattr(config, name), facts.get(name)
        if name == "rope_parameters" and theirs is not None:
            ours, theirs = tidy(ours), tidy(theirs)
        if theirs not in (None, ours):
            problems.append(f"{name}: the head says {ours}, the target {theirs}")
    return problems


def tidy(rope: dict) -> dict:
    """Rope settings without the old spelling of rope_type, and without what is not set."""
    return {name: value for name, value in rope.items() if name != "type" and value is not None}


def init_near_identity(*projections: nn.Linear) -> None:
    """What a new layer adds to its residual starts small, as in the models that it is copied from."""
    for projection in projections:
        nn.init.normal_(projection.weight, std=0.02)
