"""Choose the tree, or none, by what it costs and gains here and now: tokens per second, not acceptance length.

    gain(N, D)     tokens per step of the best N nodes down to depth D, counted on the largest tree: a smaller tree is a
                   part of it (its best nodes), so one full step tells what every smaller one would have gained
    seconds(N, D)  of a whole step: the median of those seen, each divided by how much slower than usual the machine was
                   then; of a tree not used yet, between plain decoding and the largest tree as the cost model puts it
                   (costs.py), which is measured once and kept

The first steps use the largest tree, then none; another batch size, which gains the same and costs something else, begins
with none. From then on it is the tree of best gain / seconds, unless the largest is nearly as good, or the last choice; and
now and then the largest again (and every eighth time none), so rarely that looking costs one step in a hundred. Where plain
decoding is best it decodes plainly, and looks ever more rarely; where no tree could pay even if the drafter were as much
better than seen as chance allows, the first steps end early. So a drafter which never helps costs next to nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import median, pvariance
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only, concatenate, select
from foredraft.inference.drafters.costs import SIZES, CostModel, Costs, Tree
from foredraft.inference.drafters.grown import GrownTree
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree

FIRST, REMEMBER = 24, 128  # full steps at first (of fewer, what a tree gains is a guess); full steps remembered
FEWEST = 6  # full steps after which a drafter may be seen not to help
# Steps until it looks again: at least; at most, where it drafts; at most, where it does not.
EXPLORE, OFTEN, RARELY = 16, 256, 1024
TIMED, RECENT = 3, 9  # steps of a tree before their median counts; the newest ones, of which it is the median
NEWEST = 5  # steps whose median says how fast the machine is at the moment
# A tree must promise so much more than what was used last, tree or none, to take its place: within that its measured cost may
# be wrong, and every change costs steps. The largest tree goes before any that promises less than FULL_MARGIN over it: the
# best of sixty nearly equal trees seems better than it is.
MARGIN, FULL_MARGIN = 1.03, 1.05
PLAIN_LOOKS = 8  # of so many looks at the largest tree one is at plain decoding too, where it drafts


class Plan(NamedTuple):
    nodes: int  # 1 is plain decoding
    levels: int


class Case(NamedTuple):
    """What decides what a tree costs and gains."""

    batch: int
    greedy: bool


PLAIN = Plan(1, 0)


class AutoTree(Drafter):
    def __init__(self, inner: Tree, target: Target, costs: Callable[[int], Costs] | None = None):
        """inner: with the largest tree that may be used. costs: of a batch size; None measures them."""
        self.inner, self.costs = inner, CostModel(inner, target) if costs is None else costs
        self.broadcast = target.broadcast
        self.layers, self.nodes, self.full = inner.layers, inner.nodes, Plan(inner.nodes, inner.depth)
        self.branches = inner.branches
        self.known: dict[Case, Costs] = {}
        # Ranks of the nodes along each accepted path, of greedy texts or of sampled ones, which are drafted less well.
        self.paths: dict[bool, deque[list[int]]] = {}
        self.taken: dict[tuple[Case, Plan], deque[float]] = {}  # seconds of whole steps
        self.case: Case | None = None
        # What the newest steps took, as shares of what such steps take: how fast the machine is at the moment.
        self.pace: deque[float] = deque(maxlen=NEWEST)
        self.pause, self.best, self.looks = EXPLORE, self.full, 0
        self.plans: list[Plan] = []  # of the next steps, the next one last
        self.untried = False  # are these the first ones of a batch size?
        self.use(self.full)

    def prepare(self, most: int) -> None:
        """Measure now what batches of up to so many rows cost, and not when one is met."""
        for batch in range(1, most + 1):
            self.costs(batch)

    def use(self, plan: Plan) -> None:
        """Propose this tree next."""
        self.plan, self.depth = plan, plan.levels

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.plan_for(Case(batch, sampling.temperature is None))
        self.waiting = list[Accepted]()
        self.inner.begin(batch, capacity, sampling)

    def select_sequences(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_sequences(rows, capacity, sampling)
        if self.waiting:  # as one piece, since rows may join often while it decodes plainly
            self.waiting = [select(concatenate(self.waiting), rows)]
        self.plan_for(Case(len(rows), sampling.temperature is None))

    @property
    def cached_drafters(self) -> Sequence[GrownTree]:
        return self.inner.cached_drafters

    def plan_for(self, case: Case) -> None:
        """Trees for such batches from now on; what they cost is measured when one is met first."""
        self.started: float | None = None
        if case == self.case:
            return
        self.case, self.plans, self.untried = case, [], case not in self.known
        self.seen = self.paths.setdefault(case.greedy, deque(maxlen=REMEMBER))
        if self.untried:
            self.known[case] = self.costs(case.batch)
            missing = -(-(FIRST - len(self.seen)) // case.batch)  # every row of a step is one more that is seen
            # Where gains are known the costs decide at once: a server meets every size, and in large batches a full tree
            # costs many plain steps.
            full = max(TIMED + 1, missing) if missing > 0 else 0
            self.plans = [PLAIN] * (TIMED + 1) + [self.full] * full
        self.use_next()

    def use_next(self) -> None:
        if self.untried and self.full in self.plans and self.is_hopeless():
            self.plans, self.untried = [PLAIN] * (TIMED + 1), False
        if not self.plans:
            self.untried = False
            last, self.best = self.best, self.choose()
            self.looks += 1
            looks = [self.full] * (1 if self.best == PLAIN else TIMED)
            enough = len(looks) * self.pause_of_a_look()
            if self.best == PLAIN:
                self.pause = min(max(2 * (self.pause if last == PLAIN else EXPLORE), enough), RARELY)
            else:
                self.pause = min(max(EXPLORE, enough), OFTEN)
                if self.looks % PLAIN_LOOKS == 0:
                    looks.insert(0, PLAIN)
            # A new tree takes turns with the one before it, so that both are timed at the same pace of the machine.
            turns = [last, self.best] if self.timed(last) else [self.best]
            steps = [self.best] * self.pause if self.timed(self.best) else turns * (TIMED + 1)
            self.plans = looks + steps
        self.use(self.plans.pop())

    def pause_of_a_look(self) -> int:
        """So many steps with the best tree for one with the largest, which then costs 1 % of them."""
        lost = self.seconds(self.full) / self.seconds(self.best) - self.gain(self.full) / self.gain(self.best)
        return round(100 * lost)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.note_time()
        self.last = self.plan
        self.waiting.append(accepted)
        if self.plan == PLAIN:
            return bonus_only(accepted)
        merged, self.waiting = concatenate(self.waiting), []
        self.inner.resize(*self.plan)
        return self.inner.propose(merged, gumbel)

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        if self.plan == self.full:
            ranks = self.inner.ranks.tolist()
            self.seen.extend([ranks[row][node - 1] for node in path[1:]] for row, path in enumerate(paths) if path)
        self.use_next()

    def note_time(self) -> None:
        """What the last step took."""
        now = time.perf_counter()
        if self.started is not None:
            seconds = self.broadcast(now - self.started)
            if self.timed(self.last):
                self.pace.append(seconds / self.seconds(self.last))
            pace = median(self.pace) if self.pace else 1.0
            self.taken.setdefault(self.of_case(self.last), deque(maxlen=RECENT)).append(seconds / pace)
        self.started = now

    def of_case(self, plan: Plan) -> tuple[Case, Plan]:
        assert self.case is not None, "a step before begin"
        return self.case, plan

    def timed(self, plan: Plan) -> bool:
        return len(self.taken.get(self.of_case(plan), ())) >= TIMED

    def seconds(self, plan: Plan) -> float:
        """Of a step with this tree. One that was not seen lies where the cost model puts it beside those that were."""
        if self.timed(plan):
            return median(self.taken[self.of_case(plan)])
        seen = [one for one in (PLAIN, self.full) if self.timed(one)]
        if len(seen) < 2:
            return self.predicted(plan) * (self.seconds(seen[0]) / self.predicted(seen[0]) if seen else 1.0)
        low, high, most = self.seconds(PLAIN), self.seconds(self.full), self.predicted(self.full)
        room = most - self.predicted(PLAIN)
        return high - (high - low) * min(1.0, (most - self.predicted(plan)) / room) if room > 0 else high

    def predicted(self, plan: Plan) -> float:
        return self.known[self.of_case(plan)[0]].seconds(*plan)

    def gains(self) -> list[list[float]]:
        """[levels][nodes - 1]: drafts of such a tree that are accepted in a step. Along a path ranks only rise, so its nodes
        within a smaller tree are its first ones."""
        hits = [[0] * self.full.nodes for _ in range(self.full.levels + 1)]
        for ranks in self.seen:
            for depth, rank in enumerate(ranks, start=1):
                hits[depth][rank + 1] += 1
        return (torch.tensor(hits).cumsum(0).cumsum(1) / max(1, len(self.seen))).tolist()

    def gain(self, plan: Plan) -> float:
        """Tokens per step."""
        return 1 + self.gains()[plan.levels][plan.nodes - 1]

    def choose(self, doubt: float = 0.0) -> Plan:
        """The best tree, or none. doubt: so many drafts more than were seen may be accepted in a step."""
        gains = self.gains()
        sizes = [size for size in SIZES if 1 < size < self.full.nodes] + [self.full.nodes]
        plans = [Plan(size, levels) for size in sizes for levels in range(1, self.full.levels + 1) if levels < size]
        speed = {plan: (1 + gains[plan.levels][plan.nodes - 1] + doubt) / self.seconds(plan) for plan in plans}
        best = max(plans, key=lambda plan: speed[plan])
        if MARGIN * speed.get(self.best, 0.0) >= speed[best]:
            best = self.best
        enough = (MARGIN if self.best == PLAIN else 1.0) / self.seconds(PLAIN)
        if speed[self.full] > max(enough, speed[best] / FULL_MARGIN):
            return self.full
        return best if speed[best] > enough else PLAIN

    def is_hopeless(self) -> bool:
        """Would no tree pay, even if the drafter were better than seen by two standard errors?"""
        count = len(self.seen)
        if count < FEWEST or not self.timed(self.full):
            return False
        spread = pvariance([len(ranks) for ranks in self.seen])
        return self.choose(doubt=2 * sqrt((spread + 1 / count) / count)) == PLAIN
