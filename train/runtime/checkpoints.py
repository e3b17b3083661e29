"""Checkpoints on disk. A directory named checkpoint-N is complete: it is written, and deleted, under another name.

checkpoints/
  checkpoint-40/            weights, optimizer, schedule, random states, trainer_state.json, by the Trainer
  best-20.safetensors       the head with the greatest acceptance length on validation prompts so far
  unfinished/               what a run is about to write or to delete; nothing in it is ever read
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from train.runtime import distributed

STATE = "trainer_state.json"


def step_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def newest(directory: Path) -> str | None:
    """The newest complete checkpoint."""
    found = [path for path in directory.glob("checkpoint-*") if (path / STATE).is_file()]
    return str(max(found, key=step_of)) if found else None


@contextlib.contextmanager
def written_whole(directory: Path, step: int) -> Iterator[Path]:
    """A folder in which all processes write checkpoint-`step`; it appears in `directory` once all have."""
    unfinished = directory / "unfinished"
    if distributed.rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    distributed.barrier()
    yield unfinished
    distributed.barrier()
    whole = directory / f"checkpoint-{step}"
    if distributed.rank() == 0 and not whole.exists():
        (unfinished / whole.name).rename(whole)
    distributed.barrier()


def rotate(directory: Path, limit: int | None, best: int | None) -> None:
    """Delete all but the newest `limit` checkpoints (None: keep them all), and weights that are the best no more."""
    old = sorted(directory.glob("checkpoint-*"), key=step_of)[: -limit if limit else 0]
    for path in old:
        gone = path.rename(directory / "unfinished" / path.name)
        shutil.rmtree(gone)
    for path in directory.glob("best-*.safetensors"):
        if step_of(path) != best:
            path.unlink()


def best_step(history: list[dict[str, Any]]) -> int | None:
    """The step with the greatest measured acceptance length, the latest of equals; None if none was measured."""
    measured = [(entry["acceptance_length"], entry["step"]) for entry in history if "acceptance_length" in entry]
    return max(measured)[1] if measured else None


def best_file(directory: Path, step: int) -> Path:
    return directory / f"best-{step}.safetensors"


def keep_best(directory: Path, step: int, weights: dict[str, Tensor]) -> None:
    """Write the head's weights of `step`; those of an earlier step go when the next checkpoint is complete, since a
    run that is killed before goes on from where they were the best."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / f"best-{step}.part"
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, part)
    os.replace(part, best_file(directory, step))
