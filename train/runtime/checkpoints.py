"""Checkpoints on disk. A directory named checkpoint-N is complete: it is written, and deleted, under another name.

checkpoints/
  checkpoint-40/            weights, optimizer, schedule, random states, trainer_state.json, by the Trainer
    head/                   the head of this step, as the finished one is written
  best-20/                  the head that drafted best on validation prompts so far, likewise
  unfinished/               what a run is about to write or to delete; nothing in it is ever read
"""

import shutil
from pathlib import Path
from typing import Any

from foredraft.train.runtime import distributed

STATE = "trainer_state.json"
UNFINISHED = "unfinished"  # the Trainer's output_dir


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def newest(directory: Path) -> str | None:
    """Return the newest complete checkpoint."""
    found = [path for path in directory.glob("checkpoint-*") if (path / STATE).is_file()]
    return str(max(found, key=step_of)) if found else None


def clear_unfinished(directory: Path) -> None:
    """Delete what a killed run was writing, before another one writes there."""
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)


def complete(directory: Path, step: int) -> None:
    """Give checkpoint-`step` its name, once all processes have written their parts."""
    distributed.barrier()
    if distributed.rank() == 0:
        written, final = directory / UNFINISHED / f"checkpoint-{step}", directory / f"checkpoint-{step}"
        if final.exists():
            shutil.rmtree(written)
        else:
            written.rename(final)
    distributed.barrier()


def rotate(directory: Path, limit: int | None, best: int | None) -> None:
    """Delete all but the newest `limit` checkpoints (None, 0 and -1: keep all), and heads that are no longer the best."""
    for path in sorted(directory.glob("checkpoint-*"), key=step_of)[: -max(limit or 0, 0)]:
        shutil.rmtree(path.rename(directory / UNFINISHED / path.name))
    for path in directory.glob("best-*"):
        if step_of(path) != best:
            shutil.rmtree(path)


def best_step(history: list[dict[str, Any]]) -> int | None:
    """Return the step with the greatest measured acceptance length, or the newest of those that are below it by less than its
    standard error: so small a difference is noise, and what was learned since is not. None if none was measured."""
    measured = [entry for entry in history if "acceptance_length" in entry]
    if not measured:
        return None
    best = max(measured, key=lambda entry: entry["acceptance_length"])
    least = best["acceptance_length"] - best["acceptance_error"]
    return max(entry["step"] for entry in measured if entry["acceptance_length"] >= least)


def best_head(directory: Path, step: int) -> Path:
    """Return where the head of `step` is. That of an earlier step stays until the next checkpoint is complete, since a run
    that is killed before it continues from where it was the best."""
    return directory / f"best-{step}"
