"""The web application: its routes, its errors, and its process."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from foredraft.inference.serve.accepted_log import AcceptedLog
from foredraft.inference.serve.errors import ApiError
from foredraft.inference.serve.followed_head import FollowedHead
from foredraft.inference.serve.limits import Gate
from foredraft.inference.serve.openai.protocol import ChatRequest, CompletionRequest
from foredraft.inference.serve.openai.responses import ResponsesAnswer
from foredraft.inference.serve.openai.responses_protocol import ResponsesRequest
from foredraft.inference.serve.service import INTERNAL_ERROR, Service
from foredraft.inference.serve.worker import Worker

KEEP_ALIVE = 120  # seconds of an idle connection: more than in clients (Go 90, nginx 60), which would meet a closed one
PAGE = Path(__file__).with_name("page.html")
# Forbid content of other hosts, and embedding in other pages. Inline code is the page's.
PAGE_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def create_app(
    worker: Worker,
    names: Sequence[str],
    max_tokens: int | None = None,
    max_body: int = 2**22,
    api_key: str | None = None,
    logs: Sequence[Sequence[AcceptedLog]] = (),
    local_only: bool = False,
    cors: Sequence[str] = (),
    heads: Sequence[FollowedHead] = (),
) -> FastAPI:
    """Create the application, which starts and stops the worker. max_body: bytes of a request's body. cors: origins whose
    pages may send requests. heads: those that may change. See `Service` and `Gate`."""
    service = Service(worker, names, max_tokens, logs or [()] * len(names))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        tasks = [asyncio.create_task(head.follow()) for head in heads]
        yield
        for task in tasks:
            task.cancel()
        worker.stop()

    app = FastAPI(title="foredraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.worker = worker
    add_answer_routes(app, service)
    add_status_routes(app, service)
    add_error_handlers(app)
    paths = {route.path for route in app.routes if isinstance(route, Route)}

    def seen(path: str, status: int) -> None:
        service.metrics.requests.labels(path if path in paths else "other", status).inc()

    app.add_middleware(Gate, api_key=api_key, max_body=max_body, seen=seen, local_only=local_only)
    if cors:  # outermost: a preflight has no key
        allowed: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "allow_private_network": True}
        app.add_middleware(CORSMiddleware, allow_origins=cors, **allowed)
    return app


def add_answer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: ChatRequest, raw_request: Request) -> Response:
        return await service.answer(request, raw_request)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: CompletionRequest, raw_request: Request) -> Response:
        return await service.answer(request, raw_request)

    @app.post("/v1/responses", response_model=None)
    async def responses(request: ResponsesRequest, raw_request: Request) -> Response:
        return await service.answer(request.chat(), raw_request, partial(ResponsesAnswer, request))


def add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models/", include_in_schema=False)  # as some clients join their base URL and "models/"
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model(name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.tenant(name)
        return service.model(name)

    @app.head("/health", include_in_schema=False)  # load balancers and `wget --spider` ask so
    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.worker.is_alive()
        return JSONResponse({"status": "ok" if alive else "dead"}, 200 if alive else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"content-security-policy": PAGE_POLICY})


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(raw_request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        if first["type"] == "extra_forbidden":
            message, code = f"Unknown parameter: {param!r}: remove it", "unknown_parameter"
            return ApiError(400, message, param, code).response()
        if first["type"] == "json_invalid":
            return ApiError(400, f"the body is not JSON: {first['ctx']['error']} at character {param}").response()
        message = first["msg"].removeprefix("Value error, ")
        return ApiError(400, f"{param}: {message}" if param else message, param).response()

    @app.exception_handler(HTTPException)
    async def refused(raw_request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            path, headers, message = repr(raw_request.url.path[:100]), dict(error.headers or {}), error.detail
            if error.status_code == 404:
                message = f"{path} is not served here: /openapi.json lists all paths. A client's base URL ends with /v1"
            elif error.status_code == 400:
                message = "the body cannot be read: send JSON in UTF-8, uncompressed, without extreme depth or numbers"
            elif error.status_code == 405:
                message = f"{raw_request.method} is not supported by {path}: use {headers['Allow']}"
            error = ApiError(error.status_code, message, headers=headers)
        return error.response()

    @app.exception_handler(Exception)
    async def bug(raw_request: Request, error: Exception) -> Response:
        return ApiError(500, INTERNAL_ERROR).response()


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {"time": round(record.created, 3), "level": record.levelname, "message": record.getMessage()}
        facts |= record.__dict__.get("facts", {})
        return json.dumps(facts | ({"trace": self.formatException(record.exc_info)} if record.exc_info else {}))


def run(app: FastAPI, host: str, port: int, drain: float = 30.0) -> None:
    """Serve until SIGTERM or SIGINT. Then reject new requests, and give running ones `drain` seconds to finish. The process
    exits with 1 if the worker died or the server did not start."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    settings: dict[str, Any] = {"http": "h11", "server_header": False, "access_log": False, "log_config": None}
    settings |= {"timeout_graceful_shutdown": round(drain), "timeout_keep_alive": KEEP_ALIVE}
    server = uvicorn.Server(uvicorn.Config(app, host, port, **settings))
    app.state.worker.on_death = partial(setattr, server, "should_exit", True)
    with suppress(KeyboardInterrupt):
        server.run()
    if app.state.worker.dead or not server.started:
        sys.exit(1)
