"""Progress of long work, a line at a time, on stderr: stdout is for results."""

import os
import sys
import time

FIRST, EVERY = 1.0, 5.0  # seconds until the first line, and between lines


def report(line: str) -> None:
    """Print a line of progress on stderr, from the first process of a run."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


class Ticker:
    """Print `what: done of total unit` now and then, but nothing for work that takes less than a second."""

    def __init__(self, what: str, total: int | None = None, unit: str = "rows"):
        """Start at 0. total: None if unknown."""
        self.what, self.total, self.unit = what, total, unit
        self.done, self.start = 0, time.perf_counter()
        self.next = self.start + FIRST

    def add(self, count: int = 1) -> None:
        self.done += count
        now = time.perf_counter()
        if now < self.next:
            return
        self.next = now + EVERY
        of = "" if self.total is None else f" of {self.total:,}"
        report(f"{self.what}: {self.done:,}{of} {self.unit}, {now - self.start:.0f} s")
