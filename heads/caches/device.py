"""The device of a target: its name, synchronization, and transfers that overlap with its work."""

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Rows of a product, and queries of attention, that a forward has at least. For fewer a CPU, and for one query a GPU, uses
# other kernels, which round differently. Products that are all packed need fewer (packing.fewest_rows).
FEWEST_ROWS = 4


def device_name(device: torch.device) -> str:
    """Return the name of the device, with the number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


@contextlib.contextmanager
def host_by_default() -> Iterator[None]:
    """Make tensors without a named device on the host, also after `torch.set_default_device("cuda")`."""
    with contextlib.nullcontext() if torch.zeros(0).device.type == "cpu" else torch.device("cpu"):
        yield


def synchronize(device: torch.device) -> None:
    """Wait for the device, for example before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class HostCopy:
    """Copy a tensor to the host. The copy follows the work queued so far, and `wait` does not wait for work queued later."""

    def __init__(self, tensor: Tensor):
        self.device, self.tensor = tensor.device, tensor
        if tensor.device.type == "cuda":
            self.tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.tensor.copy_(tensor, non_blocking=True)
            self.done = torch.cuda.Event()
            self.done.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self.device.type == "cuda":
            self.done.synchronize()
        return self.tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to the device without waiting for the work that runs there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
