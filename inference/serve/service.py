"""The path of a request: encode its prompts, submit its texts to the worker's thread, and send the answer."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foredraft import inference as decoding
from foredraft.inference.grammar import Grammar, Grammars
from foredraft.inference.serve.accepted_log import AcceptedLog
from foredraft.inference.serve.echo import Echo, Scored, score
from foredraft.inference.serve.errors import ApiError, context_exceeded
from foredraft.inference.serve.metrics import Metrics
from foredraft.inference.serve.openai import tools
from foredraft.inference.serve.openai.completion import Answer
from foredraft.inference.serve.openai.prompts import PromptEncoder
from foredraft.inference.serve.openai.protocol import ChatRequest, CommonRequest, CompletionRequest
from foredraft.inference.serve.openai.reasoning import pending_marks
from foredraft.inference.serve.worker import Worker

log = logging.getLogger("foredraft.serve")
TAIL = 16  # number of tokens at the end of a prompt that are searched for the mark that opens reasoning
DEFAULT_MAX_TOKENS = 2**16  # limit of an answer if neither request, config nor the target's context sets one
PING = 15.0  # seconds without an event after which an empty one is sent, because proxies close silent streams
EVENT_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would collect the events
Result = TypeVar("Result")
INTERNAL_ERROR = "internal server error; see the server's log"


class EventStream(StreamingResponse):
    """Stream an answer, and close it in any case, even if the client disconnects before the first byte."""

    def __init__(self, answer: Answer, ended: Any):
        super().__init__(self.events(answer), media_type="text/event-stream", headers=EVENT_HEADERS)
        self.finish = ended

    async def events(self, answer: Answer) -> AsyncIterator[str]:
        try:
            async for event in with_pings(answer.events(), answer.ping):
                yield event
        except ApiError as error:
            yield answer.error_event(error)
        except Exception:
            log.exception("a stream failed")
            answer.failure = ApiError(500, INTERNAL_ERROR)
            yield answer.error_event(answer.failure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.finish()


class Service:
    def __init__(
        self,
        worker: Worker,
        names: Sequence[str],
        max_tokens: int | None,
        logs: Sequence[Sequence[AcceptedLog]],
    ):
        """Initialize the service. names: of the model, for clients, one per tenant. max_tokens: default limit of an answer;
        None is the context. logs: of each tenant."""
        self.worker, self.names, self.max_tokens, self.logs = worker, names, max_tokens, logs
        self.metrics = Metrics(worker)
        self.target = worker.target
        self.encoder, self.encoding = PromptEncoder(self.target), ThreadPoolExecutor(1, "tokenizer")
        # Separate threads, because a schema may take seconds to compile.
        self.grammars: Grammars | None = None
        self.scoring = asyncio.Lock()
        self.compiling = ThreadPoolExecutor(4, "grammar")

    def model(self, name: str) -> dict[str, Any]:
        facts = {"id": name, "object": "model", "created": 0, "owned_by": "foredraft"}
        return {**facts, "max_model_len": self.worker.context(tenant=self.tenant(name))}

    def tenant(self, name: str | None) -> int:
        """Return the tenant's number. Raises ApiError for an unknown model."""
        if name is not None and name not in self.names:
            message = f"The model {name!r} does not exist; served here: {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, "model", "model_not_found")
        return 0 if name is None else self.names.index(name)

    async def answer(
        self, request: ChatRequest | CompletionRequest, raw_request: Request, form: Callable[..., Answer] = Answer
    ) -> Response:
        """Answer a request. form: the class of the answer, with its extra arguments."""
        tenant = self.tenant(request.model or None)  # some clients send an empty name
        answer = await unless_disconnected(raw_request, self.begin(request, tenant, form))
        if answer is None:
            return Response(status_code=499)
        ended = partial(self.finish, answer, raw_request.url.path, tenant)
        if request.stream:
            return EventStream(answer, ended)
        try:
            body = await unless_disconnected(raw_request, answer.read())
            if body is None:
                return Response(status_code=499)
            text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            # A client may have sent half of a surrogate pair, which UTF-8 cannot encode, in what is repeated.
            return Response(text.encode(errors="backslashreplace"), media_type="application/json")
        finally:
            ended()

    async def begin(
        self, request: ChatRequest | CompletionRequest, tenant: int, form: Callable[..., Answer] = Answer
    ) -> Answer:
        """Submit the texts of a request. They are counted before they are encoded, which bounds the number of waiting
        requests. Their timeout starts here."""
        encode: Any = self.encoder.chat if isinstance(request, ChatRequest) else self.encoder.completion
        run, deadline = asyncio.get_running_loop().run_in_executor, time.monotonic() + self.worker.timeout
        try:
            with self.worker.reserved(request.num_texts):
                async with asyncio.timeout(self.worker.timeout):
                    prompts = await run(self.encoding, encode, request)
                    closing = self.pending_marks(request, prompts[0])[1]
                    grammar = await run(self.compiling, self.grammar, request, closing) if request.has_grammar else None
                    requests = self.requests(request, prompts, grammar, tenant)
                    wanted = isinstance(request, CompletionRequest) and request.echo
                    echoes = [await self.echo(request, prompt) for prompt in prompts] if wanted else []
                jobs = self.worker.submit(requests, request.speculative, tenant, deadline)
        except ValueError as error:
            raise ApiError(400, str(error)) from None
        except RecursionError:
            raise ApiError(400, "the request is nested too deeply") from None
        except TimeoutError:
            raise self.worker.timed_out from None
        return form(self.worker, jobs, request, self.names[tenant], echoes)

    async def echo(self, request: CommonRequest, prompt: list[int]) -> Echo:
        """Return a prompt that precedes its texts, with log-probabilities if requested. These are computed in chunks between
        steps, of one prompt at a time."""
        scored = list[Scored]()
        if request.top_tokens is not None:
            async with self.scoring:
                chunks = score(self.target, prompt, request.top_tokens)
                while (chunk := await asyncio.wrap_future(self.worker.call(partial(next, chunks, None)))) is not None:
                    scored += chunk
        args = self.target.text_tokenizer, prompt, scored, request.skip_special_tokens
        return await asyncio.get_running_loop().run_in_executor(self.encoding, Echo.of, *args)

    def grammar(self, request: CommonRequest, closing: str) -> Grammar | None:
        self.grammars = self.grammars or Grammars(self.target)
        return tools.answer_grammar(request, self.target.text_tokenizer.chat_template, self.grammars, closing)

    def requests(
        self, request: CommonRequest, prompts: list[list[int]], grammar: Grammar | None, tenant: int
    ) -> list[decoding.Request]:
        unknown = [token for token in request.stop_token_ids if not 0 <= token < self.target.vocab_size]
        if unknown:
            raise ValueError(f"stop_token_ids names {unknown}: tokens are 0 to {self.target.vocab_size - 1}")
        ends = frozenset([*([] if request.ignore_eos else self.target.eos_token_ids), *request.stop_token_ids])
        params = request.sampling(grammar)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        trace = request.top_tokens if request.top_tokens is not None else 0 if request.trace else None
        rooms = [self.max_new_tokens(request, len(prompt), tenant) for prompt in prompts]
        marks = [self.pending_marks(request, prompt) for prompt in prompts]
        more = request.stop_strings, trace, request.min_tokens
        return [
            decoding.Request(prompt, params, most, seed + index, ends, *more, reasoning)
            for index, (prompt, most, reasoning) in enumerate(
                facts for facts in zip(prompts, rooms, marks, strict=True) for _ in range(request.n)
            )
        ]

    def pending_marks(self, request: CommonRequest, prompt: list[int]) -> tuple[str, str]:
        """Return the marks of the reasoning that an answer may start with, with a grammar only if the prompt opens it."""
        if not isinstance(request, ChatRequest):
            return "", ""
        tokenizer = self.target.text_tokenizer
        marks = pending_marks(tokenizer.chat_template, tokenizer.decode(prompt[-TAIL:]))
        return ("", "") if request.has_grammar and marks[0] else marks

    def max_new_tokens(self, request: CommonRequest, prompt: int, tenant: int) -> int:
        """Return the maximum length of an answer to a prompt of this length. Raises ApiError if it exceeds the context."""
        context, most = self.worker.context(request.speculative, tenant), request.budget
        if context is None:
            return (self.max_tokens or DEFAULT_MAX_TOKENS) if most is None else most
        wanted = 1 if most is None else most
        if prompt + wanted > context:
            where = "messages" if isinstance(request, ChatRequest) else "prompt"
            requested = f"{prompt + wanted} tokens ({prompt} in the {where}, {wanted} in the completion)"
            raise context_exceeded(context, requested, f"{where} or completion", where)
        return min(context - prompt, self.max_tokens or context) if most is None else most

    def finish(self, answer: Answer, path: str, tenant: int) -> None:
        answer.close()
        seconds = time.monotonic() - answer.began
        self.metrics.observe(answer, seconds)
        for accepted_log in self.logs[tenant] if answer.request.store is not False else ():
            try:
                accepted_log.write(answer)
            except OSError as error:  # such as a full disk, which must not fail the request
                log.error("the log of accepted drafts cannot be written: %s", error)
        unended = "cancelled" if answer.failure is None else "error"
        reasons = [choice.whole.finish_reason or unended for choice in answer.choices.values()]
        facts = {"id": answer.id, "path": path, "seconds": round(seconds, 3), "finish_reasons": reasons}
        log.info("request", extra={"facts": {**facts, **answer.usage()}})


async def unless_disconnected(raw_request: Request, awaited: Coroutine[Any, Any, Result]) -> Result | None:
    """Return what `awaited` returns, and raise its exceptions. Returns None if the client disconnects first."""

    async def disconnected() -> None:
        while (await raw_request.receive())["type"] != "http.disconnect":
            pass

    waiting, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        leaving.cancel()


async def with_pings(events: AsyncIterator[str], ping: Callable[[], str]) -> AsyncIterator[str]:
    """Yield the events, and pings during silence: text may be held back, or the request may be waiting."""
    coming: asyncio.Future[str] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            if (await asyncio.wait({coming}, timeout=PING))[0]:
                event, coming = coming.result(), None
                yield event
            else:
                yield ping()
    except StopAsyncIteration:
        return
    finally:
        if coming is not None:
            coming.cancel()
