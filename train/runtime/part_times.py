"""How long the parts of training steps take, without a wait for the device."""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch


class PartTimes:
    """Measure parts of a step: on a CPU, and where nothing is computed, by the clock; elsewhere by events in the device's
    queue, which are read on demand."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.times: Counter[str] = Counter()  # how often each part was timed
        self.host: defaultdict[str, float] = defaultdict(float)  # seconds
        self.events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def part(self, name: str, on_host: bool = False) -> Iterator[None]:
        """Measure the time of a part. on_host: the work inside is the host's, and the device may run meanwhile."""
        self.times[name] += 1
        if on_host or self.device.type in ("cpu", "meta"):
            start = time.perf_counter()
            yield
            self.host[name] += time.perf_counter() - start
            return
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.events.append((name, begin, end))

    def seconds(self) -> defaultdict[str, float]:
        """Return the seconds of each part since `reset`. Wait for the device."""
        found = self.host.copy()
        for name, begin, end in self.events:
            end.synchronize()
            found[name] += begin.elapsed_time(end) / 1000
        return found
