"""The processes of one run, as torchrun starts them. All of it works in a run of one process too.

accelerate's own tools (PartialState, gather, reduce) act on the accelerators, in the group that Trainer opens with a time-out
of half an hour. What goes through here goes from host to host, so that no accelerator waits for it, and has a time-out of
its own: the others wait for hours while one process writes text. Where a process dies, torchrun ends the others at once.
"""

import contextlib
import datetime
import functools
import os
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
TIMEOUT = datetime.timedelta(days=7)


def rank() -> int:
    """torchrun's own variable: the process group may not exist yet."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def host_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=TIMEOUT)


def all_reduce(x: Tensor) -> Tensor:
    """The sum of `x` over all processes, each of which must call this. On the host."""
    x = x.detach().cpu()
    if world_size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=host_group())
    return x


def broadcast(value: T) -> T:
    """The first process's `value`, which may be anything that can be pickled; the others wait for it."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=host_group())
    return box[0]


def barrier() -> None:
    broadcast(None)


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """The first process runs the block, and then the others, which find what it has left."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def shutdown() -> None:
    """Close the process group: nothing that follows needs the other processes."""
    if dist.is_initialized():
        dist.barrier(group=host_group())
        dist.destroy_process_group()
