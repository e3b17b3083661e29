"""Let the target answer the questions of a set of conversations, turn by turn; no row is lost or doubled.

A head drafts what its target writes: the questions stay, every answer is the target's own, from any server that speaks
OpenAI's protocol or from the engine in this process (train/data/generation_clients.py).

The output is one line of JSON per conversation, in the order they finish, written by one append. After a kill the lines
that are there are checked against source and settings, half a line at the end is cut, and the rest follows.

    {"number": 0, "messages": [..], "finish_reasons": ["stop"], "tokens": [..], "starts": [0], "written": [[40, 211]], ..}
    {"number": 1, "error": "status 400: ..", ..}

The ids are what the target was given and what it wrote, reasoning, channels and tool calls too; training reads them
unchanged (train/data/written_rows.py). Without ids, from an engine that returns none, it reads the messages. A row with an
`error` has the answers that came before it.
"""

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.inference.evaluation.progress import Progress
from foredraft.train.data.columns import declared
from foredraft.train.data.layouts import Message, SkippedRow
from foredraft.train.data.sources import Source
from foredraft.train.runtime.locks import hold


class GenerationSettings(NamedTuple):
    temperature: float
    top_p: float | None
    max_new_tokens: int  # of one answer
    seed: int  # row n of the source is answered with seed + n


class ConversationRequest(NamedTuple):
    number: int  # counted from 0 over the conversations with a question
    where: str
    turns: list[Message]  # all but the answers, up to a tool's result: the target's own call may be another
    tools: list[dict] | None = None

    @property
    def digest(self) -> str:
        asked = [self.turns, self.tools] if self.tools else self.turns
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


class Reply(NamedTuple):
    message: Message
    finish_reason: str
    prompt: list[int] | None  # the ids that it answers, and its own, where the engine tells them
    tokens: list[int] | None

    @property
    def goes_on(self) -> bool:
        """Return whether another turn can follow: not after reasoning that was cut off, nor a tool's call."""
        return bool(self.message["content"]) and "tool_calls" not in self.message


class AnsweredRow:
    """Hold a conversation while it is answered."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reasons: list[str] = []
        self.tokens: list[int] = []
        self.starts: list[int] = []
        self.written: list[list[int]] = []
        self.error: str | None = None

    def take(self, reply: Reply) -> None:
        if not reply.message["content"] and "tool_calls" not in reply.message:
            self.error = f"an answer without content (finish_reason {reply.finish_reason})"
            if not reply.tokens and "reasoning_content" not in reply.message:
                return
        self.messages.append(reply.message)
        self.reasons.append(reply.finish_reason)
        if reply.tokens and reply.prompt:
            # A template may show earlier answers otherwise than they were written: then this one is a separate document.
            before = self.tokens[self.starts[-1] :] if self.starts else []
            if not before or reply.prompt[: len(before)] != before:
                self.starts.append(len(self.tokens))
                before = []
            self.tokens += reply.prompt[len(before) :]
            self.written.append([len(self.tokens), len(self.tokens) + len(reply.tokens)])
            self.tokens += reply.tokens

    @property
    def row(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.error is None else {"error": self.error}
        if self.reasons:
            while self.messages[-1]["role"] != "assistant":
                self.messages.pop()
            found |= {"messages": self.messages, "finish_reasons": self.reasons}
        if self.reasons and len(self.written) == len(self.reasons):
            found |= {"tokens": self.tokens, "starts": self.starts, "written": self.written}
        return found


def questions(source: Source, dropped: dict[str, int]) -> Iterator[ConversationRequest]:
    """Yield every conversation's turns without the answers. Rows without a question are counted in `dropped`."""
    number = 0
    for row in source.rows():
        try:
            messages = source.conversation(row)
            said = [] if isinstance(messages, str) else messages
            before = itertools.takewhile(lambda message: message["role"] != "tool", said)
            turns = [message for message in before if message["role"] != "assistant"]
            while turns and turns[-1]["role"] != "user":
                turns.pop()  # nothing answers them
            if not turns:
                raise SkippedRow("no question in it")
            tools = declared(row.value, source.messages)
        except SkippedRow as reason:
            dropped[str(reason)] = dropped.get(str(reason), 0) + 1
            continue
        yield ConversationRequest(number, row.where, turns, tools)
        number += 1


class Output:
    """Write the file of answered rows, locked against a second writer. `done`: the digests of its rows, by their numbers."""

    def __init__(self, file: Path, settings: dict[str, Any], total: int | None = None):
        """Open the file. total: number of rows of the finished file, for the progress bar."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.settings = file, settings
        self.lock = hold(file, "output")
        self.file = file.open("ab+", buffering=0)
        self.done: dict[int, str] = {}
        self.since, end = time.monotonic(), 0
        self.file.seek(0)
        for line in iter(self.file.readline, b""):
            if not line.endswith(b"\n"):
                break  # the kill came within this line
            self.check(line)
            end += len(line)
        self.file.truncate(end)
        self.progress = Progress("answering", total, "rows", done=len(self.done))

    def check(self, line: bytes) -> None:
        where = f"output={self.path}, line {len(self.done) + 1}"
        try:
            row = json.loads(line)
            number, digest, settings = row["number"], row["digest"], row["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where} is not what regeneration writes ({error})") from None
        if number in self.done:
            raise ValueError(f"{where} is row {number} once more: the file was changed")
        different = [
            f"{name} {settings.get(name)}" for name in self.settings if settings.get(name) != self.settings[name]
        ]
        if different:
            raise ValueError(
                f"output={self.path} was written with other settings ({', '.join(different)}): give "
                "the same, or another output"
            )
        self.done[number] = digest

    def remaining(self, rows: Iterable[ConversationRequest]) -> Iterator[ConversationRequest]:
        """Yield the rows that are not done. Raise ValueError if the done ones were other rows."""
        for row in rows:
            if row.number not in self.done:
                yield row
            elif row.digest != self.done[row.number]:
                raise ValueError(f"output={self.path} has another question as row {row.number} than {row.where} asks")

    def add(self, row: ConversationRequest, answered: dict[str, Any]) -> None:
        facts = {
            "number": row.number,
            "where": row.where,
            "digest": row.digest,
            "seed": self.settings["seed"] + row.number,
        }
        line = json.dumps(answered | facts | {"settings": self.settings}, ensure_ascii=False).encode() + b"\n"
        if self.file.write(line) != len(line):
            raise OSError(28, "no space left on device", str(self.path))
        self.done[row.number] = row.digest
        if time.monotonic() - self.since >= 10:
            os.fsync(self.file.fileno())
            self.since = time.monotonic()
        self.progress.add()
