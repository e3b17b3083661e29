"""Read settings of a config that families name differently, and take a model out of its wrappers."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# The number of positions in configs: of most families, of MPT, of Whisper.
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
# What the modules of torch.compile, of data parallelism and of peft call the model in them. A wrapper of another package may
# change logits.
WRAPPED = ("_orig_mod", "module", "base_model", "model")
WRAPPERS = ("torch", "peft")


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the model in wrappers of WRAPPERS, whose forward does not name its arguments. Its layers contain adapters of
    peft. Raises ValueError for what has no config, and for prompts of peft, which are outside of the model."""
    inner, parts = model, dict[str, nn.Module]()
    while isinstance(inner, nn.Module) and not issubclass(type(inner), PreTrainedModel):
        parts = dict(inner.named_children())
        name = next((name for name in WRAPPED if name in parts), None)
        if name is None or "prompt_encoder" in parts or type(inner).__module__.partition(".")[0] not in WRAPPERS:
            break
        inner = parts[name]
    if "prompt_encoder" in parts or not isinstance(getattr(inner, "config", None), PreTrainedConfig):
        raise ValueError(
            f"model is {type(model).__name__}, not a language model of transformers: give that (of a pipeline, its .model), "
            "or a path to Target.from_pretrained"
        )
    return inner


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config's settings. Those with another name in its family (GPT-2's n_embd, MPT's d_model) also have their
    usual name, which `to_dict` omits."""
    settings = config.to_dict()
    return {usual: settings[name] for usual, name in config.attribute_map.items() if name in settings} | settings


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the largest number of positions that a config specifies; None if it does not, or sets no limit (XLNet's -1)."""
    named = (getattr(config, name, None) for name in POSITIONS)
    limit = next((number for number in named if number is not None), None)
    return None if limit == -1 else limit


def keys_kept(config: PreTrainedConfig, context: int | None) -> int | None:
    """Return the number of keys with the highest scores that a token attends to (Doge), if texts may be longer. The scores
    of equal tokens are equal in the first layer, and the number of columns decides between them."""
    kept = getattr(config, "keep_window_size", None)
    return None if kept is None or (context is not None and context <= kept) else kept


def uses_sparse_indexer(config: PreTrainedConfig) -> bool:
    """Return whether attention only uses the keys that an indexer scores highest (DeepSeek-V3.2, GLM-5, MiniMax-M3). The
    rounding of a score depends on the number of tokens in a forward, so at a near-tie the choice does too."""
    names = ("index_topk", "index_topk_blocks", "indexer_budget")
    return any(getattr(config, name, None) is not None for name in names)
