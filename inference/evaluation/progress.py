"""Show how far a long run has come, on stderr: a bar on a terminal, sparse lines elsewhere. stdout is for what a program
returns."""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self, TextIO, TypeVar

from tqdm import tqdm

T = TypeVar("T")
FIRST, EVERY = 1.0, 10.0  # seconds until the first line, and the least between two lines


def report(line: str, file: TextIO | None = None) -> None:
    """Print a line from the first process of a run, to stderr unless `file` is given, without breaking a bar."""
    if os.environ.get("RANK", "0") == "0":
        file = file or sys.stderr
        tqdm.write(line, file=file)
        file.flush()


class Progress:
    """Show `what`, how much of `total` is done, the rate and the time left, but nothing in the first second."""

    def __init__(self, what: str, total: int | None = None, unit: str = "rows", done: int = 0):
        """Start to count. total: None if it is unknown. done: the work of earlier runs, which does not count for the rate."""
        self.what, self.total, self.unit, self.first, self.done = what, total, unit, done, done
        self.start = time.perf_counter()
        self.next = self.start + FIRST
        settings: dict[str, Any] = {"desc": what, "initial": done, "unit": f" {unit}", "delay": FIRST}
        alone = os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None
        shown = sys.stderr.isatty() and alone  # bars of several processes would overwrite each other
        self.bar = tqdm(total=total, leave=False, dynamic_ncols=True, **settings) if shown else None

    def add(self, count: int = 1, note: str = "") -> None:
        """Count work that was done. note: a few words on it, which the bar or the line ends with."""
        self.done += count
        if self.bar is not None:
            self.bar.total = self.total
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(count)
        elif (now := time.perf_counter()) >= self.next:
            self.next = now + max(EVERY, (now - self.start) / 20)
            report(self.line() + (f"; {note}" if note else ""))

    @property
    def rate(self) -> float:
        """Return the units per second of this run."""
        return (self.done - self.first) / (time.perf_counter() - self.start)

    @property
    def seconds_left(self) -> float | None:
        return None if self.total is None or self.done <= self.first else (self.total - self.done) / self.rate

    def line(self) -> str:
        of = "" if self.total is None else f" of {self.total:,}"
        left = "" if self.seconds_left is None else f", {tqdm.format_interval(self.seconds_left)} left"
        return f"{self.what}: {self.done:,}{of} {self.unit}, {self.rate:,.{0 if self.rate >= 10 else 1}f}/s{left}"

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def track(items: Sequence[T], what: str, unit: str = "rows") -> Iterator[T]:
    """Yield the items, each of which counts as done when the next one is asked for."""
    with Progress(what, len(items), unit) as progress:
        for item in items:
            yield item
            progress.add()
