"""The command line as users type it, in separate processes: what one reports when it ends, and servers that answer."""

import atexit
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import ROOT, typed

SMALL = typed("""
    data=text preset=test_model target.device=cpu max_length=64 self_generated_tokens=0 keep_checkpoints=true
    trainer.per_device_train_batch_size=4 trainer.logging_steps=1 trainer.warmup_steps=2
    eval.final_num_prompts=4 eval.prompt_tokens=16 eval.max_new_tokens=8 eval.num_prompts=2
""")
STEPS = 8  # of a run with SMALL_EAGLE3
# For runs that are compared step by step: no proof, few measurements.
SMALL_EAGLE3 = typed(f"""
    head=eagle3 head.draft_vocab_size=128
    data=text preset=test_model target.device=cpu max_length=64 self_generated_tokens=0
    trainer.max_steps={STEPS} trainer.bf16=false trainer.learning_rate=0.001 trainer.warmup_steps=2 trainer.logging_steps=1
    eval.final_num_prompts=2 eval.timed_prompts=1 eval.prompt_tokens=16 eval.max_new_tokens=4 eval.num_prompts=1
    eval.steps={STEPS} eval.check_float32=false
""")
# A run that waits, after this step, for the signal that stops it: it cannot reach its end before.
HELD = """
import time
from foredraft.train.run import main
from foredraft.train.runtime.callbacks import StopOnSignal
from foredraft.train.trainer import HeadTrainer
def log(trainer, *args, plain=HeadTrainer.log, **kwargs):
    plain(trainer, *args, **kwargs)
    (stop,) = (found for found in trainer.callback_handler.callbacks if isinstance(found, StopOnSignal))
    while trainer.state.global_step == {step} and not stop.signalled:
        time.sleep(0.01)
HeadTrainer.log = log
main()
"""
# The same rows in a step: by one process, and by each of two.
ONE, TWO = "trainer.per_device_train_batch_size=4", "trainer.per_device_train_batch_size=2"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


# Read when they are imported: a child of the fork server would not see them.
READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH", "CUDA")


