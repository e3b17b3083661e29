"""Let a target write texts. A conversation is a coroutine that asks, and returns its row:

    async def conversation(ask: Ask) -> Row:
        question = await ask(Request(opening, ...))
        answer = await ask(Request([*opening, *question.tokens], ...))
        return {"number": number, "tokens": .., "written": ..}

`in_process` runs many of them with our engine, `through_server` with any server that speaks OpenAI's protocol. Both append
each row when it is finished (written_rows.py). A request that cannot be answered raises SkippedRow where it is awaited.
"""

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from types import coroutine
from typing import Any, NamedTuple

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.messages import TemplateNeeds, arrange
from foredraft.inference.engine import Engine
from foredraft.inference.evaluation.progress import report
from foredraft.inference.request import Request
from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow, tool_calls, unicode
from foredraft.train.writing.written_rows import Row, RowFile

FAILURES = 16  # conversations in a row that a server fails at, at least, before it is taken for broken
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a request is repeated, at first and at most
QUIET = 60.0  # seconds without an answer after which the user is told, again and again
PATIENCE = 900.0  # seconds in which a server may refuse all requests by status 429
TOKEN_IDS = "return_token_ids"  # supported by vLLM and SGLang


@dataclass(eq=False)
class Chat(Request):
    """Ask a server for an answer to messages, which it renders itself. The prompt is empty."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template


def sent(messages: list[Message]) -> list[Message]:
    """Return messages as servers take them: calls have ids that every template takes, and their arguments are JSON."""
    needs = TemplateNeeds(ids="nine", text_arguments=True, no_content=None)
    return [{name: value for name, value in each.items() if name != "weight"} for each in arrange(messages, needs)]


class Reply(NamedTuple):
    """Hold a text. prompt, tokens: empty from a server that does not return ids. message: of a server's answer."""

    finish_reason: str
    prompt: list[int]
    tokens: list[int]
    message: Message = {}  # noqa: RUF012 -- never changed


Ask = Callable[[Request], Awaitable[Reply]]
Conversation = Callable[[Ask], Coroutine[Any, Any, Row]]
Show = Callable[[dict[Request, list[int]]], None]  # gets the texts that are being written


def in_process(
    target: Target,
    conversations: Iterable[Conversation],
    rows: RowFile,
    batch: int,
    show: Show,
    wanted: float = math.inf,
) -> None:
    """Write with our engine, `batch` conversations at a time. A text depends only on its own request. wanted: tokens in the
    loss that `rows` gets; unfinished rows are left then."""
    engine = Engine(target, None, max_num_seqs=batch, reuse_prefixes=not target.is_collective)
    left = iter(conversations)
    running: dict[Request, Coroutine[Any, Any, Row]] = {}
    texts: dict[Request, list[int]] = {}

    @coroutine
    def ask(request: Request) -> Generator[Request, Reply, Reply]:
        try:
            engine.add(request)
        except ValueError as error:  # the prompt is too long, or has tokens that the target lacks
            raise SkippedRow(str(error)) from None
        return (yield request)

    def proceed(conversation: Coroutine[Any, Any, Row], reply: Reply | None) -> None:
        """Continue a conversation until its next request waits in the engine, or its row is finished."""
        try:
            request = conversation.send(reply)
        except StopIteration as ended:
            rows.append(ended.value)
        else:
            running[request], texts[request] = conversation, []

    while rows.tokens < wanted:
        while len(running) < batch and (conversation := next(left, None)) is not None:
            proceed(conversation(ask), None)
        if not running:
            break
        for output in engine.step():
            request = output.request
            texts[request] += output.tokens
            if output.finish_reason == "error":
                raise ValueError(f"{target.name} gives logits that are not numbers: set another target.dtype")
            if output.finish_reason is not None:
                proceed(running.pop(request), Reply(output.finish_reason, request.prompt, texts.pop(request)))
        show(texts)
    engine.close()


