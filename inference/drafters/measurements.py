"""Keep what `tree=auto` learned about a target, a drafter and a machine: for the next batch, and for the next run."""

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch

from foredraft.heads.caches.device import device_name
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.cache_directory import measured_before, remember
from foredraft.heads.target_model.packing import num_weights
from foredraft.inference.sampling import Sampling

RECENT = 7  # newest steps of a size that count
ENOUGH = 3  # steps before a size counts fully: the first one of a shape may include what is made once for it
LEVEL = 0.1  # typical cost of drafting a level, as a share of a step without drafts
FASTER = 0.8  # share of the usual time below which a step without drafts shows that the machine has become faster
# Guesses before anything was seen: the chance of a first draft; and the number of drafts that a guess counts for.
CHANCE, WEIGHT = 0.3, 4.0
REMEMBER = 128.0  # first drafts after which what was seen counts half
FROM_FILE = 32.0  # first drafts that the earlier runs count for
VERSION = 3  # of the file's layout


class Plan(NamedTuple):
    """Describe the size of a tree; one node is a step without drafts."""

    nodes: int
    levels: int


PLAIN = Plan(1, 0)


class Case(NamedTuple):
    """Hold what decides the cost and the gain of a tree."""

    batch: int  # a power of two, at least the number of sequences, since they leave one by one
    greedy: bool

    @classmethod
    def of(cls, batch: int, sampling: Sampling) -> "Case":
        return cls(1 << (batch - 1).bit_length(), sampling.temperature is None)


class Costs:
    """Record the seconds of whole steps: one table by nodes for the trees of a head, whose drafting takes time, and one for
    those of a suffix. Between measured sizes, seconds are interpolated. Beyond them, a node costs what it cost so far."""

    def __init__(self, node: float, levels: dict[int, int]):
        """Start without measurements. node: the typical cost of one more node, as a share of a step without drafts. levels:
        of the head's trees by nodes, if it drafts level by level; 1 if it drafts all at once."""
        self.node, self.levels = node, levels
        self.plain = deque[float](maxlen=RECENT)
        self.tables: dict[str, dict[int, deque[float]]] = {"head": {}, "suffix": {}}

    @property
    def knows_plain(self) -> bool:
        return len(self.plain) >= ENOUGH

    def knows(self, arm: str, nodes: int) -> bool:
        """Return whether trees of this size, or larger ones, were measured."""
        return any(size >= nodes and len(recent) >= ENOUGH for size, recent in self.tables[arm].items())

    def add(self, arm: str, nodes: int, seconds: float) -> None:
        """Record a whole step. arm: "head" or "suffix". nodes: planned for its tree; 1 is a step without drafts."""
        if nodes > 1:
            self.tables[arm].setdefault(nodes, deque(maxlen=RECENT)).append(seconds)
            return
        if self.plain and seconds < FASTER * median(self.plain):
            # While drafts are in use, few plain steps are timed, and the old ones would make drafts look cheap for long.
            self.plain.clear()
        self.plain.append(seconds)

    def typical(self, arm: str, nodes: int) -> float:
        """Return the seconds of a step with a tree of this size, from those of a step without drafts."""
        levels = self.levels.get(nodes, 0) if arm == "head" else 0
        return (median(self.plain) if self.plain else 1.0) * (1 + self.node * (nodes - 1) + LEVEL * levels)

    def measured(self, arm: str) -> list[tuple[int, float]]:
        """Return (nodes, seconds) of the measured sizes, the smallest first. No tree is cheaper than a step without drafts,
        whatever was measured in a noisy moment."""
        least = self.typical(arm, 1)
        points = [(1, least)]
        for nodes, recent in sorted(self.tables[arm].items()):
            seconds = min(*recent, 2 * self.typical(arm, nodes))
            if len(recent) >= ENOUGH:
                seconds = mean(one for one in recent if one <= 2 * median(recent))
            points.append((nodes, max(least, seconds)))
        return points

    def seconds(self, arm: str, nodes: int) -> float:
        """Return the mean seconds of a step."""
        points = self.measured(arm)
        for (low, less), (high, more) in pairwise(points):
            if nodes <= high:
                return less + (more - less) * (nodes - low) / (high - low)
        least, (last, most) = points[0][1], points[-1]
        if last >= 4:
            seconds = most + (most - least) * (nodes - last) / (last - 1)
        else:  # too few nodes to know what one costs: what is more than the typical cost of verifying them was for drafting
            levels = self.levels if arm == "head" else {}
            drafting = max(0.0, most - self.typical("suffix", last)) * levels.get(nodes, 0) / levels.get(last, 1)
            seconds = self.typical("suffix", nodes) + drafting if last > 1 else self.typical(arm, nodes)
        # A suffix's tree costs no more than that of a head, whose drafting takes time.
        return seconds if arm == "head" else min(seconds, self.seconds("head", nodes))

    def dump(self) -> dict[str, Any]:
        return {arm: self.measured(arm) for arm in self.tables}

    def load(self, dumped: dict[str, Any]) -> None:
        """Start from what `dump` returned. A value counts as ENOUGH steps, so that new ones soon outweigh it."""
        for arm, points in dumped.items():
            for nodes, seconds in points:
                if not 0 <= seconds < 3600:
                    raise ValueError(f"{seconds} seconds cannot be a step's")
                recent = self.plain if nodes == 1 else self.tables[arm].setdefault(nodes, deque(maxlen=RECENT))
                recent.clear()
                recent.extend([float(seconds)] * ENOUGH)


