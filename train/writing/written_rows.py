"""Rows that a target wrote, one line of JSON each, in a file that only grows. Encoder (encoding.py) reads it.

    {"number": 7, "tokens": [..], "written": [[40, 211], ..], "asked": [[24, 33], ..], ..}
    {"number": 8, "dropped": "question without an end", "tokens": [..], ..}

`written` are the stretches in the loss, the target's answers; `asked` its questions. `starts`, if given, is where each of
several documents starts in `tokens`. Rows of regeneration also have `messages`. FILE.about.json says who wrote the rows and
how. A writer locks the file, cuts a line that a kill left unfinished, and writes the numbers that are missing.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from foredraft.heads.checkpoint import same_weights
from foredraft.train.runtime.locks import hold

Row = dict[str, Any]


class RowFile:
    """Read a file of rows, or append to it. done: the digest of each row, or None, by its number. lines: for each line,
    the tokens in the loss up to its end. errors: the number of rows that lack an answer, and say why."""

    def __init__(self, path: Path, about: dict[str, Any] | None = None, key: str = "data.path", wait: bool = False):
        """Open the file. about: the writer, None to only read. Its `target` and `settings` must be those of the rows in the
        file. key: the setting that named the file. wait: until another process has written it, instead of an error."""
        self.path, self.key, self.writer = path, key, None
        self.done: dict[int, str | None] = {}
        self.lines: list[int] = []
        self.dropped, self.errors = Counter[str](), 0
        if about is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.writer = hold(path, key, wait)
            self.check_about(about)
        end = 0
        for line, row in self.read():
            self.take(row)
            end += len(line)
        if self.writer is not None:
            self.writer.truncate(end)

    @property
    def about(self) -> dict[str, Any]:
        """Return what FILE.about.json says."""
        note = self.path.with_suffix(".about.json")
        return json.loads(note.read_text()) if note.is_file() else {}

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the loss."""
        return self.lines[-1] if self.lines else 0

    @property
    def kept(self) -> int:
        return len(self.done) - self.dropped.total()

    def check_about(self, about: dict[str, Any]) -> None:
        """Raise ValueError if the rows in the file have another writer. Note the writer of the first ones."""
        if not self.path.stat().st_size:
            self.path.with_suffix(".about.json").write_text(json.dumps(about, indent=1) + "\n")
            return
        ours, theirs = about.get("target"), self.about.get("target")
        if ours and theirs and not same_weights(ours, theirs):
            raise ValueError(
                f"{self.path} was written by {theirs['name']}, not by these weights of {ours['name']}: give another file"
            )
        settings, found = about.get("settings", {}), self.about.get("settings", {})
        different = [f"{name} {found.get(name)}" for name, value in settings.items() if found.get(name) != value]
        if different:
            raise ValueError(
                f"{self.key}={self.path} was written with other settings ({', '.join(different)}): give the same, or another "
                f"{self.key}"
            )

    def read(self) -> Iterator[tuple[bytes, Row]]:
        """Yield each line and its row, without a last line that a kill left unfinished."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as lines:
            for count, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                    _ = row["number"]
                except (ValueError, KeyError, TypeError):
                    is_data = self.key == "data.path"
                    remedy = "data=conversations reads others" if is_data else f"give another {self.key}"
                    where = f"{self.key}={self.path}, line {count}"
                    raise ValueError(f"{where} is not a row that a target wrote: {remedy}") from None
                yield line, row

    def take(self, row: Row) -> None:
        number = row["number"]
        if number in self.done and self.writer is not None:
            where = f"{self.key}={self.path}, line {len(self.lines) + 1}"
            raise ValueError(f"{where} is row {number} once more: the file was changed")
        self.done[number] = row.get("digest")
        self.dropped.update([row["dropped"]] if "dropped" in row else [])
        self.errors += "error" in row
        self.lines.append(self.tokens + sum(end - start for start, end in row.get("written", [])))

    def append(self, row: Row) -> None:
        assert self.writer is not None
        self.writer.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self.writer.flush()
        self.take(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.writer is not None:
            os.fsync(self.writer.fileno())
            self.writer.close()
