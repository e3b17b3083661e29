"""Keys and values of targets with sliding windows: sliding layers keep what they can still see, the others everything.

Entry e of a text lies in column e % ring of a sliding layer, so new entries replace those that no window reaches any more,
and nothing is moved. The ring is as long as the window and the largest tree together, so rejected drafts never overwrite
entries that are needed.

    other layers     [ 0 1 2 3 4 5 6 7 8 9 n n . . . . ]     n the newest forward
    ring of 8        [ 8 9 n n 4 5 6 7 ]                     0 to 3 are out of sight

A mask is made of entries as for other layers, and then gathered in the order of the ring's columns
(`SlidingCache.cached_entries`). A forward of prompts, which may be longer than the ring, sees the ring and all new entries,
and keeps the newest.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.caches.kv_cache import CacheLayer, KVCache, whole_blocks

SLACK = 64  # spare entries: a text can be continued from this many tokens before its end


class Sliding(NamedTuple):
    """Describe which layers see only a window, and what they keep."""

    layers: frozenset[int]
    window: int  # tokens
    nodes: int  # largest size of a tree
    key_block: int = 1  # a ring is a multiple of it

    @property
    def ring(self) -> int:
        return whole_blocks(self.window + self.nodes + SLACK, self.key_block)


class SlidingLayer(CacheLayer):
    cache: "SlidingCache"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache, new = self.cache, key_states.shape[2]
        if not cache.wraps(new):
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        slots, cached, written = cache.slots.to(self.keys.device), (self.keys, self.values), [key_states, value_states]
        if cache.new_counts is None:
            entries, seen = cache.columns(new), [cache.of_rows(states, cache.ring) for states in cached]
        else:
            text, last, n = cache.text_columns, cache.new_counts, min(new, cache.ring)
            pairs = zip(cached, written, strict=True)
            seen = [torch.cat([cache.of_rows(old, text), states], 2) for old, states in pairs]
            # If there are fewer, the last one is also written in the place of padding.
            newest = (last - n).clamp(min=0) + torch.arange(n, device=last.device)
            newest = newest.minimum(last - 1).clamp(min=0)
            entries = cache.seq_lens + newest
            written = [states.take_along_dim(newest.to(states.device)[:, None, :, None], 2) for states in written]
        columns = (entries % cache.ring).to(slots.device)
        for old, states in zip(cached, written, strict=True):
            old[slots, :, columns] = states.transpose(1, 2)
        return seen[0], seen[1]


class SlidingCache(KVCache):
    def __init__(self, sliding: Sliding, layers: int, *args: Any, **kwargs: Any):
        """Allocate a KVCache, which gets all further arguments, with rings for sliding layers."""
        self.sliding = sliding
        super().__init__(layers, *args, **kwargs)
        self.ring = min(whole_blocks(self.capacity, self.key_block), sliding.ring)
        self.slides = [number in sliding.layers for number in range(layers)]
        for number in sliding.layers:
            self.layers[number] = SlidingLayer(self, number)

    def columns_in(self, key: tuple) -> int:
        return self.ring if key[0] else super().columns_in(key)

    def columns_of(self, key: tuple, entries: Tensor) -> Tensor:
        return entries % self.ring if key[0] else entries

    def wraps(self, new: int) -> bool:
        """Return whether a forward of new entries may see texts of which a ring only has the newest entries."""
        return self.width(new) > self.ring

    @property
    def text_columns(self) -> int:
        """Return the number of columns of a ring that contain text."""
        return min(max(self.lengths), self.ring)

    def cached_entries(self, new: int) -> Tensor | None:
        if not self.wraps(new):
            return None
        if self.new_counts is not None:
            return torch.cat([self.newest(self.seq_lens, self.text_columns), self.columns(new)], dim=1)
        assert new <= self.sliding.nodes, f"{new} entries after a text, in rings for {self.sliding.nodes}"
        return self.newest(self.seq_lens + new, self.ring)

    def newest(self, ends: Tensor, columns: int) -> Tensor:
        """Return (batch, columns) int64: the newest entry before `ends` (batch, 1) in each column; negative if it is
        empty."""
        return ends - 1 - (ends - 1 - torch.arange(columns, device=self.device)) % self.ring

    def erase_uncommitted(self, slot: int) -> None:
        length = self.slot_lengths[slot]
        written = torch.arange(length, min(length + self.sliding.nodes, self.capacity), device=self.device)
        for key, block in self.blocks.items():
            block[:, :, slot, :, self.columns_of(key, written).to(block.device)] = 0

    def can_rewind(self, length: int, earlier: int) -> bool:
        """Return whether the rings still contain the window before the earlier length."""
        oldest = length + self.sliding.nodes - self.ring  # rejected drafts replaced the entries before it
        return self.ring >= self.capacity or max(0, earlier - self.sliding.window) >= oldest
