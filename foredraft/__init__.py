"""foredraft: draft heads for frozen language models, and decoding with them that does not change the text.

The rooms of this package are the folders heads, inference, train, conf and scripts at the top of the repository, linked here.
Names below are imported when they are first used, so that `foredraft --help` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.heads import DraftHead, Target, load_head, save_head
    from foredraft.inference import Drafter, Engine, Request, SamplingParams, drafter_for, generate, load_drafter

__version__ = "0.2.0"

ROOMS = {
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


def __getattr__(name: str) -> Any:
    for room, names in ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"foredraft.{room}"), name)
    raise AttributeError(f"module 'foredraft' has no attribute {name!r}")
