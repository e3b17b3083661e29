"""Suffix counting where the text repeats itself, a head's tree elsewhere: in each step what promises more tokens per second.

A suffix that was found costs a look-up and a forward over few nodes; a head's tree costs the head as well. The counts decide:

    suffix     (1 + share * expected) / seconds(nodes)    expected: drafts that its counts say are right; share: that were
    head       gain / seconds, of the tree (or none) that AutoTree takes

The union of both trees (union.py) accepts more per step, but pays for both in every one.
"""

from collections.abc import Sequence

from torch import Tensor

from foredraft.inference.drafters.auto import AutoTree
from foredraft.inference.drafters.base import Accepted, Drafter
from foredraft.inference.drafters.cached_tree import CachedTree
from foredraft.inference.drafters.suffix import SuffixDrafter
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree

PRIOR = 8.0  # drafts' worth of trust in the counts before any was verified
REMEMBER = 256.0  # expected drafts after which what was learned of them counts half


class Switch(Drafter):
    def __init__(self, suffix: SuffixDrafter, auto: AutoTree):
        self.suffix, self.auto = suffix, auto
        self.layers, self.nodes = auto.layers, max(suffix.nodes, auto.nodes)
        self.branches = suffix.branches or auto.branches
        self.by_suffix = False  # was the last tree a suffix's?

    @property
    def depth(self) -> int:  # type: ignore[override]  # of the next tree
        return max(self.suffix.depth, self.auto.depth)

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.suffix.begin(batch, capacity, sampling)
        self.auto.begin(batch, capacity, sampling)
        self.promised = self.auto.promised_speed()

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.suffix.select_sequences(slots, capacity, sampling)
        self.auto.select_sequences(slots, capacity, sampling)
        self.promised = self.auto.promised_speed()

    @property
    def remembers_others(self) -> bool:  # type: ignore[override]
        return self.by_suffix and self.suffix.remembers_others

    @property
    def cached_drafters(self) -> Sequence[CachedTree]:
        return self.auto.cached_drafters

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.suffix.propose(accepted, gumbel)
        expected, right = self.auto.memory.suffix or (PRIOR, PRIOR)
        self.size = tree.tokens.shape[1]
        self.now_expected = sum(self.suffix.expected)
        gain = 1 + right / expected * self.now_expected / len(self.suffix.expected)
        # Nothing is promised before plain steps were timed.
        promised = self.promised * self.auto.costs.verify(self.size)
        self.by_suffix = self.now_expected > 0 and 0 < promised < gain
        if self.by_suffix:
            self.auto.postpone(accepted)
            return tree
        return self.auto.propose(accepted, None if gumbel is None else gumbel[:, : self.auto.depth + 1])

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        if not self.by_suffix:
            self.auto.observe(paths, choices)
            return
        lengths = [len(path) for path in paths if path]
        self.emitted = sum(lengths) / max(1, len(lengths))
        expected, right = self.auto.memory.suffix or (PRIOR, PRIOR)
        expected, right = expected + self.now_expected, right + sum(lengths) - len(lengths)
        share = 0.5 if expected > REMEMBER else 1.0
        self.auto.memory.suffix[:] = share * expected, share * right

    def forget_outputs(self) -> None:
        self.suffix.forget_outputs()

    def observe_seconds(self, seconds: float | None) -> None:
        if not self.by_suffix:
            self.auto.observe_seconds(seconds)
            self.promised = self.auto.promised_speed()
            return
        seconds = self.auto.broadcast(seconds)
        if seconds is not None:
            self.auto.costs.add(self.size, seconds)
        self.auto.account(self.emitted, self.auto.costs.verify(self.size))
