"""Targets of any size with random weights, to measure the cost of decoding, but not acceptance."""

import torch

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.loading import model_class, read_config, resolve_dtype


def shaped_target(path: str, dtype: str = "bfloat16", device: str | None = None, seed: int = 0) -> Target:
    """Create a model of the shape that a config.json describes, without a tokenizer."""
    config = read_config(path)
    torch.manual_seed(seed)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        model = model_class(config).from_config(config, dtype=resolve_dtype(dtype))
    return Target(model, name=path)
