"""Where foredraft keeps what it would otherwise make again: measured costs, converted targets, text that a target wrote."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """The folder that the variable FOREDRAFT_CACHE names, or ~/.cache/foredraft."""
    return Path(os.environ.get("FOREDRAFT_CACHE") or Path.home() / ".cache" / "foredraft")
