"""A run's directory: what a second run does with it, and how a stopped one is resumed."""

import os
import shutil
from pathlib import Path
from typing import IO, Any, cast

from omegaconf import DictConfig, OmegaConf
from transformers import TrainerState

from foredraft.train.runtime import checkpoints, distributed
from foredraft.train.runtime.locks import FILE as LOCK
from foredraft.train.runtime.locks import hold, write_atomically

LOCKS: list[IO[bytes]] = []  # of the run in this process
CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.json", "checkpoints"
REPLICATED = {"single", "ddp"}  # strategies whose checkpoints are the same
# What does not change a run: how rows are spread over processes (`rows_per_step` is compared), and where it is written.
SPREAD = {"strategy", "processes", "context_parallel"}
SPREAD |= {f"trainer.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
SPREAD |= {"written_tokens"}  # a resumed run reads the text that it has
SAME_RUN = SPREAD | {"output_dir"}
# What may change when a stopped run is resumed: what is logged, measured and kept, and for how long it trains.
FREE = {"eval", "keep_checkpoints", "data.num_proc"}
FREE |= {f"trainer.{name}" for name in ("report_to", "logging_steps", "save_steps", "save_total_limit")}
FREE |= {"trainer.profile", "trainer.max_steps", "trainer.max_minutes", "trainer.num_train_epochs"}
FREE |= {"trainer.dataloader_num_workers", "trainer.dataloader_prefetch_factor"}
FREE |= {f"hidden_states.{name}" for name in ("url", "timeout", "patience", "run", "path", "load_full_target")}


def done_before(cfg: DictConfig) -> bool:
    """Return whether `cfg.output_dir` contains a finished run of this very config. A sweep that is started again skips it."""
    directory = Path(cfg.output_dir)
    return (directory / METRICS).exists() and not differences(saved_config(directory), as_saved(cfg))


def open_directory(cfg: DictConfig, need_bytes: int) -> tuple[Path, str | None]:
    """Prepare `cfg.output_dir`, and find the checkpoint to resume from (None to start at the first step).

    A finished run found there is kept, under a numbered name. An unfinished one with the same config is resumed. Raises
    ValueError for one with another config or one that another process is writing, so that nothing is lost or mixed, and
    where the disk has less than `need_bytes` free.
    """
    directory = Path(cfg.output_dir)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output_dir={directory} is a file: give a directory")
    start = Path(cfg.get("init_from") or "/").absolute()
    if (directory / METRICS).exists() and directory.absolute() in (start, *start.parents):
        raise ValueError(
            f"init_from={cfg.init_from} lies in output_dir={directory}, whose finished run would get another name, so that "
            "this run could not be resumed: give another output_dir"
        )
    # Before anything moves, so on the nearest folder that exists.
    free = shutil.disk_usage(next(path for path in (directory, *directory.absolute().parents) if path.is_dir())).free
    if free < need_bytes:
        raise ValueError(
            f"output_dir={directory} has {free / 2**20:.0f} MiB free and this run writes up to "
            f"{need_bytes / 2**20:.0f} MiB: free some, or give another output_dir"
        )
    unlock()
    LOCKS.append(claim(directory))
    checkpoint = checkpoints.newest(directory / CHECKPOINTS)
    now = as_saved(cfg)
    if checkpoint is not None:
        before = saved_config(directory)
        check_same_run(directory, before, now)
        checkpoints.check_whole(Path(checkpoint))
        now["written_tokens"] = before.get("written_tokens", now["written_tokens"])
        print(f"resuming from {checkpoint}", flush=True)
    checkpoints.clear_unfinished(directory / CHECKPOINTS)
    write_atomically(directory / CONFIG, OmegaConf.to_yaml(now))
    return directory, checkpoint


def claim(directory: Path) -> IO[bytes]:
    """Create it for this process alone, until the result is closed. A finished run that lies there gets a numbered name.
    Raises ValueError as `hold`."""
    directory.mkdir(parents=True, exist_ok=True)
    lock, file = hold(directory, "output_dir"), directory / LOCK
    # Otherwise it moved before it was locked.
    stands = file.exists() and os.path.samestat(file.stat(), os.fstat(lock.fileno()))
    if stands and not (directory / METRICS).exists():
        return lock
    with lock:
        if stands:
            set_aside(directory)
    return claim(directory)


def set_aside(directory: Path) -> None:
    """Give a finished run a numbered name."""
    number = next(n for n in range(1, 10_000) if not Path(f"{directory}.{n}").exists())
    try:
        directory.rename(f"{directory}.{number}")
    except OSError as error:  # a mount point, or the working directory
        raise ValueError(
            f"output_dir={directory} holds a finished run and cannot be renamed ({error.strerror}): give another output_dir"
        ) from error
    print(f"{directory} holds a finished run; it is kept as {directory}.{number}", flush=True)


def unlock() -> None:
    """Let other processes write the directory of the newest run."""
    while LOCKS:
        LOCKS.pop().close()


def rows_per_step(cfg: DictConfig) -> int:
    """Return the size of the global batch."""
    return cfg.trainer.per_device_train_batch_size * cfg.trainer.gradient_accumulation_steps * distributed.world_size()


def written_tokens(cfg: DictConfig) -> int:
    """Return the number of tokens that the target writes before a run reads them: no more than it reads."""
    tokens, steps = cfg.get("self_generated_tokens", 0), cfg.trainer.max_steps
    return min(tokens, steps * rows_per_step(cfg) * cfg.max_length) if steps > 0 else tokens


def as_saved(cfg: DictConfig) -> dict[str, Any]:
    facts = {"processes": distributed.world_size(), "rows_per_step": rows_per_step(cfg)}
    facts["written_tokens"] = written_tokens(cfg)
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True)) | facts


