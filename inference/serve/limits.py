"""Checks of every request before it is handled: API key, Host, and the type, size and duration of its body.

The key protects /v1/, as in vLLM. Other paths need none, on any host: / (the page), /health, /openapi.json and /metrics. They
name models, tenants and heads and count requests, but never contain text.
"""

import asyncio
import hmac
import re
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.inference.serve.address import is_loopback
from foredraft.inference.serve.errors import ApiError

MAX_HEADERS = 2**14  # bytes
BODY_SECONDS = 120  # timeout for a whole body


class Gate:
    """Check requests. api_key: required as a bearer token for /v1/, or None. max_body: bytes. seen(path, status): called once
    per response. local_only: refuse a Host that is not a name of this machine. Otherwise a web page could point its own name
    here (DNS rebinding) and send requests without a key."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, max_body: int, seen: Callable[[str, int], None], local_only: bool
    ):
        self.app, self.api_key, self.max_body, self.seen, self.local_only = app, api_key, max_body, seen, local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        received, whole, ends = 0, False, asyncio.get_running_loop().time() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal received, whole
            try:
                # After the body, the next message is the disconnect of the client.
                async with asyncio.timeout_at(None if whole else ends):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {BODY_SECONDS} seconds") from None
            received, whole = received + len(message.get("body", b"")), not message.get("more_body", False)
            if received > self.max_body:
                raise self.too_large
            return message

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.seen(scope["path"], message["status"])
            await send(message)

        refused = self.refusal(scope["method"], scope["path"], Headers(scope=scope))
        await (refused.response() if refused else self.app)(scope, counted, noted)

    @property
    def too_large(self) -> ApiError:
        message = f"the body is larger than the limit of {self.max_body} bytes"
        return ApiError(413, message, headers={"connection": "close"})

    def refusal(self, method: str, path: str, headers: Headers) -> ApiError | None:
        """Return the error of a request, before its body is read; None if it passes."""
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
            return ApiError(431, f"the headers are larger than {MAX_HEADERS} bytes", headers={"connection": "close"})
        host = headers.get("host", "localhost")  # checks of load balancers in HTTP/1.0 have none, browsers always do
        if self.local_only and not is_loopback(re.sub(r":\d+$", "", host)):
            remedy = "set FOREDRAFT_API_KEY, or start the server with insecure=true"
            return ApiError(403, f"Host {host[:100]!r} is not this machine: {remedy}")
        if path.startswith("/v1/") and self.api_key is not None:
            given = re.sub("^bearer +", "", headers.get("authorization", ""), flags=re.IGNORECASE)
            if not hmac.compare_digest(given.encode(), self.api_key.encode()):
                wanted = {"www-authenticate": "Bearer"}
                return ApiError(401, "the API key is missing or invalid", code="invalid_api_key", headers=wanted)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            # Pages of other sites may send any other type, or none, without permission from the browser (CORS).
            return ApiError(415, f"Content-Type {kind!r} is not supported: send application/json")
        length = headers.get("content-length", "0")
        return self.too_large if length.isdecimal() and int(length[:20]) > self.max_body else None
