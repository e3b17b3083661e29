"""A run's directory: what a second run does with it, how a stopped one goes on, and what a terminal shows meanwhile."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.json", "checkpoints"
STATE = "trainer_state.json"  # what Trainer writes last into a checkpoint


def open_directory(cfg: DictConfig, need_bytes: int) -> tuple[Path, str | None]:
    """Make `cfg.output_dir` ready, and find the checkpoint to go on from (None to start anew).

    A finished run found there is kept, under a numbered name. An unfinished one with the same config goes on. Raises
    ValueError for one with another config, so that nothing is lost or mixed, and where the disk has less than
    `need_bytes` free.
    """
    directory = Path(cfg.output_dir)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output_dir={directory} is a file: give a directory")
    # Looked at before anything moves, so on the nearest folder that there is.
    free = shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.is_dir())).free
    if free < need_bytes:
        raise ValueError(
            f"output_dir={directory} has {free / 2**20:.0f} MiB free and this run writes up to "
            f"{need_bytes / 2**20:.0f} MiB: free some, or give another output_dir"
        )
    if (directory / METRICS).exists():
        number = next(n for n in range(1, 10_000) if not Path(f"{directory}.{n}").exists())
        print(f"{directory} holds a finished run; it is kept as {directory}.{number}", flush=True)
        directory.rename(f"{directory}.{number}")
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = newest_checkpoint(directory / CHECKPOINTS)
    if checkpoint is not None:
        before = OmegaConf.load(directory / CONFIG) if (directory / CONFIG).exists() else OmegaConf.create()
        different = differences(OmegaConf.to_container(before), OmegaConf.to_container(cfg, resolve=True))
        if different:
            raise ValueError(
                f"output_dir={directory} holds an unfinished run with another config ({'; '.join(different[:3])}): "
                f"give another output_dir, the old settings to go on, or delete {directory / CHECKPOINTS}"
            )
        print(f"going on from {checkpoint}", flush=True)
    (directory / CONFIG).write_text(OmegaConf.to_yaml(cfg, resolve=True))
    return directory, checkpoint


def newest_checkpoint(directory: Path) -> str | None:
    """The newest one that was written whole."""
    found = [path for path in directory.glob("checkpoint-*") if (path / STATE).is_file()]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def end_of_training(checkpoint: str) -> TrainerState | None:
    """The state in `checkpoint` if it is of the last step: the run was stopped later, while it measured."""
    state = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
    return state if state.global_step >= state.max_steps else None


def seconds_of(state: TrainerState) -> float:
    """How long training took up to the newest log entry, a resumed run's earlier parts counted."""
    return max((entry["train_seconds"] for entry in state.log_history if "train_seconds" in entry), default=0.0)


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Dotted keys that differ, as `trainer.max_steps is 160 there, 80 here`. Where it is written does not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    same = old == new or name.split(".")[-1] == "output_dir"
    return [] if same else [f"{name} is {old} there, {new} here"]


class StopOnSignal(TrainerCallback):
    """Ctrl-C or SIGTERM: finish the step, save a checkpoint, stop. A second one stops at once."""

    def __init__(self) -> None:
        self.stopped = False
        self.before: dict[int, Any] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        self.restore()
        # Not `print`: the signal may have come in the middle of one, and Python's streams refuse to be entered twice.
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step ...\n")

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopped:
            # Logged too: losses since the last entry are in no checkpoint.
            control.should_log = control.should_save = control.should_training_stop = True


class Progress(TrainerCallback):
    """One line per log entry: step, loss, agreement per depth, tokens/s, time left. It notes the time in the entry."""

    def __init__(self) -> None:
        self.start, self.first, self.earlier = time.perf_counter(), 0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start, self.first, self.earlier = time.perf_counter(), state.global_step, seconds_of(state)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        seconds = time.perf_counter() - self.start
        state.log_history[-1]["train_seconds"] = round(self.earlier + seconds, 3)
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        done = state.global_step - self.first
        left = seconds / max(1, done) * (state.max_steps - state.global_step)
        agree = " ".join(f"{logs[key]:.3f}" for key in logs if key.startswith("agree_"))
        print(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}  agreement by depth {agree}  "
            f"{logs['tokens_per_second']:,.0f} tokens/s  {left:.0f} s left",
            flush=True,
        )


class Measure(TrainerCallback):
    """Every `every` steps, `measure()` gives the acceptance length of the very weights in training."""

    def __init__(self, every: int, measure: Callable[[], float]):
        self.every, self.measure = every, measure

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and state.global_step % self.every == 0:
            length = round(self.measure(), 4)
            state.log_history.append({"step": state.global_step, "acceptance_length": length})
            if state.is_world_process_zero:
                at = f"step {state.global_step}/{state.max_steps}"
                print(f"{at}  acceptance length {length:.2f} (validation)", flush=True)
