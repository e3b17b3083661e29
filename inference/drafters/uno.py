"""Drafts of the target itself, with UNO's LoRA on noise tokens (heads/uno.py): one forward over a block after the text, with
the target's own cache, and the best paths of its independent logits, like any block drafter.

Depth 1 is the target's own choice, read from the bonus token's logits, so a step of two forwards adds two tokens or more. The
block occupies the entries of the later tree. Its verification overwrites them, because the tree has as many nodes.
"""

from functools import partial
from typing import Any

from torch import Tensor

from foredraft.heads.target import Target
from foredraft.heads.uno import UnoHead
from foredraft.inference.drafters.base import Accepted, bonus_tokens
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.cached_tree import CachedTree
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree


class UnoTree(BlockTree):
    head: UnoHead

    def __init__(self, head: UnoHead, target: Target, nodes: int = 32, depth: int | None = None, **options: Any):
        """Initialize like `BlockTree`. depth: None is the depth that the head was trained for; it may be larger."""
        super().__init__(head, target, nodes, depth, **options)
        self.depth = self.levels = min(self.depth, nodes - 1)
        self.forwards = head.forwards

    @property
    def cached_drafters(self) -> list[CachedTree]:
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
        # Other drafters may use this target's cache too, with other heads and widths.
        key = "uno", self, cache.kv_bucket, self.nodes, self.levels
        inputs = bonus_tokens(accepted), gumbel, self.sampling.temperature
        tree, self.ranks = cache.graphs(key, partial(self.draft_parallel, cache), *inputs)
        return tree

    def draft_parallel(
        self, cache: Any, bonus: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> tuple[TokenTree, Tensor]:
        """Draft the trees below the bonus tokens (batch, 1), and return them with the ranks of their nodes."""
        return self.rerank(*self.expand(cache, bonus, bonus, gumbel, temperature))

    def draft_block(self, hidden: Tensor, cache: Any) -> Tensor:
        return self.head.draft_block(hidden, cache, self.levels)
