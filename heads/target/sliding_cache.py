"""Keys and values of targets with sliding windows: the layers that have one keep what it can still see, the others all.

Entry e of a text lies in column e % ring of a sliding layer, so whatever is written takes the place of what no window reaches
any more, and nothing is moved. The ring is as long as the window and the largest tree together: rejected drafts were written
over nothing that is needed.

    other layers     [ 0 1 2 3 4 5 6 7 8 9 n n . . . . ]     n the newest forward
    ring of 8        [ 8 9 n n 4 5 6 7 ]                     0 to 3 are out of sight

A mask is made of entries as for other layers, and then gathered in the order of the ring's columns (`SlidingCache.held`). Of
prompts, which may be longer than the ring, a forward sees the ring and all that is new, and keeps what is newest.
"""

from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target.cache import CacheLayer, KVCache, whole_blocks

# Entries more than are needed: so many after a sequence's newest whole block of the prefix cache, and of the block in which
# its window begins, are there as well.
SLACK = 64


class Sliding(NamedTuple):
    """Which layers see a window alone, and what they keep."""

    layers: frozenset[int]
    window: int  # tokens
    nodes: int  # of a tree at most
    share: float  # of the bytes of an entry that all layers keep
    key_block: int = 1  # a ring is a multiple of it

    @property
    def ring(self) -> int:
        return whole_blocks(self.window + self.nodes + SLACK, self.key_block)

    def weigh(self, entries: int) -> int:
        """Entries of all layers that take as many bytes as a sequence of so many."""
        return entries - int(self.share * max(0, entries - self.ring))


class SlidingLayer(CacheLayer):
    cache: "SlidingCache"

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache, new = self.cache, key_states.shape[2]
        if not cache.wraps(new):
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        slots, seen, written = cache.slots.to(self.keys.device), [self.keys, self.values], [key_states, value_states]
        if cache.new_counts is None:
            entries = cache.columns(new)
        else:
            text, last, n = cache.text_columns, cache.new_counts, min(new, cache.ring)
            seen = [torch.cat([old[:, :, :text], states], 2) for old, states in zip(seen, written, strict=True)]
            # Where there are fewer, the last one is written again in the place of padding.
            newest = (last - n).clamp(min=0) + torch.arange(n, device=last.device)
            newest = newest.minimum(last - 1).clamp(min=0)
            entries = cache.seq_lens + newest
            written = [states.take_along_dim(newest.to(states.device)[:, None, :, None], 2) for states in written]
        columns = (entries % cache.ring).to(slots.device)
        for mine, states in zip((self.keys, self.values), written, strict=True):
            mine[slots, :, columns] = states.transpose(1, 2)
        return seen[0], seen[1]


class SlidingCache(KVCache):
    def __init__(self, sliding: Sliding, layers: int, *args: Any, **kwargs: Any):
        """As `KVCache`, of which all further arguments are."""
        self.sliding = sliding
        super().__init__(layers, *args, **kwargs)
        self.slides = [number in sliding.layers for number in range(layers)]
        for number in sliding.layers:
            self.layers[number] = SlidingLayer(self, number)

    def allocate(self, max_batch: int, capacity: int) -> None:
        super().allocate(max_batch, capacity)
        self.ring = min(whole_blocks(capacity, self.key_block), self.sliding.ring)

    def weigh(self, capacity: int) -> int:
        return self.sliding.weigh(capacity)

    def like(self, batch: int, capacity: int) -> KVCache:
        return SlidingCache(self.sliding, len(self.layers), batch, capacity, self.device)

    def columns_in(self, key: tuple) -> int:
        return self.ring if key[0] else super().columns_in(key)

    def columns_of(self, key: tuple, entries: Tensor) -> Tensor:
        return entries % self.ring if key[0] else entries

    def wraps(self, new: int) -> bool:
        """May a forward of new entries meet texts of which a ring holds the newest entries alone?"""
        return self.width(new) > self.ring

    @property
    def text_columns(self) -> int:
        """Of a ring, that hold text."""
        return min(max(self.lengths), self.ring)

    def held(self, new: int) -> Tensor | None:
        if not self.wraps(new):
            return None
        if self.new_counts is not None:
            return torch.cat([self.newest(self.seq_lens, self.text_columns), self.columns(new)], dim=1)
        assert new <= self.sliding.nodes, f"{new} entries after a text, in rings for {self.sliding.nodes}"
        return self.newest(self.seq_lens + new, self.ring)

    def newest(self, ends: Tensor, columns: int) -> Tensor:
        """(batch, columns) int64: the newest entry before `ends` (batch, 1) that lies in each; negative where none does."""
        return ends - 1 - (ends - 1 - torch.arange(columns, device=self.device)) % self.ring

    def erase_uncommitted(self, slot: int) -> None:
        length = self.lengths[slot]
        written = torch.arange(length, min(length + self.sliding.nodes, self.capacity), device=self.device)
        for key, block in self.blocks.items():
            block[:, :, slot, :, self.columns_of(key, written).to(block.device)] = 0

    def holds(self, slot: int, start: int, end: int) -> bool:
        """Are all entries from `start` on there, in all layers?"""
        return start >= self.lengths[slot] + self.sliding.nodes - self.ring or self.ring >= self.capacity

    def copy_out(self, slot: int, start: int, end: int) -> dict[tuple, Tensor]:
        """As `KVCache.copy_out`, without the blocks of sliding layers where these entries are not there any more."""
        entries, whole = torch.arange(start, end, device=self.device), self.holds(slot, start, end)
        return {
            key: block[:, :, slot, :, self.columns_of(key, entries).to(block.device)]
            for key, block in self.blocks.items()
            if whole or not key[0]
        }

    def copy_in(self, slot: int, pieces: list[dict[tuple, Tensor]], end: int) -> None:
        for key in pieces[-1]:
            parts = (piece.get(key) for piece in reversed(pieces))
            newest = [*takewhile(lambda part: part is not None, parts)]
            states = torch.cat(newest[::-1], dim=3)[..., -self.columns_in(key) :, :]
            block = self.block_like(key, states)
            entries = torch.arange(end - states.shape[3], end, device=self.device)
            block[:, :, slot, :, self.columns_of(key, entries).to(block.device)] = states


def share_of(cache: KVCache) -> float:
    """Which share of a cache's memory its sliding layers have."""
    size = {key: block.numel() * block.element_size() for key, block in cache.blocks.items()}
    return sum(size[key] for key in size if key[0]) / sum(size.values())
