"""The union of several drafters, whose trees are merged into one: an n-gram's branch next to a head's tree, or several draft
models (SpecInfer, Miao et al., arXiv:2305.09781, section 3.2: merge-based construction).

Two nodes are equal if the paths from the bonus token to them consist of the same tokens. The first one is retained, and the
children of the others become its children.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Drafter, select_layers
from foredraft.inference.sampling import mix
from foredraft.inference.tree import TokenTree, from_parents


class Union(Drafter):
    def __init__(self, drafters: Sequence[Drafter]):
        """Initialize with at least two drafters. Nodes that several of them draft count for the first one."""
        if len(drafters) < 2:
            raise ValueError(f"a union needs at least two drafters, not {len(drafters)}: name them joined by +")
        self.drafters = self.parts = list(drafters)
        self.layers = sorted({layer for drafter in drafters for layer in drafter.layers})
        self.nodes = 1 + sum(drafter.nodes - 1 for drafter in drafters)
        self.remembers_others = any(drafter.remembers_others for drafter in drafters)

    @property
    def depth(self) -> int:  # type: ignore[override]  # the depth of an AutoTree changes
        return max(drafter.depth for drafter in self.drafters)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        drafted = [
            drafter.propose(select_layers(accepted, self.layers, drafter.layers), gumbel) for drafter in self.drafters
        ]
        tree, self.positions = merge(drafted, self.depth)
        return tree

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        """Pass each drafter the result for its nodes. Those of a path that it drafted, too, come first in it."""
        dummy_node = self.nodes
        for drafter, position in zip(self.drafters, self.positions, strict=True):
            numbers = torch.arange(position.shape[1], device=position.device).expand_as(position)
            unmatched = choices.new_full((len(position), choices.shape[1] + 1), dummy_node)
            own = unmatched.scatter_reduce(1, position, numbers, "amin")
            rows = zip(paths, own.tolist(), strict=True)
            mine = [[row[node] for node in path if row[node] < dummy_node] for path, row in rows]
            drafter.observe(mine, choices.gather(1, position.clamp(max=choices.shape[1] - 1)))


def merge(drafted: Sequence[TokenTree], depth: int) -> tuple[TokenTree, list[Tensor]]:
    """Return one tree (batch, at most the sum of nodes), and for each tree the new positions of its nodes (batch, its nodes),
    which are after the last node for padding."""
    sizes = [tree.tokens.shape[1] for tree in drafted]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    tokens = torch.cat([tree.tokens for tree in drafted], 1)
    parents = torch.cat([tree.parents + first for tree, first in zip(drafted, firsts, strict=True)], 1)
    depths = torch.cat([tree.depths for tree in drafted], 1)
    # A path has one token per depth, so the sum of mixed (depth, token) pairs identifies it, up to 64-bit collisions,
    # which would cost a draft, but never cause a wrong token.
    mixed = mix((tokens + 1) * 64 + mix(depths))
    parts = zip(drafted, mixed.split(sizes, 1))
    paths = torch.cat([(tree.ancestors * part[:, None]).sum(-1) for tree, part in parts], 1)
    alike = paths[:, :, None] == paths[:, None, :]
    first = alike.int().argmax(2)  # (batch, n): the first node that equals each node
    batch, nodes = tokens.shape
    order = torch.arange(nodes, device=tokens.device)
    stays = (first == order) & (tokens >= 0)
    # Retained nodes come first, in their order, so parents precede children. The others become padding.
    ranked = torch.where(stays, order, order + nodes).argsort(1)
    position = torch.empty_like(ranked).scatter(1, ranked, order.expand(batch, -1))
    whole, tokens = tokens, torch.where(stays, tokens, -1).gather(1, ranked)
    parents = torch.where(stays, position.gather(1, first.gather(1, parents)), 0).gather(1, ranked)
    if tokens.device.type == "cpu":
        # Remove columns that are padding in all sequences. On other devices, counting them would wait for the device.
        width = int(stays.sum(1).max())
        tokens, parents = tokens[:, :width], parents[:, :width]
    where = torch.where(whole >= 0, position.gather(1, first), tokens.shape[1])
    return from_parents(tokens, parents, depth), list(where.split(sizes, 1))
