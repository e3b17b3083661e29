"""How far long work has come, a line at a time, on stderr: stdout is for what a program gives."""

import os
import sys
import time

FIRST, EVERY = 1.0, 5.0  # seconds until the first line, and between lines


def report(line: str) -> None:
    """Print a line of progress on stderr, from the first process of a run."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


class Ticker:
    """Prints `what: done of total unit` now and then; nothing for what is done within a second."""

    def __init__(self, what: str, total: int | None = None, unit: str = "rows"):
        """total: None where it is not known."""
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
