"""The layout of a kind of head that nobody else publishes: weights under the head's names, its class in config.json."""

import sys
from typing import Any, Self

from heads.base import DraftHead
from heads.formats.base import Format, Found
from heads.target import Target


class OwnFormat(Format):
    title = "foretoken's own"

    def __init__(self, kind: type[DraftHead]):
        self.kind = kind

    @classmethod
    def match(cls, found: Found) -> Self | None:
        name = found.config.get("foretoken", {}).get("class")
        if name is None:
            return None
        module, _, path = str(name).partition(":")
        # Only what is imported already: a config.json from elsewhere shall not make Python run a module.
        kind = getattr(sys.modules.get(module), path, None)
        if not (isinstance(kind, type) and issubclass(kind, DraftHead)):
            raise found.wrong(f"config.json names the head class {name}, which is not imported: import {module} first")
        return cls(kind)

    def own_config(self, found: Found, target: Target) -> dict[str, Any]:
        return found.config


def class_name(kind: type[DraftHead]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
