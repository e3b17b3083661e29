"""A server as users start it, in a separate process on a free loopback port."""

import http.client
import json
import re
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.support import ROOT
from tests.support.processes import inherited, python_for


class Served:
    def __init__(self, process: subprocess.Popen, port: int, log: Path):
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

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
