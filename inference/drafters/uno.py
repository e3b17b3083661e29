"""Drafts of the target itself, with UNO's LoRA on rows of noise (heads/uno.py): one forward over a block beside the text in
the target's own cache, and the best paths of its independent logits, as of any block drafter's.

Depth 1 is the target's own choice, read off the bonus token's row, so a step of two forwards gains two tokens at least. The
block is written where the tree will stand. Its verification writes over it, since the tree has as many nodes.
"""

from functools import partial
from typing import Any

from torch import Tensor

from foredraft.heads.target import Target
from foredraft.heads.uno import UnoHead
from foredraft.inference.drafters.base import Accepted, bonus_tokens
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.grown import GrownTree
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree


class UnoTree(BlockTree):
    head: UnoHead

    def __init__(self, head: UnoHead, target: Target, nodes: int = 32, depth: int | None = None, **options: Any):
        """As `BlockTree`. depth: None for what the head was trained for; more is possible."""
        super().__init__(head, target, nodes, depth, **options)
        self.depth = self.levels = min(self.depth, nodes - 1)
        self.forwards = head.forwards

    @property
    def cached_drafters(self) -> list[GrownTree]:
        return []

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.sampling = sampling

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.sampling = sampling

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        cache = accepted.cache
        assert cache is not None, "the target's cache is not known"
        self.make_pairs()
        cache.set_bucket(self.levels)
        # Other drafters use this cache of the target's too, with heads and widths of their own.
        key = "uno", self, cache.kv_bucket, self.nodes, self.levels
        inputs = bonus_tokens(accepted), gumbel, self.sampling.temperature
        tree, self.ranks = cache.graphs(key, partial(self.grow_beside, cache), *inputs)
        return tree

    def grow_beside(
        self, cache: Any, bonus: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> tuple[TokenTree, Tensor]:
        """The tree below these bonus tokens (batch, 1), and its nodes' ranks."""
        return self.rerank(*self.expand(cache, bonus, bonus, gumbel, temperature))

    def draft_block(self, hidden: Tensor, cache: Any) -> Tensor:
        return self.head.draft_block(hidden, cache, self.levels)
