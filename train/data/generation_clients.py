"""Generation clients of regeneration: a server that speaks OpenAI's protocol, or the target in this process."""

import asyncio
import itertools
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from foredraft.heads.target import Target
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow
from foredraft.train.data.regeneration import ConversationRequest, GenerationSettings, Output
from foredraft.train.data.self_generated import continue_rows


class Reply(NamedTuple):
    message: Message
    finish_reason: str


class Refused(ValueError):
    """This conversation cannot be answered, others can."""


class Server:
    """A server that speaks OpenAI's protocol. The `openai` package retries (429 with Retry-After, 408, 409, 5xx, time-outs,
    cut connections: exponential, with jitter); an answer that cannot be read is requested again here."""

    def __init__(
        self, endpoint: str, model: str | None, timeout: float, retries: int, settings: GenerationSettings, extra: dict
    ):
        try:
            import openai
        except ImportError:
            raise ValueError("endpoint=... needs the openai package: pip install 'foredraft[regenerate]'") from None
        self.errors, self.endpoint, self.retries, self.settings, self.extra = openai, endpoint, retries, settings, extra
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = openai.AsyncOpenAI(base_url=endpoint, api_key=key, timeout=timeout, max_retries=retries)
        self.model = model or ""

    async def start(self) -> None:
        """Ask which model is served, where none was named."""
        if not self.model:
            self.model = (await self.retried(self.client.models.list)).data[0].id

    async def reply(self, messages: list[Message], seed: int) -> Reply:
        request: dict[str, Any] = {"messages": messages, "model": self.model, "seed": seed}
        request |= {"temperature": self.settings.temperature, "max_tokens": self.settings.max_tokens}
        if self.settings.top_p is not None:
            request["top_p"] = self.settings.top_p

        async def once() -> Reply:
            out = await self.client.chat.completions.create(extra_body=self.extra or None, **request)
            choice = out.choices[0]
            text, said = choice.message.content, choice.message.model_extra or {}
            if text is None:  # all of max_tokens went into thoughts, or tools were called
                raise Refused(f"an answer without content (finish_reason {choice.finish_reason})")
            if not isinstance(text, str) or not isinstance(choice.finish_reason, str):
                raise TypeError("an answer without text")
            message: Message = {"role": "assistant", "content": text}
            thoughts = next((said[name] for name in THOUGHTS if said.get(name)), None)
            return Reply(message | ({"reasoning_content": thoughts} if thoughts else {}), choice.finish_reason)

        return await self.retried(once)

    async def retried(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Raises Refused for a request that the server will never take, ValueError for a server that gives no answer."""
        failure: Exception | None = None
        for attempt in range(self.retries + 1):
            try:
                return await ask()
            except Refused:
                raise
            except self.errors.APIStatusError as error:
                if error.status_code in (400, 413, 422):
                    raise Refused(f"status {error.status_code}: {error.message[:300]}") from None
                failure = error
                break
            except self.errors.APIConnectionError as error:
                failure = error
                break
            except (self.errors.APIResponseValidationError, ValueError, TypeError, IndexError, AttributeError) as error:
                failure = error  # no JSON, or not an answer's
                await asyncio.sleep(min(8.0, 0.5 * 2**attempt) * random.uniform(0.75, 1.0))
        raise ValueError(
            f"endpoint={self.endpoint} gives no answer, tried {self.retries + 1} times ({failure}); what is answered is "
            "kept, the same command continues from there"
        ) from failure

    async def converse(self, row: ConversationRequest) -> dict[str, Any]:
        """The conversation with an answer after each of the user's turns."""
        messages: list[Message] = []
        reasons: list[str] = []
        try:
            for turn in row.turns:
                messages.append(turn)
                if turn["role"] == "user":
                    message, reason = await self.reply(messages, self.settings.seed + row.number)
                    messages.append(message)
                    reasons.append(reason)
        except Refused as error:
            return {"error": str(error)}
        return {"messages": messages, "finish_reasons": reasons}


async def through_server(server: Server, rows: Iterable[ConversationRequest], concurrency: int, output: Output) -> None:
    """At most `concurrency` conversations at once; rows that are done early wait, so that they are written in order."""
    gate = asyncio.Semaphore(concurrency)

    async def one(row: ConversationRequest) -> dict[str, Any]:
        async with gate:
            return await server.converse(row)

    waiting: deque[tuple[ConversationRequest, asyncio.Task]] = deque()
    try:
        for row in rows:
            waiting.append((row, asyncio.create_task(one(row))))
            if len(waiting) >= 4 * concurrency:
                first, task = waiting.popleft()
                output.add(first, await task)
        while waiting:
            first, task = waiting.popleft()
            output.add(first, await task)
    finally:
        for _, task in waiting:
            task.cancel()
        await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
        await server.client.close()


def in_process(
    target: Target,
    form: ChatFormat,
    rows: Iterable[ConversationRequest],
    batch: int,
    settings: GenerationSettings,
    output: Output,
) -> None:
    """By our own engine: the same turn of `batch` conversations at once. An answer depends on its own row alone."""
    left = iter(rows)
    while some := list(itertools.islice(left, batch)):
        for row, answered in zip(some, answer(target, form, some, settings), strict=True):
            output.add(row, answered)


def answer(
    target: Target, form: ChatFormat, rows: list[ConversationRequest], settings: GenerationSettings
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"messages": [], "finish_reasons": []} for _ in rows]
    left = [deque(row.turns) for row in rows]
    while any(left):
        prompts: dict[int, list[int]] = {}
        for i, turns in enumerate(left):
            while turns and i not in prompts:
                found[i]["messages"].append(turn := turns.popleft())
                if turn["role"] != "user":
                    continue
                try:
                    prompts[i] = form.prompt(found[i]["messages"])
                    if target.context is not None and len(prompts[i]) >= target.context:
                        raise SkippedRow(f"a prompt of {len(prompts[i])} tokens, the target reads {target.context}")
                except SkippedRow as error:
                    prompts.pop(i, None)
                    found[i] = {"error": str(error)}
                    turns.clear()
        for i, (message, reason) in replies(target, form, rows, prompts, settings).items():
            found[i]["messages"].append(message)
            found[i]["finish_reasons"].append(reason)
    return found


def replies(
    target: Target,
    form: ChatFormat,
    rows: list[ConversationRequest],
    prompts: dict[int, list[int]],
    settings: GenerationSettings,
) -> dict[int, Reply]:
    if not prompts:
        return {}
    out = continue_rows(
        target,
        list(prompts.values()),
        max_new_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=[settings.seed + rows[i].number for i in prompts],
    )
    found = {}
    for i, tokens, reason in zip(prompts, out.new_tokens, out.finish_reasons, strict=True):
        text = form.tokenizer.decode(tokens, skip_special_tokens=True)
        found[i] = Reply({"role": "assistant", "content": text}, reason)
    return found
