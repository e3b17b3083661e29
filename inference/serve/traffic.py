"""Served texts, stored within a size limit for learning.py, and the acceptance length of heads on them.

A sample is a text as accepted_log.py logs it, with its seed and temperature. In the directory of the heads:

    new.jsonl, older.jsonl   samples since the last round; if they exceed the limit, the oldest are deleted
    replay.jsonl             a uniform random subset of the samples of all earlier rounds; a file of accepted_log.py
                             (log_text=true) may be put here before the first round
    round/                   the data of a round: train/ for training, recent.jsonl and replay.jsonl for the comparison

As a program, it decodes samples with several heads, to compare them: see `evaluate`.
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
HELD_OUT = 5  # one of this many prompts is never trained on
MAX_EVAL_TEXTS = 96  # maximum number of texts of each set that heads are compared on
TokenCounts = list[list[int]]  # new tokens and target forwards of each text, without the prompt's forward


class Traffic:
    def __init__(self, directory: Path, limit: int):
        """Store samples in this directory. limit: bytes of all files of samples together."""
        self.directory, self.limit, self.lock, self.full = directory, limit, threading.Lock(), False
        self.new, self.older, self.replay = (directory / f"{name}.jsonl" for name in ("new", "older", "replay"))
        self.round = directory / "round"
        self.count = len(lines(self.new)) + len(lines(self.older))  # number of samples since the last round

    def write(self, answer: Answer) -> None:
        if not answer.request.speculative:
            return
        samples = [
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
        self.add(samples)

    def add(self, samples: Sequence[dict[str, Any]]) -> None:
        """Store samples. Never raises: a full disk causes only a warning."""
        if not samples:
            return
        written = b"".join(json.dumps(sample).encode() + b"\n" for sample in samples)
        try:
            with self.lock:
                if self.new.exists() and self.new.stat().st_size + len(written) > self.limit // 8:
                    os.replace(self.new, self.older)
                with self.new.open("ab") as file:
                    file.write(written)
                self.count += len(samples)
            self.full = False
        except OSError as error:
            if not self.full:
                log.warning("learning: served texts are not stored: %s", error)
            self.full = True

    def begin(self, seed: int) -> Path:
        """Create the folder of the next round atomically, or return that of an unfinished round."""
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
        known_held = chance.sample(known_held, min(len(known_held), MAX_EVAL_TEXTS))
        (part / "rest.jsonl").write_bytes(b"".join(held[:-MAX_EVAL_TEXTS]))
        (part / "recent.jsonl").write_bytes(b"".join(held[-MAX_EVAL_TEXTS:]))
        (part / "replay.jsonl").write_bytes(b"".join(known_held))
        (part / "train" / "new.jsonl").write_bytes(b"".join(seen))
        (part / "train" / "replay.jsonl").write_bytes(b"".join(known))
        part.rename(self.round)
        for path in taken:
            path.unlink(missing_ok=True)
        return self.round

    def end(self) -> None:
        """Add the round's samples to the replay subset, and remove the round's folder."""
        new = (self.round / name for name in ("train/new.jsonl", "recent.jsonl", "rest.jsonl"))
        samples = {line for path in (self.replay, *new) for line in lines(path)}
        kept, size = list[bytes](), 0
        # Samples with the smallest hashes are a uniform subset of all samples so far.
        for line in sorted(samples, key=zlib.crc32):
            if (size := size + len(line)) > self.limit // 4:
                break
            kept.append(line)
        part = self.replay.with_suffix(".part")
        part.write_bytes(b"".join(kept))
        os.replace(part, self.replay)
        shutil.rmtree(self.round)

    def newest(self) -> bytes:
        """Return the newest samples since the last round."""
        return b"".join(lines(self.new)[-MAX_EVAL_TEXTS:])


def lines(path: Path) -> list[bytes]:
    """Return the valid lines: the disk may have been full in the middle of one."""
    found = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in found if line.startswith(b"{") and line.endswith(b"}\n") and is_valid_sample(line)]


def is_valid_sample(line: bytes) -> bool:
    """Return whether the text can be decoded again: files of other programs, and logs without ids, may be here."""
    try:
        sample = json.loads(line)
        return bool(sample.get("ids")) and bool(request_of(sample).prompt)
    except (ValueError, TypeError, KeyError):
        return False


def request_of(sample: dict[str, Any]) -> Request:
    """Return the request that created the sample. Raises ValueError, TypeError or KeyError."""
    params = SamplingParams(temperature=float(sample.get("temperature", 1.0)))
    prompt, ids = ([operator.index(token) for token in sample[name]] for name in ("prompt_ids", "ids"))
    return Request(prompt, params, len(ids), operator.index(sample.get("seed", 0)))


def split(samples: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split into training and held-out samples by their prompt, so that equal prompts are in the same part."""
    keys = [zlib.crc32(json.dumps(json.loads(sample)["prompt_ids"]).encode()) for sample in samples]
    held = [sample for sample, key in zip(samples, keys, strict=True) if key % HELD_OUT == 0]
    return [sample for sample, key in zip(samples, keys) if key % HELD_OUT], held or list(samples[::HELD_OUT])


def acceptance(texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the acceptance length over all texts, and its standard error. It is computed over texts, because the steps of a
    text are correlated."""
    emitted, forwards = np.array(texts, dtype=np.float64).T
    value = emitted.sum() / forwards.sum()
    return float(value), standard_error((emitted - value * forwards) / forwards.mean())


def acceptance_difference(old: TokenCounts, new: TokenCounts) -> tuple[float, float]:
    """Return the difference of the acceptance lengths of two heads on the same texts, and its standard error."""
    values, parts = [], []
    for texts in (old, new):
        emitted, forwards = np.array(texts, dtype=np.float64).T
        values.append(emitted.sum() / forwards.sum())
        parts.append((emitted - values[-1] * forwards) / forwards.mean())
    return float(values[1] - values[0]), standard_error(parts[1] - parts[0])


def standard_error(parts: np.ndarray) -> float:
    return float(parts.std(ddof=1) / len(parts) ** 0.5) if len(parts) > 1 else float("inf")


def decode(target: Target, drafter: Drafter, samples: Sequence[dict[str, Any]]) -> TokenCounts:
    """Decode the texts of the samples again, and count tokens and forwards."""
    engine, found = Engine(target, drafter, max_num_seqs=8), dict[Request, list[int]]()
    for request in map(request_of, samples):
        try:
            engine.add(request)
        except ValueError as error:  # a sample of another target, for example
            log.warning("learning: a text is skipped: %s", error)
        else:
            found[request] = [0, 0]
    while engine.has_work:
        for output in engine.step():
            if output.accepted is not None:
                found[output.request][0] += len(output.tokens)
                found[output.request][1] += 1
    return [counts for counts in found.values() if counts[1]]


def evaluate(target: dict[str, Any], heads: Sequence[str], files: Sequence[str], output: str) -> None:
    """Write to `output`, as JSON, the TokenCounts of each head for each file of samples, with fixed trees."""
    settings = dict(target)
    loaded = pkgutil.resolve_name(settings.pop("_target_"))(**settings)
    drafters = [load_drafter(head, loaded, tree="fixed") for head in heads]
    samples = [[json.loads(line) for line in lines(Path(file))] for file in files]
    found = [[decode(loaded, drafter, some) for drafter in drafters] for some in samples]
    part = Path(f"{output}.part")
    part.write_text(json.dumps(found))
    os.replace(part, output)


if __name__ == "__main__":
    evaluate(**json.loads(sys.argv[1]))
