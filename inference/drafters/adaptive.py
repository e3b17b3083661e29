"""Adaptive length: draft as deep as it paid off lately, and stop early if the draft is not confident.

The number of levels follows acceptance, as in transformers' assisted generation: two more after a tree was accepted down to
its last level, one fewer otherwise. Within a step, drafting stops when no branch is likely (similar to BiLD, Kim et al.,
arXiv:2302.07863). Only the length of drafts changes, not how they are verified.
"""

import math

from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Wrapper
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.tree import TokenTree


class AdaptiveLength(Wrapper):
    inner: DynamicTree

    def __init__(self, inner: DynamicTree, confidence: float = 0.2):
        """Initialize the policy. inner: tree or chain of a head or draft model, with the maximum number of levels.
        confidence: drafting stops when the best branch has a smaller probability, as the draft scores it, in all sequences; 0
        disables this. The check waits for the device once per level."""
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
