"""Let the target answer the questions of a set of conversations, turn by turn; no row is lost or doubled.

A head drafts what its target writes: the questions stay, every answer is the target's own, from any server that speaks
OpenAI's protocol or from the engine in this process (train/data/generation_clients.py).

The output is one line of JSON per conversation, in the order of the source. A line is written by one append. After a kill
the lines that are there are checked against source and settings, half a line at the end is cut, and the rest follows.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.train.data.layouts import Message, SkippedRow
from foredraft.train.data.sources import Source


class GenerationSettings(NamedTuple):
    temperature: float
    top_p: float | None
    max_tokens: int  # of one answer
    seed: int  # row n of the source is answered with seed + n


class ConversationRequest(NamedTuple):
    number: int  # counted from 0 over the conversations with a question
    where: str
    turns: list[Message]  # all but the answers

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.turns, sort_keys=True).encode()).hexdigest()[:16]


def questions(source: Source, dropped: dict[str, int]) -> Iterator[ConversationRequest]:
    """Every conversation's turns without the answers. Rows without a question are counted in `dropped`."""
    number = 0
    for row in source.rows():
        try:
            messages = source.conversation(row)
            if isinstance(messages, str) or all(message["role"] != "user" for message in messages):
                raise SkippedRow("no question in it")
        except SkippedRow as reason:
            dropped[str(reason)] = dropped.get(str(reason), 0) + 1
            continue
        turns = [message for message in messages if message["role"] != "assistant"]
        while turns[-1]["role"] != "user":
            turns.pop()  # nothing answers them
        yield ConversationRequest(number, row.where, turns)
        number += 1


class Output:
    """The file of answered rows, locked against a second writer. `done`: the digests of its rows."""

    def __init__(self, file: Path, settings: dict[str, Any]):
        file.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.settings = file, settings
        self.file = file.open("ab+", buffering=0)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"output={file} is being written by another process") from None
        self.done: list[str] = []
        self.since, end = time.monotonic(), 0
        self.file.seek(0)
        for line in iter(self.file.readline, b""):
            if not line.endswith(b"\n"):
                break  # the kill came within this line
            self.done.append(self.checked(line))
            end += len(line)
        self.file.truncate(end)

    def checked(self, line: bytes) -> str:
        number = len(self.done)
        try:
            row = json.loads(line)
            found, digest, settings = row["number"], row["digest"], row["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"output={self.path}, line {number + 1} is not what regeneration writes ({error})"
            ) from None
        if found != number:
            raise ValueError(f"output={self.path}, line {number + 1} is row {found}: the file was changed")
        different = [
            f"{name} {settings.get(name)}" for name in self.settings if settings.get(name) != self.settings[name]
        ]
        if different:
            raise ValueError(
                f"output={self.path} was written with other settings ({', '.join(different)}): give "
                "the same, or another output"
            )
        return digest

    def remaining(self, rows: Iterable[ConversationRequest]) -> Iterator[ConversationRequest]:
        """The rows after those that are done. Raises ValueError where these were other rows."""
        for row in rows:
            if row.number >= len(self.done):
                yield row
            elif row.digest != self.done[row.number]:
                raise ValueError(
                    f"output={self.path}, line {row.number + 1} answers another question than {row.where} asks"
                )

    def add(self, row: ConversationRequest, answered: dict[str, Any]) -> None:
        assert row.number == len(self.done), "rows are written in order"
        facts = {
            "number": row.number,
            "where": row.where,
            "digest": row.digest,
            "seed": self.settings["seed"] + row.number,
        }
        line = json.dumps(answered | facts | {"settings": self.settings}, ensure_ascii=False).encode() + b"\n"
        if self.file.write(line) != len(line):
            raise OSError(28, "no space left on device", str(self.path))
        os.fsync(self.file.fileno())
        self.done.append(row.digest)
        if time.monotonic() - self.since >= 10:
            print(f"{len(self.done)} rows answered", flush=True)
            self.since = time.monotonic()
