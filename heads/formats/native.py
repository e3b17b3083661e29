"""The layout of a kind of head that nobody else publishes: weights with the head's names, and its class in config.json."""

import importlib
import os
import pkgutil
from typing import Any, Self

from foredraft import heads
from foredraft.heads.base import DraftHead
from foredraft.heads.formats.base import Format, HeadFiles
from foredraft.heads.target_model import Target


class NativeFormat(Format):
    title = DraftHead.format

    def __init__(self, kind: type[DraftHead]):
        self.kind, self.title = kind, kind.format

    @classmethod
    def match(cls, files: HeadFiles) -> Self | None:
        name = files.config.get("foredraft", {}).get("class")
        return None if name is None else cls(find_class(files, str(name)))

    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        # The number of layers of a draft model has different names in different families.
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
            if files.config.get(name) is not None:
                files.check_count(name, files.config[name])
        return files.config

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        config = head.to_config()
        name = f"{self.kind.__module__}:{self.kind.__qualname__}"
        return config | {"foredraft": config.get("foredraft", {}) | {"class": name}}


def find_class(files: HeadFiles, name: str) -> type[DraftHead]:
    """Return the head class that a config.json names as module:Class, among the imported ones, those in heads/, and those in
    the modules that FOREDRAFT_HEADS names: files are data, and must not decide what else Python imports."""
    module = name.partition(":")[0]
    if module in (found.name for found in pkgutil.iter_modules(heads.__path__, "foredraft.heads.")):
        importlib.import_module(module)
    for own in filter(None, os.environ.get("FOREDRAFT_HEADS", "").split(",")):
        try:
            importlib.import_module(own.strip())
        except ImportError as error:
            raise ValueError(f"FOREDRAFT_HEADS={own}: {error}") from error
    kinds = subclasses(DraftHead)  # type: ignore[type-abstract]
    kind = next((kind for kind in kinds if f"{kind.__module__}:{kind.__qualname__}" == name), None)
    if kind is None:
        raise files.error(
            f"config.json names the head class {name}, which is not imported, or not a DraftHead: import "
            f"{name.split(':')[0]} first, or set FOREDRAFT_HEADS={name.split(':')[0]}"
        )
    return kind


def subclasses(kind: type[DraftHead]) -> list[type[DraftHead]]:
    return [kind for direct in kind.__subclasses__() for kind in (direct, *subclasses(direct))]
