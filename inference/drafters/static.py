"""A fixed tree for heads that draft all depths at once (Medusa, arXiv:2401.10774, section 2.3.3).

The tree is a list of rank paths: (0,) is the best guess at depth 1, and (0, 2) the third guess at depth 2 below it. It is
built greedily from measured accuracies: how often the guess of rank r at depth d equals the target's token.
"""

import heapq

import torch
from torch import Tensor

from foredraft.heads.base import ParallelHead
from foredraft.heads.caches.cuda_graphs import CudaGraphs
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_tokens, newest
from foredraft.inference.drafters.cached_tree import check_width
from foredraft.inference.sampling import temper
from foredraft.inference.tree import TokenTree, from_parents

# Defaults until a head's accuracies are measured: roughly those of published heads.
TYPICAL = [[0.6 * 0.8**d * share for share in (1.0, 0.2, 0.1, 0.06, 0.04, 0.03)] for d in range(8)]


def select_paths(accuracies: list[list[float]], nodes: int) -> list[tuple[int, ...]]:
    """Return the `nodes` - 1 rank paths with the highest probability of acceptance, in this order, so parents come first.

    accuracies[d][r]: probability that the guess of rank r is right at depth d + 1. A path's probability is the product.
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
    def __init__(
        self,
        head: ParallelHead,
        target: Target,
        nodes: int = 16,
        accuracies: list[list[float]] | None = None,
        width: int | None = None,
    ):
        """Initialize the tree. nodes: including the bonus token. accuracies: measured for this head (see
        train/finalize.py). width: guesses per depth; 1 drafts a chain; None is unlimited, or 1 if the target
        only supports chains."""
        if nodes < 2:
            raise ValueError(f"nodes={nodes} is too small: a static tree has at least 2, the bonus token and a draft")
        self.head, self.target, self.layers = head, target, head.layers
        vocab = target.vocab_size if head.draft_ids is None else len(head.draft_ids)
        ranks = min(vocab, check_width(width, vocab, target))
        self.branches = ranks > 1
        accuracies = [row[:ranks] for row in (accuracies or TYPICAL)[: head.depth]]
        self.paths = select_paths(accuracies, nodes)
        self.depth, self.nodes = max(map(len, self.paths)), len(self.paths) + 1
        index = {(): 0} | {path: number for number, path in enumerate(self.paths, start=1)}
        parents = torch.tensor([[0] + [index[path[:-1]] for path in self.paths]])
        tree = from_parents(torch.zeros_like(parents), parents, self.depth)
        self.tree = TokenTree(*(part.to(target.device) for part in tree))  # without its tokens
        self.num_ranks = 1 + max(max(path) for path in self.paths)
        places = [(len(path) - 1) * self.num_ranks + path[-1] for path in self.paths]
        self.places = torch.tensor(places, device=target.device)  # of the nodes among the guesses of all depths
        self.graphs = CudaGraphs(target.device, target.capabilities.cuda_graphs)
        self.resize(self.nodes, self.depth)

    def resize(self, nodes: int, levels: int) -> None:
        """Draft the best `nodes` nodes from now on. levels: at least their depth."""
        self.size, self.levels = nodes, max(map(len, self.paths[: nodes - 1]))

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tokens, aux_hidden_states = bonus_tokens(accepted), accepted.aux_hidden_states[:, 0]
        if accepted.tokens.shape[1] > 1:
            aux_hidden_states = newest(accepted.aux_hidden_states, accepted.device_counts)[:, 0]
        self.ranks = torch.arange(self.size - 1).expand(len(tokens), -1)  # on the host
        return self.graphs(self.size, self.draft, tokens, aux_hidden_states, gumbel, self.sampling.temperature)

    def draft(
        self, bonus: Tensor, aux_hidden_states: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> TokenTree:
        """Draft the tree below the bonus tokens (batch, 1), from aux hidden states (batch, width)."""
        logits, size = self.head.draft_all(aux_hidden_states)[:, : self.levels].float(), self.size
        if gumbel is not None and temperature is not None:
            noise = gumbel if self.head.draft_ids is None else gumbel[..., self.head.draft_ids]
            logits = temper(logits, temperature) + noise[:, : self.levels]
        guesses = self.head.to_target_ids(logits.topk(self.num_ranks).indices).flatten(1)
        tokens = torch.cat([bonus, guesses[:, self.places[: size - 1]]], dim=1)
        tree = self.tree.parents[:, :size], self.tree.ancestors[:, :size, :size], self.tree.depths[:, :size]
        return TokenTree(tokens, *(part.expand(len(tokens), *part.shape[1:]) for part in tree))
