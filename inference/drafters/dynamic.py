"""Grow a tree with a recurrent head, the most probable branches first (EAGLE-2, arXiv:2406.16858, section 4).

*Expand*: every level retains the `width` best continuations of the `width` frontier nodes, by the product of the draft's
probabilities along the path. *Rerank*: the best `nodes` of all candidates form the tree. A child never scores higher than
its parent, so the best candidates are always connected.
"""

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
        head, width, batch = self.head, self.width, len(bonus)

        def best_of(hidden: Tensor, depth: int) -> torch.return_types.topk:
            noise = None if gumbel is None else gumbel[:, depth - 1 : depth]
            return self.log_probs(head.logits(hidden, depth), noise, temperature).topk(width)

        best = best_of(hidden, 1)
        tokens, scores = self.to_target_ids(best.indices[:, 0]), best.values[:, 0]  # (batch, width)
        hidden = hidden.expand(-1, width, -1)
        # Indices among the candidates, of which the bonus token is 0.
        frontier = torch.arange(1, width + 1, device=tokens.device).expand(batch, -1)
        own = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        candidates = [bonus, tokens]
        parents = [frontier.new_zeros(batch, width + 1)]
        ranked, among, size = [scores], own, 1 + width
        for depth in range(2, self.levels + 1):
            going = self.stop_improbable(scores)
            if going is None:
                break
            positions = (cache.seq_lens + depth - 2).expand(-1, width)
            hidden = head.draft_step(hidden, head.embed(tokens, self.target), positions, cache.mask(among), cache)
            cache.num_uncommitted += width
            best = best_of(hidden, depth)
            scored = (best.values + going[:, :, None]).flatten(1)  # (batch, width * width)
            named = self.to_target_ids(best.indices).flatten(1)
            candidates.append(named)
            ranked.append(scored)
            parents.append(frontier.repeat_interleave(width, dim=1))
            if depth == self.levels:
                break
            scores, chosen = scored.topk(width)
            parent = chosen // width
            tokens, frontier = named.gather(1, chosen), chosen + size
            hidden = hidden.gather(1, parent[:, :, None].expand(-1, -1, hidden.shape[-1]))
            among = torch.cat([among.gather(1, parent[:, :, None].expand(-1, -1, among.shape[-1])), own], -1)
            size += width * width
        return torch.cat(candidates, 1), torch.cat(parents, 1), torch.cat(ranked, 1)
