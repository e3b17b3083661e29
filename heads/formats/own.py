"""The layout of a kind of head that nobody else publishes: weights under the head's names, its class in config.json."""

import pkgutil
import sys
from typing import Any, Self

from heads.base import DraftHead
from heads.formats.base import Format, HeadFiles
from heads.target import Target


class NativeFormat(Format):
    title = "foredraft's own"

    def __init__(self, kind: type[DraftHead]):
        self.kind = kind

    @classmethod
    def match(cls, found: HeadFiles) -> Self | None:
        name = found.config.get("foredraft", {}).get("class")
        return None if name is None else cls(named(found, str(name)))

    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        return found.config

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
        config = head.to_config()
        name = f"{self.kind.__module__}:{self.kind.__qualname__}"
        return config | {"foredraft": config.get("foredraft", {}) | {"class": name}}


def named(found: HeadFiles, name: str) -> type[DraftHead]:
    """The head class that a config.json names as module:Class. Only what is installed here can be named: no code ever comes
    with the files, and those of the Hub's cache cannot even make Python import a module that it has."""
    module = name.partition(":")[0]
    pulled = any(part.startswith("models--") for part in found.where.parts)
    if pulled and module not in sys.modules:
        raise found.wrong(f"config.json names the head class {name}, which is not imported: import {module} first")
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise found.wrong(f"config.json names the head class {name}, which is not installed here: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, DraftHead)):
        raise found.wrong(f"config.json names the head class {name}, which is no DraftHead")
    return kind
