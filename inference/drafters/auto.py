"""Choose the tree, or none, by what it costs and gains here and now: tokens per second, not acceptance length.

    gain(plan)     tokens per step: from how often drafts at each depth were accepted (memory.py). A smaller tree is a part
                   of a larger one (its best nodes), so a step also tells what every smaller tree would have gained
    seconds(plan)  of a whole step, from the steps that were seen (costs.py)

Only steps that write text are timed. The first ones are plain. Then the drafter drafts little, because a draft of one or two
tokens costs next to nothing, and more as soon as its drafts are accepted often enough. Larger trees than the best one are
tried as long as they may turn out better, but all trials together cost about one step in two hundred. A second account
compares the text so far with the baseline: where drafts lost more than that, nothing is drafted until it is made up.
What was learned is remembered for the next run (memory.py).
"""

import time
from collections.abc import Sequence
from math import log2

import torch
from torch import Tensor

from foredraft.heads.caches.device import synchronize
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, PendingAccepted, bonus_only
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.cached_tree import CachedTree
from foredraft.inference.drafters.costs import PLAIN, Plan
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.memory import Case, Memory
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree

HeadTree = DynamicTree | BlockTree | StaticTree  # its best nodes are a smaller tree

# Nodes of the trees that it chooses from, next to the largest. A GPU pads trees to powers of two, and captures each size.
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PADDED = tuple(size for size in SIZES if size & (size - 1) == 0)
EVERY = 4  # steps between choices
MARGIN = 1.03  # a plan must promise this much more than the last one to take its place
# Plain steps that trials may cost at first, and share of the time that they may cost later; and plain steps by which drafts
# may be behind the baseline.
FREE, SHARE, BEHIND = 0.5, 0.005, 1.0
MOST_LEAD = 8.0  # plain steps: what drafts gained earlier makes up for no greater loss
PLAIN_EVERY = 64  # steps after which a plain one is timed again
OPTIMISM = 1.0  # standard errors by which a plan may be better than seen, when it is considered for a trial


def plans_of(tree: HeadTree, device: torch.device) -> list[Plan]:
    """Return the sizes to choose from, each a part of the next one. A tree's depth grows more slowly than its nodes."""
    full = Plan(tree.nodes, tree.depth)
    grows = isinstance(tree, DynamicTree) and tree.branches
    sizes = [size for size in (SIZES if device.type == "cpu" else PADDED) if size < full.nodes]
    levels = [round(log2(size)) + 1 if grows else size - 1 for size in sizes]
    return [Plan(size, min(most, size - 1, full.levels)) for size, most in zip(sizes, levels, strict=True)] + [full]


