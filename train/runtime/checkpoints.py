"""Checkpoints on disk. A directory named checkpoint-N is complete: it is written, and deleted, under another name.

checkpoints/
  checkpoint-40/            weights, optimizer, schedule, random states, trainer_state.json, by the Trainer
    head/                   the head of this step, as the finished one is written
  best-20/                  the head that drafted best on validation prompts so far, likewise
  unfinished/               what a run is about to write or to delete; nothing in it is ever read
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from foredraft.heads.hub.client import HEAD
from foredraft.train.runtime import distributed

STATE = "trainer_state.json"
SIZES = "sizes.json"  # bytes of each file that a run resumes from
UNFINISHED = "unfinished"  # the Trainer's output_dir


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def written(directory: Path, kind: str) -> list[Path]:
    """Return what a run has written as KIND-N, the newest last. Copies of other names (checkpoint-9.bak) are the user's."""
    return sorted((path for path in directory.iterdir() if re.fullmatch(rf"{kind}-\d+", path.name)), key=step_of)


def newest(directory: Path) -> str | None:
    """Return the newest complete checkpoint."""
    found = written(directory, "checkpoint") if directory.is_dir() else []
    return next((str(path) for path in reversed(found) if (path / STATE).is_file()), None)


def sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each file of a checkpoint, without the head, which no run resumes from."""
    files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    return {name: file.stat().st_size for name, file in files.items() if not name.startswith(f"{HEAD}/")}


def check_whole(path: Path) -> None:
    """Raise ValueError for a checkpoint of which files are missing or cut, as by a machine that went down or in a copy."""
    file, now = path / SIZES, sizes(path)
    if not file.exists():  # of an earlier version
        return
    try:
        damaged = [name for name, size in json.loads(file.read_bytes()).items() if now.get(name) != size]
    except (ValueError, AttributeError):  # not JSON, or another value than an object
        damaged = [SIZES]
    remedy = f"{file} to go on without" if damaged == [SIZES] else "this directory to go on from the checkpoint before"
    if damaged:
        raise ValueError(
            f"{path} is damaged: {', '.join(damaged)} {'is' if len(damaged) == 1 else 'are'} missing or not of the size that "
            f"was written. Restore the files, or delete {remedy}"
        )


def clear_unfinished(directory: Path) -> None:
    """Delete what a killed run was writing, before another one writes there."""
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)


def complete(directory: Path, step: int) -> None:
    """Give checkpoint-`step` its name, once all processes have written their parts."""
    distributed.barrier()
    if distributed.rank() == 0:
        new, final = directory / UNFINISHED / f"checkpoint-{step}", directory / f"checkpoint-{step}"
        if final.exists():
            shutil.rmtree(new)
        else:
            (new / SIZES).write_text(json.dumps(sizes(new)))
            new.rename(final)
    distributed.barrier()


def rotate(directory: Path, limit: int | None, best: int | None) -> None:
    """Delete all but the newest `limit` checkpoints (None, 0 and -1: keep all), and heads that are no longer the best."""
    for path in written(directory, "checkpoint")[: -max(limit or 0, 0)]:
        shutil.rmtree(path.rename(directory / UNFINISHED / path.name))
    for path in written(directory, "best"):
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
