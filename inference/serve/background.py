"""Low-priority processes next to a server, one at a time, within a share of the device's time."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("foredraft.serve")
TICK = 0.05  # seconds between two polls of a process
IDLE = 0.25  # seconds without a request after which a CPU is idle
ATTEMPTS = 5  # maximum number of starts of a process
# A process has the lowest priority, and dies with the thread that starts it, even if the server is killed.
CHILD = """
import ctypes, os, sys
os.nice(19)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Stopped(Exception):
    """Report that the server ends."""


class Background:
    def __init__(self, is_busy: Callable[[], bool], on_gpu: bool, budget: float = 60.0, share: float | None = None):
        """Initialize with a process limit. is_busy: whether requests are served. on_gpu: where processes run. budget: maximum
        minutes of a process. share: maximum share of the time; None is 0.1 on a GPU, and 1 on a CPU, in idle times only."""
        self.is_busy, self.on_gpu, self.budget = is_busy, on_gpu, 60 * budget
        self.share = share if share is not None else 0.1 if on_gpu else 1.0
        if budget <= 0 or not 0 < self.share <= 1:
            raise ValueError(f"learn.max_minutes={budget} must be above 0, learn.device_share={share} in (0, 1]")
        self.stopped, self.lock, self.turn = threading.Event(), threading.Lock(), threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.allowed = self.is_running = True  # whether the share permits the process to run; whether it runs
        self.last_busy = time.monotonic()  # time of the last activity
        self.seconds = 0.0  # total run time of processes

    def on_request(self) -> None:
        """Handle a new request: pause the process on a CPU."""
        if not self.on_gpu:
            self.pause_or_resume()

    def run(self, arguments: list[str], output: Path, meanwhile: Callable[[], None]) -> tuple[bool, float]:
        """Run Python with these arguments, again if it was killed, because training resumes. Returns whether it succeeded and
        the seconds that it ran. output: file for its output. meanwhile: called at every poll. Raises Stopped."""
        while not self.turn.acquire(timeout=TICK):
            self.poll(meanwhile)
        try:
            before = self.seconds
            return self.run_with_retries(arguments, output, meanwhile), self.seconds - before
        finally:
            self.turn.release()

    def poll(self, meanwhile: Callable[[], None]) -> None:
        if self.stopped.is_set():
            raise Stopped
        meanwhile()

    def run_with_retries(self, arguments: list[str], output: Path, meanwhile: Callable[[], None]) -> bool:
        for attempt in range(ATTEMPTS):
            with output.open("wb") as opened:
                command = [sys.executable, "-c", CHILD, *arguments]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=opened, stderr=opened)
                code = self.watch(process, meanwhile)
            if code == 0:
                return True
            said = output.read_text(errors="replace").strip().rpartition("\n")[2]
            log.warning("learning: a process ended with %s: %s", "its time limit" if code is None else code, said)
            if code is None or code > 0:
                return False
            if self.stopped.wait(2.0**attempt):
                raise Stopped
        return False

    def watch(self, process: "subprocess.Popen[bytes]", meanwhile: Callable[[], None]) -> int | None:
        """Wait for the process and return its exit code; None if its time limit is exceeded."""
        began = last = time.monotonic()
        ran, self.is_running, self.process = 0.0, True, process
        try:
            while (code := process.poll()) is None:
                self.allowed = ran <= self.share * (last - began)
                self.pause_or_resume()
                self.stopped.wait(TICK)
                self.poll(meanwhile)
                now = time.monotonic()
                ran, self.seconds = ran + self.is_running * (now - last), self.seconds + self.is_running * (now - last)
                last = now
                if ran > self.budget:
                    return None
            return code
        finally:
            self.process = None
            process.kill()
            process.wait()

    def pause_or_resume(self) -> None:
        """Let the process run or pause it, as its share and the server's load permit."""
        with self.lock:
            process, now = self.process, time.monotonic()
            if self.is_busy():
                self.last_busy = now
            may = self.allowed and (self.on_gpu or now - self.last_busy > IDLE)
            if process is not None and may != self.is_running:
                process.send_signal(signal.SIGCONT if may else signal.SIGSTOP)
                self.is_running = may
