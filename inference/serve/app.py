"""The routes. Nothing here decodes: requests go to the worker's thread, and its outputs come back."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from foredraft import inference as decoding
from foredraft.inference.grammar import Grammar, Grammars
from foredraft.inference.min_tokens import MinTokens
from foredraft.inference.serve import tools
from foredraft.inference.serve.accepted_log import AcceptedLog
from foredraft.inference.serve.completion import Answer, Echo
from foredraft.inference.serve.learning import Learning
from foredraft.inference.serve.limits import Gate, Refused, error_body, error_response
from foredraft.inference.serve.metrics import Metrics
from foredraft.inference.serve.prompts import PromptEncoder
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest, CompletionRequest
from foredraft.inference.serve.worker import Failed, QueueFull, Worker

log = logging.getLogger("foredraft.serve")
PATHS = ("/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/completions", "/v1/chat/completions")
ENDLESS = 2**16  # tokens of an answer of a target without a context, whose request and config name none
PAGE = Path(__file__).with_name("page.html")
# Nothing of another host, nobody's frame; what is inline is the page's own.
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RETRY_AFTER = "1"  # seconds
BUG = "the server met an error of its own; see its log"


class EventStream(StreamingResponse):
    """Ends its answer however it ends itself: also where the client has gone before the first byte."""

    def __init__(self, answer: Answer, ended: Any):
        super().__init__(self.events(answer), media_type="text/event-stream", headers={"cache-control": "no-store"})
        self.ended = ended

    async def events(self, answer: Answer) -> AsyncIterator[str]:
        try:
            async for chunk in answer.chunks():
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        except Failed as failed:
            yield f"data: {json.dumps(error_body(str(failed), failed.status))}\n\n"
        except Exception:
            log.exception("a stream failed")
            answer.failure = Failed(BUG)
            yield f"data: {json.dumps(error_body(BUG, 500))}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.ended()


class Service:
    """What the routes share."""

    def __init__(
        self,
        worker: Worker,
        name: str,
        max_tokens: int | None,
        accepted_log: AcceptedLog | None,
        learning: Learning | None,
    ):
        """name: of the model, for clients. max_tokens: of an answer whose request names none; None: what the context has."""
        self.accepted_log, self.learning = accepted_log, learning
        self.worker, self.name, self.max_tokens = worker, name, max_tokens
        self.metrics = Metrics(worker, learning)
        self.target = worker.target
        self.encoder, self.encoding = PromptEncoder(self.target), ThreadPoolExecutor(1, "tokenizer")
        # Of their own: a schema that takes seconds to compile holds up nobody.
        self.grammars: Grammars | None = None
        self.compiling = ThreadPoolExecutor(4, "grammar")

    def model(self) -> dict[str, Any]:
        facts = {"id": self.name, "object": "model", "created": 0, "owned_by": "foredraft"}
        return {**facts, "max_model_len": self.worker.context()}

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"The model {name!r} does not exist: {self.name!r} is served here"
            raise Refused(404, message, "model", "model_not_found")

    async def answer(self, asked: ChatRequest | CompletionRequest, request: Request) -> Response:
        self.check_model(asked.model)
        answer = await self.begin(asked)
        ended = partial(self.ended, answer, request.url.path)
        if asked.stream:
            return EventStream(answer, ended)
        try:
            stayed = await read_whole(answer, request)
            return JSONResponse(answer.whole()) if stayed else Response(status_code=499)
        finally:
            ended()

    async def begin(self, asked: ChatRequest | CompletionRequest) -> Answer:
        """Submit its texts. They are counted before anything is made of them, so only so many wait to be encoded."""
        encode: Any = self.encoder.chat if isinstance(asked, ChatRequest) else self.encoder.completion
        loop, submitted = asyncio.get_running_loop(), False
        try:
            self.worker.reserve(asked.num_texts)
            try:
                prompts = await loop.run_in_executor(self.encoding, encode, asked)
                grammar = await loop.run_in_executor(self.compiling, self.grammar, asked) if asked.has_grammar else None
                requests = self.requests(asked, prompts, grammar)
                echoes = await self.echoes(asked, prompts)
                jobs = self.worker.submit(requests, asked.speculative)
                submitted = True
            finally:
                if not submitted:
                    self.worker.release(asked.num_texts)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return Answer(self.worker, jobs, asked, self.name, sum(map(len, prompts)), echoes)

    async def echoes(self, asked: ChatRequest | CompletionRequest, prompts: list[list[int]]) -> list[Echo]:
        """The prompts, where they stand before their texts, with their log-probabilities where these were asked for."""
        if isinstance(asked, ChatRequest) or not asked.echo:
            return []
        loop, found = asyncio.get_running_loop(), []
        for prompt in prompts:
            top = asked.logprobs
            scored = [] if top is None else await asyncio.wrap_future(self.worker.score(prompt, top))
            found.append(await loop.run_in_executor(self.encoding, Echo.of, self.encoder.tokenizer, prompt, scored))
        return found

    def grammar(self, asked: CommonRequest) -> Grammar | None:
        self.grammars = self.grammars or Grammars(self.target)
        return tools.grammar(asked, self.target.text_tokenizer.chat_template, self.grammars)

    def requests(
        self, asked: CommonRequest, prompts: list[list[int]], grammar: Grammar | None
    ) -> list[decoding.Request]:
        unknown = [token for token in asked.stop_token_ids if not 0 <= token < self.target.vocab_size]
        if unknown:
            raise ValueError(f"stop_token_ids names {unknown}: tokens are 0 to {self.target.vocab_size - 1}")
        ends = frozenset([*self.target.eos_token_ids, *asked.stop_token_ids])
        rule = MinTokens(asked.min_tokens, ends) if asked.min_tokens else grammar
        params, seed = asked.sampling(self.target.vocab_size, rule), asked.first_seed()
        trace = asked.top_tokens if asked.top_tokens is not None else 0 if asked.trace else None
        rooms = [self.room(asked, len(prompt)) for prompt in prompts]
        return [
            decoding.Request(prompt, params, most, seed + index, ends, asked.stop_strings, trace)
            for index, (prompt, most) in enumerate(
                pair for pair in zip(prompts, rooms, strict=True) for _ in range(asked.n)
            )
        ]

    def room(self, asked: CommonRequest, prompt: int) -> int:
        """Tokens that the answer to a prompt of so many may have. Raises Refused, in OpenAI's words: clients search them."""
        context, most = self.worker.context(asked.speculative), asked.budget
        if context is None:
            return most or self.max_tokens or ENDLESS
        if prompt + (most or 1) > context:
            where = "messages" if isinstance(asked, ChatRequest) else "prompt"
            message = (
                f"This model's maximum context length is {context} tokens. However, you requested {prompt + (most or 1)} "
                f"tokens ({prompt} in the {where}, {most or 1} in the completion). Please reduce the length of the {where} "
                "or completion."
            )
            raise Refused(400, message, where, "context_length_exceeded")
        return most or min(context - prompt, self.max_tokens or context)

    def ended(self, answer: Answer, path: str) -> None:
        answer.close()
        seconds = time.monotonic() - answer.began
        self.metrics.ended(answer, seconds)
        if self.accepted_log is not None and answer.asked.store is not False:
            try:
                self.accepted_log.write(answer)
            except OSError as error:  # a full disk, say, which takes no answer from anybody
                log.error("the log of accepted drafts cannot be written: %s", error)
        if self.learning is not None and answer.asked.store is not False:
            self.learning.write(answer)
        unended = "cancelled" if answer.failure is None else "error"
        reasons = [choice.finish_reason or unended for choice in answer.choices.values()]
        facts = {"id": answer.id, "path": path, "seconds": round(seconds, 3), "finish_reasons": reasons}
        log.info("request", extra={"facts": {**facts, **answer.usage()}})


