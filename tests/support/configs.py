"""conf/ as a program sees it, remembered: to compose one command line takes Hydra half a second, and tests compose a
thousand. Importing this module makes Hydra answer the same question from memory. Only the yaml of this repository is
remembered, which no test changes."""

import os
import pickle
from functools import cache, wraps

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, open_dict

from foredraft.config import read as composed
from foredraft.words import CONF

__all__ = ["composed"]


def searched() -> tuple[str, ...] | None:
    """Return where Hydra looks for yaml, or None if that is more than this repository."""
    path = tuple(entry.path or "" for entry in GlobalHydra.instance().config_loader().get_search_path().get_path())
    ours = ("pkg://hydra", "structured://", str(CONF.parent.resolve()), f"file://{CONF.parent.resolve()}")
    return path if all(place.startswith(ours) for place in path) else None


@cache
def answer(path: tuple[str, ...], program: str, *overrides: str) -> bytes:
    return pickle.dumps(plain_compose(program, [*overrides], return_hydra_config=True))


@wraps(hydra.compose)
def compose(program: str, overrides: list[str], return_hydra_config: bool = False) -> DictConfig:
    path = searched()
    if not return_hydra_config or path is None:
        return plain_compose(program, overrides, return_hydra_config=return_hydra_config)
    found = pickle.loads(answer(path, program, *overrides))
    with open_dict(found):
        found.hydra.runtime.cwd = os.getcwd()
    return found


plain_compose, hydra.compose = hydra.compose, compose
