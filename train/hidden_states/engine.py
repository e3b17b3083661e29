"""The client of an engine that gives a target's hidden states, by the protocol of vLLM's `extract_hidden_states`.

    POST <url>/completions   {"prompt": [token ids], "max_tokens": 1, ...}
    answer                   {"kv_transfer_params": {"hidden_states_path": "/dev/shm/states/cmpl-....safetensors"}, ...}

The file lies on a disk that both sides see, holds hidden_states (tokens, layers, hidden) and token_ids (tokens,), and is
written under its own lock, FILE.lock. Who has read both deletes them.
"""

import atexit
import contextlib
import fcntl
import hashlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.train.runtime import distributed

BUSY = (408, 409, 425, 429)  # with 5xx: statuses that may be others the next time


class EngineError(ValueError):
    """Carry one sentence for the user."""


class Transient(Exception):
    """Signal a failure that may be over when the request is sent again."""


# A dead engine, a cut answer, half a file, and what is not an answer of an engine at all.
TRANSIENT = (Transient, OSError, http.client.HTTPException, SafetensorError, ValueError, LookupError, TypeError)


class States(NamedTuple):
    """Hold what an engine returns for a text."""

    tensor: Tensor  # (tokens, layers, hidden), in the dtype of the engine
    layers: list[int] | None  # None if the engine does not report them
    written: list[int]  # the token that it wrote; empty if it does not report it


