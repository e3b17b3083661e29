"""Choose in every step what to draft, by the tokens per second that it promises here and now.

    arm              tokens per step                                               seconds per step
    no drafts        1                                                             measured
    a head's tree    counted: how often drafts at each depth were accepted         measured for each size
    a suffix's tree  1 + drafts that its counts expect * the share that was right  measured by nodes

The first steps have no drafts. Then the head drafts little, because a draft of one or two tokens costs next to nothing, and
more as soon as its drafts are accepted often enough. Larger trees than the best one are tried as long as they may turn out
better, but all trials together cost about one step in two hundred. A second account compares the text so far with the
baseline: where drafts lost more than that, nothing is drafted until it is made up. Only steps that write text are timed.

n-grams may take the place of the suffix. Without a head the first two arms are one.
"""

import math
from functools import partial

import torch
from torch import Tensor

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.sharding import broadcast
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, PendingAccepted, bonus_only
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.measurements import PLAIN, Case, Measurements, Plan
from foredraft.inference.drafters.ngram import NgramDrafter
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.drafters.suffix import SuffixDrafter
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree

HeadTree = DynamicTree | BlockTree | StaticTree  # its best nodes are a smaller tree

# Nodes of the trees that it chooses from, next to the largest. A GPU pads trees to powers of two, and captures each size.
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CPU_NODE, NODE = 0.1, 0.005  # typical cost of one more node on a CPU and elsewhere, as a share of a step without drafts
EVERY = 4  # steps between choices
MARGIN = 1.03  # a plan must promise this much more than the last one to take its place
# Plain steps that trials may cost at first, and share of the time that they may cost later; and plain steps by which drafts
# may be behind the baseline.
FREE, SHARE, BEHIND = 0.7, 0.005, 1.0
# Plain steps: the largest gain that earlier drafts count for, and the largest loss of a step.
MOST_LEAD, MOST_LOSS = 8.0, 2.0
# Steps without the head after which it processes their tokens: until then their hidden states take memory.
MOST_PENDING = 256
PLAIN_EVERY = 64  # steps after which a plain one is timed again
OPTIMISM = 1.0  # standard errors by which a plan may be better than seen, when it is considered for a trial
# Drafts' worth of trust in a suffix's counts before any was verified, and expected drafts after which they count half.
PRIOR, REMEMBER = 8.0, 256.0


def plans_of(tree: HeadTree | NoDrafter, device: torch.device) -> list[Plan]:
    """Return the sizes to choose from, each a part of the next one. A tree's depth grows more slowly than its nodes."""
    if isinstance(tree, NoDrafter):
        return []
    full = Plan(tree.nodes, tree.depth)
    grows = isinstance(tree, DynamicTree) and tree.branches
    sizes = [size for size in SIZES if size < full.nodes and (device.type == "cpu" or size.bit_count() == 1)]
    levels = [round(math.log2(size)) + 1 if grows else size - 1 for size in sizes]
    return [Plan(size, min(most, size - 1, full.levels)) for size, most in zip(sizes, levels, strict=True)] + [full]


