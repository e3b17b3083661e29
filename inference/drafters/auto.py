"""Choose the tree, or none, by what it costs and gains here and now: tokens per second, not acceptance length.

    gain(N, D)     tokens per step of the best N nodes down to depth D, counted on the largest tree: a smaller tree is a
                   part of it (its best nodes), so one step with the largest tells what every smaller one would have gained
    seconds(N, D)  of a whole step: the median of those seen, each divided by how much slower than usual the machine was
                   then; of a tree not used yet, estimated from plain steps and the trees that were (`estimate`)

Nothing is timed but steps that write text. The first ones are plain, then come a small tree and the largest; another batch
size, which gains the same and costs something else, begins plainly too. From then on it is the tree of best gain / seconds,
unless the largest is nearly as good, or the last choice; and now and then the largest again (and every eighth time none), so
rarely that exploring costs one step in a hundred. Where plain decoding is best it decodes plainly, and explores ever more
rarely; where no tree could pay even if the drafter were as much better than seen as chance allows, the first steps end early.
So a drafter which never helps costs next to nothing.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import log, sqrt
from statistics import median, pvariance
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.heads.target.device import synchronize
from foredraft.inference.drafters.base import Accepted, Drafter, PendingAccepted, bonus_only
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.cached_tree import CachedTree
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree

HeadTree = DynamicTree | BlockTree | StaticTree  # its best nodes are a smaller tree

SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes of the trees that it chooses from, beside the largest
SMALL = 8  # nodes of the first tree that is tried
FIRST, REMEMBER = 24, 128  # full steps at first (of fewer, what a tree gains is a guess); full steps remembered
FEWEST = 6  # full steps after which a drafter may be seen not to help
MIN_INTERVAL, MAX_INTERVAL = 16, 1024  # steps until it explores again
TIMED, RECENT = 3, 9  # steps of a tree before their median counts; the newest ones, of which it is the median
NEWEST = 5  # steps whose median says how fast the machine is at the moment
# A tree must promise so much more than what was used last, tree or none, to take its place: within that its measured cost may
# be wrong, and every change costs steps. The largest tree goes before any that promises less than FULL_MARGIN over it: the
# best of sixty nearly equal trees seems better than it is.
MARGIN, FULL_MARGIN = 1.03, 1.05
PLAIN_EVERY = 8  # explorations, one of which is of plain decoding too, where it drafts


class Plan(NamedTuple):
    nodes: int  # 1 is plain decoding
    levels: int


class Case(NamedTuple):
    """What decides what a tree costs and gains."""

    batch: int  # a power of two, at least what it is, since sequences leave one by one
    greedy: bool

    @classmethod
    def of(cls, batch: int, sampling: Sampling) -> "Case":
        return cls(1 << (batch - 1).bit_length(), sampling.temperature is None)


class Times:
    """Seconds of the steps of one case."""

    def __init__(self) -> None:
        self.steps: dict[Plan, deque[float]] = {}
        self.drafting: deque[float] = deque(maxlen=TIMED)  # the largest tree's, without its verification

    def add(self, plan: Plan, seconds: float) -> None:
        self.steps.setdefault(plan, deque(maxlen=RECENT)).append(seconds)

    def __contains__(self, plan: Plan) -> bool:
        return len(self.steps.get(plan, ())) >= TIMED

    def __getitem__(self, plan: Plan) -> float:
        return median(self.steps[plan])


PLAIN = Plan(1, 0)


class AutoTree(Drafter):
    def __init__(self, inner: HeadTree, target: Target):
        """inner: with the largest tree that may be used."""
        self.inner, self.device, self.broadcast = inner, target.device, target.broadcast
        self.layers, self.nodes, self.branches = inner.layers, inner.nodes, inner.branches
        self.full = Plan(inner.nodes, inner.depth)
        self.small = Plan(min(SMALL, inner.nodes), min(SMALL - 1, inner.nodes - 1, inner.depth))
        self.all_times: dict[Case, Times] = {}
        # Ranks of the nodes along each accepted path, of greedy texts or of sampled ones, which are drafted less well.
        self.all_paths: dict[bool, deque[list[int]]] = {}
        self.case: Case | None = None
        # What the newest steps took, as shares of what such steps take: how slow the machine is at the moment.
        self.slowdowns: deque[float] = deque(maxlen=NEWEST)
        self.interval, self.best, self.explorations = MIN_INTERVAL, self.full, 0
        self.plans: list[Plan] = []  # of the next steps, the next one last
        self.untried = False  # are these the first ones of a batch size?
        self.pending = PendingAccepted()  # by the inner drafter
        self.use(PLAIN)

    def use(self, plan: Plan) -> None:
        """Propose this tree next."""
        self.plan, self.depth = plan, plan.levels

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.plan_for(Case.of(batch, sampling))
        self.pending = PendingAccepted()
        self.inner.begin(batch, capacity, sampling)

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_sequences(slots, capacity, sampling)
        self.pending.select(slots)
        self.plan_for(Case.of(len(slots), sampling))

    @property
    def cached_drafters(self) -> Sequence[CachedTree]:
        return self.inner.cached_drafters

    def plan_for(self, case: Case) -> None:
        """Trees for such batches from now on."""
        if case == self.case:
            return
        self.case, self.plans, self.untried = case, [], case not in self.all_times
        self.paths = self.all_paths.setdefault(case.greedy, deque(maxlen=REMEMBER))
        self.times = self.all_times.setdefault(case, Times())
        if self.untried:
            missing = -(-(FIRST - len(self.paths)) // case.batch)  # every sequence of a step is one more path
            # Where gains are known the costs decide at once: a server meets every size, and in large batches a full tree
            # costs many plain steps.
            if missing > 0 or self.nearest_case() is None:
                self.plans = [self.full] * max(TIMED + 1, missing)
                self.plans += [self.small] * (TIMED + 1) if self.small != self.full else []
            self.plans += [PLAIN] * (TIMED + 1)
        self.use_next()

    def use_next(self) -> None:
        if self.untried and self.full in self.plans and self.is_hopeless():
            self.plans, self.untried = [PLAIN] * (TIMED + 1), False
        if not self.plans and PLAIN not in self.times:  # every step was one that captured, say
            self.plans = [PLAIN] * TIMED
        if not self.plans:
            self.untried = False
            last, self.best = self.best, self.choose()
            if self.best in self.times:
                exploring = self.exploring(last)
                self.plans = exploring + [self.best] * self.interval
            else:  # it takes turns with one before it that costs the like, so that both see the same speed of the machine
                alike = last in self.times and self.times[last] < 2 * self.seconds(self.best)
                self.plans = ([last, self.best] if alike else [self.best]) * (TIMED + 1)
        self.use(self.plans.pop())

    def exploring(self, last: Plan) -> list[Plan]:
        """What is tried after `interval` steps with the best tree, or none; decides how many. last: the best before it."""
        assert self.case is not None, "a step before begin"
        self.explorations += 1
        # In a batch one step says as much of what is gained as many steps of one sequence.
        plans = [self.full] * (1 if self.best == PLAIN else -(-TIMED // self.case.batch))
        enough = len(plans) * self.steps_per_exploration()
        if self.best == PLAIN:
            doubled = 2 * (self.interval if last == PLAIN else MIN_INTERVAL)
            self.interval = min(max(doubled, enough), MAX_INTERVAL)
            return plans
        self.interval = min(max(MIN_INTERVAL, enough), MAX_INTERVAL)
        return [PLAIN, *plans] if self.explorations % PLAIN_EVERY == 0 else plans

    def steps_per_exploration(self) -> int:
        """So many steps with the best tree for one with the largest, which then costs 1 % of them."""
        slower = self.seconds(self.full) / self.seconds(self.best)
        return round(100 * (slower - self.gain(self.full) / self.gain(self.best)))

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.pending.append(accepted)
        if self.plan == PLAIN:
            return bonus_only(accepted)
        merged = self.pending.take()
        self.inner.resize(*self.plan)
        if self.plan != self.full or len(self.times.drafting) == TIMED:
            return self.inner.propose(merged, gumbel)
        started = self.now()
        tree = self.inner.propose(merged, gumbel)
        self.times.drafting.append(self.broadcast(self.now() - started))
        return tree

    def postpone(self, accepted: Accepted) -> None:
        """Another drafter's tree is verified in this step: the inner one sees what was accepted before its next tree."""
        self.pending.append(accepted)

    @property
    def slowdown(self) -> float:
        """How many times slower than usual the machine is at the moment."""
        return median(self.slowdowns) if self.slowdowns else 1.0

    def promised_speed(self) -> float:
        """Tokens per second and sequence of plain decoding or the best tree; 0 before plain steps were timed."""
        if PLAIN not in self.times:
            return 0.0
        plain = 1 / self.seconds(PLAIN)
        return max(plain, self.gain(self.best) / self.seconds(self.best)) if self.best in self.times else plain

    def now(self) -> float:
        """Seconds, when the device has done what it was given."""
        synchronize(self.device)
        return time.perf_counter()

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        if self.plan == self.full:
            ranks = self.inner.ranks.tolist()
            self.paths.extend([ranks[row][node - 1] for node in path[1:]] for row, path in enumerate(paths) if path)

    def observe_seconds(self, seconds: float | None) -> None:
        seconds = self.broadcast(seconds)
        if seconds is not None:
            if self.plan in self.times:
                self.slowdowns.append(seconds / self.times[self.plan])
            self.times.add(self.plan, seconds / self.slowdown)
        self.use_next()

    def seconds(self, plan: Plan) -> float:
        """Of a step with this tree."""
        return self.times[plan] if plan in self.times else self.estimate(plan)

    def estimate(self, plan: Plan) -> float:
        """Of a tree that was not used yet: a plain step, and of what the largest tree adds to it the levels' share of
        drafting, if they are drafted one after the other, and the nodes' share of verification, bent where the small tree
        was."""
        if PLAIN not in self.times:
            return 1.0
        return self.times[PLAIN] + self.drafting_seconds(plan.levels) + self.verifying_seconds(plan.nodes)

    def seconds_to_verify(self, nodes: int) -> float:
        """Of a step with a tree that nobody drafts."""
        return 1.0 if PLAIN not in self.times else self.times[PLAIN] + self.verifying_seconds(nodes)

    def drafting_seconds(self, levels: int) -> float:
        drafting = self.full_seconds()[1]
        return drafting * levels / self.full.levels if isinstance(self.inner, DynamicTree) else drafting

    def verifying_seconds(self, nodes: int) -> float:
        """What so many nodes add to a plain step: between the points (1, 0) and (largest, what is left of its step without
        drafting) and, once it was used, the small tree's."""
        plain, (full, drafting) = self.times[PLAIN], self.full_seconds()
        most = max(0.0, full - plain - drafting)
        points = [(1, 0.0), (self.full.nodes, most)]
        if self.small in self.times and self.small.nodes < self.full.nodes:
            added = self.times[self.small] - plain - self.drafting_seconds(self.small.levels)
            points.insert(1, (self.small.nodes, min(max(0.0, added), most)))
        nodes = min(nodes, self.full.nodes)
        (low, least), (high, most) = next(pair for pair in pairwise(points) if nodes <= pair[1][0])
        return least + (most - least) * (nodes - low) / (high - low)

    def full_seconds(self) -> tuple[float, float]:
        """Of a step with the largest tree, and of its drafting; where it was not used yet, after the nearest batch size: a
        node costs as much for each sequence as it does there, and drafting as many plain steps."""
        if self.full in self.times:
            return self.times[self.full], median(self.times.drafting)
        plain, near = self.times[PLAIN], self.nearest_case()
        if near is None:
            return plain, 0.0
        assert self.case is not None, "a step before begin"
        times = self.all_times[near]
        drafting = median(times.drafting)
        added = max(0.0, times[self.full] - times[PLAIN] - drafting) * self.case.batch / near.batch
        drafting *= plain / times[PLAIN]
        return plain + drafting + added, drafting

    def nearest_case(self) -> Case | None:
        """The one nearest in batch size in which plain steps and the largest tree were timed."""
        assert self.case is not None, "a step before begin"
        batch = self.case.batch
        timed = [case for case, times in self.all_times.items() if PLAIN in times and self.full in times]
        return min(timed, key=lambda case: abs(log(case.batch / batch)), default=None)

    def gains(self) -> list[list[float]]:
        """[levels][nodes - 1]: drafts of such a tree that are accepted in a step. Along a path ranks only rise, so its nodes
        within a smaller tree are its first ones."""
        hits = [[0] * self.full.nodes for _ in range(self.full.levels + 1)]
        for ranks in self.paths:
            for depth, rank in enumerate(ranks, start=1):
                hits[depth][rank + 1] += 1
        return (torch.tensor(hits).cumsum(0).cumsum(1) / max(1, len(self.paths))).tolist()

    def gain(self, plan: Plan) -> float:
        """Tokens per step."""
        return 1 + self.gains()[plan.levels][plan.nodes - 1]

    def choose(self, margin_of_error: float = 0.0) -> Plan:
        """The best tree, or none. margin_of_error: so many drafts more than were seen may be accepted in a step."""
        gains = self.gains()
        sizes = [size for size in SIZES if size < self.full.nodes] + [self.full.nodes]
        plans = [Plan(size, levels) for size in sizes for levels in range(1, self.full.levels + 1) if levels < size]
        speed = {
            plan: (1 + gains[plan.levels][plan.nodes - 1] + margin_of_error) / self.seconds(plan) for plan in plans
        }
        best = max(plans, key=lambda plan: speed[plan])
        if MARGIN * speed.get(self.best, 0.0) >= speed[best]:
            best = self.best
        enough = (MARGIN if self.best == PLAIN else 1.0) / self.seconds(PLAIN)
        if speed[self.full] > max(enough, speed[best] / FULL_MARGIN):
            return self.full
        return best if speed[best] > enough else PLAIN

    def is_hopeless(self) -> bool:
        """Would no tree pay, even if the drafter were better than seen by two standard errors?"""
        count = len(self.paths)
        if count < FEWEST or self.full not in self.times:
            return False
        spread = pvariance([len(ranks) for ranks in self.paths])
        return self.choose(margin_of_error=2 * sqrt((spread + 1 / count) / count)) == PLAIN
