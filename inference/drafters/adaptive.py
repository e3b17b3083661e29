"""Adaptive length: draft as deep as it has paid lately, and stop sooner where the draft is not sure of itself.

The levels follow what was accepted, as in transformers' assisted generation: two more after a tree accepted down to its
last level, one fewer after any other. Within a step drafting stops once no branch is likely any more (as BiLD, Kim et al.,
arXiv:2302.07863, falls back). Only the draft gets shorter; what is accepted of it is chosen as ever.
"""

import math

from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Wrapper
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.tree import TokenTree


class AdaptiveLength(Wrapper):
    inner: DynamicTree

    def __init__(self, inner: DynamicTree, confidence: float = 0.2):
        """inner: a head's or a draft model's tree or chain, with the most levels that may be drafted. confidence: the
        probability, as the drafter scores it, of the best branch below which no sequence drafts on; 0 never stops so. It
        costs one wait for the device per level."""
        if not 0 <= confidence < 1:
            raise ValueError(f"confidence={confidence} must be a probability below 1; 0 drafts all levels")
        super().__init__(inner)
        self.most = self.levels = inner.depth
        inner.should_stop = (lambda scores: bool(scores.max() < math.log(confidence))) if confidence else None

    @property
    def depth(self) -> int:  # type: ignore[override]
        return self.levels

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        self.inner.resize(self.nodes, self.levels)
        return self.inner.propose(accepted, gumbel)

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        deepest = max(len(path) for path in paths) - 1
        self.levels = min(self.most, self.levels + 2) if deepest == self.levels else max(1, self.levels - 1)
