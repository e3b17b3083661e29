"""A tree from a block head: one pass gives logits for every depth, and the tree consists of their best tokens.

If all drafts of a depth share their logits, a path's score is the sum of its tokens' scores. The tree is the exact set of
the `nodes` best paths (DDTree, arXiv:2604.12989), found level by level: the parent of one of the N best paths is one of them,
and has at most N - 1 better ones on its level, so N per level suffice.

If a correction makes logits depend on the path, a level is drafted from the `width` best nodes of the previous one, with
separate logits for each and the state of the correction along its path. The noise of a position is added after every
correction.
"""

import torch
from torch import Tensor

from foredraft.heads.base import BlockHead
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.cached_tree import MIN_PROBABILITY, WIDTH, CachedTree, check_width


class BlockTree(CachedTree):
    head: BlockHead

    def __init__(
        self,
        head: BlockHead,
        target: Target,
        nodes: int = 32,
        depth: int | None = None,
        width: int | None = None,
        min_probability: float = MIN_PROBABILITY,
        min_confidence: float = 0.0,
    ):
        """Initialize the tree. depth: None is the head's. width: 1 drafts a chain; None is unlimited, or 5 with a correction,
        or 1 if the target supports only chains. min_probability: used only with a correction, because other levels cost
        nothing. min_confidence: a head that predicts acceptance omits drafts below this probability."""
        if not 0 <= min_confidence < 1 or (min_confidence and not head.confident):
            raise ValueError(
                f"min_confidence={min_confidence} must be a probability below 1, and the head must predict acceptance: set 0"
            )
        width = check_width(width, WIDTH if head.correction else nodes - 1, target)
        super().__init__(
            head,
            target,
            nodes,
            head.depth if depth is None else depth,
            width,
            min_probability if head.correction else 0.0,
        )
        self.head, self.min_confidence = head, min_confidence
        self.entries = head.block_entries

    def expand(
        self, cache: KVCache, hidden: Tensor, bonus: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, block = self.head, self.head.draft_block(hidden, cache)[:, : self.levels]
        base = head.base_logits(block)
        if not head.correction:
            logits = head.correct(base, block, block[..., :0], 1)
            noise = None if gumbel is None else gumbel[:, : logits.shape[1]]
            values, ids = self.log_probs(logits, noise, temperature).topk(self.width)  # of all depths at once
            ids = self.to_target_ids(ids)
            return self.grow(lambda depth, _: (values[:, depth - 1 : depth], ids[:, depth - 1 : depth], ()), bonus)

        def best(depth: int, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor]]:
            at, logits = block[:, depth - 1 : depth].expand(-1, tokens.shape[1], -1), base[:, depth - 1 : depth]
            noise = None if gumbel is None else gumbel[:, depth - 1 : depth]
            if head.candidates and noise is not None:
                # The target's token is likely one of those with a high sum of logit and noise.
                kept = self.log_probs(logits, noise, temperature).topk(head.candidates).indices
                logits = torch.full_like(logits, -torch.inf).scatter(-1, kept, logits.gather(-1, kept))
            correction, memory = head.condition(depth, at, tokens, memory)
            logits = head.correct(logits, at, correction, depth)
            values, ids = self.log_probs(logits, noise, temperature).topk(self.width)
            if self.min_confidence:
                unsure = correction[..., -1:].sigmoid() < self.min_confidence
                values = values.masked_fill(unsure, -torch.inf)
            return values, self.to_target_ids(ids), (memory,)

        return self.grow(best, bonus, block.new_zeros(len(block), 1, head.memory))
