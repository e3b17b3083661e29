"""Measure what a decoding step costs on this machine: seconds by nodes that the target verifies, plus seconds of drafting.

    seconds(plan) = verify(nodes of its trees) + drafting(plan)

The verification of a suffix's draft costs what that of a head's tree with as many nodes costs, so all steps teach one table.
Between measured sizes it is interpolated. Beyond them a node costs what it cost so far, at first what is typical.
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

RECENT = 9  # newest measurements of a size that count
ENOUGH = 3  # measurements before a size counts: the first one of a shape may include what is made once for it
FASTER = 0.8  # share of the usual time below which a plain step shows that the machine has become faster
# Typical cost as a share of an autoregressive step: of one more node, and of one drafted level.
NODE = {"cpu": 0.1, "other": 0.005}
LEVEL = 0.1


class Plan(NamedTuple):
    """Describe the size of a tree; one node is the baseline, a step without drafts."""

    nodes: int
    levels: int


PLAIN = Plan(1, 0)


class Costs:
    """Record the seconds of the steps of one batch size."""

    def __init__(self, batch: int, device: str, near: "Costs | None" = None, by_level: bool = True):
        """Start without measurements. near: the costs of another batch size, whose cost per node and sequence holds until
        this one was measured. by_level: does the head draft the levels of a tree one after the other, or all at once?"""
        self.batch, self.device, self.near, self.by_level = batch, device, near, by_level
        self.verifying: dict[int, deque[float]] = {}  # by nodes of the tree
        self.drafting: dict[Plan, deque[float]] = {}
        self.sizes: dict[Plan, deque[int]] = {}  # nodes of the trees that a plan led to, which may stop early

    @property
    def knows_plain(self) -> bool:
        return self.is_measured(1)

    def is_measured(self, nodes: int) -> bool:
        return len(self.verifying.get(nodes, ())) >= ENOUGH

    def times_drafting(self, plan: Plan) -> bool:
        """Return whether the drafting of this plan still has to be timed. A GPU must wait for that, a CPU need not."""
        return self.device == "cpu" or len(self.drafting.get(plan, ())) <= ENOUGH

    def add(self, nodes: int, seconds: float, plan: Plan = PLAIN, drafting: float | None = None) -> None:
        """Record a whole step. nodes: of its tree. plan, drafting: of a head's tree, and what drafting it took, if timed."""
        if plan != PLAIN:
            self.sizes.setdefault(plan, deque(maxlen=RECENT)).append(nodes)
            if drafting is not None:
                self.drafting.setdefault(plan, deque(maxlen=RECENT)).append(drafting)
            seconds -= self.draft(plan) if drafting is None else drafting
        measured = self.verifying.setdefault(nodes, deque(maxlen=RECENT))
        if nodes == 1 and measured and seconds < FASTER * median(measured):
            # While drafts are in use, few plain steps are timed, and the old ones would make drafts look cheap for long.
            measured.clear()
        measured.append(max(seconds, 0.0))

    def plain(self) -> float:
        """Return the seconds of a step without drafts; 1 before any was measured."""
        return median(self.verifying[1]) if self.verifying.get(1) else 1.0

    def node(self) -> float:
        """Return what one more node costs, as a share of a plain step, before it was measured here."""
        if self.near is None:
            return NODE["cpu" if self.device == "cpu" else "other"] * self.batch
        sizes = [nodes for nodes in self.near.verifying if nodes > 1 and self.near.is_measured(nodes)]
        if not sizes:
            return self.near.node() * self.batch / self.near.batch
        largest = max(sizes)
        share = (self.near.verify(largest) / self.near.plain() - 1) / (largest - 1)
        return max(share, 0.0) * self.batch / self.near.batch

    def verify(self, nodes: int) -> float:
        """Return the seconds of a step with a tree of this many nodes, without its drafting."""
        least = self.plain()  # which no tree can be below, whatever was measured in a noisy moment
        sizes = [size for size in sorted(self.verifying) if size > 1 and self.is_measured(size)]
        points = [(1, least), *((size, max(least, median(self.verifying[size]))) for size in sizes)]
        for (low, less), (high, more) in pairwise(points):
            if nodes <= high:
                return less + (more - less) * (nodes - low) / (high - low)
        last, most = points[-1]
        slope = (most - least) / (last - 1) if last >= 4 else self.node() * least
        return most + slope * (nodes - last)

    def draft(self, plan: Plan) -> float:
        """Return the seconds that drafting takes."""
        if plan in self.drafting:
            usual = median(self.drafting[plan])
            return mean(seconds for seconds in self.drafting[plan] if seconds <= 2 * usual)
        known = [(abs(other.levels - plan.levels), other) for other in self.drafting]
        if known:
            other = min(known)[1]
            return self.draft(other) * (plan.levels / other.levels if self.by_level else 1.0)
        if self.near is not None and self.near.drafting:
            return self.near.draft(plan) * self.plain() / self.near.plain()
        return LEVEL * (plan.levels if self.by_level else 1) * self.plain()

    def seconds(self, plan: Plan) -> float:
        """Return the mean seconds of a step with this plan."""
        if plan == PLAIN:
            return self.plain()
        sizes = self.sizes.get(plan) or [plan.nodes]
        return mean(map(self.verify, sizes)) + self.draft(plan)

    def dump(self) -> dict[str, Any]:
        """Return what the next run starts from, as JSON has it."""
        return {
            "verifying": [[size, self.verify(size)] for size in self.verifying if self.is_measured(size)],
            "drafting": [[*plan, self.draft(plan)] for plan in self.drafting],
            "sizes": [[*plan, *sizes] for plan, sizes in self.sizes.items()],
        }

    def load(self, dumped: dict[str, Any]) -> None:
        """Start from what `dump` returned. Raises ValueError or TypeError for anything else."""
        for size, seconds in dumped["verifying"]:
            self.verifying[int(size)] = deque(repeated(float(seconds)), maxlen=RECENT)
        for nodes, levels, seconds in dumped["drafting"]:
            self.drafting[Plan(int(nodes), int(levels))] = deque(repeated(float(seconds)), maxlen=RECENT)
        for nodes, levels, *sizes in dumped["sizes"]:
            self.sizes[Plan(int(nodes), int(levels))] = deque(map(int, sizes), maxlen=RECENT)


def repeated(seconds: float) -> Iterable[float]:
    """Return a remembered value as many times as it takes to count, so that new ones soon outweigh it."""
    if not 0 <= seconds < 3600:
        raise ValueError(f"{seconds} seconds cannot be a step's")
    return [seconds] * ENOUGH
