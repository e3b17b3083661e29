"""Keep what `tree=auto` learned about a target, a drafter and a machine: for the next batch, and for the next run.

There is one small JSON file per target, drafter and machine, in the cache. FOREDRAFT_REMEMBER=0 switches these files
off. A file that is corrupt, or of something else, is ignored. Two processes may use one: the last to end replaces it.
"""

import hashlib
import json
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft.heads.caches.device import device_name
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.cache_directory import cache_directory
from foredraft.inference.drafters.costs import Costs, Plan
from foredraft.inference.sampling import Sampling

# Guesses before anything was seen: the chance of a first draft; and the number of drafts that a guess counts for.
CHANCE, WEIGHT = 0.3, 4.0
REMEMBER = 128.0  # first drafts after which what was seen counts half
FROM_FILE = 32.0  # first drafts that the earlier runs count for
SAVE_EVERY = 60.0  # seconds between writing the file
VERSION = 1  # of its layout


class Case(NamedTuple):
    """Hold what decides the cost and the gain of a tree."""

    batch: int  # a power of two, at least what it is, since sequences leave one by one
    greedy: bool

    @classmethod
    def of(cls, batch: int, sampling: Sampling) -> "Case":
        return cls(1 << (batch - 1).bit_length(), sampling.temperature is None)


class Hits:
    """Count how often the draft at each depth was accepted after the one before it, in the trees of each plan."""

    def __init__(self, plans: Sequence[Plan]):
        self.plans = plans
        self.tried = [[0.0] * plan.levels for plan in plans]
        self.accepted = [[0.0] * plan.levels for plan in plans]

    def add(self, plan: Plan, ranks: list[int]) -> None:
        """Record an accepted path. ranks: of its nodes among all nodes of the tree; along a path they only rise, so its
        nodes within a smaller tree are its first ones."""
        for size, tried, accepted in zip(self.plans, self.tried, self.accepted, strict=True):
            if size.nodes > plan.nodes:
                break
            for depth in range(size.levels):
                tried[depth] += 1
                if depth >= len(ranks) or ranks[depth] >= size.nodes - 1:
                    break
                accepted[depth] += 1
        if self.tried[0][0] > REMEMBER:
            self.scale(0.5)

    def scale(self, share: float) -> None:
        """Let what was seen count this much of what it counts."""
        for row in (*self.tried, *self.accepted):
            row[:] = [share * count for count in row]

    def gains(self, optimism: float = 0.0) -> list[float]:
        """Return the tokens per step of each plan. What was seldom seen is taken to be like the smaller plan at the same
        depth, or the depth before. optimism: standard errors to add."""
        gains, below = [], list[float]()
        for tried, accepted in zip(self.tried, self.accepted, strict=True):
            chances, reached, gain = list[float](), 1.0, 1.0
            for depth, (count, hits) in enumerate(zip(tried, accepted, strict=True)):
                guess = below[depth] if depth < len(below) else chances[-1] if chances else CHANCE
                chance = (hits + WEIGHT * guess) / (count + WEIGHT)
                chances.append(chance)
                error = sqrt((chance * (1 - chance) + 1 / (count + WEIGHT)) / (count + WEIGHT))
                reached *= min(1.0, chance + optimism * error)
                gain += reached
            gains.append(gain)
            below = chances
        return gains


class Memory:
    """Keep what was learned, by kind of batch, in memory and in a file."""

    def __init__(self, plans: Sequence[Plan], device: str, by_level: bool = True):
        """Start with nothing learned. by_level: as for `Costs`."""
        self.plans, self.device, self.by_level = plans, device, by_level
        self.costs: dict[Case, Costs] = {}
        self.hits = {greedy: Hits(plans) for greedy in (True, False)}  # sampled texts are drafted less well
        # Of a suffix's drafts (switch.py): how many its counts expected to be right, and how many were; empty before any.
        self.suffix: list[float] = []
        self.write: weakref.finalize | None = None
        self.written = time.monotonic()

    def costs_of(self, case: Case) -> Costs:
        """Return the costs of such batches; before any was timed they follow from the nearest batch size."""
        if case not in self.costs:
            known = [other for other, costs in self.costs.items() if costs.knows_plain]
            near = min(known, key=lambda other: abs(other.batch.bit_length() - case.batch.bit_length()), default=case)
            self.costs[case] = Costs(case.batch, self.device, self.costs.get(near), self.by_level)
        return self.costs[case]

    def keep(self, about: dict[str, Any]) -> None:
        """Start from what earlier runs with the same `about` left, and leave what is learned to the next one."""
        about = about | {"version": VERSION, "plans": [list(plan) for plan in self.plans]}
        name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        file = cache_directory() / "drafting" / f"{name}.json"
        fresh = Memory(self.plans, self.device, self.by_level)
        try:
            dumped = json.loads(file.read_text(encoding="utf-8"))
            if dumped["about"] == about:
                fresh.load(dumped)
                self.costs, self.hits, self.suffix = fresh.costs, fresh.hits, fresh.suffix
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
            pass  # there is no file, or a damaged one, which is replaced
        # Also at the end of the process. It must not refer to this object, which would then never go.
        self.write = weakref.finalize(self, write, file, about, self.costs, self.hits, self.suffix)

    def save(self) -> None:
        """Write the file, if the last time is long ago."""
        if self.write is not None and time.monotonic() - self.written > SAVE_EVERY:
            self.written = time.monotonic()
            _, function, arguments, _ = self.write.peek()  # type: ignore[misc]  # alive as long as this object is
            function(*arguments)

    def load(self, dumped: dict[str, Any]) -> None:
        """Start from what `write` wrote. Raises an error of Python's for anything else."""
        for batch, greedy, costs in dumped["costs"]:
            self.costs_of(Case(int(batch), bool(greedy))).load(costs)
        for greedy, hits in self.hits.items():
            rows = dumped["hits"][str(greedy)]
            for table, counts in zip((hits.tried, hits.accepted), rows, strict=True):
                for row, given in zip(table, counts, strict=True):
                    row[:] = [float(count) for _, count in zip(row, given, strict=True)]
            if hits.tried[0][0] > FROM_FILE:
                hits.scale(FROM_FILE / hits.tried[0][0])
        self.suffix += [float(count) for count in dumped["suffix"]]


def write(
    file: Path, about: dict[str, Any], costs: dict[Case, Costs], hits: dict[bool, Hits], suffix: list[float]
) -> None:
    """Write what was learned, completely or not at all."""
    measured = [[*case, one.dump()] for case, one in costs.items() if one.knows_plain]
    if not measured:
        return
    counts = {str(greedy): [one.tried, one.accepted] for greedy, one in hits.items()}
    dumped = {"about": about, "costs": measured, "hits": counts, "suffix": suffix}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(dumped, part)
        os.replace(part.name, file)
    except OSError:
        pass  # a cache that cannot be written: the next run learns anew


def about(target: Target, drafter: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for earlier measurements to hold. drafter: a head's directory, or another word."""
    weights = sorted(Path(drafter).glob("*.safetensors")) if Path(drafter).is_dir() else []
    return {
        "device": device_name(target.device),
        "torch": torch.__version__,
        "dtype": str(target.dtype),
        "target": target.name,
        "parameters": target.model.num_parameters(),
        "drafter": str(Path(drafter).resolve()) if weights else drafter,
        "options": {name: repr(value) for name, value in options.items()},
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
    }


def is_on() -> bool:
    """Return whether files may be read and written: not with FOREDRAFT_REMEMBER=0 in the environment."""
    return os.environ.get("FOREDRAFT_REMEMBER", "1") != "0"
