"""The directory for results that are reused: converted targets, text that a target wrote, and what was measured on a machine.

Measurements are small JSON files, one for each set of facts on which they depend. FOREDRAFT_REMEMBER=0 switches them off. A
file that is damaged, or about something else, is ignored. Two processes may write one: the last one replaces it.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cache_directory() -> Path:
    """Return the directory of the variable FOREDRAFT_CACHE, or ~/.cache/foredraft. Raise ValueError if the user has no home,
    as in some containers."""
    path = os.environ.get("FOREDRAFT_CACHE") or "~/.cache/foredraft"
    try:
        return Path(path).expanduser()
    except RuntimeError:
        need = "set FOREDRAFT_CACHE to a directory for the cache"
        raise ValueError(f"{path}: this user has no home directory: {need}") from None


def measured_before(kind: str, about: dict[str, Any]) -> Any:
    """Return what `remember` wrote about the same facts; None if nothing is readable."""
    if os.environ.get("FOREDRAFT_REMEMBER") == "0":
        return None
    try:
        content = json.loads(file_of(kind, about).read_text(encoding="utf-8"))
        return content["measured"] if content["about"] == about else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remember(kind: str, about: dict[str, Any], measured: Any) -> None:
    """Write what was measured, completely or not at all. about: what must be equal for it to hold."""
    if os.environ.get("FOREDRAFT_REMEMBER") == "0":
        return
    try:
        file = file_of(kind, about)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump({"about": about, "measured": measured}, part)
        os.replace(part.name, file)
    except (OSError, ValueError):
        pass  # a cache that cannot be written: the next run measures again


def measured_once(kind: str, about: dict[str, Any], measure: Callable[[], Any]) -> Any:
    """Return what was measured before about the same facts, otherwise the result of `measure`, which is remembered."""
    found = measured_before(kind, about)
    if found is None:
        found = measure()
        remember(kind, about, found)
    return found


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_of(kind: str, about: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / kind / f"{name}.json"
