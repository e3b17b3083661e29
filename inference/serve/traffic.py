"""What was served, kept on disk within a limit for learning.py, and what heads gain on it.

A row is a text as accepted_log.py logs it, with the seed and temperature that drew it. Below the directory of the heads:

    new.jsonl, older.jsonl   rows since the last round; where they fill up before the next one, the oldest are lost
    replay.jsonl             of the rows of all earlier rounds a sample, in which each is as likely as any other; a file of
                             accepted_log.py (log_text=true) may lie there before the first round
    round/                   what a round trains on (train/), and is judged by (recent.jsonl, replay.jsonl)

As a program it is the judge, which decodes rows with some heads: see `judge`.
"""

import json
import logging
import operator
import os
import pkgutil
import random
import shutil
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.heads.target import Target
from foredraft.inference.drafters import Drafter, load_drafter
from foredraft.inference.engine import Engine
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.serve.completion import Answer

log = logging.getLogger("foredraft.serve")
HELD_OUT = 5  # one prompt of so many is never trained on
JUDGED = 96  # texts of either set that a head is judged by
Gains = list[list[int]]  # of each text the tokens gained and the target's forwards, the prompt's left out


class Traffic:
    def __init__(self, directory: Path, limit: int):
        """limit: bytes of all files of rows together."""
        self.directory, self.limit, self.lock, self.full = directory, limit, threading.Lock(), False
        self.new, self.older, self.replay = (directory / f"{name}.jsonl" for name in ("new", "older", "replay"))
        self.round = directory / "round"
        self.count = len(lines(self.new)) + len(lines(self.older))  # rows since the last round

    def write(self, answer: Answer) -> None:
        if not answer.asked.speculative:
            return
        rows = [
            {
                "id": f"{answer.id}-{choice.index}",
                "prompt_ids": choice.job.request.prompt,
                "ids": choice.ids,
                "accepted": choice.accepted,
                "drafted": choice.drafted,
                "seed": choice.job.request.seed,
                "temperature": choice.job.request.params.temperature,
            }
            for choice in answer.choices.values()
            if choice.accepted
        ]
        self.add(rows)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Never raises: a full disk is a warning."""
        if not rows:
            return
        written = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        try:
            with self.lock:
                if self.new.exists() and self.new.stat().st_size + len(written) > self.limit // 8:
                    os.replace(self.new, self.older)
                with self.new.open("ab") as file:
                    file.write(written)
                self.count += len(rows)
            self.full = False
        except OSError as error:
            if not self.full:
                log.warning("learning: what is served is not kept: %s", error)
            self.full = True

    def begin(self, seed: int) -> Path:
        """The folder of the next round, complete or not there; of one that a server left unfinished, if there is one."""
        if self.round.is_dir():
            return self.round
        taken = [self.directory / f"taken-{path.name}" for path in (self.older, self.new)]
        with self.lock:
            for path, moved in zip((self.older, self.new), taken, strict=True):
                if path.exists() and not moved.exists():
                    os.replace(path, moved)
            self.count = 0
        new, old = lines(taken[0]) + lines(taken[1]), lines(self.replay)
        chance, part = random.Random(seed), self.directory / "part"
        shutil.rmtree(part, ignore_errors=True)
        (part / "train").mkdir(parents=True)
        seen, held = split(new)
        known, known_held = split(old)
        known = chance.sample(known, min(len(known), len(seen)))
        known_held = chance.sample(known_held, min(len(known_held), JUDGED))
        (part / "rest.jsonl").write_bytes(b"".join(held[:-JUDGED]))
        (part / "recent.jsonl").write_bytes(b"".join(held[-JUDGED:]))
        (part / "replay.jsonl").write_bytes(b"".join(known_held))
        (part / "train" / "new.jsonl").write_bytes(b"".join(seen))
        (part / "train" / "replay.jsonl").write_bytes(b"".join(known))
        part.rename(self.round)
        for path in taken:
            path.unlink(missing_ok=True)
        return self.round

    def end(self) -> None:
        """Keep a sample of the round's rows, and remove it."""
        new = (self.round / name for name in ("train/new.jsonl", "recent.jsonl", "rest.jsonl"))
        rows = {line for path in (self.replay, *new) for line in lines(path)}
        kept, size = list[bytes](), 0
        for line in sorted(
            rows, key=zlib.crc32
        ):  # the rows of the smallest hashes are a fair sample of all there ever were
            if (size := size + len(line)) > self.limit // 4:
                break
            kept.append(line)
        part = self.replay.with_suffix(".part")
        part.write_bytes(b"".join(kept))
        os.replace(part, self.replay)
        shutil.rmtree(self.round)

    def newest(self) -> bytes:
        """Some rows since the last round."""
        return b"".join(lines(self.new)[-JUDGED:])


