"""Read settings of a config that families name differently."""

from typing import Any

from transformers import PreTrainedConfig

# The number of positions in configs: of most families, of MPT, of Whisper.
POSITIONS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


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
