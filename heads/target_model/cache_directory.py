"""The directory for results that are reused: measured costs, converted targets, text that a target wrote."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory of the variable FOREDRAFT_CACHE, or ~/.cache/foredraft."""
    return Path(os.environ.get("FOREDRAFT_CACHE") or Path.home() / ".cache" / "foredraft")