class Hits:
    """Count how often the draft at each depth was accepted after the one before it, in the trees of each plan."""

    def __init__(self, plans: Sequence[Plan]):
        self.plans = plans
        self.tried = [[0.0] * plan.levels for plan in plans]
        self.accepted = [[0.0] * plan.levels for plan in plans]

    def add(self, plan: Plan, ranks: list[int]) -> None:
        """Record an accepted path. ranks: of its nodes among all nodes of the tree. They only rise along a path, so its nodes
        within a smaller tree are its first ones, and a step also shows what every smaller tree would have gained."""
        for size, tried, accepted in zip(self.plans, self.tried, self.accepted, strict=True):
            if size.nodes > plan.nodes:
                break
            for depth in range(size.levels):
                tried[depth] += 1
                if depth >= len(ranks) or ranks[depth] >= size.nodes - 1:
                    break
                accepted[depth] += 1
        self.limit(REMEMBER, REMEMBER / 2)

    def limit(self, most: float, count: float) -> None:
        """Let what was seen count as `count` first drafts, if it counts as more than `most`."""
        if self.tried and (first := self.tried[0][0]) > most:
            for row in (*self.tried, *self.accepted):
                row[:] = [count / first * number for number in row]

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


class Measurements:
    """Hold what was learned, by kind of batch."""

    def __init__(self, plans: Sequence[Plan], node: float, by_level: bool):
        """Start with nothing learned. by_level: whether the head drafts the levels of a tree one after the other."""
        self.plans, self.node, self.by_level = plans, node, by_level
        self.costs: dict[Case, Costs] = {}
        self.hits = {greedy: Hits(plans) for greedy in (True, False)}  # sampled texts are drafted less well
        # Of a suffix's drafts: the number that its counts expected to be right, and the number that were.
        self.suffix: list[float] = []
        self.file: weakref.finalize | None = None  # its call writes the file; it also runs when the process ends

    def costs_of(self, case: Case) -> Costs:
        levels = {plan.nodes: plan.levels if self.by_level else 1 for plan in self.plans}
        return self.costs.setdefault(case, Costs(self.node * case.batch, levels))

    def keep(self, about: dict[str, Any]) -> None:
        """Start from what earlier runs with the same `about` left, and leave what is learned to the next one."""
        about = about | {"version": VERSION, "plans": [list(plan) for plan in self.plans]}
        fresh = Measurements(self.plans, self.node, self.by_level)
        try:
            fresh.load(measured_before("drafting", about))
            self.costs, self.hits, self.suffix = fresh.costs, fresh.hits, fresh.suffix
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            pass  # nothing was learned, or the file is damaged, and is replaced
        # Its arguments must not refer to this object, which would then never be deleted.
        self.file = weakref.finalize(self, write, about, self.costs, self.hits, self.suffix)

    def load(self, dumped: dict[str, Any]) -> None:
        """Start from what `write` wrote. Raises an error of Python's for anything else."""
        for batch, greedy, costs in dumped["costs"]:
            self.costs_of(Case(int(batch), bool(greedy))).load(costs)
        for greedy, hits in self.hits.items():
            rows = dumped["hits"][str(greedy)]
            for table, counts in zip((hits.tried, hits.accepted), rows, strict=True):
                for row, given in zip(table, counts, strict=True):
                    row[:] = [float(count) for _, count in zip(row, given, strict=True)]
            hits.limit(FROM_FILE, FROM_FILE)
        self.suffix += [float(count) for count in dumped["suffix"]]


def write(about: dict[str, Any], costs: dict[Case, Costs], hits: dict[bool, Hits], suffix: list[float]) -> None:
    measured = [[*case, found.dump()] for case, found in costs.items() if found.knows_plain]
    counts = {str(greedy): [found.tried, found.accepted] for greedy, found in hits.items()}
    if measured:
        remember("drafting", about, {"costs": measured, "hits": counts, "suffix": suffix})


def about(target: Target, drafter: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for earlier measurements to hold. drafter: a head's directory, or another word."""
    weights = sorted(Path(drafter).glob("*.safetensors")) if Path(drafter).is_dir() else []
    return {
        "device": device_name(target.device),
        "torch": torch.__version__,
        "dtype": str(target.dtype),
        "target": target.name,
        "parameters": num_weights(target.model),
        "drafter": str(Path(drafter).resolve()) if weights else drafter,
        "options": {name: repr(value) for name, value in options.items()},
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
    }
