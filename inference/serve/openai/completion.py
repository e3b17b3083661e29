"""A growing answer in the format of OpenAI's API, one choice per text. `usage` includes the acceptance length."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foredraft.inference.serve.echo import Echo
from foredraft.inference.serve.errors import ApiError
from foredraft.inference.serve.openai.choice import Choice, Piece
from foredraft.inference.serve.openai.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from foredraft.inference.serve.openai.protocol import ChatRequest, CommonRequest, StreamOptions
from foredraft.inference.serve.worker import Job, Worker
from foredraft.inference.text import token_texts_of


class Answer:
    """Build all choices of a client's request. Whoever reads it must call `close` at the end."""

    def __init__(
        self, worker: Worker, jobs: Sequence[Job], request: CommonRequest, model: str, echoes: Sequence[Echo] = ()
    ):
        """Initialize the choices. echoes: one per prompt, if requested."""
        tokenizer = worker.target.text_tokenizer
        self.token_texts = token_texts_of(tokenizer)
        self.worker, self.request, self.model, self.outputs = worker, request, model, jobs[0].outputs
        self.choices = {job: Choice(index, job, request, tokenizer) for index, job in enumerate(jobs)}
        self.prompts = [job.request.prompt for job in jobs]
        self.prompt_tokens = sum(map(len, self.prompts[:: request.n]))
        self.echoed = [choice.echo(echoes[choice.index // request.n]) for choice in self.choices.values() if echoes]
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.began, self.created = time.monotonic(), int(time.time())
        self.first_token: float | None = None  # seconds until the first token
        self.failure: ApiError | None = None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what each step adds. Raises ApiError."""
        while any(choice.whole.finish_reason is None for choice in self.choices.values()):
            job, output = await self.outputs.get()
            if isinstance(output, ApiError):
                self.failure = output
                raise output
            if self.first_token is None:
                self.first_token = time.monotonic() - self.began
            yield self.choices[job].push(output)

    def close(self) -> None:
        for job, choice in self.choices.items():
            if choice.whole.finish_reason is None:
                self.worker.cancel(job)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.whole.ids) for choice in self.choices.values())

    def usage(self) -> dict[str, Any]:
        """Return token counts. acceptance_length: new tokens per target forward after the prompt; null without forwards."""
        forwards = sum(len(choice.accepted) for choice in self.choices.values())
        emitted = sum(choice.emitted for choice in self.choices.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "acceptance_length": emitted / forwards if forwards else None,
        }

    async def read(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError."""
        async for _ in self.chunks():
            pass
        return self.body()

    def body(self) -> dict[str, Any]:
        choices = [self.fields(choice.whole, self.message(choice)) for choice in self.choices.values()]
        return self.envelope(choices, "", usage=self.usage(), **self.prompt_ids())

    def envelope(self, choices: list[dict[str, Any]], ending: str = ".chunk", **more: Any) -> dict[str, Any]:
        kind = f"chat.completion{ending}" if self.chat else "text_completion"
        facts = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**facts, "choices": choices, **more}

    def prompt_ids(self) -> dict[str, Any]:
        """Return the prompt's ids where vLLM has them: next to a chat's choices. Completions have them in each choice."""
        return {"prompt_token_ids": self.prompts[0]} if self.chat and self.request.return_token_ids else {}

    def fields(self, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = self.logprobs_field(piece.logprobs)
        fields = {"index": piece.choice, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if self.request.return_token_ids:
            fields["token_ids"] = piece.ids
            if piece.is_first and not self.chat:
                fields["prompt_token_ids"] = self.prompts[piece.choice]
        return fields

    def message(self, choice: Choice) -> dict[str, Any]:
        piece = choice.whole
        if not self.chat:
            return {"text": piece.text}
        message: dict[str, Any] = {"role": "assistant", "content": piece.text}
        if choice.reasons:
            message |= reasoning_fields(piece.reasoning or None)
        if piece.calls:
            message |= {"content": piece.text or None, "tool_calls": piece.calls}
        return {"message": message}

    def delta(self, piece: Piece) -> dict[str, Any]:
        if not self.chat:
            return {"text": piece.text}
        delta: dict[str, Any] = reasoning_fields(piece.reasoning) if piece.reasoning else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(piece.calls)]
        if piece.text or not delta:
            delta["content"] = piece.text
        return {"delta": delta}

    def logprobs_field(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.top_tokens is None:
            return None
        form = chat_logprobs if self.chat else completion_logprobs
        return form(self.token_texts, logprobs, self.request.return_tokens_as_token_ids)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the streamed chunks: roles, then what each step adds, then the usage if requested. Raises ApiError."""
        options = self.request.stream_options or StreamOptions.model_validate({})

        def chunk(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
            if options.include_usage:
                more["usage"] = self.usage() if options.continuous_usage_stats else None
            return self.envelope([fields], **more)

        for choice in self.choices.values() if self.chat else ():
            delta = {"role": "assistant", "content": ""}
            begin = {"index": choice.index, "delta": delta, "finish_reason": None}
            yield chunk(begin, **(self.prompt_ids() if choice.index == 0 else {}))
        for piece in self.echoed:
            yield chunk(self.fields(piece, self.delta(piece)))
        async for piece in self.pieces():
            shown = piece.text or piece.reasoning or piece.logprobs or piece.trace or piece.finish_reason
            if shown or self.request.return_token_ids:  # otherwise its text is held back
                for part in piece.parts():
                    yield chunk(self.fields(part, self.delta(part)), **({"trace": part.trace} if part.trace else {}))
        if options.include_usage:
            yield self.envelope([], usage=self.usage())

    async def events(self) -> AsyncIterator[str]:
        """Yield the chunks as server-sent events. Raises ApiError."""
        async for chunk in self.chunks():
            yield data(chunk)
        yield "data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> str:
        return data(error.body())

    def ping(self) -> str:
        """Return an event that adds nothing. It is not a comment, at which some clients end (openai-go, simple loops)."""
        open_choices = (choice.index for choice in self.choices.values() if choice.whole.finish_reason is None)
        nothing = Piece(next(open_choices, 0))
        return data(self.envelope([self.fields(nothing, self.delta(nothing))]))


def data(value: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


def reasoning_fields(text: str | None) -> dict[str, Any]:
    """Return the reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}