@cache
def forking_python() -> str:
    """Return a program that takes the arguments of `python` and forks (fork_server.py), or python if forking is not
    available. FOREDRAFT_TESTS_FORK=0 starts an interpreter each time, to compare."""
    if not sys.platform.startswith("linux") or os.environ.get("FOREDRAFT_TESTS_FORK") == "0":
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="fork-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program, address = folder / "python", str(folder / "socket")
    support = ROOT / "tests" / "support"
    client = shlex.join([sys.executable, "-IS", str(support / "fork_client.py"), address])
    program.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    program.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, str(support / "fork_server.py"), address],
        env=inherited() | {"HF_HOME": str(folder / "huggingface")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and b"ready\n" in iter(server.stdout.readline, b""), "the fork server failed"
    atexit.register(server.communicate)  # it ends when its standard input closes
    return str(program)


def inherited() -> dict[str, str]:
    """Return this process's environment. One thread: sums of floats are equal in every run."""
    ours = {name: value for name, value in os.environ.items() if name != "FOREDRAFT_TRACE"}
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def python_for(environment: dict[str, str]) -> str:
    """Return the program `python` for a child with these variables: one that forks, unless imports read them."""
    return sys.executable if any(name.startswith(READ_AT_IMPORT) for name in environment) else forking_python()


class Forked(subprocess.Popen):
    """A process that fork_client.py stands for. Who kills it and waits finds that the program itself has ended."""

    def send_signal(self, sig: int) -> None:
        super().send_signal(signal.SIGRTMIN if sig == signal.SIGKILL else sig)


def start(*command: str, cwd: Path, real: bool = False, **environment: str) -> subprocess.Popen:
    """Start a command. Python forks, and so does what torchrun starts; `real`: the process is a new interpreter with the
    reported process id and its own children."""
    python = python_for(environment)
    if not real:
        command = tuple(python if part == sys.executable else part for part in command)
    process = (Forked if python != sys.executable and python in command else subprocess.Popen)(
        command,
        cwd=cwd,
        env=inherited() | {"PYTHON_EXEC": python} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)  # of a test that was ended by its time limit
    return process


def script(path: str, *arguments: str, cwd: Path, **environment: str) -> Ended:
    """Run `python path arguments`, with a path in this repository, to its end."""
    return end(start(sys.executable, str(ROOT / path), *arguments, cwd=cwd, **environment))


def program(*arguments: str, cwd: Path, real: bool = False, **environment: str) -> subprocess.Popen:
    """Run `python train/run.py` with these arguments."""
    return start(sys.executable, str(ROOT / "train" / "run.py"), *arguments, cwd=cwd, real=real, **environment)


def torchrun(*arguments: str, cwd: Path, processes: int = 2) -> subprocess.Popen:
    """Run processes on this machine, on a free port. torchrun itself is real, so that its children can be found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return start(*command, *arguments, cwd=cwd, real=True)


def children(process: subprocess.Popen) -> list[int]:
    """Return the process ids of what a real process has started."""
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def until(process: subprocess.Popen, text: str) -> str:
    """Return what the process prints up to a line that matches this pattern."""
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if re.search(text, line):
            return printed
    raise AssertionError(f"{text!r} was never printed: {printed}{process.communicate()[1]}")


def reserved_port() -> int:
    """Return a port on which nobody listens, for a program that cannot choose one itself. It stays bound by a socket that
    lets others bind it too, so nobody else gets it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    atexit.register(held.close)
    return held.getsockname()[1]


def end(process: subprocess.Popen, typed: str | None = None) -> Ended:
    """Wait for a process; the limit is the test's own (pytest-timeout)."""
    try:
        out, err = process.communicate(typed)
    finally:
        process.kill()
    return Ended(process.returncode, out, err)


def succeeded(ended: Ended) -> Ended:
    assert ended.code == 0, ended.err
    return ended


def losses(directory: Path) -> list[float]:
    """Return the loss of each log entry of the run in this folder."""
    return [entry["loss"] for entry in json.loads((directory / "history.json").read_text()) if "loss" in entry]


def printed(out: str) -> list[tuple[str, str, str]]:
    """Step, loss and accuracy of each line of progress."""
    return re.findall(r"^step (\d+)/\d+  loss (\S+)  accuracy by depth ([\d. ]+)  ", out, re.M)


def complaint(ended: Ended) -> str:
    """Return the only sentence on stderr, of a run that ended on bad input before it did anything."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err and not printed(ended.out)
    lines = [line.removeprefix("error: ") for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and ended.err.rstrip().endswith(lines[0]), ended.err
    return lines[0]


def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Yield a folder that is a file system of this size."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs Linux, and the right to mount one")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


class Served:
    """A server as users start it."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none") -> Any:
        import openai  # the fixtures of all tests import this file

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def raw(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> socket.socket:
        """Return a connection that has sent this and read nothing."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        facts = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))} | headers
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in facts.items())
        connection.sendall(head.encode() + b"\r\n" + body)
        return connection

    def post(
        self, body: bytes, path: str = "/v1/chat/completions", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        with self.raw(body, path, Connection="close", **headers) as connection:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def metric(self, name: str, label: str = "") -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", answer.read().decode(), re.M)
        return sum(float(value) for labels, value in found if label in labels)

    def logged(self) -> list[dict]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


def on_cpu(target: Path | str) -> list[str]:
    """Return settings of a small target."""
    return [f"target={target}", "target.dtype=float32", "target.device=cpu"]


@contextmanager
def served(folder: Path, *arguments: str, program: str = "scripts/serve.py", **environment: str) -> Iterator[Served]:
    """Yield `python scripts/serve.py` with these arguments, once it answers; it is killed at the end if it still runs."""
    number, log = tempfile.mkstemp(".log", "serve-", folder)
    command = [python_for(environment), str(ROOT / program), "port=0", *arguments]
    with open(number, "w") as opened:
        process = subprocess.Popen(command, cwd=folder, env=inherited() | environment, stdout=opened, stderr=opened)
    try:
        while not (running := re.search(r"Uvicorn running on http://127\.0\.0\.1:(\d+)", Path(log).read_text())):
            assert process.poll() is None, Path(log).read_text()
            time.sleep(0.1)
        yield Served(process, int(running[1]), Path(log))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait for a condition; the limit is the test's own (pytest-timeout)."""
    while not condition():
        time.sleep(0.02)
