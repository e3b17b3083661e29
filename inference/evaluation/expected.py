"""Decoding speed by the cost model beside measured speed, over tree sizes and batch sizes.

expected = plain * gain(N, D) * read[1] / (read[N] + draft[D]): the gain is counted on the largest tree, of which every
smaller one is a part; the costs are those that AutoTree chooses by (inference/drafters/costs.py). They may have been measured
when the machine was faster or slower, so they only say how many plain steps a step takes; `plain` is the speed of plain
decoding, measured before and after the trees on the same texts. Measured is the engine in full swing: all rows of the batch
writing, no prompt being read.
"""

import copy
import time
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.heads.target.device import synchronise
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.drafters.costs import SIZES, CostModel, Costs, PaddedRoot, Tree
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.engine import Engine
from foredraft.inference.request import Request
from foredraft.inference.tree import TokenTree

TREES = 5  # sizes that are tried


class Speed(NamedTuple):
    batch: int
    nodes: int
    expected: float  # tokens per second
    measured: float


class Observed(Wrapper):
    """The largest tree, and what smaller ones would have gained."""

    inner: Tree

    def __init__(self, inner: Tree):
        """inner: a copy, since its `should_stop` is replaced."""
        super().__init__(inner)
        self.ranks: list[list[int]] = []  # along each accepted path
        self.levels: list[int] = []  # that each step drafted: fewer than all where the draft was not sure
        if not isinstance(inner, StaticTree) and (should_stop := inner.should_stop) is not None:

            def stops(scores: Tensor) -> bool:
                if stop := should_stop(scores):
                    self.levels[-1] = self.asked
                self.asked += 1
                return stop

            inner.should_stop = stops

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.levels.append(self.inner.depth)
        self.asked = 1  # each time after that many levels
        return self.inner.propose(accepted, gumbel)

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        ranks = self.inner.ranks.tolist()
        self.ranks += [[ranks[row][node - 1] for node in path[1:]] for row, path in enumerate(paths) if path]

    def speedup(self, nodes: int, costs: Costs) -> float:
        """Over plain decoding, with a tree of so many nodes and all its levels."""
        kept = sum(sum(rank < nodes - 1 for rank in ranks) for ranks in self.ranks)
        deepest = min(nodes - 1, self.inner.depth)
        seconds = [costs.seconds(nodes, min(levels, deepest)) for levels in self.levels]
        return (1 + kept / len(self.ranks)) * costs.seconds(1, 0) / (sum(seconds) / len(seconds))


def sizes(largest: int) -> list[int]:
    """Of the trees that are tried, smallest first."""
    known = [size for size in SIZES if 1 < size < largest] + [largest]
    return sorted({known[(len(known) - 1) * number // (TREES - 1)] for number in range(TREES)})


def compare(
    target: Target, inner: Tree, prompts: list[list[int]], new_tokens: int, batch: int, repeats: int = 5
) -> tuple[list[Speed], Costs]:
    """The speeds of some trees, medians over `repeats` batches of prompts, and the costs that they are expected by. inner:
    with the largest tree. Texts are greedy; prompts are used again where there are fewer than the batches need."""
    batches = [[prompts[(turn * batch + row) % len(prompts)] for row in range(batch)] for turn in range(repeats)]
    lengths = [len(row) for rows in batches for row in rows]
    costs = CostModel(inner, target, sum(lengths) // len(lengths) + new_tokens // 2)(batch)
    trees: dict[int, Tree] = {}
    for nodes in sizes(inner.nodes):
        trees[nodes] = tree = copy.copy(inner)
        tree.resize(nodes, min(nodes - 1, inner.depth))
    expected: dict[int, list[float]] = {nodes: [] for nodes in trees}
    measured: dict[int, list[float]] = {nodes: [] for nodes in trees}
    for rows in batches:
        observed = Observed(copy.copy(inner))
        in_full_swing(target, observed, rows, new_tokens)
        before = speed(target, PaddedRoot(1, inner.layers), rows, new_tokens)
        for nodes, tree in trees.items():
            measured[nodes].append(speed(target, tree, rows, new_tokens))
        after = speed(target, PaddedRoot(1, inner.layers), rows, new_tokens)
        for nodes in trees:
            expected[nodes].append((before + after) / 2 * observed.speedup(nodes, costs))
    return [Speed(batch, nodes, median(expected[nodes]), median(measured[nodes])) for nodes in trees], costs


def speed(target: Target, drafter: Drafter, rows: list[list[int]], new_tokens: int) -> float:
    """Tokens per second."""
    tokens, seconds = in_full_swing(target, drafter, rows, new_tokens)
    return tokens / seconds


@torch.inference_mode()
def in_full_swing(target: Target, drafter: Drafter, rows: list[list[int]], new_tokens: int) -> tuple[int, float]:
    """Tokens and seconds, after the prompts and before the step that ends a row, which may be cut short."""
    engine = Engine(target, drafter)
    for seed, row in enumerate(rows):
        engine.add(Request(row, max_new_tokens=new_tokens, seed=seed))
    engine.step()
    tokens, seconds, running = 0, 0.0, True
    synchronise(target.device)
    start = time.perf_counter()
    while running and engine.has_work:
        outputs = engine.step()
        synchronise(target.device)
        running = all(output.finish_reason is None for output in outputs)
        if running or not tokens:
            tokens += sum(len(output.tokens) for output in outputs)
            seconds = time.perf_counter() - start
    engine.close()
    return tokens, seconds
