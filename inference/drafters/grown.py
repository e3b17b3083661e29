"""What all trees have in common that a head grows over keys and values of its own (dynamic.py, block.py)."""

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from foredraft.heads.base import BlockHead, RecurrentHead
from foredraft.heads.target import Target
from foredraft.heads.target.cache import KVCache
from foredraft.inference.drafters.base import Accepted, Drafter, widened
from foredraft.inference.sampling import Sampling, temper
from foredraft.inference.tree import TokenTree, from_parents

# A head learns the target's distribution, but a greedy target always takes the top of it: a first guess of probability
# 0.3 is right more often than that. Sharpened scores go deeper and less wide (2.39 -> 2.49 tokens per step, 16 nodes,
# embedded target).
GREEDY = 2.0
# Levels stop where less of the draft's probability is left than this: the next one would cost more than it gains. To look is
# a wait for the device, which only a CPU has for nothing (2.01 -> 2.22 times plain speed, with 8 levels of 5 for 7 of 6).
MIN_PROBABILITY = 0.25
WIDTH = 5  # branches kept per level
# A level's loss of score, so that a child stays below its parent where the draft is certain (log 1 = 0) in float32.
STEP = 1e-3


def check_width(width: int | None, usual: int, target: Target) -> int:
    """Return the branches per level: `usual`, or 1 where the target supports or prefers chains, if width is None. Raise
    ValueError where more were asked for than it supports."""
    if width is None:
        return usual if target.supports_trees and not target.prefers_chains else 1
    if width > 1 and not target.supports_trees:
        raise ValueError(f"width={width} asks for a tree, and {target.why_no_trees}: leave width out, or take width=1")
    return width


