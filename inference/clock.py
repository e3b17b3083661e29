"""Timing of the stages of a step."""

import time

import torch

from foredraft.heads.caches.device import synchronize


class Clock:
    """Measure seconds per stage. Each lap waits for the device, so this is off by default."""

    def __init__(self, device: torch.device, enabled: bool):
        self.device, self.enabled, self.last = device, enabled, time.perf_counter()
        self.seconds = dict.fromkeys(("draft", "forward", "verify", "commit", "host"), 0.0) if enabled else {}

    def start(self) -> None:
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self.enabled:
            synchronize(self.device)
            now = time.perf_counter()
            self.seconds[stage] += now - self.last
            self.last = now
