"""engine=vllm learn=true: vLLM behind a process that stores served texts, and loads better heads into it while it runs.

    clients -> Proxy -> vLLM, on a private socket: whoever can reach it may change the weights
                 |
       token ids of prompts and answers -> Learning -> InVllm.swap

Requests wait while weights change, and none is lost. vLLM does not report which drafts it accepted, so all tokens have equal
weight in training, and a worse head is not detected later.
"""

import asyncio
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from safetensors import safe_open
from starlette.types import Receive, Scope, Send

from foredraft.inference.serve.app import protect
from foredraft.inference.serve.learning import Learning
from foredraft.inference.serve.limits import error_response
from foredraft.inference.serve.service import unless_disconnected

log = logging.getLogger("foredraft.serve")
logging.getLogger("httpx2").setLevel(logging.WARNING)  # at INFO it logs a line per request
LEARNABLE = ("/v1/completions", "/v1/chat/completions")
OPEN = ("/health", "/version", "/tokenize", "/detokenize")  # in addition to /v1/, but nothing that changes the server
EXTENSION = "foredraft_weights"  # the name of vllm_weights.py in vLLM's workers
GONE = "vLLM has ended; this server ends"


class InVllm:
    """Run vLLM's process, and replace the head in it."""

    def __init__(self, program: str, command: Callable[[Path], list[str]], export: Callable[[Path, Path], Any]):
        """Prepare the command, after writing its head to a folder. export(head, folder): writes a head."""
        self.folder = Path(tempfile.mkdtemp(prefix="foredraft-vllm-"))  # only for this user
        self.program, self.export = program, export
        self.head, self.exported = "", self.folder / "first"
        self.socket = self.folder / "socket"
        shutil.copy(Path(__file__).with_name("vllm_weights.py"), self.folder / f"{EXTENSION}.py")
        more = {"uds": self.socket, "weight-transfer-config": '{"backend": "foredraft"}'}
        more["worker-extension-cls"] = f"{EXTENSION}.Extension"
        self.command = command(self.exported) + [
            word for key, value in more.items() for word in (f"--{key}", str(value))
        ]
        self.client = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(self.socket)), base_url="http://vllm", timeout=300
        )
        self.open = 0  # number of unfinished requests
        self.dead, self.stopping = False, False
        self.on_death: Callable[[], object] = lambda: None

    def start(self) -> None:
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("VLLM_API_KEY", None)  # this process checks the key, and nobody else can reach the socket
        command = [self.program, *self.command[1:]]
        self.process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        code = self.process.wait()
        self.dead = not self.stopping
        if self.dead:
            log.critical("vLLM has ended with exit code %s", code)
            self.on_death()

    def stop(self) -> None:
        self.stopping = True
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder)

    def call(self, path: str, body: Any = None) -> None:
        answer = self.client.post(path, json=body)
        if answer.is_error:
            raise RuntimeError(f"vLLM's {path} returned {answer.status_code}: {answer.text[:300]}")

    def swap(self, head: Path) -> None:
        new = self.folder / head.name
        self.export(head, new)
        if tensor_shapes(new) != tensor_shapes(self.exported):
            shutil.rmtree(new)
            raise ValueError("vLLM can only replace the weights of a head, but the new tensors have other shapes")
        try:
            self.call("/pause?mode=keep")
            self.load(new)
            self.call("/resume")
        except Exception:
            self.process.kill()  # its head is partially loaded, and requests are blocked
            raise
        shutil.rmtree(self.exported)
        self.exported, self.head = new, head.name

    def load(self, folder: Path) -> None:
        self.call("/start_draft_weight_update")
        self.call("/update_weights", {"update_info": {"path": str(folder)}})
        self.call("/finish_weight_update", {"weight_version": folder.name})


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    found = dict[str, list[int]]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Proxy:
    def __init__(self, vllm: InVllm, learning: Learning):
        self.vllm, self.learning = vllm, learning
        transport = httpx2.AsyncHTTPTransport(uds=str(vllm.socket), limits=httpx2.Limits(max_connections=None))
        self.client = httpx2.AsyncClient(transport=transport, base_url="http://vllm", timeout=None)

    async def wait_until_ready(self) -> None:
        """Wait until vLLM answers. Raises RuntimeError if it ends before."""
        while True:
            try:
                if (await self.client.get("/health")).is_success:
                    return
            except httpx2.TransportError:
                if self.vllm.dead:
                    raise RuntimeError(GONE) from None
            await asyncio.sleep(0.2)

    async def answer(self, request: Request) -> Response:
        path = request.url.path
        if ".." in path or not (path.startswith("/v1/") or path in OPEN):
            return error_response(f"{path} does not exist", 404)
        body, fields = await request.body(), None
        if path in LEARNABLE and request.method == "POST":
            fields = parse_learnable_request(body)
            body = body if fields is None else json.dumps({**fields, "return_token_ids": True}).encode()
        kinds = {name: request.headers[name] for name in ("content-type", "accept") if name in request.headers}
        kinds["accept-encoding"] = "identity"
        url = httpx2.URL(path=path, query=request.url.query.encode())
        sent = self.client.build_request(request.method, url, content=body, headers=kinds)
        answers = list[httpx2.Response]()

        async def send() -> None:
            answers.append(await self.client.send(sent, stream=True))

        ended = self.begin()
        try:
            if not await unless_disconnected(request, send()):
                return Response(status_code=499)
            return Relay(answers[0], fields, self.learning, ended)
        except httpx2.TransportError as error:
            return error_response(GONE if self.vllm.dead else f"vLLM does not answer: {error}", 503)
        finally:
            if not answers:  # otherwise the relay does this
                ended()

    def begin(self) -> Callable[[], None]:
        """Count a new request, and return a function to call at its end."""
        self.vllm.open += 1
        self.learning.background.on_request()

        def end() -> None:
            self.vllm.open -= 1

        return end

    async def metrics(self) -> Response:
        """Return vLLM's metrics and two more."""
        theirs = await self.client.get("/metrics")
        head, seconds = self.vllm.head, self.learning.background.seconds
        ours = f'foredraft_head{{head="{head}"}} 1\nforedraft_learning_seconds {seconds:.3f}\n'
        return Response(theirs.text + ours, media_type="text/plain; version=0.0.4")