def lines(path: Path) -> list[bytes]:
    """Those that are whole: a disk may have been full in the middle of one."""
    found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in found if line.startswith(b"{") and line.endswith(b"}\n") and is_row(line)]


def is_row(line: bytes) -> bool:
    """One that can be written again: another program may have put the file there, and accepted_log.py may log no ids."""
    try:
        row = json.loads(line)
        return bool(row.get("ids")) and bool(request_of(row).prompt)
    except (ValueError, TypeError, KeyError):
        return False


def request_of(row: dict[str, Any]) -> Request:
    """What wrote the row. Raises ValueError, TypeError or KeyError."""
    params = SamplingParams(temperature=float(row.get("temperature", 1.0)))
    prompt, ids = ([operator.index(token) for token in row[name]] for name in ("prompt_ids", "ids"))
    return Request(prompt, params, len(ids), operator.index(row.get("seed", 0)))


def split(rows: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What may be trained on, and what is held out: by its prompt, so that a question is always in the same part."""
    keys = [zlib.crc32(json.dumps(json.loads(row)["prompt_ids"]).encode()) for row in rows]
    held = [row for row, key in zip(rows, keys, strict=True) if key % HELD_OUT == 0]
    return [row for row, key in zip(rows, keys, strict=True) if key % HELD_OUT], held or list(rows[::HELD_OUT])


def acceptance(texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Tokens per forward over all texts, and its standard error, texts being what differs (not steps: those of a text are
    alike)."""
    gained, forwards = np.array(texts, dtype=np.float64).T
    value = gained.sum() / forwards.sum()
    return float(value), standard_error((gained - value * forwards) / forwards.mean())


def gain(old: Gains, new: Gains) -> tuple[float, float]:
    """By how much a head gains more tokens per forward than another on the same texts, and the standard error of that."""
    values, parts = [], []
    for texts in (old, new):
        gained, forwards = np.array(texts, dtype=np.float64).T
        values.append(gained.sum() / forwards.sum())
        parts.append((gained - values[-1] * forwards) / forwards.mean())
    return float(values[1] - values[0]), standard_error(parts[1] - parts[0])


def standard_error(parts: np.ndarray) -> float:
    return float(parts.std(ddof=1) / len(parts) ** 0.5) if len(parts) > 1 else float("inf")


def decode(target: Target, drafter: Drafter, rows: Sequence[dict[str, Any]]) -> Gains:
    """Write the rows' texts again."""
    engine, found = Engine(target, drafter, max_num_seqs=8), dict[Request, list[int]]()
    for request in map(request_of, rows):
        try:
            engine.add(request)
        except ValueError as error:  # of another target, say
            log.warning("learning: a row is left out: %s", error)
        else:
            found[request] = [0, 0]
    while engine.has_work:
        for output in engine.step():
            if output.accepted is not None:
                found[output.request][0] += len(output.tokens)
                found[output.request][1] += output.forwards
    return [counts for counts in found.values() if counts[1]]


def judge(target: dict[str, Any], heads: Sequence[str], files: Sequence[str], output: str) -> None:
    """Write to `output` as JSON, for each file of rows, the Gains of each head, with a tree that no clock sizes."""
    settings = dict(target)
    loaded = pkgutil.resolve_name(settings.pop("_target_"))(**settings)
    drafters = [load_drafter(head, loaded, tree="fixed") for head in heads]
    rows = [[json.loads(line) for line in lines(Path(file))] for file in files]
    found = [[decode(loaded, drafter, some) for drafter in drafters] for some in rows]
    part = Path(f"{output}.part")
    part.write_text(json.dumps(found))
    os.replace(part, output)


if __name__ == "__main__":
    judge(**json.loads(sys.argv[1]))