class Server:
    """Ask a server. The `openai` package retries (429 with Retry-After, 408, 409, 5xx, time-outs, cut connections). Repeated
    here are requests that status 429 still refuses, and those whose answer cannot be read.

    failed: why requests got no answer after all retries, since the last answer. trouble: why the last request is repeated, if
    nothing has been answered since."""

    def __init__(self, endpoint: str, model: str | None, timeout: float = 600.0, retries: int = 6, **chat: Any):
        """Connect to a server. model: None is the first that it serves. chat: more fields of chat requests. Raise ValueError
        if it does not answer."""
        try:
            import openai
        except ImportError:
            raise ValueError("endpoint=... needs the openai package: pip install 'foredraft[regenerate]'") from None
        self.errors, self.endpoint, self.retries, self.chat = openai, endpoint, retries, chat
        self.patience, self.last_answer, self.failed = max(PATIENCE, timeout), time.monotonic(), list[str]()
        self.trouble = ""
        self.ids = {TOKEN_IDS: True}  # {} for a server that refuses it
        settings: dict[str, Any] = {"base_url": endpoint, "timeout": timeout, "max_retries": retries}
        settings["api_key"] = os.environ.get("OPENAI_API_KEY", "none")
        self.client = openai.AsyncOpenAI(**settings)
        try:
            self.model = model or openai.OpenAI(**settings).models.list().data[0].id
        except openai.OpenAIError as error:
            raise self.unavailable(error) from error
        except (ValueError, TypeError, IndexError, AttributeError) as error:  # a page, or other JSON
            raise ValueError(
                f"{endpoint}/models does not list a model. Check the address (OpenAI's ends with /v1), or set model=NAME"
            ) from error

    def unavailable(self, failure: object) -> ValueError:
        return ValueError(
            f"endpoint={self.endpoint} gives no answer, tried {self.retries + 1} times ({failure}); what is answered is "
            "kept, the same command continues from there"
        )

    async def ask(self, request: Request) -> Reply:
        """Return the reply. While the server refuses the request by status 429 it waits, and longer each time, so that as
        many are in flight as the server takes, and all of them again when it takes more.

        Raise SkippedRow for a request that the server will never take, or did not answer, and ValueError for a server that is
        not there, or answers nothing but 429."""
        errors, tried, pause = self.errors, 0, PAUSE
        while True:
            ids = self.ids
            try:
                reply = await self.reply(request, ids)
                self.last_answer = time.monotonic()
                self.failed.clear()
                self.trouble = ""
                return reply
            except errors.APIStatusError as error:
                status, waited, failure = error.status_code, time.monotonic() - self.last_answer, str(error)
                if ids and TOKEN_IDS in error.message:
                    if self.ids:
                        report(f"{self.endpoint} does not support {TOKEN_IDS}: training will tokenize the messages")
                    self.ids = {}
                    continue
                if status in (400, 413, 422):
                    self.failed.clear()
                    raise SkippedRow(f"status {status}: {error.message[:300]}") from None
                if status in (401, 403, 404) or (status == 429 and waited > self.patience):
                    raise self.unavailable(error) from error
                tried += 0 if status == 429 else self.retries + 1
            except errors.APITimeoutError as error:
                tried, failure = self.retries + 1, str(error)
            except errors.APIConnectionError as error:
                raise self.unavailable(error) from error
            except (errors.APIResponseValidationError, ValueError, TypeError, IndexError, AttributeError) as error:
                tried, failure = tried + 1, str(error)  # no JSON, or not an answer's
            self.trouble = failure
            if tried > self.retries:
                self.failed.append(failure)
                raise SkippedRow(f"tried {self.retries + 1} times: {failure[:300]}")
            await asyncio.sleep(pause * random.uniform(0.75, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def reply(self, request: Request, ids: dict[str, bool]) -> Reply:
        """Ask once. Raise TypeError or ValueError for an answer without text."""
        params = request.params
        fields: dict[str, Any] = {"model": self.model, "seed": request.seed, "max_tokens": request.max_new_tokens}
        fields |= {"temperature": params.temperature}
        if isinstance(request, Chat):
            fields |= {"messages": sent(request.messages)} | ({"tools": request.tools} if request.tools else {})
            fields |= {} if params.top_p is None else {"top_p": params.top_p}
            options = request.options | self.chat.get("chat_template_kwargs", {})
            more = self.chat | ids | ({"chat_template_kwargs": options} if options else {})
            answer = await self.client.chat.completions.create(extra_body=more or None, **fields)
        else:  # exactly these settings, whatever the server's defaults are
            fields |= {"prompt": request.prompt, "stop": [*request.stop_strings] or None, "top_p": params.top_p or 1.0}
            extra = {"min_p": params.min_p or 0.0, "top_k": -1, "skip_special_tokens": False} | ids
            answer = await self.client.completions.create(extra_body=extra, **fields)
        if not getattr(answer, "choices", None):  # a page, or an error with status 200
            raise TypeError(f"not an answer: {str(answer)[:200]}")
        choice = answer.choices[0]
        said = choice.message.model_dump() if isinstance(request, Chat) else {"content": choice.text}
        if not isinstance(said["content"], str | None) or not isinstance(choice.finish_reason, str):
            raise TypeError("an answer without text or finish_reason")
        message: Message = {"role": "assistant", "content": said["content"] or ""}
        reasoning = next((said[name] for name in THOUGHTS if said.get(name)), None)
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": tool_calls(said["tool_calls"])} if said.get("tool_calls") else {}
        unicode(json.dumps(message, ensure_ascii=False))  # JSON can spell halves of characters, which no file takes
        given = (answer.model_extra or {}) | (choice.model_extra or {})
        return Reply(choice.finish_reason, given.get("prompt_token_ids") or [], given.get("token_ids") or [], message)


def through_server(
    server: Server, conversations: Iterable[Conversation], rows: RowFile, concurrency: int, show: Show
) -> None:
    """Write `concurrency` conversations at a time.

    Rows wait while the server fails, until it answers again. Raise ValueError, and write none of them, if it fails at all."""
    left, waiting = iter(conversations), list[Row]()

    async def work() -> None:
        for conversation in left:
            waiting.append(await conversation(server.ask))
            if not server.failed:
                flush()
            elif len(waiting) > max(FAILURES, concurrency):
                raise server.unavailable(server.failed[-1])

    def flush() -> None:
        while waiting:
            rows.append(waiting.pop(0))
        show({})

    async def tell_of_silence() -> None:
        while True:
            await asyncio.sleep(QUIET)
            if (seconds := time.monotonic() - server.last_answer) >= QUIET:
                reason = server.trouble or f"it may be busy with {concurrency} conversations"
                report(f"{server.endpoint} has answered nothing for {seconds:.0f} s ({reason[:300]})")

    async def run() -> None:
        watch = asyncio.create_task(tell_of_silence())
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
        finally:
            watch.cancel()
            await server.client.close()

    try:
        asyncio.run(run())
    except* (ValueError, OSError) as errors:
        raise errors.exceptions[0] from None
    if waiting and not rows.done:
        raise server.unavailable(server.failed[-1])
    flush()
