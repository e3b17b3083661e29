"""Choose the tree, or none, by what it costs and gains here and now: tokens per second, not acceptance length.

    gain(N, D)     tokens per step of the best N nodes down to depth D, counted on the largest tree: a smaller tree is a
                   part of it (its best nodes), so one full step tells what every smaller one would have gained
    seconds(N, D)  of a whole step: the median of those seen; of a tree not used yet, between plain decoding and the largest
                   tree as reading N rows and drafting D levels is, measured at the first use for this batch size

The first steps use the largest tree and none in turn; from then on the tree of best gain / seconds, and now and then the
largest and none again. Where plain decoding is best it decodes plainly, and looks again so rarely that looking costs one
step in a hundred, after twice as many steps each time: a drafter which never helps costs next to nothing.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.target import Target
from inference.drafters.base import Accepted, Drafter, root_only, select, unpadded
from inference.drafters.grown import GrownTree
from inference.drafters.static import StaticTree
from inference.sampling import Sampling, SamplingParams
from inference.tree import TokenTree, chain

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FIRST, REMEMBER = 24, 64  # full steps at first (of fewer, what a tree gains is a guess); full steps remembered
EXPLORE, RARELY = 16, 1024  # steps until it looks again; at most, where it decodes plainly
TIMED = 3  # steps of a tree before their median counts
MARGIN = 1.03  # what speculation must promise over plain decoding: nearer lies what the measured costs are wrong by
TEXT = 256  # entries of text in the cache that costs are measured over


class Plan(NamedTuple):
    nodes: int  # 1 is plain decoding
    levels: int


PLAIN = Plan(1, 0)


class Costs(NamedTuple):
    read: dict[int, float]  # seconds by number of nodes
    draft: list[float]  # seconds by number of levels, 0 first


class AutoTree(Drafter):
    def __init__(self, inner: GrownTree | StaticTree, target: Target):
        """inner: with the largest tree that may be used."""
        self.inner, self.target = inner, target
        self.layers, self.nodes, self.full = inner.layers, inner.nodes, Plan(inner.nodes, inner.depth)
        self.branches = inner.branches
        self.costs: dict[int, Costs] = {}
        self.seen: deque[list[int]] = deque(maxlen=REMEMBER)  # ranks of the nodes along each accepted path
        self.taken: dict[tuple[int, Plan], deque[float]] = {}  # seconds of whole steps, by batch size and tree
        self.batch, self.pause = 0, EXPLORE
        self.plans: list[Plan] = []  # of the next steps, the next one last
        self.use(self.full)

    def use(self, plan: Plan) -> None:
        """Propose this tree next."""
        self.plan, self.depth = plan, plan.levels

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.plan_for(batch)
        self.waiting = list[Accepted]()
        self.inner.begin(batch, capacity, sampling)

    def select_rows(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_rows(rows, capacity, sampling)
        self.waiting = [select(piece, rows) for piece in self.waiting]
        self.plan_for(len(rows))

    @property
    def readers(self) -> Sequence[GrownTree]:
        return self.inner.readers

    def plan_for(self, batch: int) -> None:
        """Trees for a batch of this size from now on; what they cost is measured when it is met first."""
        if batch not in self.costs:
            self.costs[batch] = measure(self.inner, self.target, batch, self.full)
            self.plans = [PLAIN] * (TIMED + 1) + [self.full] * FIRST
        elif batch != self.batch:
            self.plans = []
        if batch != self.batch:
            self.batch = batch
            self.use_next()
        self.started: float | None = None

    def use_next(self) -> None:
        if not self.plans:
            best = self.choose()
            self.pause = min(max(2 * self.pause, self.worth()), RARELY) if best == PLAIN else EXPLORE
            looks = [self.full] if best == PLAIN else [PLAIN, self.full]
            self.plans = looks + [best] * self.pause if self.timed(best) else [best] * (TIMED + 1)
        self.use(self.plans.pop())

    def worth(self) -> int:
        """Plain steps between two looks at the largest tree, for those to cost one in a hundred."""
        return round(100 * (self.seconds(self.full) / self.seconds(PLAIN) - self.gain(self.full)))

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.note_time()
        self.last = self.plan
        self.waiting.append(accepted)
        if self.plan == PLAIN:
            return root_only(accepted)
        merged, self.waiting = merge(self.waiting), []
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
            seconds = now - self.started
            self.taken.setdefault((self.batch, self.last), deque(maxlen=2 * TIMED + 1)).append(seconds)
        self.started = now

    def timed(self, plan: Plan) -> bool:
        return len(self.taken.get((self.batch, plan), ())) >= TIMED

    def seconds(self, plan: Plan) -> float:
        if self.timed(plan):
            return median(self.taken[self.batch, plan])
        if not (self.timed(PLAIN) and self.timed(self.full)):
            return self.predicted(plan)
        # Between the two that were seen, where calibration puts it.
        low, high, most = self.seconds(PLAIN), self.seconds(self.full), self.predicted(self.full)
        room = most - self.predicted(PLAIN)
        return high - (high - low) * min(1.0, (most - self.predicted(plan)) / room) if room > 0 else high

    def predicted(self, plan: Plan) -> float:
        costs = self.costs[self.batch]
        size = next((size for size in costs.read if size >= plan.nodes), max(costs.read))
        return costs.read[size] + (costs.draft[plan.levels] if plan.nodes > 1 else 0.0)

    def gain(self, plan: Plan) -> float:
        """Tokens per step. Along a path ranks only rise, so the nodes within the plan are its first ones."""
        kept = sum(sum(rank < plan.nodes - 1 for rank in ranks[: plan.levels]) for ranks in self.seen)
        return 1 + kept / max(1, len(self.seen))

    def choose(self) -> Plan:
        def speed(plan: Plan) -> float:
            return self.gain(plan) / self.seconds(plan)

        sizes = [size for size in SIZES if 1 < size < self.full.nodes] + [self.full.nodes]
        plans = [Plan(size, levels) for size in sizes for levels in range(1, self.full.levels + 1) if levels < size]
        most = max(map(speed, plans))
        # The smallest of those that are as good: it leaves most of the device to others.
        best = next(plan for plan in plans if speed(plan) * MARGIN >= most)
        return best if speed(best) > MARGIN * speed(PLAIN) else PLAIN


def merge(pieces: list[Accepted]) -> Accepted:
    """What several steps accepted, as one: each row's tokens of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    counts = [sum(piece.counts[row] for piece in pieces) if last.counts[row] else 0 for row in range(len(first.counts))]
    if all(unpadded(piece) for piece in pieces):
        tokens, features = torch.cat([p.tokens for p in pieces], 1), torch.cat([p.features for p in pieces], 1)
        return Accepted(tokens, features, counts, last.text)
    tokens = first.tokens.new_zeros(len(counts), max(counts))
    features = first.features.new_zeros(len(counts), max(counts), first.features.shape[-1])
    for row, total in enumerate(counts):
        at = 0
        for piece in pieces if total else ():
            count = piece.counts[row]
            tokens[row, at : at + count] = piece.tokens[row, :count]
            features[row, at : at + count] = piece.features[row, :count]
            at += count
    return Accepted(tokens, features, counts, last.text)


