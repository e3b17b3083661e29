"""The order in which training reads its rows."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

# Bytes of the folder of a socket, whose path has at most 107 on Linux and 103 on macOS. multiprocessing appends 32.
LONGEST = 75 if sys.platform == "linux" else 71


class EpochStream(Dataset):
    """Stream `size` rows out of `rows`, epoch after epoch, each epoch in another order.

    A step takes the next rows of the stream: which ones depends on how many rows a step takes, and not on how many
    processes, batches and restarts they are spread over. No epoch ends with a smaller batch. (Trainer's own sampler starts
    each epoch in a new batch, so its steps depend on how they are spread.)
    """

    def __init__(self, rows: Any, size: int, seed: int, later: Callable[[int], Any] | None = None):
        """Set the stream. rows: any dataset with a length and an index. seed: of the orders. later: returns the rows of any
        epoch but the first, if they differ."""
        self.first, self.size, self.seed, self.later = rows, size, seed, later
        self.rows, self.epoch, self.order = rows, -1, torch.empty(0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if get_worker_info() is not None and os.getpgrp() != os.getpid():
            # Schedulers and terminals signal a whole group or each process, and the trainer wants more rows for its step.
            os.setpgid(0, 0)
            if sys.platform == "linux":
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                threading.Thread(target=end_with_trainer, daemon=True).start()
        number = self.locate(index)
        return self.rows[number]

    def locate(self, index: int) -> int:
        """Return the number of this row in its epoch's rows, `self.rows` from here on."""
        epoch, place = divmod(index, len(self.first))
        if epoch != self.epoch:
            self.rows = self.first if epoch == 0 or self.later is None else self.later(epoch)
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(len(self.rows), generator=generator)
        return int(self.order[place % len(self.rows)])


def end_with_trainer() -> None:
    """End this worker when its trainer sends SIGTERM, not when others do."""
    trainer = multiprocessing.parent_process()  # which `forkserver` starts through another process
    assert trainer is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer.pid:
        pass
    os._exit(0)


def sockets_fit() -> bool:
    """Return whether the sockets of processes that read rows have short enough paths."""
    return len(os.fsencode(tempfile.gettempdir())) <= LONGEST


def check_sockets() -> None:
    """Raise ValueError if the sockets of processes that read rows would have too long paths. A run would wait for ever."""
    if not sockets_fit():
        need = f"set it to a path of at most {LONGEST} bytes, such as /tmp"
        raise ValueError(
            f"TMPDIR={tempfile.gettempdir()} is too long for the sockets of processes that read rows: {need}"
        )