class Client:
    def __init__(self, url: str | list[str], run: str, timeout: float, patience: float):
        """Connect to an engine, or to several. run: the directory of the run. timeout: seconds for one answer. patience:
        seconds until a request that nobody answers ends the run. Raise ValueError for other values."""
        self.urls = list(dict.fromkeys(one.rstrip("/") for one in ([url] if isinstance(url, str) else url)))
        if not self.urls or not all(re.match("https?://", one) for one in self.urls) or timeout <= 0 or patience < 0:
            raise ValueError(
                f"hidden_states.url={url}, timeout={timeout}, patience={patience}: give http://HOST:PORT/v1, and seconds"
            )
        self.timeout, self.patience = timeout, patience
        owner = f"{os.path.abspath(run)} {distributed.rank()}"
        # Part of the name of every file that is written for this client.
        self.tag = f"foredraft-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        self.models: dict[str, str] = {}  # as each engine calls what it serves
        self.columns: dict[str, list[int]] = {}  # which of its layers are wanted, and in which order
        self.folders: set[Path] = set()  # where files were found
        self.process, self.busy, self.stopping, self.said = os.getpid(), False, False, False
        atexit.register(self.close)  # before multiprocessing's own, which waits for the workers

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Surround all requests for a row. In a worker of a DataLoader what was asked for is read and deleted in any case:
        terminals and schedulers send their signals to all processes, and the trainer still wants to finish its step."""
        if self.process != os.getpid():
            self.process = os.getpid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, self.leave)
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            if self.stopping:
                os._exit(0)

    def leave(self, number: int, frame: Any) -> None:
        self.stopping = True
        if not self.busy:
            os._exit(0)

    def close(self) -> None:
        """Let the workers go, and delete what was written and never read."""
        workers = [child for child in multiprocessing.active_children() if child.daemon]
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGUSR1)
        for worker in workers:
            worker.join(self.timeout)
        self.delete_stale_files()

    def delete_stale_files(self) -> None:
        """Delete stale files, also those of an earlier process that was killed: it had the same tag."""
        for folder in self.folders:
            for file in folder.glob(f"*{self.tag}*"):
                file.unlink(missing_ok=True)

    def states(self, tokens: list[int], urls: list[str]) -> States:
        """Return the states of the first of these engines, or if it is gone of the next one, and so on. Raise EngineError for
        a request that is refused, or that nobody has answered for `patience` seconds."""
        begun, wait = time.monotonic(), 0.25
        for url in itertools.cycle(urls):
            try:
                found = self.ask(url, tokens)
                self.said = False
                return found._replace(tensor=found.tensor[:, self.columns[url]]) if url in self.columns else found
            except EngineError:
                raise
            except TRANSIENT as error:
                reason = f"{error or type(error).__name__}".strip().split("\n")[0]
            if time.monotonic() - begun + wait > self.patience or self.is_orphaned():
                raise EngineError(
                    f"hidden_states.url={url} has given no hidden states for {self.patience:g} s ({reason}): see that the "
                    "engine runs; the same command continues from the newest checkpoint"
                )
            if not self.said:  # once for each time that engines are gone
                wanted = f"asking again, {self.patience:g} s at most"
                print(
                    f"hidden_states.url={url} gives no hidden states ({reason}): {wanted}", file=sys.stderr, flush=True
                )
            self.said = True
            time.sleep(wait * random.uniform(0.75, 1.0))
            wait = min(2.0, 2 * wait)
        raise AssertionError("no urls")

    def is_orphaned(self) -> bool:
        """Return whether nobody waits for an answer any more."""
        parent = multiprocessing.parent_process()
        return self.stopping or (parent is not None and not parent.is_alive())

    def ask(self, url: str, tokens: list[int]) -> States:
        if url not in self.models:
            self.models[url] = self.send(url, "models")["data"][0]["id"]
        asked = {"model": self.models[url], "prompt": tokens, "max_tokens": 1, "temperature": 0.0}
        answer = self.send(url, "completions", asked | {"return_token_ids": True})
        parameters, choices = answer.get("kv_transfer_params") or {}, answer.get("choices") or [{}]
        path = parameters.get("hidden_states_path")
        if path is None:
            raise EngineError(
                f"hidden_states.url={url} answers without hidden states: start it as in conf/hidden_states/server.yaml"
            )
        if self.tag not in Path(path).name:  # it is read and deleted
            raise EngineError(
                f"hidden_states.url={url} names {path}, which is not a file of this request: its id is not in the name"
            )
        self.folders.add(Path(path).parent)
        tensor = collect(Path(path), tokens, time.monotonic() + self.timeout)
        return States(tensor, parameters.get("layers"), choices[0].get("token_ids") or [])

    def send(self, url: str, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer. vLLM names files by the request's id, which starts with `tag`."""
        headers = {"Content-Type": "application/json", "X-Request-Id": f"{self.tag}-{uuid.uuid4().hex}"}
        headers["Authorization"] = f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(f"{url}/{route}", data, headers)
            with urllib.request.urlopen(request, timeout=self.timeout) as got:
                found = json.load(got)
        except urllib.error.HTTPError as error:
            said = error.read(300).decode(errors="replace")
            if error.code >= 500 or error.code in BUSY:
                raise Transient(f"status {error.code}: {said}") from None
            raise EngineError(
                f"hidden_states.url={url} refuses a request (status {error.code}: {' '.join(said.split())}): give an address "
                "such as http://HOST:8000/v1 of an engine that reads at least max_length + 1 tokens"
            ) from None
        if not isinstance(found, dict):
            raise Transient("an answer that is not an object")
        return found


def collect(path: Path, tokens: list[int], deadline: float) -> Tensor:
    """Return the hidden states in an engine's file for these tokens, and delete the file and its lock."""
    lock = Path(f"{path}.lock")
    try:
        with contextlib.suppress(FileNotFoundError), lock.open() as opened:
            wait_for(opened, deadline)
        with safe_open(path, "pt") as found:
            read, states = found.get_tensor("token_ids").tolist(), found.get_tensor("hidden_states")
    finally:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    if read != tokens or states.ndim != 3 or len(states) != len(tokens):
        raise Transient(f"{path.name} holds states {tuple(states.shape)} of other tokens than were asked for")
    return states


def wait_for(lock: Any, deadline: float) -> None:
    """Wait until the file's writer has finished, or is dead."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if time.monotonic() > deadline:
            raise Transient(f"{lock.name} stays locked")
        time.sleep(0.005)
