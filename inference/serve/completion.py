"""An answer as it grows, one choice per text, in OpenAI's words. `usage` says the acceptance length too."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from foredraft.inference.engine import RequestOutput
from foredraft.inference.serve.detokenizer import Detokenizer, StopStrings
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest
from foredraft.inference.serve.tools import ToolReader, reader
from foredraft.inference.serve.worker import Failed, Job, Worker
from foredraft.inference.trace import Trace


class Piece(NamedTuple):
    """What one step added to a choice."""

    choice: int
    text: str
    logprobs: list[dict[str, Any]]  # an entry per token, as chat completions have them
    trace: dict[str, Any] | None
    finish_reason: str | None
    calls: list[dict[str, Any]]  # of tools, all at once at the end


class Choice:
    """One text of an answer."""

    def __init__(self, index: int, job: Job, asked: CommonRequest, tokenizer: PreTrainedTokenizerBase):
        self.index, self.job, self.asked, self.tokenizer = index, job, asked, tokenizer
        self.detokenizer, self.stops = Detokenizer(tokenizer), StopStrings(asked.stop_strings)
        self.tools: ToolReader | None = reader(asked, tokenizer.chat_template)
        self.calls: list[dict[str, Any]] = []
        self.text, self.logprobs = "", list[dict[str, Any]]()
        self.ids, self.accepted, self.drafted = list[int](), list[int](), list[int]()  # see accepted_log.py
        self.gained = 0
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> Piece:
        pieces = [self.detokenizer.push(token) for token in output.tokens]
        if output.finish_reason is not None and pieces:
            pieces[-1] += self.detokenizer.flush()
        text = self.stops.push("".join(pieces))
        if output.finish_reason is not None:
            text += self.stops.flush()
        self.finish_reason = "stop" if self.stops.stopped else output.finish_reason
        self.ids += output.tokens
        if output.accepted is not None:
            self.accepted.append(output.accepted)
            self.drafted.append(min(output.depth, output.nodes - 1))
            self.gained += len(output.tokens)
        if self.tools is not None:
            text = self.tools.push(text)
            if self.finish_reason is not None:
                rest, self.calls = self.tools.end()
                text += rest
                self.finish_reason = "tool_calls" if self.calls else self.finish_reason
        self.text += text
        logprobs = (
            [] if self.asked.top_tokens is None or output.trace is None else self.logprob_entries(output, output.trace)
        )
        self.logprobs += logprobs
        trace = self.trace_entry(output, pieces) if self.asked.trace else None
        return Piece(self.index, text, logprobs, trace, self.finish_reason, self.calls)

    def logprob_entries(self, output: RequestOutput, trace: Trace) -> list[dict[str, Any]]:
        """Log-probabilities of the new tokens; the end token is not part of the text."""
        shown = [token for token in output.tokens if token not in self.job.request.eos_token_ids]
        top = self.asked.top_tokens or 0
        return [
            {**self.token(token, logprob), "top_logprobs": [self.token(*one) for one in best[:top]]}
            for token, logprob, best in zip(shown, trace.logprobs, trace.top, strict=False)
        ]

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        whole = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": whole}

    def trace_entry(self, output: RequestOutput, pieces: list[str]) -> dict[str, Any]:
        """Each token's text and whether it was drafted; and the step's tree, where it drafted one."""
        accepted = output.accepted or 0
        entry: dict[str, Any] = {
            "tokens": [{"text": text, "drafted": number < accepted} for number, text in enumerate(pieces)]
        }
        if output.trace is not None and output.accepted is not None:
            entry["tree"] = {
                "tokens": [self.tokenizer.decode([token]) for token in output.trace.tokens],
                "parents": output.trace.parents,
                "probabilities": [round(value, 4) for value in output.trace.probabilities],
                "accepted": output.trace.path,
            }
        return entry


class Answer:
    """All choices of a client's request. Whoever reads it calls `close` in the end."""

    def __init__(self, worker: Worker, jobs: Sequence[Job], asked: CommonRequest, model: str, prompt_tokens: int):
        tokenizer = worker.target.text_tokenizer
        self.worker, self.asked, self.model, self.prompt_tokens = worker, asked, model, prompt_tokens
        self.choices = {job: Choice(index, job, asked, tokenizer) for index, job in enumerate(jobs)}
        self.outputs = jobs[0].outputs
        self.chat = isinstance(asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.began, self.created = time.monotonic(), int(time.time())
        self.first_token: float | None = None  # seconds until it came
        self.failure: Failed | None = None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises Failed."""
        while any(choice.finish_reason is None for choice in self.choices.values()):
            job, output = await self.outputs.get()
            choice = self.choices[job]
            if choice.finish_reason is not None:
                continue  # its stop string has been found
            if isinstance(output, Failed):
                self.failure = output
                raise output
            if self.first_token is None:
                self.first_token = time.monotonic() - self.began
            yield choice.push(output)
            if choice.finish_reason is not None and output.finish_reason is None:
                self.worker.cancel(job)

    def close(self) -> None:
        for job, choice in self.choices.items():
            if choice.finish_reason is None:
                self.worker.cancel(job)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices.values())

    def usage(self) -> dict[str, Any]:
        """acceptance_length: tokens gained per target forward, the prompt's left out; null where there was none."""
        steps = sum(len(choice.accepted) for choice in self.choices.values())
        gained = sum(choice.gained for choice in self.choices.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "acceptance_length": gained / steps if steps else None,
        }

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [
            {
                "index": choice.index,
                **self.content("message", choice.text, choice.calls, {"role": "assistant"}),
                "logprobs": self.logprobs_field(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in self.choices.values()
        ]
        return {**self.envelope(kind), "choices": choices, "usage": self.usage()}

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def content(self, name: str, text: str, calls: list[dict[str, Any]], more: dict[str, Any]) -> dict[str, Any]:
        if not self.chat:
            return {"text": text}
        return {name: {**more, "content": text or None, "tool_calls": calls} if calls else {**more, "content": text}}

    def logprobs_field(self, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        if self.asked.top_tokens is None:
            return None
        if self.chat:
            return {"content": logprobs}
        return {
            "tokens": [one["token"] for one in logprobs],
            "token_logprobs": [one["logprob"] for one in logprobs],
            "top_logprobs": [{best["token"]: best["logprob"] for best in one["top_logprobs"]} for one in logprobs],
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """What is streamed: roles first, then what each step added, and the usage where it was asked for. Raises Failed."""
        envelope = self.envelope("chat.completion.chunk" if self.chat else "text_completion")
        if self.chat:
            for choice in self.choices.values():
                delta = {"role": "assistant", "content": ""}
                yield {**envelope, "choices": [{"index": choice.index, "delta": delta, "finish_reason": None}]}
        async for piece in self.pieces():
            if not (piece.text or piece.logprobs or piece.trace or piece.finish_reason):
                continue  # what it added is held back
            part = {
                "index": piece.choice,
                **self.content("delta", piece.text, numbered(piece.calls), {}),
                "logprobs": self.logprobs_field(piece.logprobs),
                "finish_reason": piece.finish_reason,
            }
            yield {**envelope, "choices": [part], **({"trace": piece.trace} if piece.trace else {})}
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield {**envelope, "choices": [], "usage": self.usage()}


def numbered(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as they are streamed: parts of each carry its number."""
    return [{"index": number, **call} for number, call in enumerate(calls)]