def saved_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(file))) if file.exists() else {}


def check_same_run(directory: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError unless a run of config `now` may resume from a checkpoint of `before`: all must be the same but what
    is FREE, which is said, and how the steps' rows are spread over processes, where the strategy's checkpoints allow that."""
    found = differences(before, now)
    different = [line for line in found if not free(line.split()[0])]
    if found and not different:
        print(f"resuming with other settings: {'; '.join(found)}", flush=True)
    if different:
        product = "processes x trainer.per_device_train_batch_size x trainer.gradient_accumulation_steps"
        note = f" (rows_per_step is {product})" if any("rows_per_step" in line for line in different) else ""
        raise ValueError(
            f"output_dir={directory} holds an unfinished run with another config ({'; '.join(different[:3])}): "
            f"give another output_dir, the old settings to resume it{note}, or delete {directory / CHECKPOINTS}"
        )
    old, new = before["strategy"], now["strategy"]
    if old != new and not {old, new} <= REPLICATED:
        raise ValueError(
            f"output_dir={directory} holds checkpoints of strategy={old}, which strategy={new} cannot read: "
            f"resume with strategy={old}"
        )
    counts = before["processes"], now["processes"]
    if counts[0] != counts[1] and new.startswith("zero"):
        raise ValueError(
            f"strategy={new} has cut its checkpoints in {directory} for {counts[0]} processes and here are "
            f"{counts[1]}: resume with {counts[0]} (strategy=fsdp and strategy=ddp resume with any number)"
        )


def free(name: str) -> bool:
    return name in FREE or name.partition(".")[0] in FREE


def seconds_of(state: TrainerState) -> float:
    """Return how long training took up to the newest log entry, including earlier parts of a resumed run."""
    return max((entry["train_seconds"] for entry in state.log_history if "train_seconds" in entry), default=0.0)


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """List dotted keys that differ, as `trainer.max_steps is 160 there, 80 here`, but for SAME_RUN."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for key in keys for d in differences(old.get(key), new.get(key), f"{name}.{key}".lstrip("."))]
    same = old == new or SAME_RUN & {name, name.rpartition(".")[2]}
    return [] if same else [f"{name} is {old} there, {new} here"]
