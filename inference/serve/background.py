"""Processes of low priority beside a server, one at a time, within a share of the device's time."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("foredraft.serve")
TICK = 0.05  # seconds between two looks at a process
IDLE = 0.25  # seconds without a request after which a CPU is idle
ATTEMPTS = 5  # that a process has to end well
# A process lets all others go first, and dies with the thread that starts it, also where the server is killed.
CHILD = """
import ctypes, os, sys
os.nice(19)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Stopped(Exception):
    """The server ends."""


class Background:
    def __init__(self, is_busy: Callable[[], bool], on_gpu: bool, budget: float = 60.0, share: float | None = None):
        """is_busy: is anything served? on_gpu: where the processes run. budget: minutes that one may run. share: of the time
        that it may run; None is 0.1 on a GPU, and on a CPU, where it runs while nothing is served, all of that."""
        self.is_busy, self.on_gpu, self.budget = is_busy, on_gpu, 60 * budget
        self.share = share if share is not None else 0.1 if on_gpu else 1.0
        if budget <= 0 or not 0 < self.share <= 1:
            raise ValueError(f"learn.budget={budget} must be above 0, and learn.share={share} between 0 and 1")
        self.stopped, self.lock, self.turn = threading.Event(), threading.Lock(), threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.allowed = self.goes = True  # whether its share of time lets the process run; whether it runs
        self.busy = time.monotonic()  # when something was served last
        self.seconds = 0.0  # that processes ran

    def hold(self) -> None:
        """A request has come."""
        if not self.on_gpu:
            self.steer()

    def run(self, arguments: list[str], output: Path, meanwhile: Callable[[], None]) -> tuple[bool, float]:
        """Run Python with these arguments, again where it was killed, since training resumes: did it end well, and the
        seconds that it ran. output: what it says. meanwhile: called at every look at it. Raises Stopped."""
        while not self.turn.acquire(timeout=TICK):
            self.look(meanwhile)
        try:
            before = self.seconds
            return self.succeeds(arguments, output, meanwhile), self.seconds - before
        finally:
            self.turn.release()

    def look(self, meanwhile: Callable[[], None]) -> None:
        if self.stopped.is_set():
            raise Stopped
        meanwhile()

    def succeeds(self, arguments: list[str], output: Path, meanwhile: Callable[[], None]) -> bool:
        for attempt in range(ATTEMPTS):
            with output.open("wb") as opened:
                command = [sys.executable, "-c", CHILD, *arguments]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened)
                code = self.watch(process, meanwhile)
            if code == 0:
                return True
            said = output.read_text(errors="replace").strip().rpartition("\n")[2]
            log.warning("learning: a process ended with %s: %s", "its budget" if code is None else code, said)
            if code is None or code > 0:
                return False
            if self.stopped.wait(2.0**attempt):
                raise Stopped
        return False

    def watch(self, process: "subprocess.Popen[bytes]", meanwhile: Callable[[], None]) -> int | None:
        """Its exit code; None where its budget is spent."""
        began = last = time.monotonic()
        ran, self.goes, self.process = 0.0, True, process
        try:
            while (code := process.poll()) is None:
                self.allowed = ran <= self.share * (last - began)
                self.steer()
                self.stopped.wait(TICK)
                self.look(meanwhile)
                now = time.monotonic()
                ran, self.seconds = ran + self.goes * (now - last), self.seconds + self.goes * (now - last)
                last = now
                if ran > self.budget:
                    return None
            return code
        finally:
            self.process = None
            process.kill()
            process.wait()

    def steer(self) -> None:
        """Let the process run, or halt it."""
        with self.lock:
            process, now = self.process, time.monotonic()
            if self.is_busy():
                self.busy = now
            may = self.allowed and (self.on_gpu or now - self.busy > IDLE)
            if process is not None and may != self.goes:
                process.send_signal(signal.SIGCONT if may else signal.SIGSTOP)
                self.goes = may
