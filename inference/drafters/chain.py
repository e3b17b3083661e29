"""One branch of each tree, for targets that support only chains (heads/caches/state_cache.py); drafts of other engines."""

import warnings

import torch
from torch import Tensor

from foredraft.heads.checkpoint import check_is_target
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, Wrapper
from foredraft.inference.drafters.lookahead import Lookahead
from foredraft.inference.drafters.union import Union
from foredraft.inference.tree import TokenTree, chain


def as_supported(drafter: Drafter, target: Target) -> Drafter:
    """Return the drafter as the target supports it: unchanged, one branch of its trees, or none, with a
    warning. Raises ValueError for what is not a target or not a drafter."""
    check_is_target(target)
    if not isinstance(drafter, Drafter):
        raise ValueError(f"drafter is {type(drafter).__name__}, not a Drafter: load_drafter(path, target) makes one")
    if target.capabilities.trees or drafter.nodes == 1:
        return drafter
    if not target.capabilities.chains:
        reason = "for several tokens at once than for single tokens"
        if target.capabilities.depends_on_batch:
            reason = "in a batch with other texts, because it quantizes their activations together"
        warnings.warn(
            f"{target.name or target.config.model_type} computes different logits {reason}. Drafting is disabled, because "
            "drafts would change the text",
            stacklevel=4,
        )
        return NoDrafter()
    if target.capabilities.sparse_indexer:
        warnings.warn(
            f"{target.name or target.config.model_type} attends only to the keys with the highest indexer scores. If two "
            "scores are equal up to rounding, a forward over several tokens may select another key than a forward over one. "
            "So a text with drafts may differ from one without",
            stacklevel=4,
        )
    parts = drafter.parts if isinstance(drafter, Union) else [drafter]
    if len(others := [part for part in parts if not isinstance(part, Lookahead)]) < len(parts):
        warnings.warn(
            f"lookahead learns nothing from chains, and {target.capabilities.why}, so it is left out. Use suffix or ngram",
            stacklevel=4,
        )
        drafter = Union(others) if len(others) > 1 else (others or [NoDrafter()])[0]
    return Chain(drafter) if drafter.branches else drafter


class Likeliest(Wrapper):
    """Draft the most probable tokens also where the target samples, as other engines do. With the target's own noise, which
    they do not have, more drafts are accepted."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return self.inner.propose(accepted, None)


class Chain(Wrapper):
    def __init__(self, inner: Drafter):
        """Initialize the chain, which is the deepest branch of the trees of `inner`, the first one of equal depth."""
        super().__init__(inner)
        self.branches = False

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.inner.propose(accepted, gumbel)
        self.size = tree.tokens.shape[1]
        real = tree.tokens >= 0
        deepest = torch.where(real, tree.depths, -1).argmax(1)
        above = tree.ancestors.gather(1, deepest[:, None, None].expand(-1, 1, self.size))[:, 0]
        order = torch.arange(self.size, device=real.device)
        # The nodes of the branch from node 0 down, then others, which become padding.
        self.positions = torch.where(above, order, order + self.size).argsort(1)[:, : tree.depths.max() + 1]
        return chain(torch.where(above, tree.tokens, -1).gather(1, self.positions))

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        """Pass the result on. The target's choice after nodes that were not verified is unknown: -1."""
        positions = self.positions.tolist()
        mine = [[row[node] for node in path] for row, path in zip(positions, paths, strict=True)]
        self.inner.observe(mine, choices.new_full((len(choices), self.size), -1).scatter(1, self.positions, choices))
