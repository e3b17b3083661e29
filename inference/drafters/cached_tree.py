"""The common part of trees that a head with a KV cache drafts level by level (dynamic.py, block.py).

*Expand*: the `width` best nodes of a level are its frontier, and the next level consists of their best continuations, by the
product of the draft's probabilities along the path. *Rerank*: the best `nodes` of all candidates form the tree. A child never
scores higher than its parent, so the best candidates are always connected.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.base import BlockHead, RecurrentHead
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, newest, pad_accepted
from foredraft.inference.sampling import Sampling, temper
from foredraft.inference.tree import TokenTree, from_parents

# A head learns the target's distribution, but a greedy target always takes its argmax: a first guess of probability 0.3 is
# right more often than that. Sharpened scores make trees deeper and narrower (acceptance length 2.39 -> 2.49, 16 nodes,
# test model).
GREEDY = 2.0
# Drafting stops at a level with a smaller total probability, because the next level would cost more than it gains. Reading
# the scores waits for the device, which is free only on a CPU (2.01 -> 2.22 times the baseline's speed with 8 levels of 5).
MIN_PROBABILITY = 0.25
WIDTH = 5  # branches per level
# Score that each level loses, so that a child ranks below its parent even if the draft is certain (log 1 = 0) in float32.
STEP = 1e-3


def check_width(width: int | None, usual: int, target: Target) -> int:
    """Return the branches per level. None means `usual`, or 1 if the target only supports chains. Raises ValueError if it
    does not support this width."""
    if width is None:
        return usual if target.capabilities.trees else 1
    if width < 1:
        raise ValueError(f"width={width} must be at least 1, which drafts a chain")
    if width > 1 and not target.capabilities.trees:
        raise ValueError(f"width={width} asks for a tree, and {target.capabilities.why}: remove width or set width=1")
    return width


class CachedTree(Drafter):
    """Draft a tree of the `nodes` best candidates."""

    entries: int  # cache entries that drafting a tree with all levels adds to the head's cache
    cache_lag: int = 1  # number of entries that its cache is behind the text, because each needs the next token
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
        """Initialize the tree. nodes: maximum number of nodes, including the bonus token. depth: number of levels below it.
        width: branches per level. min_probability: on a CPU, a sequence is drafted no further if the branches of a level have
        a smaller total probability, as the draft scores them; 0 drafts all levels."""
        if depth < 1 or width < 1 or nodes < 2 or not min_probability >= 0:
            raise ValueError(
                f"a tree needs at least depth=1, width=1, nodes=2 and min_probability=0, not depth={depth}, width={width}, "
                f"nodes={nodes} and min_probability={min_probability}"
            )
        self.target, self.layers, self.cache_layers = target, head.layers, head.cache_layers
        depth = depth if head.limit is None else min(depth, head.limit)
        self.depth = self.levels = depth
        vocab = target.vocab_size if head.draft_ids is None else len(head.draft_ids)
        self.width = min(width, vocab)
        self.branches = self.width > 1
        self.nodes = min(nodes, 1 + self.width + (depth - 1) * self.width**2)
        self.min_probability = min_probability if target.device.type == "cpu" else 0.0
        self.draft_ids = head.draft_ids
        self.cache: KVCache | None = None

    def resize(self, nodes: int, levels: int) -> None:
        """Draft trees of this size from now on. `depth` stays the maximum of `levels`."""
        assert nodes >= 2 and 1 <= levels <= self.depth
        self.nodes, self.levels = nodes, levels

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        super().begin(batch, capacity, sampling)
        room = self.cache_entries(capacity)
        cache = self.cache
        if cache is None or not cache.graphs.active or cache.num_slots < batch or cache.capacity < room:
            capture = self.target.capabilities.cuda_graphs
            self.cache = cache = KVCache(self.cache_layers, batch, room, self.target.device, capture)
        cache.clear()
        cache.use(range(batch))

    @property
    def cached_drafters(self) -> "list[CachedTree]":
        return [self]

    def prefill(self, accepted: Accepted) -> None:
        """Prefill the next part of the prompts of new sequences, or tokens of steps without this drafter, in the rows that
        the cache uses."""
        cache = self.open_cache()
        cache.kv_bucket = None  # its forwards are not captured
        embeddings = self.head.embed(accepted.tokens, self.target)
        self.head.draft_extend(accepted.aux_hidden_states, embeddings, cache)
        cache.set_lengths([length + count for length, count in zip(cache.lengths, accepted.counts, strict=True)])

    def open_cache(self) -> KVCache:
        assert self.cache is not None, "`begin` precedes drafting"
        return self.cache

    def cache_entries(self, capacity: int) -> int:
        """Return the number of cache entries for texts of `capacity` tokens and the drafting of a tree after them."""
        return capacity + 1 + self.depth + self.entries

    def log_probs(self, logits: Tensor, gumbel: Tensor | None, temperature: Tensor | None) -> Tensor:
        """Return log-probabilities (batch, n, draft vocab) float32 of drafts with these logits and the noise of their
        positions (batch, 1 or n, vocab). Filters such as top-p are not applied: they cost more than they gain."""
        if gumbel is None or temperature is None:
            logits = GREEDY * logits.float()
        else:
            noise = gumbel if self.draft_ids is None else gumbel[..., self.draft_ids]
            logits = temper(logits, temperature, 1 / GREEDY) + noise
        return logits.log_softmax(-1).clamp(max=-STEP)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        cache = self.open_cache()
        if cache.graphs.active:  # of a fixed width, for any number of accepted tokens
            accepted = pad_accepted(accepted, 1 + self.depth)
        new, counts = accepted.tokens.shape[1], accepted.device_counts
        lengths = [length + count for length, count in zip(cache.lengths, accepted.counts, strict=True)]
        draft, seq_lens = partial(self.draft, lengths), cache.seq_lens + counts
        inputs = accepted.tokens, accepted.aux_hidden_states, counts, gumbel, self.sampling.temperature
        if not self.min_probability and new <= 1 + self.depth:  # neither reads scores nor catches up after other steps
            cache.set_bucket(new + self.entries)
            key = "draft", cache.kv_bucket, self.nodes, self.levels
            tree, self.ranks = cache.graphs(key, draft, *inputs)
        else:
            cache.kv_bucket = None
            tree, self.ranks = draft(*inputs)
        cache.set_lengths(lengths, seq_lens)
        return tree

    def draft(
        self,
        lengths: list[int],
        tokens: Tensor,
        aux_hidden_states: Tensor,
        counts: Tensor,
        gumbel: Tensor | None,
        temperature: Tensor | None,
    ) -> tuple[TokenTree, Tensor]:
        """Draft the trees below tokens (batch, new), of which the first `counts` (batch, 1) are real. Returns them with the
        ranks of their nodes. lengths: of the head's cache with these tokens."""
        head, cache = self.head, self.open_cache()
        cache.rewind()
        hidden = newest(head.draft_extend(aux_hidden_states, head.embed(tokens, self.target), cache), counts)
        cache.extend(lengths, counts)
        return self.rerank(*self.expand(cache, hidden, newest(tokens, counts), gumbel, temperature))

    def stop_improbable(self, scores: Tensor) -> Tensor | None:
        """Return the scores (batch, width) of a level below which another is drafted: -inf in the sequences that stop there,
        so that a text's drafts do not depend on the other texts of a batch. None if all stop."""
        if not self.min_probability:
            return scores
        stops = scores.exp().sum(1, keepdim=True) < self.min_probability
        return None if stops.all() else scores.masked_fill(stops, -torch.inf)

    @abstractmethod
    def expand(
        self, cache: KVCache, hidden: Tensor, bonus: Tensor, gumbel: Tensor | None, temperature: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result of `grow` below the bonus tokens (batch, 1). hidden: (batch, 1, width), the output of
        `draft_extend` at the end of each sequence."""

    def grow(self, best: Callable[..., Any], bonus: Tensor, *states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, parents and scores (batch, n) of the candidates, of which the bonus token is the first and has no
        score. Candidates with a score of -inf are not drafted.

        best: gets a depth, tokens (batch, nodes) of the frontier above it, and states (batch, nodes, ...) of these nodes,
        which start as `states`. It returns scores and target ids (batch, n, guesses) of the best guesses after each node, or
        after all (n = 1), and the new states."""
        # N per level suffice for the best N. Where probabilities decide whether to go on, the whole frontier counts.
        most = max(self.nodes - 1, self.width) if self.min_probability else self.nodes - 1
        candidates, parents, ranked = [bonus], [torch.zeros_like(bonus)], list[Tensor]()
        tokens, scores, frontier, size = bonus, bonus.new_zeros(bonus.shape, dtype=torch.float32), parents[0], 1
        for depth in range(1, self.levels + 1):
            going = self.stop_improbable(scores) if depth > 1 else scores
            if going is None:
                break
            values, ids, states = best(depth, tokens, *states)
            scored = (going[:, :, None] + values).flatten(1)
            scores, chosen = scored.topk(min(most, scored.shape[1]))
            parent = chosen // values.shape[2]
            tokens = ids.expand(-1, tokens.shape[1], -1).flatten(1).gather(1, chosen)
            candidates.append(tokens)
            parents.append(frontier.gather(1, parent))
            ranked.append(scores)
            if depth == self.levels:
                break
            kept = min(self.width, tokens.shape[1])
            frontier = torch.arange(size, size + kept, device=bonus.device).expand(len(bonus), -1)
            size += tokens.shape[1]
            tokens, scores, parent = tokens[:, :kept], scores[:, :kept], parent[:, :kept, None]
            states = tuple(state.gather(1, parent.expand(-1, -1, state.shape[-1])) for state in states)
        return torch.cat(candidates, 1), torch.cat(parents, 1), torch.cat(ranked, 1)

    def rerank(self, tokens: Tensor, parents: Tensor, scores: Tensor) -> tuple[TokenTree, Tensor]:
        """Return the tree of the best `nodes` candidates (batch, n), and the ranks of its nodes. Candidates keep their order,
        in which parents come first. The bonus token has no score."""
        nodes, drafted = min(self.nodes, tokens.shape[1]) - 1, scores > -torch.inf
        if self.min_probability:  # only on a CPU: on other devices this would wait for the device
            nodes = min(nodes, int(drafted.sum(1).max()))
        tokens = torch.cat([tokens[:, :1], tokens[:, 1:].where(drafted, -1)], 1)
        chosen, ranks = scores.topk(nodes).indices.sort(1)
        chosen = chosen + 1
        chosen = torch.cat([chosen.new_zeros(len(chosen), 1), chosen], 1)
        order = torch.arange(chosen.shape[1], device=tokens.device).expand(len(chosen), -1)
        position = torch.zeros_like(parents).scatter(1, chosen, order)
        new_parents = position.gather(1, parents.gather(1, chosen))
        return from_parents(tokens.gather(1, chosen), new_parents, self.levels), ranks
