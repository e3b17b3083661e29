"""A tree from a block head: one pass gives logits for every depth, and the tree consists of their best tokens.

If all drafts of a depth share their logits, a path's score is the sum of its tokens' scores. The tree is the exact set of
the `nodes` best paths (DDTree, arXiv:2604.12989), found level by level: the parent of one of the N best paths is one of them,
and has at most N - 1 better ones on its level, so N per level suffice.

If a correction makes logits depend on the path, a level is drafted from the `width` best nodes of the previous one, with
separate logits for each. The noise of a position is added after every correction.
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
        block = self.head.draft_block(hidden, cache)[:, : self.levels]
        return self.best_paths(BlockScorer(self, block, gumbel, temperature), bonus)

    def best_paths(self, scorer: "BlockScorer", bonus: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        most, candidates, parents = self.nodes - 1, [bonus], [torch.zeros_like(bonus)]
        ranked: list[Tensor] = []
        tokens, scores, frontier, size = bonus, bonus.new_zeros(bonus.shape, dtype=torch.float32), parents[0], 1
        for depth in range(1, self.levels + 1):
            going = self.stop_improbable(scores) if depth > 1 else scores
            if going is None:
                break
            values, ids = scorer.best(depth, tokens)  # (batch, parents or 1, guesses)
            scored = (going[:, :, None] + values).flatten(1)
            scores, chosen = scored.topk(min(most, scored.shape[1]))
            parent = chosen // values.shape[2]
            tokens = ids.expand(-1, tokens.shape[1], -1).flatten(1).gather(1, chosen)
            candidates.append(tokens)
            parents.append(frontier.gather(1, parent))
            ranked.append(scores)
            kept = min(self.width, tokens.shape[1])
            frontier = torch.arange(size, size + kept, device=bonus.device).expand(len(bonus), -1)
            size += tokens.shape[1]
            tokens, scores = tokens[:, :kept], scores[:, :kept]
            scorer.select(parent[:, :kept])
        return torch.cat(candidates, 1), torch.cat(parents, 1), torch.cat(ranked, 1)


class BlockScorer:
    """Score the tokens of a block, with the state of the head's correction along the paths of the frontier."""

    def __init__(self, tree: BlockTree, hidden: Tensor, gumbel: Tensor | None, temperature: Tensor | None):
        self.tree, self.hidden, self.gumbel, self.temperature = tree, hidden, gumbel, temperature
        self.base = tree.head.base_logits(hidden)
        self.memory = hidden.new_zeros(len(hidden), 1, tree.head.memory)
        if not tree.head.correction:  # all depths at once
            logits = tree.head.correct(self.base, hidden, hidden[..., :0], 1)
            noise = None if gumbel is None else gumbel[:, : logits.shape[1]]
            self.table = tree.log_probs(logits, noise, temperature).topk(tree.width)

    def best(self, depth: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and target ids (batch, n, guesses) after tokens (batch, nodes): for each, or for all (n = 1)."""
        tree, level = self.tree, slice(depth - 1, depth)
        if not tree.head.correction:
            values, ids = (part[:, level] for part in self.table)
            return values, tree.to_target_ids(ids)
        hidden, base = self.hidden[:, level].expand(-1, tokens.shape[1], -1), self.base[:, level]
        noise = None if self.gumbel is None else self.gumbel[:, level]
        if tree.head.candidates and noise is not None:
            # The target's token is likely one of those with a high sum of logit and noise.
            kept = tree.log_probs(base, noise, self.temperature).topk(tree.head.candidates).indices
            base = torch.full_like(base, -torch.inf).scatter(-1, kept, base.gather(-1, kept))
        correction, self.memory = tree.head.condition(depth, hidden, tokens, self.memory)
        logits = tree.head.correct(base, hidden, correction, depth)
        values, ids = tree.log_probs(logits, noise, self.temperature).topk(tree.width)
        if tree.min_confidence:
            unsure = correction[..., -1:].sigmoid() < tree.min_confidence
            values = values.masked_fill(unsure, -torch.inf)
        return values, tree.to_target_ids(ids)

    def select(self, parents: Tensor) -> None:
        """Replace the frontier by children of its nodes `parents` (batch, n)."""
        if self.memory.shape[-1]:
            self.memory = self.memory.gather(1, parents[:, :, None].expand(-1, -1, self.memory.shape[-1]))
