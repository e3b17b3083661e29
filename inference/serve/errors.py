"""Errors in OpenAI's format."""

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """End a request. code: one of the error codes of OpenAI's API, which clients recognize."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # ASCII, because a message may quote half of a surrogate pair, which UTF-8 cannot encode.
        return Response(json.dumps(self.body()), self.status_code, self.headers, media_type="application/json")


def context_exceeded(context: int, requested: str, shorten: str, param: str) -> ApiError:
    """Return the error for a text that is too long, in OpenAI's words."""
    message = (
        f"This model's maximum context length is {context} tokens. However, you requested {requested}. "
        f"Please reduce the length of the {shorten}."
    )
    return ApiError(400, message, param, "context_length_exceeded")