class GrownTree(Drafter):
    """The `nodes` best of the candidates that `grow` makes level by level."""

    entries: int  # that growing a tree of all levels writes into the head's cache
    cache_lag: int = 1  # entries that its cache has fewer than a text has tokens: each needs the token after it
    head: RecurrentHead | BlockHead

    def __init__(
        self,
        head: RecurrentHead | BlockHead,
        target: Target,
        nodes: int,
        depth: int,
        width: int,
        min_probability: float,
    ):
        """nodes: of the tree at most, the bonus token counted. depth: levels below it. width: branches kept per level.
        min_probability: on a CPU, the probability of a level's branches together, as the draft scores them, below which no
        sequence drafts on; 0 drafts all levels."""
        if depth < 1 or width < 1 or nodes < 2 or min_probability < 0:
            raise ValueError(
                f"a dynamic tree needs depth={depth} and width={width} of at least 1, nodes={nodes} of 2, "
                f"min_probability={min_probability} of 0"
            )
        self.target, self.layers, self.cache_layers = target, head.layers, head.cache_layers
        depth = depth if head.limit is None else min(depth, head.limit)
        self.depth = self.levels = depth
        vocab = target.vocab_size if head.draft_ids is None else len(head.draft_ids)
        self.width = min(width, vocab)
        self.branches = self.width > 1
        self.nodes = min(nodes, 1 + self.width + (depth - 1) * self.width**2)
        # Stop at a level of these scores (batch, width)?
        self.should_stop: Callable[[Tensor], bool] | None = None
        if min_probability > 0 and target.device.type == "cpu":
            self.should_stop = lambda scores: all(sum(map(math.exp, row)) < min_probability for row in scores.tolist())
        self.draft_ids = head.draft_ids
        self.cache: KVCache | None = None

    def resize(self, nodes: int, levels: int) -> None:
        """Propose trees of this many nodes and levels from now on; `depth` stays the most that may be asked for."""
        assert nodes >= 2 and 1 <= levels <= self.depth
        self.nodes, self.levels = nodes, levels

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.sampling = sampling
        room = self.room(capacity)
        cache = self.cache
        if cache is None or not cache.graphs.active or cache.max_batch < batch or cache.capacity < room:
            cache = KVCache(
                self.cache_layers, batch, room, self.target.device, capture=self.target.supports_cuda_graphs
            )
        elif cache.batch != batch:
            cache.use(batch)
        cache.clear()
        self.cache = cache

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        assert self.cache is not None
        self.sampling = sampling
        self.cache.reorder(slots, max(self.cache.capacity, self.room(capacity)))

    @property
    def cached_drafters(self) -> "list[GrownTree]":
        return [self]

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """For prompts of at most so many tokens, which `prefill` fills before their sequences join."""
        return KVCache(self.cache_layers, batch, capacity, self.target.device)

    def prefill(self, accepted: Accepted, cache: KVCache) -> None:
        """A part of the prompts of sequences that are to join, after what this cache of theirs holds."""
        embeddings = self.head.embed(accepted.tokens, self.target)
        self.head.draft_extend(accepted.aux_hidden_states, embeddings, cache)
        cache.set_lengths([length + count for length, count in zip(cache.lengths, accepted.counts, strict=True)])

    def room(self, capacity: int) -> int:
        """Entries of the head's cache for texts of this length, and what growing a tree writes after them."""
        return capacity + 1 + self.depth + self.entries

    def log_probs(self, logits: Tensor, gumbel: Tensor | None, temperature: Tensor | None) -> Tensor:
        """Log-probabilities (batch, n, draft vocab) of drafts with these logits, seen through the noise of their position
        (batch, 1 or n, vocab): float32. Filters such as top-p are left out: they cost more than they gain."""
        if gumbel is None or temperature is None:
            logits = GREEDY * logits.float()
        else:
            noise = gumbel if self.draft_ids is None else gumbel[..., self.draft_ids]
            logits = temper(logits, temperature, 1 / GREEDY) + noise
        return logits.log_softmax(-1).clamp(max=-STEP)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        cache = self.cache
        assert cache is not None
        if cache.graphs.active:  # of one width, whatever was accepted
            accepted = widened(accepted, 1 + self.depth)
        new, counts = accepted.tokens.shape[1], accepted.device_counts
        lengths = [length + count for length, count in zip(cache.lengths, accepted.counts, strict=True)]
        room = max(cache.lengths) + new + self.entries  # a short one's padding may stand after a long one's text
        if room > cache.capacity:
            cache.reorder(list(range(cache.batch)), room)
        grow, seq_lens = partial(self.grow, lengths), cache.seq_lens + counts
        inputs = accepted.tokens, accepted.aux_hidden_states, counts, gumbel, self.sampling.temperature
        if self.should_stop is None and new <= 1 + self.depth:  # neither looks at scores nor catches up
            cache.set_bucket(new + self.entries)
            key = "grow", cache.kv_bucket, self.nodes, self.levels
            tree, self.ranks = cache.graphs(key, grow, *inputs)
        else:
            cache.kv_bucket = None
            tree, self.ranks = grow(*inputs)
        cache.set_lengths(lengths, seq_lens)
        return tree

    def grow(
        self,
        lengths: list[int],
        tokens: Tensor,
        aux_hidden_states: Tensor,
        counts: Tensor,
        gumbel: Tensor | None,
        temperature: Tensor | None,
    ) -> tuple[TokenTree, Tensor]:
        """The tree below tokens (batch, new), of which the first `counts` (batch, 1) are real, and its nodes' ranks.
        lengths: of the sequences with them."""
        head, cache = self.head, self.cache
        assert cache is not None
        cache.rewind()
        hidden = newest(head.draft_extend(aux_hidden_states, head.embed(tokens, self.target), cache), counts)
        cache.extend(lengths, counts)
        return self.rerank(*self.expand(cache, hidden, newest(tokens, counts), gumbel, temperature))

    @abstractmethod
    def expand(
        self, cache: KVCache, hidden: Tensor, bonus: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and scores (batch, n) of the candidates; bonus (batch, 1) is the first and has no score. hidden:
        (batch, 1, width), of `draft_extend` at each sequence's end."""

    def rerank(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> tuple[TokenTree, Tensor]:
        """The best `nodes` of all candidates (batch, n), in their order, which puts parents first, and their ranks. The
        bonus token has no score."""
        chosen, ranks = scores.topk(min(self.nodes, tokens.shape[1]) - 1).indices.sort(1)
        chosen = chosen + 1
        chosen = torch.cat([chosen.new_zeros(len(chosen), 1), chosen], 1)
        order = torch.arange(chosen.shape[1], device=tokens.device).expand(len(chosen), -1)
        position = torch.zeros_like(parents).scatter(1, chosen, order)
        new_parents = position.gather(1, parents.gather(1, chosen))
        return from_parents(tokens.gather(1, chosen), new_parents, self.levels), ranks


def newest(x: Tensor, counts: Tensor) -> Tensor:
    """(batch, 1, ...): of x (batch, new, ...) what stands last of the real entries of each row; counts: (batch, 1)."""
    if x.shape[1] == 1:
        return x
    last = (counts - 1).clamp(min=0)
    return x.gather(1, last) if x.dim() == 2 else x.gather(1, last[:, :, None].expand(-1, 1, x.shape[-1]))
