"""Answers in the format of OpenAI's Responses API: items, and events that describe how they grow."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from foredraft.inference.serve.errors import ApiError
from foredraft.inference.serve.openai.choice import Piece
from foredraft.inference.serve.openai.completion import Answer
from foredraft.inference.serve.openai.responses_protocol import ResponsesRequest
from foredraft.inference.serve.openai.tools import decode_json

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}  # of ids


class ResponsesAnswer(Answer):
    """Build the items and events of an answer. An event shares its data, so it is valid until the next one is made."""

    def __init__(self, request: ResponsesRequest, *given: Any):
        super().__init__(*given)
        self.responses_request, self.id = request, f"resp_{uuid.uuid4().hex}"
        self.output, self.logprobs = list[dict[str, Any]](), list[dict[str, Any]]()
        self.number = self.reasoning_tokens = 0

    def body(self) -> dict[str, Any]:
        (choice,) = self.choices.values()
        reason = choice.whole.finish_reason
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        error = None if self.failure is None else {"code": "server_error", "message": self.failure.detail}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status if error is None else "failed",
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": self.output,
            **self.responses_request.echo(),
            "background": False,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "metadata": {},
            "usage": None if reason is None else self.usage_details(),
        }

    def usage_details(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage.pop("prompt_tokens"),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.pop("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            **usage,
        }

    async def events(self) -> AsyncIterator[str]:
        async for event in self.chunks():
            yield as_event(event)

    def error_event(self, error: ApiError) -> str:
        self.failure = error
        return as_event(self.event("failed", response=self.body()))

    def ping(self) -> str:
        return as_event(self.event("in_progress", response=self.body()))

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        yield self.event("created", response=self.body())
        yield self.event("in_progress", response=self.body())
        async for piece in self.pieces():
            for event in self.grow(piece):
                yield event
        whole = self.body()
        yield self.event(whole["status"], response=whole)

    def grow(self, piece: Piece) -> Iterator[dict[str, Any]]:
        if piece.reasoning:
            self.reasoning_tokens += len(piece.ids)
            yield from self.extend_item("reasoning", piece.reasoning)
        self.logprobs += [] if piece.reasoning else self.logprob_entries(piece)
        if piece.text:
            yield from self.extend_item("message", piece.text, logprobs=self.logprobs)
            self.logprobs = []
        if piece.finish_reason is None:
            return
        if not (self.output or piece.calls):
            yield from self.open_item("message")
        yield from self.close_item("incomplete" if piece.finish_reason == "length" else "completed")
        for call in piece.calls:
            yield from self.add_call(call)

    def logprob_entries(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens, if requested. `bytes` may be null in chats, but not here."""
        found = (self.logprobs_field(piece.logprobs) or {"content": []})["content"]
        for entry in found:
            for one in (entry, *entry["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return list(found)

    def extend_item(self, kind: str, text: str, **more: list[Any]) -> Iterator[dict[str, Any]]:
        """Append to the last item, or to a new one if the last is of another kind."""
        if not self.output or self.output[-1]["type"] != kind:
            yield from self.close_item("completed")
            yield from self.open_item(kind)
        (part,) = self.output[-1]["content"]
        part["text"] += text
        for name, values in more.items():
            part[name] += values
        yield self.item_event(f"{part['type']}.delta", content_index=0, delta=text, **more)

    def open_item(self, kind: str) -> Iterator[dict[str, Any]]:
        given: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item = {"id": new_id(kind), "type": kind, "status": "in_progress", **given, "content": []}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output.append(item)
        yield self.item_event("output_item.added", item=item)
        item["content"].append(part)
        yield self.item_event("content_part.added", content_index=0, part=part)

    def close_item(self, status: str) -> Iterator[dict[str, Any]]:
        """End the open item, if any."""
        if not self.output or self.output[-1]["status"] != "in_progress":
            return
        item = self.output[-1]
        item["status"], (part,) = status, item["content"]
        said = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self.item_event(f"{part['type']}.done", content_index=0, **said)
        yield self.item_event("content_part.done", content_index=0, part=part)
        yield self.item_event("output_item.done", item=item)

    def add_call(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        name = call["function"]["name"]
        tool = next(tool for tool in self.responses_request.tools if tool.full_name == name)
        item, field, text = tool.item(call)
        self.output.append({"id": new_id(item["type"]), **item, field: ""})
        yield self.item_event("output_item.added", item=self.output[-1])
        yield self.item_event(f"{item['type']}_{field}.delta", delta=text)
        status = "completed" if decode_json(text, 0)[1] else "incomplete"
        self.output[-1] |= {field: text} | ({"status": status} if "status" in item else {})
        named = {"name": tool.name} if tool.type == "function" else {}
        yield self.item_event(f"{item['type']}_{field}.done", **named, **{field: text})
        yield self.item_event("output_item.done", item=self.output[-1])

    def item_event(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        place = {"output_index": len(self.output) - 1, "item_id": self.output[-1]["id"]}
        return self.event(kind, **place, **facts)

    def event(self, kind: str, **facts: Any) -> dict[str, Any]:
        self.number += 1
        return {"type": f"response.{kind}", "sequence_number": self.number - 1, **facts}


def new_id(kind: str) -> str:
    return f"{PREFIXES[kind]}_{uuid.uuid4().hex}"


def as_event(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
