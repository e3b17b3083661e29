"""Of the device that a target runs on: its name, when it has done its work, and what goes there and back meanwhile."""

import platform
from pathlib import Path

import torch
from torch import Tensor


def device_name(device: torch.device) -> str:
    """As people know it, with the number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {torch.get_num_threads()} threads"


def synchronise(device: torch.device) -> None:
    """Wait for it, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class HostCopy:
    """A tensor for the host. It is copied behind what the device was given so far, and `wait` does not wait for what it is
    given meanwhile (a forward)."""

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
    """A tensor of the host, on the device, without waiting for what runs there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
