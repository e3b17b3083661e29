"""What `target=` and `drafter=` of a command line load, with their options (conf/options)."""

import functools
from typing import Any

import torch

from foredraft.heads import Target
from foredraft.heads.target_model.loading import model_class, read_config, resolve_device, resolve_dtype
from foredraft.inference import Drafter, load_drafter


@functools.wraps(Target.from_pretrained)
def open_target(path: str, dtype: str = "auto", device: str | None = None, **options: Any) -> Target:
    if not str(path).endswith(".json"):
        return Target.from_pretrained(path, dtype=dtype, device=device, **options)
    for name in (name for name, value in options.items() if value):
        raise ValueError(f"target.{name}={options[name]}: {path} is a config.json, whose weights are random. Set null.")
    return shaped_target(path, "bfloat16" if dtype == "auto" else dtype, device)


def shaped_target(path: str, dtype: str = "bfloat16", device: str | None = None, seed: int = 0) -> Target:
    """Create a model of the shape that a config.json describes, with random weights and without a tokenizer."""
    config = read_config(path)
    torch.manual_seed(seed)
    with torch.device(resolve_device(device)):
        model = model_class(config).from_config(config, dtype=resolve_dtype(dtype))
    return Target(model, name=path)


def open_drafter(
    path: str,
    target: Target,
    *,
    revision: str | None = None,
    tree: str | None = None,
    nodes: int | None = None,
    depth: int | None = None,
    width: int | None = None,
    min_probability: float | None = None,
    min_confidence: float | None = None,
    longest: int | None = None,
    per_match: float | None = None,
    past: int | None = None,
    window: int | None = None,
    ngram: int | None = None,
    guesses: int | None = None,
) -> Drafter:
    """Load a drafter with the options that are not null. Each drafter has some of them, and raises ValueError for others."""
    options = {name: value for name, value in locals().items() if value is not None}
    return load_drafter(**options)
