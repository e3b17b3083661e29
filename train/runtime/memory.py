"""How much memory a process has had, and how to keep what the C library frees, on a CPU with glibc.

By default every large tensor has its own mapping, given back to the kernel when it is freed and paged in again,
zeroed, for the next one: a third of a training step's time went there (measured: 1.78 s and 1.19 s a step of 8,192 tokens,
6M parameters, two cores). A GPU's memory is kept by torch's own allocator, and its host has large rows and shards to give
back.
"""

import contextlib
import ctypes
import resource
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import torch

from foredraft.train.runtime import distributed

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt's names, from malloc.h


def disable_malloc_trim() -> None:
    if sys.platform == "linux" and not torch.cuda.is_available():
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, -1)


def peak_memory(device: torch.device) -> int:
    """Return the peak bytes of the device, or of this process if the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilo = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo


@contextlib.contextmanager
def explain_out_of_memory(cfg: Any, target: str, head: str) -> Iterator[None]:
    """Raise ValueError, with the setting to change, where a batch does not fit. cfg: as in conf/train.yaml. target, head:
    their names, for scripts/plan.py."""
    rows, length, processes = cfg.trainer.per_device_train_batch_size, cfg.max_length, distributed.world_size()
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU's has no separate class
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator: " not in str(error):
            raise
        remedy = "take strategy=fsdp over more devices, or hidden_states=offline"
        if length > 1024:
            share = "share rows by a larger context_parallel, " if processes > 1 else ""
            remedy = f"lower max_length={length}, {share}or {remedy}"
        if rows > 1:
            remedy = "halve the first and double trainer.gradient_accumulation_steps, which trains the same"
        plan = f"{shlex.quote(f'target={target}')} head={head} strategy={cfg.strategy} gpus={processes}"
        plan += f" context_parallel={cfg.context_parallel}" if cfg.context_parallel > 1 else ""
        raise ValueError(
            f"out of memory with trainer.per_device_train_batch_size={rows} and max_length={length}: {remedy}; "
            f"`foredraft plan {plan} trainer.per_device_train_batch_size={rows} max_length={length}` says what fits"
        ) from error
