"""One branch of each tree, for targets that cannot read more (heads/target/state_cache.py)."""

import warnings

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, Wrapper, bonus_only, concatenate, select
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree, chain


def readable(drafter: Drafter, target: Target) -> Drafter:
    """The drafter as this target can read it: as it is, one branch of its trees, or nothing, which it says once."""
    if target.supports_trees or drafter.depth == 0:
        return drafter
    if not target.supports_chains:
        warnings.warn(
            f"{target.name or target.config.model_type} does not read several tokens at once as it reads them one by one, "
            "so it is decoded plainly and nothing is drafted: drafts would change its text",
            stacklevel=4,
        )
        return NoDrafter()
    if target.picks_keys:
        warnings.warn(
            f"{target.name or target.config.model_type} looks at those keys alone that its indexer scores highest: where two "
            "scores are equal but for rounding, a read of several tokens may pick another key than a read of one, and what "
            "is drafted for may go on otherwise than what is decoded plainly",
            stacklevel=4,
        )
    return CatchUp(Chain(drafter) if drafter.branches else drafter)


class CatchUp(Wrapper):
    """Drafts nothing in a step that lets the target's state catch up with the text (`StateCache.needs_catch_up`)."""

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.waiting: list[Accepted] = []
        super().begin(batch, capacity, sampling)

    def select_sequences(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.waiting = [select(piece, rows) for piece in self.waiting]
        super().select_sequences(rows, capacity, sampling)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.waiting.append(accepted)
        self.waits = accepted.needs_catch_up
        if self.waits:
            return bonus_only(accepted)
        merged, self.waiting = concatenate(self.waiting), []
        return self.inner.propose(merged, gumbel)

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        if not self.waits:
            super().observe(paths, choices)


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
        # Its nodes first, the root down, then as many others, which become padding.
        self.places = torch.where(above, order, order + self.size).argsort(1)[:, : tree.depths.max() + 1]
        return chain(torch.where(above, tree.tokens, -1).gather(1, self.places))

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        """What the target writes after nodes that it did not read is not known: -1."""
        places = self.places.tolist()
        mine = [[row[node] for node in path] for row, path in zip(places, paths, strict=True)]
        self.inner.observe(mine, choices.new_full((len(choices), self.size), -1).scatter(1, self.places, choices))