async def read_whole(answer: Answer, request: Request) -> bool:
    """Wait for the whole answer; False if the client has gone meanwhile. Raises Failed."""

    async def read() -> None:
        async for _ in answer.pieces():
            pass

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reading, leaving = asyncio.ensure_future(read()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        return reading.done()
    finally:
        reading.cancel()
        leaving.cancel()


def create_app(
    worker: Worker,
    name: str,
    max_tokens: int | None = None,
    max_body: int = 2**22,
    api_key: str | None = None,
    accepted_log: AcceptedLog | None = None,
    local_only: bool = False,
    cors: Sequence[str] = (),
    learning: Learning | None = None,
) -> FastAPI:
    """The application; it starts the worker and stops it. max_body: bytes of a request's body. cors: origins whose pages may
    ask. See `Service`, `Gate`."""
    service = Service(worker, name, max_tokens, accepted_log, learning)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        if learning is not None:
            learning.start()
        yield
        if learning is not None:
            learning.stop()
        worker.stop()

    app = FastAPI(title="foredraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.worker = worker

    def seen(path: str, status: int) -> None:
        service.metrics.requests.labels(path if path in PATHS else "other", status).inc()

    app.add_middleware(Gate, api_key=api_key, max_body=max_body, seen=seen, local_only=local_only)
    if cors:  # outermost: a preflight has no key
        app.add_middleware(CORSMiddleware, allow_origins=cors, allow_methods=["*"], allow_headers=["*"])
    add_error_handlers(app)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await service.answer(asked, request)

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.answer(asked, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model()

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok" if worker.is_alive() else "dead"}, 200 if worker.is_alive() else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": PAGE_POLICY})

    return app


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            return error_response(
                f"Unknown parameter: {param!r}: leave it out", 400, param=param, code="unknown_parameter"
            )
        return error_response(f"{param}: {message}" if param else message, 400, param=param)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        facts = {"param": error.param, "code": error.code} if isinstance(error, Refused) else {}
        return error_response(str(error.detail), error.status_code, dict(error.headers or {}), **facts)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> Response:
        return error_response("too many requests wait: try again", 429, {"retry-after": RETRY_AFTER})

    @app.exception_handler(Failed)
    async def failed(request: Request, error: Failed) -> Response:
        return error_response(str(error), error.status)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return error_response(BUG, 500)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"time": round(record.created, 3), "level": record.levelname, "message": record.getMessage()}
        facts |= record.__dict__.get("facts", {})
        return json.dumps(facts | ({"trace": self.formatException(record.exc_info)} if record.exc_info else {}))


def run(app: FastAPI, host: str, port: int, drain: float = 30.0) -> None:
    """Serve until SIGTERM or SIGINT; then take no new request, and give those that run `drain` seconds to end. Where the
    worker died, or the server never started, the process exits with 1."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    settings: dict[str, Any] = {"http": "h11", "server_header": False, "access_log": False, "log_config": None}
    server = uvicorn.Server(uvicorn.Config(app, host, port, timeout_graceful_shutdown=round(drain), **settings))
    app.state.worker.on_death = partial(setattr, server, "should_exit", True)
    with suppress(KeyboardInterrupt):
        server.run()
    if app.state.worker.dead or not server.started:
        sys.exit(1)
