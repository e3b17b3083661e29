"""One branch of each tree, for targets that support chains alone (heads/target/state_cache.py)."""

import warnings

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, Wrapper
from foredraft.inference.tree import TokenTree, chain


def as_supported(drafter: Drafter, target: Target) -> Drafter:
    """The drafter as the target supports it: as it is, one branch of its trees, or nothing, which it says once."""
    if target.supports_trees or drafter.nodes == 1:
        return drafter
    if not target.supports_chains:
        reason = "for several tokens at once than one by one"
        if target.mixes_rows:
            reason = "beside other texts than alone, by activations that are quantised together"
        warnings.warn(
            f"{target.name or target.config.model_type} gives other logits {reason}, "
            "so it is decoded plainly and nothing is drafted: drafts would change its text",
            stacklevel=4,
        )
        return NoDrafter()
    if target.picks_keys:
        warnings.warn(
            f"{target.name or target.config.model_type} looks at those keys alone that its indexer scores highest: where two "
            "scores are equal but for rounding, a forward of several tokens may pick another key than that of one, and a "
            "text with drafts may continue otherwise than one without",
            stacklevel=4,
        )
    return Chain(drafter) if drafter.branches else drafter


class Chain(Wrapper):
    def __init__(self, inner: Drafter):
        """inner: of whose trees the deepest branch is proposed, the first of several as deep."""
        super().__init__(inner)
        self.branches = False

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.inner.propose(accepted, gumbel)
        self.size = tree.tokens.shape[1]
        real = tree.tokens >= 0
        deepest = torch.where(real, tree.depths, -1).argmax(1)
        above = tree.ancestors.gather(1, deepest[:, None, None].expand(-1, 1, self.size))[:, 0]
        order = torch.arange(self.size, device=real.device)
        # Its nodes first, from node 0 down, then as many others, which become padding.
        self.positions = torch.where(above, order, order + self.size).argsort(1)[:, : tree.depths.max() + 1]
        return chain(torch.where(above, tree.tokens, -1).gather(1, self.positions))

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        """What the target writes after nodes that it was not shown is unknown: -1."""
        positions = self.positions.tolist()
        mine = [[row[node] for node in path] for row, path in zip(positions, paths, strict=True)]
        self.inner.observe(mine, choices.new_full((len(choices), self.size), -1).scatter(1, self.positions, choices))
