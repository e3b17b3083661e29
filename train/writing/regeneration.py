"""Let the target answer the questions of a set of conversations, turn by turn; no row is lost or doubled.

A head drafts what its target writes: the questions stay, every answer is the target's own, from a server or from the engine
in this process (writing.py). Each conversation is one row of the output (written_rows.py), in the order they finish:

    {"number": 0, "messages": [..], "finish_reasons": ["stop"], "tokens": [..], "starts": [0], "written": [[40, 211]], ..}
    {"number": 1, "error": "status 400: ..", ..}

The ids are what the target was given and what it wrote, reasoning, channels and tool calls too; training reads them
unchanged. Without ids, from an engine that returns none, it reads the messages. A row with an `error` has the answers that
came before it.

The result of a tool answers a call that the target itself might not have made. So a conversation with tools' results gives
two rows: one ends where the first result came, and in the other one the target writes only the last answer, after all turns
that the data set has (with "weight": 0 for its answers, which are not learned).
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from foredraft.heads.target_model import Target
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.columns import declared, has_images, template_options
from foredraft.train.data.layouts import Message, SkippedRow
from foredraft.train.data.layouts import turns as as_turns
from foredraft.train.data.sources import Source
from foredraft.train.writing.writers import Ask, Chat, Conversation, Reply
from foredraft.train.writing.written_rows import Row, RowFile

TEXT = "{text}"  # its place in a task


class GenerationSettings(NamedTuple):
    temperature: float
    top_p: float | None
    max_new_tokens: int  # of one answer
    seed: int  # row n of the source is answered with seed + n


class Questions(NamedTuple):
    """Hold a conversation without its answers. number: counted from 0 over the conversations with a question."""

    number: int
    where: str
    turns: list[Message]  # all but the answers
    tools: list[dict] | None = None
    options: dict[str, Any] | None = None  # variables of the chat template
    before: tuple[Message, ...] = ()  # turns and answers of the data set before these turns

    @property
    def shown(self) -> Row:
        """Return what the target is shown besides the turns, by the names of a row's columns."""
        found = {"tools": self.tools, "chat_template_kwargs": self.options}
        return {name: value for name, value in found.items() if value}

    @property
    def digest(self) -> str:
        turns = [*self.before, *self.turns]
        asked = [turns, *self.shown.values()] if self.shown else turns
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def questions(source: Source, dropped: dict[str, int], tasks: Sequence[str] = ()) -> Iterator[Questions]:
    """Yield every conversation without its answers, and one about each raw text if there are `tasks`. Rows without a
    question are counted in `dropped`."""
    number = 0
    for row in source.rows():
        try:
            messages = source.conversation(row)
            if has_images(row.value, source.messages):
                raise SkippedRow("images, which the target would answer without seeing them")
            said = ask_about(messages, number, tasks) if isinstance(messages, str) else messages
            to_a_result = itertools.takewhile(lambda message: message["role"] != "tool", said)
            turns = [message for message in to_a_result if message["role"] != "assistant"]
            while turns and turns[-1]["role"] != "user":
                turns.pop()  # nothing answers them
            if not turns:
                raise SkippedRow("no question in it")
            shown = declared(row.value, source.messages), template_options(row.value)
            yield Questions(number, row.where, turns, *shown)
            number += 1
            if all_turns := turns_with_results(said):
                *before, last = all_turns
                yield Questions(number, row.where, [last], *shown, tuple(before))
                number += 1
        except SkippedRow as reason:
            dropped[str(reason)] = dropped.get(str(reason), 0) + 1


def turns_with_results(said: list[Message]) -> list[Message]:
    """Return the turns and answers before the last answer, if there is a tool's result among them."""
    turns = [message | {"weight": 0} if message["role"] == "assistant" else message for message in said]
    while turns and turns[-1]["role"] not in ("user", "tool"):
        turns.pop()
    return turns if any(message["role"] == "tool" for message in turns) else []


def ask_about(text: str, number: int, tasks: Sequence[str]) -> list[Message]:
    """Return what is asked about a raw text: one of the tasks with {text}, then all without, which follow its answer."""
    first = [task for task in tasks if TEXT in task]
    if not first:
        return []
    later = [task for task in tasks if TEXT not in task]
    return as_turns([first[number % len(first)].replace(TEXT, text), *later], all_user=True)


class Regeneration(NamedTuple):
    """Answer conversations: by a server, or by a `target` with its chat format in this process."""

    settings: GenerationSettings
    target: Target | None = None
    form: ChatFormat | None = None

    def remaining(self, conversations: Iterable[Questions], rows: RowFile) -> Iterator[Conversation]:
        """Yield the conversations that have no row. Raise ValueError if a row has other questions than its conversation."""
        for asked in conversations:
            if asked.number not in rows.done:
                yield partial(self.answer, asked)
            elif asked.digest != rows.done[asked.number]:
                where = f"{rows.key}={rows.path} has another question as row {asked.number}"
                raise ValueError(f"{where} than {asked.where} asks")

    async def answer(self, asked: Questions, ask: Ask) -> Row:
        """Answer each of the user's turns, as far as it goes, and return the row."""
        messages = list(asked.before)
        row: Row = {"number": asked.number, "where": asked.where, "digest": asked.digest}
        row |= {"seed": self.settings.seed + asked.number, "messages": messages, "finish_reasons": []}
        row |= {"tokens": [], "starts": [], "written": []} | asked.shown
        try:
            for turn in asked.turns:
                messages.append(turn)
                if turn["role"] in ("user", "tool"):
                    reply = await ask(self.request(asked, messages))
                    message = self.form.message(reply.tokens, reply.prompt) if self.form else reply.message
                    take(row, message, reply)
                    if not message["content"] or "tool_calls" in message:
                        break  # no turn can follow reasoning that was cut off, or a tool's call
        except SkippedRow as error:
            row["error"] = str(error)
        while messages and (messages[-1]["role"] != "assistant" or not row["finish_reasons"]):
            messages.pop()
        if len(row["written"]) < len(row["finish_reasons"]):  # the server returned no ids
            row |= {"tokens": [], "starts": [], "written": []}
        return {name: value for name, value in row.items() if value != []}

    def request(self, asked: Questions, messages: list[Message]) -> Request:
        """Return the request of the next answer. Raise SkippedRow if the template refuses the messages."""
        params = SamplingParams(temperature=self.settings.temperature, top_p=self.settings.top_p)
        most, seed = self.settings.max_new_tokens, self.settings.seed + asked.number
        if self.target is None or self.form is None:
            return Chat([], params, most, seed, messages=messages, tools=asked.tools, options=asked.options or {})
        ends, form = frozenset(self.target.eos_token_ids), self.form.with_options(asked.options or {})
        return Request(form.prompt(messages, asked.tools), params, most, seed, ends)


def take(row: Row, message: Message, reply: Reply) -> None:
    """Add an answer to a row."""
    if not message["content"] and "tool_calls" not in message:
        row["error"] = f"an answer without content (finish_reason {reply.finish_reason})"
        if not reply.tokens and "reasoning_content" not in message:
            return
    row["messages"].append(message)
    row["finish_reasons"].append(reply.finish_reason)
    if reply.tokens and reply.prompt:
        # A template may show earlier answers otherwise than they were written: then this one is a separate document.
        before = row["tokens"][row["starts"][-1] :] if row["starts"] else []
        if not before or reply.prompt[: len(before)] != before:
            row["starts"].append(len(row["tokens"]))
            before = []
        row["tokens"] += [*reply.prompt[len(before) :], *reply.tokens]
        row["written"].append([len(row["tokens"]) - len(reply.tokens), len(row["tokens"])])
