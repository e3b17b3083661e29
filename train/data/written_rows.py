"""Rows of token ids that a target wrote, one line of JSON each, in a file that only grows. Encoder (encoding.py) reads it.

    {"number": 7, "tokens": [..], "written": [[40, 211], ..], "asked": [[24, 33], ..], "temperatures": [..]}
    {"number": 8, "dropped": "question without an end", "tokens": [..], "temperatures": [..]}

`written` are the stretches in the loss, the target's answers; `asked` its questions. Rows of regeneration, which have
`messages`, may have `starts`: where in `tokens` each of several documents starts. FILE.about.json says who wrote it and
how. A file that was cut off within a line is read up to there, and continued.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any


class RowFile:
    """Append rows to a file of one writer at a time. `numbers`: of the rows in it. `questions`: ids of each kept one.
    `lines`: for each line, tokens in the loss up to its end."""

    def __init__(self, file: Path, about: dict[str, Any] | None = None):
        """Open the file. about: who writes, checked against the file's own entry. Raise ValueError for another target's
        rows."""
        self.path = file
        self.numbers: set[int] = set()
        self.questions: list[list[int]] = []
        self.lines: list[int] = []
        self.dropped = Counter[str]()
        end = 0
        if about is not None:
            self.check_about(about)
        if file.is_file():
            with file.open("rb") as opened:
                for line in opened:
                    if not line.endswith(b"\n"):
                        break  # the kill came within this line
                    self.take(json.loads(line))
                    end += len(line)
        if about is not None:
            self.file = file.open("ab", buffering=0)
            self.file.truncate(end)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in the loss."""
        return self.lines[-1] if self.lines else 0

    @property
    def kept(self) -> int:
        return len(self.numbers) - self.dropped.total()

    def check_about(self, about: dict[str, Any]) -> None:
        note = self.path.with_suffix(".about.json")
        if note.is_file():
            ours, theirs = about["target"], json.loads(note.read_text())["target"]
            if ours["embedding_digest"] != theirs["embedding_digest"]:
                raise ValueError(
                    f"{self.path} was written by {theirs['name']}, not by {ours['name']}: give another file"
                )
        else:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(about, indent=1) + "\n")

    def take(self, row: dict[str, Any]) -> None:
        counted = 0
        self.numbers.add(row["number"])
        if "dropped" in row:
            self.dropped[row["dropped"]] += 1
        else:
            self.questions += [row["tokens"][start:end] for start, end in row["asked"]]
            counted = sum(end - start for start, end in row["written"])
        self.lines.append(self.tokens + counted)

    def append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        if self.file.write(line) != len(line):
            raise OSError(28, "no space left on device", str(self.path))
        self.take(row)

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()
