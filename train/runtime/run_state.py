"""A run's directory: what a second run does with it, how a stopped one goes on, and what a terminal shows meanwhile."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.runtime import checkpoints, distributed

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.json", "checkpoints"
REPLICATED = {"single", "ddp"}  # engines whose checkpoints are the same
# What does not change a run: how rows are spread over processes (`rows_per_step` is compared), and where it is written.
SPREAD = {"strategy", "processes", "trainer.per_device_train_batch_size", "trainer.gradient_accumulation_steps"}
PLACES = {"output_dir"}


def done_before(cfg: DictConfig) -> bool:
    """Does `cfg.output_dir` hold a finished run of this very config? A sweep that is started again passes over it."""
    directory = Path(cfg.output_dir)
    return (directory / METRICS).exists() and not differences(saved_config(directory), as_saved(cfg))


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
    checkpoint = checkpoints.newest(directory / CHECKPOINTS)
    now = as_saved(cfg)
    if checkpoint is not None:
        check_same_run(directory, saved_config(directory), now)
        print(f"going on from {checkpoint}", flush=True)
    write_whole(directory / CONFIG, OmegaConf.to_yaml(now))
    return directory, checkpoint


def rows_per_step(cfg: DictConfig) -> int:
    """The global batch."""
    return cfg.trainer.per_device_train_batch_size * cfg.trainer.gradient_accumulation_steps * distributed.world_size()


def as_saved(cfg: DictConfig) -> dict[str, Any]:
    facts = {"processes": distributed.world_size(), "rows_per_step": rows_per_step(cfg)}
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)) | facts


def saved_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file))) if file.exists() else {}


def check_same_run(directory: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError unless a run of config `now` may go on from a checkpoint of `before`: all must be the same but how
    the steps' rows are spread over processes, where the engine's checkpoints allow that."""
    different = differences(before, now)
    if different:
        raise ValueError(
            f"output_dir={directory} holds an unfinished run with another config ({'; '.join(different[:3])}): "
            f"give another output_dir, the old settings to go on, or delete {directory / CHECKPOINTS}"
        )
    engines = before["strategy"]["name"], now["strategy"]["name"]
    if engines[0] != engines[1] and not set(engines) <= REPLICATED:
        raise ValueError(
            f"output_dir={directory} holds checkpoints of strategy={engines[0]}, which strategy={engines[1]} cannot read: "
            f"go on with strategy={engines[0]}"
        )
    counts = before["processes"], now["processes"]
    if counts[0] != counts[1] and engines[1].startswith("zero"):
        raise ValueError(
            f"strategy={engines[1]} has cut its checkpoints in {directory} for {counts[0]} processes and here are "
            f"{counts[1]}: go on with {counts[0]} (strategy=fsdp and strategy=ddp go on with any number)"
        )


def write_whole(file: Path, text: str) -> None:
    """Whole or not at all, whatever happens meanwhile."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.replace(file)


def seconds_of(state: TrainerState) -> float:
    """How long training took up to the newest log entry, a resumed run's earlier parts counted."""
    return max((entry["train_seconds"] for entry in state.log_history if "train_seconds" in entry), default=0.0)


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Dotted keys that differ, as `trainer.max_steps is 160 there, 80 here`. What SPREAD and PLACES name does not count."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    same = old == new or name.partition(".")[0] in SPREAD or name in SPREAD or name.split(".")[-1] in PLACES
    return [] if same else [f"{name} is {old} there, {new} here"]


class StopOnSignal(TrainerCallback):
    """Ctrl-C or SIGTERM: finish the step, save a checkpoint, stop. A second one stops at once."""

    def __init__(self) -> None:
        self.stopped = False  # has this process been told to?
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
        # A signal does not reach all processes in the same step, and they must stop in the same one.
        self.stopped = distributed.all_reduce(torch.tensor(float(self.stopped))).item() > 0
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

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.log_history[-1]["train_seconds"] = round(self.earlier + time.perf_counter() - self.start, 3)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if "loss" not in (logs or {}):
            return
        seconds = time.perf_counter() - self.start
        state.log_history[-1]["train_seconds"] = round(self.earlier + seconds, 3)
        done = state.global_step - self.first
        left = seconds / max(1, done) * (state.max_steps - state.global_step)
        accuracy = " ".join(f"{logs[key]:.3f}" for key in logs if key.startswith("acc_"))
        print(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.3f}  agreement by depth {accuracy}  "
            f"{logs['tokens_per_second']:,.0f} tokens/s  {left:.0f} s left",
            flush=True,
        )


class Measure(TrainerCallback):
    """Asks for `HeadTrainer.evaluate` every `every` steps (0: never), and after the last step."""

    def __init__(self, every: int):
        self.every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.every and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            control.should_evaluate = True
