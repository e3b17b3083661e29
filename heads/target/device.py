"""Of the device that a target runs on: its name, and when it has done its work."""

import platform
from pathlib import Path

import torch


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
