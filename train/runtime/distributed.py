"""The processes of one run, as torchrun starts them. All of it works in a run of one process too.

accelerate's own tools (PartialState, gather, reduce) act on the accelerators, in the default group, whose time-out is half an
hour. What goes through here goes from host to host, so that no accelerator waits for it, and has its own time-out: the others
wait for hours while one process writes text. Where a process dies, torchrun ends the others of its node at once.
"""

import contextlib
import datetime
import functools
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TIMEOUT = datetime.timedelta(days=7)
NFS_DELAY_S = 10  # seconds, until a network file system shows a new file everywhere


def rank() -> int:
    """Return torchrun's own variable: the process group may not exist yet."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(settings: Any) -> None:
    """Connect the processes before one of them can fail, at a file that its node lacks: the others would wait half an hour
    for it to connect. settings: `trainer` of conf/train.yaml."""
    if world_size() > 1 and not dist.is_initialized():
        both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        timeout = datetime.timedelta(seconds=settings.get("ddp_timeout", 1800))
        try:
            dist.init_process_group(settings.get("ddp_backend") or both, timeout=timeout)
            host_group()
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConnectionError(
                f"process {rank()} of {world_size()} could not connect to the others at {where}: start all of them, with a "
                f"port that is free ({str(error).splitlines()[0]})"
            ) from error


@functools.cache
def host_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def all_reduce(x: Tensor) -> Tensor:
    """Return the sum of `x` over all processes, each of which must call this. On the host."""
    x = x.detach().cpu()
    if world_size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=host_group())
    return x


def broadcast(value: T) -> T:
    """Return the first process's `value`, which may be anything that can be pickled; the others wait for it."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=host_group())
    return box[0]


def barrier() -> None:
    """Wait for all processes; raise RuntimeError if one has ended."""
    if world_size() > 1:
        dist.barrier(group=host_group())


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in the first process, and then in the others, which find what it has left."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def check_shared(directory: Path, setting: str, file: Path | None = None) -> None:
    """Raise ValueError, in every process, unless all of them see `file`, or without one can write `directory`, which is made
    where it does not exist, and see there what one has written. setting: what names it. Every process must call this."""
    if world_size() == 1:
        return
    sought = file or directory / f".{broadcast(uuid.uuid4().hex)}"
    if rank() == 0 and file is None:
        directory.mkdir(parents=True, exist_ok=True)
        sought.touch()
    barrier()
    shares = appear([sought]) and (file is not None or os.access(directory, os.W_OK))
    sharing = int(all_reduce(torch.tensor(float(shares))))
    if rank() == 0 and file is None:
        sought.unlink()
    if sharing < world_size():
        use = "write" if file is None else "read"
        raise ValueError(
            f"{setting}={directory} is one directory for only {sharing} of the {world_size()} processes: give an absolute "
            f"path on a file system that all nodes share and can {use}"
        )


def appear(files: Sequence[Path]) -> bool:
    """Wait for files of other processes, which a network file system may show later. Return whether all are there."""
    until = time.monotonic() + NFS_DELAY_S
    while not (seen := all(file.exists() for file in files)) and time.monotonic() < until:
        time.sleep(0.1)
    return seen


def check_same(value: str, what: str) -> None:
    """Raise ValueError, in every process, unless all have the same `value`, in words `what`. Each must call this."""
    different = int(all_reduce(torch.tensor(float(value != broadcast(value)))))
    if different:
        raise ValueError(
            f"{different} of the {world_size()} processes have other {what} than the first: give all nodes the same files, "
            "best on a file system that they share"
        )


@contextlib.contextmanager
def lost_process_named() -> Iterator[None]:
    """Raise ConnectionError where another process has ended, and ChildProcessError where one of this process's own that read
    rows has: torch raises a RuntimeError, for which gloo and DataLoader have no separate class."""
    try:
        yield
    except RuntimeError as error:
        if str(error).startswith("DataLoader worker (pid"):
            raise ChildProcessError(
                f"a process that reads rows has ended ({str(error).strip().rstrip('.')}): the same command resumes from the "
                "newest checkpoint; where memory is short, lower trainer.dataloader_num_workers"
            ) from error
        if world_size() == 1 or not (isinstance(error, dist.DistError) or "gloo/transport" in str(error)):
            raise
        reason = re.sub(r"^\[.*?\] ", "", str(error)).partition(". ")[0].splitlines()[0]
        raise ConnectionError(
            f"process {rank()} of {world_size()} lost another one, whose own output says why ({reason}): the same command on "
            "all nodes resumes from the newest checkpoint"
        ) from error


def shutdown() -> None:
    """Close the process group: nothing that follows needs the other processes."""
    if dist.is_initialized():
        dist.barrier(group=host_group())
        dist.destroy_process_group()
