"""Train draft heads for frozen language models, and decode with them without changing the text.

The subpackages are the folders heads, inference, train, conf and scripts at the top of the repository, linked here. The names
below are imported when they are first used, so that `foredraft --help` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.heads import DraftHead, Target, load_head, save_head
    from foredraft.inference import Drafter, Engine, Request, SamplingParams, drafter_for, generate, load_drafter

__version__ = "0.2.0"

SUBPACKAGES = {
    "heads": ("DraftHead", "Target", "load_head", "save_head"),
    "inference": ("Drafter", "Engine", "Request", "SamplingParams", "drafter_for", "generate", "load_drafter"),
}

__all__ = [
    "DraftHead",
    "Drafter",
    "Engine",
    "Request",
    "SamplingParams",
    "Target",
    "drafter_for",
    "generate",
    "load_drafter",
    "load_head",
    "save_head",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *SUBPACKAGES})


def __getattr__(name: str) -> Any:
    if name in SUBPACKAGES:
        return importlib.import_module(f"foredraft.{name}")
    for subpackage, names in SUBPACKAGES.items():
        if name in names:
            return getattr(importlib.import_module(f"foredraft.{subpackage}"), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
