"""One fixed tree for heads that draft all depths at once (Medusa, arXiv:2401.10774, section 2.3.3).

The tree is a list of rank paths: (0,) is the first guess at depth 1, (0, 2) the third guess at depth 2 below it. It is
grown greedily from measured accuracies: how often the guess of rank r at depth d is the target's token.
"""

import heapq

import torch
from torch import Tensor

from heads.base import DraftHead
from heads.target import Target
from inference.drafters.base import Accepted, Drafter, roots
from inference.sampling import Sampling
from inference.tree import TokenTree, from_parents

# Until a head's own accuracies are measured: the shape that published heads have, roughly.
TYPICAL = [[0.6 * 0.8**d * share for share in (1.0, 0.2, 0.1, 0.06, 0.04, 0.03)] for d in range(8)]


def grow(accuracies: list[list[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` - 1 rank paths with the greatest chance of being accepted, the greatest first, so parents first.

    accuracies[d][r]: chance that the guess of rank r is right at depth d + 1. A path's chance is the product.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-accuracies[0][0], (0,))]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < nodes - 1:
        chance, path = heapq.heappop(heap)
        paths.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(accuracies[depth - 1]) and accuracies[depth - 1][rank] > 0:
            sibling = chance / accuracies[depth - 1][rank] * accuracies[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if depth < len(accuracies):
            heapq.heappush(heap, (chance * accuracies[depth][0], (*path, 0)))
    return paths


class StaticTree(Drafter):
    def __init__(self, head: DraftHead, target: Target, nodes: int = 16, accuracies: list[list[float]] | None = None):
        """nodes: of the tree, its root counted. accuracies: of this head, measured (see inference/evaluate.py)."""
        if head.recurrent:
            raise ValueError(f"a static tree needs a head that drafts all depths at once, not {head.kind}")
        if nodes < 2:
            raise ValueError(f"a static tree needs nodes={nodes} of at least 2, its root and a draft")
        self.head, self.target, self.layers = head, target, head.layers
        vocab = target.vocab_size if head.draft_ids is None else len(head.draft_ids)
        accuracies = [row[:vocab] for row in (accuracies or TYPICAL)[: head.depth]]
        self.paths = grow(accuracies, nodes)
        self.depth, self.nodes = max(map(len, self.paths)), len(self.paths) + 1
        self.resize(self.nodes, self.depth)

    def resize(self, nodes: int, levels: int) -> None:
        """Propose the best `nodes` of the tree, `levels` deep at most, from now on."""
        best = [path for path in self.paths if len(path) <= levels][: nodes - 1]
        self.levels = max(map(len, best))
        order = sorted(range(len(best)), key=lambda number: (len(best[number]), best[number]))
        paths = [best[number] for number in order]
        self.order = torch.tensor([order])
        self.guessed = 1 + max(max(path) for path in paths)
        index = {(): 0} | {path: number for number, path in enumerate(paths, start=1)}
        parents = torch.tensor([[0] + [index[path[:-1]] for path in paths]])
        shape = from_parents(torch.zeros_like(parents), parents, self.depth)
        self.shape = TokenTree(*(tensor.to(self.target.device) for tensor in shape))
        flat = [(len(path) - 1) * self.guessed + path[-1] for path in paths]
        self.guesses = torch.tensor(flat, device=self.target.device)  # which of (depth, rank) each node is

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.sampling = sampling

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        features = accepted.features[:, -1]
        if len(set(accepted.counts)) > 1:
            rows = torch.arange(len(accepted.counts), device=features.device)
            features = accepted.features[rows, rows.new_tensor([max(count, 1) - 1 for count in accepted.counts])]
        logits = self.head.drafts(features)[:, : self.levels].float()
        if gumbel is not None:
            noise = gumbel if self.head.draft_ids is None else gumbel[..., self.head.draft_ids]
            logits = self.sampling.warp(logits) + noise[:, : self.levels]
        guesses = self.head.to_target(logits.topk(self.guessed).indices).flatten(1)
        tokens = torch.cat([roots(accepted), guesses[:, self.guesses]], dim=1)
        batch = len(tokens)
        self.ranks = self.order.expand(batch, -1)
        return TokenTree(tokens, *(tensor.expand(batch, *tensor.shape[1:]) for tensor in self.shape[1:]))
