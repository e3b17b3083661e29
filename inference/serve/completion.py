"""A growing answer in the format of OpenAI's API, one choice per text. `usage` includes the acceptance length."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foredraft.inference.serve.choice import Choice, Echo, Piece
from foredraft.inference.serve.limits import error_body
from foredraft.inference.serve.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest
from foredraft.inference.serve.worker import Failed, Job, Worker
from foredraft.inference.text import token_texts_of


class Answer:
    """Build all choices of a client's request. Whoever reads it must call `close` at the end."""

    def __init__(
        self,
        worker: Worker,
        jobs: Sequence[Job],
        request: CommonRequest,
        model: str,
        prompt_tokens: int,
        echoes: Sequence[Echo] = (),
    ):
        """Initialize the choices. echoes: one per prompt, if requested."""
        tokenizer = worker.target.text_tokenizer
        self.token_texts = token_texts_of(tokenizer)
        self.worker, self.request, self.model, self.prompt_tokens = worker, request, model, prompt_tokens
        self.choices = {job: Choice(index, job, request, tokenizer) for index, job in enumerate(jobs)}
        self.outputs = jobs[0].outputs
        self.prompts = [job.request.prompt for job in jobs]
        self.sent_prompt_ids = set[int]()  # choices whose prompt ids were sent
        self.echoed = [choice.echo(echoes[choice.index // request.n]) for choice in self.choices.values() if echoes]
        self.chat = isinstance(request, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.began, self.created = time.monotonic(), int(time.time())
        self.first_token: float | None = None  # seconds until the first token
        self.failure: Failed | None = None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what each step adds. Raises Failed."""
        while any(choice.finish_reason is None for choice in self.choices.values()):
            job, output = await self.outputs.get()
            if isinstance(output, Failed):
                self.failure = output
                raise output
            if self.first_token is None:
                self.first_token = time.monotonic() - self.began
            yield self.choices[job].push(output)

    def close(self) -> None:
        for job, choice in self.choices.items():
            if choice.finish_reason is None:
                self.worker.cancel(job)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices.values())

    def usage(self) -> dict[str, Any]:
        """Return token counts. acceptance_length: new tokens per target forward after the prompt; null without forwards."""
        forwards = sum(choice.forwards for choice in self.choices.values())
        emitted = sum(choice.emitted for choice in self.choices.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "acceptance_length": emitted / forwards if forwards else None,
        }

    def body(self) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [
            {
                "index": choice.index,
                **self.message(choice),
                "logprobs": self.logprobs_field(choice.logprobs),
                "finish_reason": choice.finish_reason,
                **self.token_ids(choice),
            }
            for choice in self.choices.values()
        ]
        return {**self.envelope(kind), "choices": choices, "usage": self.usage(), **self.prompt_ids()}

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def prompt_ids(self) -> dict[str, Any]:
        """Return the prompt's ids where vLLM has them: next to a chat's choices. Completions have them in each choice."""
        return {"prompt_token_ids": self.prompts[0]} if self.chat and self.request.return_token_ids else {}

    def token_ids(self, choice: Choice) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        return {"token_ids": choice.ids, **({} if self.chat else {"prompt_token_ids": choice.job.request.prompt})}

    def message(self, choice: Choice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
        reasoning = {} if choice.reasoning_reader is None else reasoning_fields(choice.reasoning or None)
        return {"message": {**message, **reasoning, **({"tool_calls": choice.calls} if choice.calls else {})}}

    def delta(self, piece: Piece) -> dict[str, Any]:
        if not self.chat:
            return {"text": piece.text}
        reasoning = reasoning_fields(piece.reasoning) if piece.reasoning else {}
        content = {"content": piece.text} if piece.text or not (reasoning or piece.calls) else {}
        calls = [{"index": number, **call} for number, call in enumerate(piece.calls)]
        return {"delta": {**reasoning, **content, **({"tool_calls": calls} if calls else {})}}

    def logprobs_field(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.top_tokens is None:
            return None
        form = chat_logprobs if self.chat else completion_logprobs
        return form(self.token_texts, logprobs, self.request.return_tokens_as_token_ids)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the streamed chunks: roles, then what each step adds, then the usage if requested. Raises Failed."""
        envelope = self.envelope("chat.completion.chunk" if self.chat else "text_completion")
        options = self.request.stream_options
        counted = options is not None and options.include_usage

        def chunk(part: dict[str, Any]) -> dict[str, Any]:
            usage = self.usage() if options is not None and options.continuous_usage_stats else None
            return {**envelope, **({"usage": usage} if counted else {}), "choices": [part]}

        if self.chat:
            for choice in self.choices.values():
                delta = {"role": "assistant", "content": ""}
                part = {"index": choice.index, "delta": delta, "finish_reason": None}
                yield chunk(part) | (self.prompt_ids() if choice.index == 0 else {})
        for piece in self.echoed:
            yield chunk(self.part(piece))
        async for piece in self.pieces():
            shown = piece.text or piece.reasoning or piece.logprobs or piece.trace or piece.finish_reason
            if not (shown or self.request.return_token_ids):
                continue  # its text is held back
            yield chunk(self.part(piece)) | ({"trace": piece.trace} if piece.trace else {})
        if counted:
            yield {**envelope, "choices": [], "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the chunks as server-sent events. Raises Failed."""
        async for chunk in self.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def error_event(self, failed: Failed) -> str:
        return f"data: {json.dumps(error_body(str(failed), failed.status))}\n\n"

    def part(self, piece: Piece) -> dict[str, Any]:
        ids: dict[str, Any] = {"token_ids": piece.ids} if self.request.return_token_ids else {}
        if ids and not self.chat and piece.choice not in self.sent_prompt_ids:
            self.sent_prompt_ids.add(piece.choice)
            ids["prompt_token_ids"] = self.prompts[piece.choice]
        return {
            "index": piece.choice,
            **self.delta(piece),
            "logprobs": self.logprobs_field(piece.logprobs),
            "finish_reason": piece.finish_reason,
            **ids,
        }


def reasoning_fields(text: str | None) -> dict[str, Any]:
    """Return the reasoning under both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}
