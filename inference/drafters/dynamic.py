"""Grow a tree with a recurrent head, the most probable branches first (EAGLE-2, arXiv:2406.16858, section 4)."""

import torch
from torch import Tensor

from foredraft.heads.base import RecurrentHead
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.cached_tree import MIN_PROBABILITY, WIDTH, CachedTree, check_width


class DynamicTree(CachedTree):
    head: RecurrentHead

    def __init__(
        self,
        head: RecurrentHead,
        target: Target,
        nodes: int = 32,
        depth: int = 8,
        width: int | None = None,
        min_probability: float = MIN_PROBABILITY,
    ):
        """Initialize the tree. width: branches per level; None is 5, or 1 if the target supports only chains."""
        super().__init__(head, target, nodes, depth, check_width(width, WIDTH, target), min_probability)
        self.head, self.entries = head, (1 + self.depth) * self.width

    def expand(
        self, cache: KVCache, hidden: Tensor, bonus: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = self.head

        def best(
            depth: int, tokens: Tensor, hidden: Tensor, among: Tensor
        ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
            if depth > 1:
                batch, count = tokens.shape
                own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
                among = torch.cat([among, own], -1)
                positions = (cache.seq_lens + depth - 2).expand(-1, count)
                hidden = head.draft_step(hidden, head.embed(tokens, self.target), positions, cache.mask(among), cache)
                cache.num_uncommitted += count
            noise = None if gumbel is None else gumbel[:, depth - 1 : depth]
            values, ids = self.log_probs(head.logits(hidden, depth), noise, temperature).topk(self.width)
            return values, self.to_target_ids(ids), (hidden, among)

        drafts_in_cache = hidden.new_zeros(len(hidden), 1, 0, dtype=torch.bool)  # those that a node sees
        return self.grow(best, bonus, hidden, drafts_in_cache)
