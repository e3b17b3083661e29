"""TargetOutput the prompts of requests that are to join: whole, or in chunks between the steps of those that are decoded.

    prompt    h h h h h h h h | a a a a | b b b b | c c        h found in the prefix cache, a b c read chunk by chunk

The rows have caches of their own until they join the batch. Drafters that read prompts read each chunk right after the
target, so nothing is left but the newest token, the root, when a row joins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache, TargetOutput
from foredraft.heads.target.cache import KVCache
from foredraft.inference.drafters.base import Accepted, Drafter, share
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import SequenceState


class LastPositions(NamedTuple):
    """Of prompts that have been read, what follows from their last tokens."""

    tokens: Tensor  # (rows, 1) int64
    reading: TargetOutput  # logits (rows, 1, vocab), features (rows, 1, width)


class Prompts:
    """Some rows whose texts are read together. Several are short enough for one chunk, a longer one is alone."""

    def __init__(self, rows: Sequence[SequenceState], target: Target, drafter: Drafter, cache: TargetCache):
        """cache: the target's, empty, with room for their texts."""
        self.rows, self.target, self.drafter, self.cache = rows, target, drafter, cache
        self.lengths = [len(row.text) for row in rows]
        self.caches = [reader.new_cache(len(rows), max(self.lengths)) for reader in drafter.cached_drafters]

    def unfinished(self) -> bool:
        return any(row.finish_reason is None for row in self.rows)

    def find(self, prefixes: PrefixCache, root: int) -> None:
        """Begin after what the prefix cache holds of the texts. Their last token is always read, since a position's features
        go with the token after it."""
        assert isinstance(self.cache, KVCache)
        found = [prefixes.find(root, row.text) for row in self.rows]
        lengths = [max(0, sum(len(block.tokens) for block in blocks) - 1) for blocks in found]
        # In a batch a short row's padding may stand after a long one's prefix.
        room = 1 + max(lengths) + max(whole - length for whole, length in zip(self.lengths, lengths, strict=True))
        for place, cache in enumerate([self.cache, *self.caches]):
            cache.reorder(list(range(cache.batch)), max(cache.capacity, room))
            for number, blocks in enumerate(found):
                if blocks:
                    cache.copy_in(number, [block.states[place] for block in blocks])
        self.cache.set_lengths(lengths)
        for reader, cache in zip(self.drafter.cached_drafters, self.caches, strict=True):
            cache.set_lengths([length and length + 1 - reader.cache_lag for length in lengths])

    def keep(self, prefixes: PrefixCache, root: int) -> None:
        """Prompts that have been read go into the prefix cache."""
        for number, row in enumerate(self.rows):
            if row.finish_reason != "error":
                caches: Any = [self.cache, *self.caches]
                prefixes.store(
                    root, row.text, caches, [0, *(reader.cache_lag for reader in self.drafter.cached_drafters)], number
                )

    def read(self, most: int | None) -> LastPositions | None:
        """Read on, at most so many tokens of all rows together, or at least one of each. None until all have been read."""
        done, device = self.cache.lengths, self.target.device
        rest = [length - start for length, start in zip(self.lengths, done, strict=True)]
        width = max(rest) if most is None else min(max(rest), max(1, most // len(rest)))
        counts = [min(width, count) for count in rest]
        parts = [row.text[start : start + width + 1] for row, start in zip(self.rows, done, strict=True)]
        text = torch.tensor([part + [0] * (width + 1 - len(part)) for part in parts], device=device)
        reading = self.target.prefill(text[:, :width], counts, self.cache, self.drafter.layers)
        self.cache.set_lengths([start + count for start, count in zip(done, counts, strict=True)])
        self.read_drafts(text[:, 1:], reading.aux_hidden_states, counts)
        if self.cache.lengths != self.lengths:
            return None
        last = text.new_tensor(counts)[:, None] - 1
        aux_hidden_states = reading.aux_hidden_states.gather(
            1, last[:, :, None].expand(-1, -1, reading.aux_hidden_states.shape[-1])
        )
        return LastPositions(text.gather(1, last), TargetOutput(reading.logits, aux_hidden_states))

    def read_drafts(self, following: Tensor, aux_hidden_states: Tensor, counts: Sequence[int]) -> None:
        """Drafters read the chunk too: each position's features (rows, n, width) with the token after it (rows, n). What
        follows a prompt's last token is not known yet."""
        ends = zip(self.cache.lengths, self.lengths, counts, strict=True)
        known = [count - (end == length) for end, length, count in ends]
        width = max(known)
        if width == 0:
            return
        texts = [row.text for row in self.rows]
        accepted = Accepted(following[:, :width], aux_hidden_states[:, :width], known, texts)
        for reader, cache in zip(self.drafter.cached_drafters, self.caches, strict=True):
            reader.prefill(share(accepted, self.drafter.layers, reader.layers), cache)