class AutoTree(Drafter):
    def __init__(self, inner: HeadTree, target: Target):
        """Wrap `inner`, which has the largest tree that may be used."""
        self.inner, self.device, self.broadcast = inner, target.device, target.broadcast
        self.layers, self.nodes, self.branches = inner.layers, inner.nodes, inner.branches
        self.plans = plans_of(inner, target.device)
        self.full = self.plans[-1]
        device = "cpu" if target.device.type == "cpu" else "other"
        self.memory = Memory(self.plans, device, by_level=isinstance(inner, DynamicTree))
        self.case: Case | None = None
        self.best, self.until_choice, self.since_plain = PLAIN, 0, 0
        self.trials, self.lead = FREE, 0.0  # the two accounts, in plain steps
        self.emitted = 1.0  # tokens per sequence of this step
        self.gains = {PLAIN: 1.0}
        self.speeds = {PLAIN: 0.0}
        self.size = 1  # nodes of its tree
        self.drafting: float | None = None  # seconds that drafting it took
        self.pending = PendingAccepted()  # by the inner drafter
        self.use(PLAIN)

    def use(self, plan: Plan) -> None:
        """Propose this tree next."""
        self.plan, self.depth = plan, plan.levels

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        if self.case is None:  # later, only `select_sequences` determines the batch
            self.choose_for(Case.of(batch, sampling))
        self.memory.save()
        self.pending = PendingAccepted()
        self.inner.begin(batch, capacity, sampling)

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_sequences(slots, capacity, sampling)
        self.pending.select(slots)
        self.choose_for(Case.of(len(slots), sampling))

    @property
    def cached_drafters(self) -> Sequence[CachedTree]:
        return self.inner.cached_drafters

    def choose_for(self, case: Case) -> None:
        """Choose trees for such batches from now on."""
        if case == self.case:
            return
        self.case = case
        self.costs, self.hits = self.memory.costs_of(case), self.memory.hits[case.greedy]
        self.until_choice = 0
        self.use_next()

    def use_next(self) -> None:
        if not self.costs.knows_plain:
            return self.use(PLAIN)
        if self.until_choice == 0:
            self.best, self.until_choice = self.choose(), EVERY
            trial = self.trial()
            if trial is not None:
                return self.use(trial)
        self.until_choice -= 1
        self.use(PLAIN if self.is_behind else self.best)

    @property
    def is_behind(self) -> bool:
        """Return whether drafts have cost more than they may."""
        return self.lead < -BEHIND

    def choose(self) -> Plan:
        """Return the best plan by what was seen."""
        self.gains = dict(zip(self.plans, self.hits.gains(), strict=True)) | {PLAIN: 1.0}
        self.speeds = {plan: gain / self.costs.seconds(plan) for plan, gain in self.gains.items()}
        best = max(self.speeds, key=lambda plan: self.speeds[plan])
        return best if self.speeds[best] > MARGIN * self.speeds[self.best] else self.best

    def trial(self) -> Plan | None:
        """Return a plan that may be better than the best one, if trying it is affordable."""
        plain = self.costs.plain()
        if self.best != PLAIN and self.since_plain >= PLAIN_EVERY:
            candidate = PLAIN
        else:
            hoped = self.hits.gains(OPTIMISM)
            speeds = [gain / self.costs.seconds(plan) for plan, gain in zip(self.plans, hoped, strict=True)]
            speed, candidate = max(zip(speeds, self.plans, strict=True))
            if candidate == self.best or speed <= self.speeds[self.best]:
                return None
        loss = max(0.0, self.costs.seconds(candidate) - self.gains[candidate] / self.speeds[self.best]) / plain
        if loss > self.trials or loss > self.lead + BEHIND:
            return None
        self.trials -= loss
        return candidate

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.pending.append(accepted)
        self.size, self.drafting = 1, None
        if self.plan == PLAIN:
            return bonus_only(accepted)
        merged = self.pending.take()
        self.inner.resize(*self.plan)
        if self.costs.times_drafting(self.plan):
            started = self.now()
            tree = self.inner.propose(merged, gumbel)
            self.drafting = self.broadcast(self.now() - started)
        else:
            tree = self.inner.propose(merged, gumbel)
        self.size = tree.tokens.shape[1]
        return tree

    def postpone(self, accepted: Accepted) -> None:
        """Note that another drafter's tree is verified in this step: the inner one sees what was accepted before its next
        tree."""
        self.pending.append(accepted)

    def promised_speed(self) -> float:
        """Return the tokens per second and sequence of the best plan; 0 before plain steps were timed."""
        if not self.costs.knows_plain:
            return 0.0
        best = PLAIN if self.is_behind else self.best
        return self.gains[best] / self.costs.seconds(best)

    def now(self) -> float:
        """Return the seconds when the device has done what it was given."""
        synchronize(self.device)
        return time.perf_counter()

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        lengths = [len(path) for path in paths if path]
        self.emitted = sum(lengths) / max(1, len(lengths))
        if self.plan != PLAIN:
            ranks = self.inner.ranks.tolist()
            for row, path in enumerate(paths):
                if path:
                    self.hits.add(self.plan, [ranks[row][node - 1] for node in path[1:]])

    def observe_seconds(self, seconds: float | None) -> None:
        seconds = self.broadcast(seconds)
        if seconds is not None:
            self.costs.add(self.size, seconds, self.plan, self.drafting)
            self.since_plain = 0 if self.plan == PLAIN else self.since_plain + 1
        drafting = 0.0 if self.plan == PLAIN else self.costs.draft(self.plan)
        self.account(self.emitted, self.costs.verify(self.size) + drafting)
        self.use_next()

    def account(self, emitted: float, seconds: float) -> None:
        """Compare a step with the baseline: it took `seconds` and wrote `emitted` tokens per sequence."""
        steps = seconds / self.costs.plain()
        self.trials = min(self.trials + SHARE * steps, 2 * FREE + SHARE * 1024)
        self.lead = min(self.lead + emitted - steps + SHARE * steps, MOST_LEAD)