@torch.inference_mode()
def measure(inner: GrownTree | StaticTree, target: Target, batch: int, full: Plan, repeats: int = 5) -> Costs:
    """Seconds of reading 1 .. N nodes and of drafting 0 .. D levels on this device, in this dtype and batch: the fastest of
    some repeats, since only disturbances make one slower."""

    def fastest(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(repeats):
            synchronise(target.device)
            start = time.perf_counter()
            work()
            synchronise(target.device)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    text = min(TEXT, (target.context or TEXT + full.nodes) - full.nodes - 1)
    read, cache = {}, target.new_cache(batch, text + full.nodes)
    if not target.reads_trees:  # its own cache has no columns that can be read over unwritten
        target.read_prompts(torch.zeros(batch, text, dtype=torch.int64, device=target.device), [text] * batch, cache)
    for size in sorted({1, full.nodes, *(size for size in SIZES if size < full.nodes)}):
        cache.set_lengths([text] * batch)
        tree = chain(torch.zeros(batch, size, dtype=torch.int64, device=target.device))
        positions, mask = cache.starts + tree.depths, cache.mask(tree.ancestors)
        read[size] = fastest(partial(target.read_tree, tree.tokens, positions, mask, cache, inner.layers))
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=target.device)
    features = torch.zeros(batch, 1, len(inner.layers) * target.hidden_size, dtype=target.dtype, device=target.device)
    fake = Accepted(tokens, features, [1] * batch, [[0]] * batch)
    probe = copy.copy(inner)  # rows may be in the middle of their texts
    if isinstance(probe, GrownTree):  # nothing is likely after made-up features, and all levels are to be timed
        probe.cache = probe.should_stop = None
    draft = [0.0]
    for levels in range(1, full.levels + 1):
        probe.begin(batch, text + repeats * 2, Sampling.of([SamplingParams()] * batch, target.vocab_size))
        probe.resize(full.nodes, levels)
        draft.append(fastest(lambda: probe.propose(fake, None)))
    return Costs(read, draft)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