class Relay(StreamingResponse):
    """Forward vLLM's answer as it arrives. In any case, the received part is stored for training."""

    def __init__(
        self, answer: httpx2.Response, fields: dict[str, Any] | None, learning: Learning, ended: Callable[[], None]
    ):
        kept = {name: answer.headers[name] for name in ("content-type", "content-length") if name in answer.headers}
        super().__init__(self.relay(), answer.status_code, kept)
        self.answer, self.fields, self.learning, self.ended = answer, fields, learning, ended
        self.received = bytearray()

    async def relay(self) -> AsyncIterator[bytes]:
        async for part in self.answer.aiter_bytes():
            if self.fields is not None:
                self.received += part
            yield part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()
            if self.fields is not None and self.answer.is_success:
                self.learning.add(samples_of(self.fields, bytes(self.received)))
            await self.answer.aclose()


def parse_learnable_request(body: bytes) -> dict[str, Any] | None:
    """Return the request if it may be used for training."""
    try:
        fields = json.loads(body)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and fields.get("store") is not False else None


def samples_of(fields: dict[str, Any], answer: bytes) -> list[dict[str, Any]]:
    """Return the samples of an answer, or of the received part of a streamed one, for traffic.py."""
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines()]
    prompt: list[int] = []
    samples = dict[int, dict[str, Any]]()
    for part in (json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")):
        prompt = part.get("prompt_token_ids") or prompt
        for choice in part.get("choices", ()):
            sample = samples.setdefault(
                choice["index"], {"id": f"{part['id']}-{choice['index']}", "prompt_ids": [], "ids": []}
            )
            sample["prompt_ids"] = choice.get("prompt_token_ids") or sample["prompt_ids"] or prompt
            sample["ids"] += choice.get("token_ids") or []
    drawn: dict[str, Any] = {"seed": number(fields.get("seed"), 0), "accepted": [], "drafted": []}
    drawn["temperature"] = number(fields.get("temperature"), 1.0)
    return [sample | drawn for sample in samples.values() if sample["prompt_ids"] and sample["ids"]]


def number(value: Any, usual: float) -> float:
    """Convert a value like vLLM, which accepts numbers as text; None and invalid values become `usual`."""
    try:
        return type(usual)(usual if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return usual


def create_proxy(
    vllm: InVllm, learning: Learning, max_body: int, api_key: str | None, local_only: bool, cors: Sequence[str]
) -> FastAPI:
    """Create the application, which starts and stops vLLM. See `protect`."""
    proxy = Proxy(vllm, learning)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        vllm.start()
        try:
            await proxy.wait_until_ready()
            learning.start()
            yield
            learning.stop()
        finally:
            vllm.stop()

    app = FastAPI(title="foredraft", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.worker = vllm
    protect(app, cors, api_key=api_key, max_body=max_body, seen=lambda path, status: None, local_only=local_only)
    app.add_api_route("/metrics", proxy.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/{path:path}", proxy.answer, methods=["GET", "POST"], response_model=None)
    return app
