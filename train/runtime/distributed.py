"""The processes of one run, as torchrun starts them. All of it works in a run of one process too.

What they say to each other here goes from host to host, so that no accelerator waits for it.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def host_group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def all_reduce(x: Tensor) -> Tensor:
    """The sum over all processes of `x`, which every process must hand over. On the host."""
    x = x.detach().cpu()
    if world_size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=host_group())
    return x


def all_gather(x: Tensor) -> Tensor:
    """The rows of all processes behind each other; every process must hand over as many. On the device."""
    if world_size() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def broadcast(value: T) -> T:
    """What the first process has as `value`, which may be anything that can be pickled; the others wait for it."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=host_group())
    return box[0]


def barrier() -> None:
    """Until every process is here."""
    broadcast(None)


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """The first process does what is inside, and then the others, which find what it has left."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def shutdown() -> None:
    """The processes have nothing more to say to each other."""
    if dist.is_initialized():
        dist.barrier(group=host_group())
        dist.destroy_process_group()