class AutoTree(Drafter):
    """Draft with the head, with the suffix if it promises more in this step, or not at all."""

    suffix: SuffixDrafter | NgramDrafter | None = None

    def __init__(self, inner: HeadTree | NoDrafter, target: Target):
        """Wrap `inner`, which has the largest tree of the head that may be used; `NoDrafter` without a head."""
        self.inner, self.parts, self.broadcast = inner, [inner], partial(broadcast, target)
        self.layers, self.nodes, self.branches = inner.layers, inner.nodes, inner.branches
        self.plans = plans_of(inner, target.device)
        node = CPU_NODE if target.device.type == "cpu" else NODE
        self.memory = Measurements(self.plans, node, by_level=isinstance(inner, DynamicTree))
        self.case: Case | None = None
        self.plan = self.best = PLAIN  # of the head: the next one, and the best by what was seen
        self.until_choice, self.since_plain = 0, 0
        self.trials, self.lead = FREE, 0.0  # the two accounts, in plain steps
        self.emitted = 1.0  # tokens per sequence of this step
        self.gains, self.speeds = {PLAIN: 1.0}, {PLAIN: 0.0}
        self.by_suffix = self.tries_suffix = False  # was the last tree the suffix's? Only to learn what it costs?
        self.size, self.expected = 1, 0.0  # nodes of the suffix's tree, and drafts that it expects to be right
        self.pending = PendingAccepted()  # by the head

    def add_suffix(self, suffix: SuffixDrafter | NgramDrafter) -> None:
        """Draft with the suffix too. Called before decoding."""
        self.suffix, self.parts, self.nodes = suffix, [self.inner, suffix], max(self.inner.nodes, suffix.nodes)
        self.branches = self.inner.branches or suffix.branches

    @property
    def depth(self) -> int:  # type: ignore[override]  # of the next tree
        return self.suffix.depth if self.suffix and self.by_suffix else self.plan.levels

    @property
    def remembers_others(self) -> bool:  # type: ignore[override]
        return self.by_suffix and self.suffix is not None and self.suffix.remembers_others

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        super().begin(batch, capacity, sampling)
        self.pending = PendingAccepted()
        if self.case is None:  # later, only `select_sequences` determines the batch
            self.choose_for(Case.of(batch, sampling))

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        super().select_sequences(slots, capacity, sampling)
        self.pending.select(slots)
        self.choose_for(Case.of(len(slots), sampling))

    def choose_for(self, case: Case) -> None:
        """Choose trees for such batches from now on."""
        if case != self.case:
            self.case, self.costs, self.hits = case, self.memory.costs_of(case), self.memory.hits[case.greedy]
            self.until_choice = 0
            self.plan = self.next_plan()

    def next_plan(self) -> Plan:
        self.is_trial = False
        if not self.costs.knows_plain:
            return PLAIN
        if self.until_choice == 0:
            self.best, self.until_choice = self.choose(), EVERY
            if (trial := self.trial()) is not None:
                self.is_trial = True
                return trial
        self.until_choice -= 1
        return self.affordable

    @property
    def affordable(self) -> Plan:
        """Return the best plan, or no drafts where they have cost more than they may."""
        return PLAIN if self.lead < -BEHIND else self.best

    def choose(self) -> Plan:
        """Return the best plan by what was seen, of those that were tried."""
        self.gains = dict(zip(self.plans, self.hits.gains(), strict=True)) | {PLAIN: 1.0}
        self.speeds = {plan: gain / self.seconds(plan) for plan, gain in self.gains.items()}
        tried = [plan for plan, count in zip(self.plans, self.hits.tried, strict=True) if count[0]]
        best = max([PLAIN, *tried], key=lambda plan: self.speeds[plan])
        return best if self.speeds[best] > MARGIN * self.speeds[self.best] else self.best

    def trial(self) -> Plan | None:
        """Return the plan that promises most, if it may be better than the best one, of those that are affordable to try."""
        if self.best != PLAIN and self.since_plain >= PLAIN_EVERY:
            return PLAIN  # whatever it costs: what plain steps take decides whether drafts pay
        gains = zip(self.plans, self.hits.gains(OPTIMISM), strict=True)
        hoped = [(plan, gain / self.seconds(plan)) for plan, gain in gains]
        most = min(self.trials, self.lead + BEHIND) * self.seconds(PLAIN)
        affordable = [
            (speed, plan)
            for plan, speed in hoped
            if speed > self.speeds[self.best] and plan != self.best
            if self.seconds(plan) - self.gains[plan] / self.speeds[self.best] <= max(0.0, most)
        ]
        return max(affordable)[1] if affordable else None

    def seconds(self, plan: Plan) -> float:
        return self.costs.seconds("head", plan.nodes)

    def prepare(self, accepted: Accepted) -> None:
        if self.suffix:
            self.lookup = self.suffix.propose(accepted, None)
            self.size, self.expected = self.lookup.tokens.shape[1], sum(self.suffix.expected)
            self.by_suffix, self.tries_suffix = self.suffix_pays(self.expected / len(self.suffix.expected))

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        if self.plans:
            self.pending.append(accepted)
        if self.by_suffix or self.plan == PLAIN or isinstance(self.inner, NoDrafter):
            if len(self.pending) >= MOST_PENDING:  # otherwise the head sees them before its next tree
                pending = self.pending.take()
                for cached in self.inner.cached_drafters:
                    cached.prefill(pending)
            return self.lookup if self.by_suffix else bonus_only(accepted)
        self.inner.resize(*self.plan)
        return self.inner.propose(self.pending.take(), None if gumbel is None else gumbel[:, : self.plan.levels + 1])

    def suffix_pays(self, drafts: float) -> tuple[bool, bool]:
        """Return whether to use the suffix's tree of `size` nodes, and whether only to learn what such a tree costs. drafts:
        number that its counts expect to be right."""
        if not drafts or not self.costs.knows_plain:
            return False, False
        expected, right = self.memory.suffix or (PRIOR, PRIOR)
        gain, seconds = 1 + right / expected * drafts, self.costs.seconds("suffix", self.size)
        plain = self.seconds(PLAIN)
        head = self.gains[self.affordable] / self.seconds(self.affordable)
        if gain > head * seconds:
            return True, False
        is_trial = not self.costs.knows("suffix", self.size) and gain > head * plain
        is_trial = is_trial and seconds - gain * plain <= self.trials * plain
        return is_trial, is_trial

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        lengths = [len(path) for path in paths if path]
        self.emitted = sum(lengths) / max(1, len(lengths))
        if self.by_suffix:
            expected, right = self.memory.suffix or (PRIOR, PRIOR)
            expected, right = expected + self.expected, right + sum(lengths) - len(lengths)
            share = 0.5 if expected > REMEMBER else 1.0
            self.memory.suffix[:] = share * expected, share * right
        elif self.plan != PLAIN and not isinstance(self.inner, NoDrafter):
            ranks = self.inner.ranks.tolist()
            for row, path in enumerate(paths):
                if path:
                    self.hits.add(self.plan, [ranks[row][node - 1] for node in path[1:]])

    def save(self) -> None:
        if self.memory.file is not None:
            self.memory.file()

    def observe_seconds(self, seconds: float | None) -> None:
        seconds = self.broadcast(seconds)
        arm, nodes = ("suffix", self.size) if self.by_suffix else ("head", self.plan.nodes)
        if seconds is not None:
            self.costs.add(arm, nodes, seconds)
        steps = self.costs.seconds(arm, nodes) / self.seconds(PLAIN)  # that the baseline would have made
        self.trials = min(self.trials + SHARE * steps, 2 * FREE + SHARE * 1024)
        if self.tries_suffix:
            self.trials = max(0.0, self.trials + self.emitted - steps)
        if self.by_suffix:  # its counts limit what it may lose
            return
        # A slow moment of the machine must not forbid drafts for long, so no step loses more than MOST_LOSS.
        self.lead = min(self.lead + max(self.emitted - steps, -MOST_LOSS) + SHARE * steps, MOST_LEAD)
        if self.is_trial:  # what it gained and cost, next to the best plan
            self.trials = max(0.0, self.trials + self.emitted / (self.speeds[self.best] * self.seconds(PLAIN)) - steps)
        if seconds is not None:
            self.since_plain = 0 if self.plan == PLAIN else self.since_plain + 1
        self.plan = self.next_plan()
