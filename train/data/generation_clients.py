"""Generation clients of regeneration: a server that speaks OpenAI's protocol, or the target in this process."""

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from foredraft.heads.target import Target
from foredraft.inference.engine import Engine
from foredraft.inference.evaluation.progress import report
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.known_tokens import Vocabulary
from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow, tool_calls
from foredraft.train.data.regeneration import AnsweredRow, ConversationRequest, GenerationSettings, Output, Reply

FAILURES = 16  # conversations in a row that a server fails at, at least, before it is taken for broken
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds that a conversation waits after status 429, at first and at most
PATIENCE = 900.0  # seconds in which a server may refuse all requests by status 429
TOKEN_IDS = "return_token_ids"  # of vLLM and SGLang


class Refused(ValueError):
    """Signal that this conversation cannot be answered, but others can."""


class Failed(ValueError):
    """Signal that this conversation was not answered after all retries: because of itself, or of a broken server."""


class Server:
    """Ask a server that speaks OpenAI's protocol. The `openai` package retries (429 with Retry-After, 408, 409, 5xx,
    time-outs, cut connections: exponential, with jitter); an answer that cannot be read is requested again here."""

    def __init__(
        self, endpoint: str, model: str | None, timeout: float, retries: int, settings: GenerationSettings, extra: dict
    ):
        try:
            import openai
        except ImportError:
            raise ValueError("endpoint=... needs the openai package: pip install 'foredraft[regenerate]'") from None
        self.errors, self.endpoint, self.retries, self.settings = openai, endpoint, retries, settings
        self.patience, self.last_answer = max(PATIENCE, timeout), time.monotonic()
        self.extra = extra | {TOKEN_IDS: True}
        key = os.environ.get("OPENAI_API_KEY", "none")
        self.client = openai.AsyncOpenAI(base_url=endpoint, api_key=key, timeout=timeout, max_retries=retries)
        self.model = model or ""

    async def start(self) -> None:
        """Ask which model is served, where none was named."""
        if not self.model:
            self.model = (await self.retried(self.client.models.list)).data[0].id

    async def reply(self, row: ConversationRequest, messages: list[Message]) -> Reply:
        request: dict[str, Any] = {"messages": messages, "model": self.model, "seed": self.settings.seed + row.number}
        request |= {"temperature": self.settings.temperature, "max_tokens": self.settings.max_new_tokens}
        if self.settings.top_p is not None:
            request["top_p"] = self.settings.top_p
        if row.tools:
            request["tools"] = row.tools

        async def once() -> Reply:
            try:
                out = await self.client.chat.completions.create(extra_body=self.extra or None, **request)
            except self.errors.APIStatusError as error:
                if TOKEN_IDS not in self.extra or TOKEN_IDS not in error.message:
                    raise
                report(f"{self.endpoint} does not support {TOKEN_IDS}: training will tokenize the messages")
                self.extra = {name: value for name, value in self.extra.items() if name != TOKEN_IDS}
                return await once()
            choice = out.choices[0]
            said = choice.message.model_dump()
            if not isinstance(said["content"], str | None) or not isinstance(choice.finish_reason, str):
                raise TypeError("an answer without text")
            message: Message = {"role": "assistant", "content": said["content"] or ""}
            thoughts = next((said[name] for name in THOUGHTS if said.get(name)), None)
            message |= {"reasoning_content": thoughts} if thoughts else {}
            message |= {"tool_calls": tool_calls(said["tool_calls"])} if said.get("tool_calls") else {}
            ids = choice.model_extra or {}
            prompt = ids.get("prompt_token_ids") or (out.model_extra or {}).get("prompt_token_ids")
            return Reply(message, choice.finish_reason, prompt, ids.get("token_ids"))

        return await self.retried(once)

    async def retried(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `ask` gives. While the server refuses it by status 429 it waits, and longer each time, so that as many
        conversations are asked for at once as the server takes, and all of them again when it takes more.

        Raises Refused for a request that the server will never take, Failed for one that it did not answer, ValueError for a
        server that is not there, or answers nothing but 429."""
        failure: Exception | None = None
        attempt, pause = 0, PAUSE
        while attempt <= self.retries:
            try:
                answer = await ask()
                self.last_answer = time.monotonic()
                return answer
            except Refused:
                raise
            except self.errors.APIStatusError as error:
                if error.status_code in (400, 413, 422):
                    raise Refused(f"status {error.status_code}: {error.message[:300]}") from None
                if error.status_code in (401, 403, 404):
                    raise self.server_unavailable(error) from error
                if error.status_code == 429:
                    if time.monotonic() - self.last_answer > self.patience:
                        raise self.server_unavailable(error) from error
                    await asyncio.sleep(pause * random.uniform(0.75, 1.0))
                    pause = min(2 * pause, LONGEST_PAUSE)
                    continue
                failure = error
                break
            except self.errors.APITimeoutError as error:
                failure = error
                break
            except self.errors.APIConnectionError as error:
                raise self.server_unavailable(error) from error
            except (self.errors.APIResponseValidationError, ValueError, TypeError, IndexError, AttributeError) as error:
                failure = error  # no JSON, or not an answer's
                await asyncio.sleep(min(8.0, 0.5 * 2**attempt) * random.uniform(0.75, 1.0))
                attempt += 1
        raise Failed(f"tried {self.retries + 1} times: {str(failure)[:300]}") from failure

    def server_unavailable(self, failure: Exception) -> ValueError:
        return ValueError(
            f"endpoint={self.endpoint} gives no answer, tried {self.retries + 1} times ({failure}); what is answered is "
            "kept, the same command continues from there"
        )

    async def converse(self, row: ConversationRequest, answered: AnsweredRow) -> None:
        """Add an answer after each of the user's turns, as far as they go. Raise Failed, with its reason in `answered`."""
        try:
            for turn in row.turns:
                answered.messages.append(turn)
                if turn["role"] == "user":
                    reply = await self.reply(row, answered.messages)
                    answered.take(reply)
                    if not reply.goes_on:
                        return
        except Refused as error:
            answered.error = str(error)
        except Failed as error:
            answered.error = str(error)
            raise


async def through_server(server: Server, rows: Iterable[ConversationRequest], concurrency: int, output: Output) -> None:
    """Answer `concurrency` conversations at once, and write each when it is done.

    A conversation that the server failed at becomes a row that says so once it has answered another one. Raises ValueError,
    and writes none of them, where it fails at all."""
    left, failed, some = iter(rows), [], bool(output.done)

    async def work() -> None:
        nonlocal some
        for row in left:
            answered = AnsweredRow()
            try:
                await server.converse(row, answered)
            except Failed as error:
                failed.append((row, answered.row))
                if len(failed) > max(FAILURES, concurrency):
                    raise server.server_unavailable(error) from error
                continue
            output.add(row, answered.row)
            some = True
            while failed:
                output.add(*failed.pop())

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* (ValueError, OSError) as errors:
        raise errors.exceptions[0] from None
    finally:
        await server.client.close()
    if failed and not some:
        raise server.server_unavailable(ValueError(failed[0][1]["error"]))
    for row, answered in failed:
        output.add(row, answered)


def in_process(
    target: Target,
    form: ChatFormat,
    rows: Iterable[ConversationRequest],
    batch: int,
    settings: GenerationSettings,
    output: Output,
) -> None:
    """Answer by our own engine, `batch` conversations at once, each written when it is done. An answer depends only on its
    own row."""
    engine = Engine(target, None, max_num_seqs=batch, reuse_prefixes=True)
    params = SamplingParams(temperature=settings.temperature, top_p=settings.top_p)
    texts: dict[Request, tuple[ConversationRequest, deque[Message], AnsweredRow, list[int]]] = {}

    def ask(row: ConversationRequest, turns: deque[Message], answered: AnsweredRow) -> None:
        """Ask for the next answer, or finish the row if none is left."""
        while turns and answered.error is None:
            answered.messages.append(turn := turns.popleft())
            if turn["role"] != "user":
                continue
            try:
                prompt = form.prompt(answered.messages, row.tools)
                if target.context is not None and len(prompt) >= target.context:
                    raise SkippedRow(f"a prompt of {len(prompt)} tokens, the target reads {target.context}")
                if (token := max(prompt)) >= Vocabulary.of(target).read:
                    name = form.tokenizer.convert_ids_to_tokens(token)
                    raise SkippedRow(f"a token that the target lacks: {name}")
            except SkippedRow as error:
                answered.error = str(error)
                break
            ends = frozenset(target.eos_token_ids)
            request = Request(prompt, params, settings.max_new_tokens, settings.seed + row.number, ends)
            texts[request] = row, turns, answered, []
            engine.add(request)
            return
        output.add(row, answered.row)

    left = iter(rows)
    while True:
        while len(texts) < batch and (row := next(left, None)) is not None:
            ask(row, deque(row.turns), AnsweredRow())
        if not texts:
            break
        for out in engine.step():
            row, turns, answered, tokens = texts[out.request]
            tokens += out.tokens
            if out.finish_reason is None:
                continue
            del texts[out.request]
            if out.finish_reason == "error":
                raise ValueError(
                    f"{target.name} gives logits that are not numbers: another dtype may do (target.dtype)"
                )
            reply = Reply(form.message(tokens, out.request.prompt), out.finish_reason, out.request.prompt, tokens)
            answered.take(reply)
            ask(row, turns if reply.goes_on else deque(), answered)
    engine.close()
