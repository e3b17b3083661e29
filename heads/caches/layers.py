"""Keys and values of one layer: all of them, or, in a layer with a sliding window, those that the window still reaches.

Entry e of a text lies in column e of a slot, or in column e % ring of a sliding layer. There new entries replace those that
no window reaches any more, and nothing is moved. The ring is as long as the window and the largest tree together, so
rejected drafts never overwrite entries that are needed.

    all entries      [ 0 1 2 3 4 5 6 7 8 9 n n . . . . ]     n the newest forward
    ring of 8        [ 8 9 n n 4 5 6 7 ]                     0 to 3 are out of sight

A mask is made of entries for all layers, and then gathered in the order of the ring's columns (`KVCache.attention_mask`).
A forward of a longer prompt sees the ring and all new entries, and keeps the newest.
"""

import math
import mmap
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from foredraft.heads.caches.cuda_graphs import power_of_two
from foredraft.heads.caches.device import FEWEST_ROWS

if TYPE_CHECKING:
    from foredraft.heads.caches.kv_cache import KVCache

SLACK = 64  # spare entries of a ring: a text can be continued from this many tokens before its end


def whole_blocks(entries: int, block: int) -> int:
    """Return the smallest multiple of `block` that is at least `entries`."""
    return -(-entries // block) * block


class Sliding(NamedTuple):
    """Describe which layers see only a window, and what they keep."""

    layers: frozenset[int]
    window: int  # tokens
    nodes: int  # largest number of entries that a forward writes into the ring before it reads it
    key_block: int = 1  # a ring is a multiple of it

    @classmethod
    def of(
        cls, window: int | None, layer_types: Sequence[str] | None, layers: int, nodes: int, key_block: int
    ) -> "Sliding | None":
        """Describe what sliding layers keep in addition to trees of this many nodes; None without a window."""
        if window is None:
            return None
        kinds = layer_types or ["sliding_attention"] * layers
        sliding = frozenset(number for number, kind in enumerate(kinds) if kind == "sliding_attention")
        return cls(sliding, window, power_of_two(max(FEWEST_ROWS, nodes)), key_block)

    @property
    def ring(self) -> int:
        return whole_blocks(self.window + self.nodes + SLACK, self.key_block)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU their pages take no memory until they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(*shape)
    memory = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a short text would take 2 MB for each head of each layer
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


class CacheLayer(CacheLayerMixin):
    """Hold keys and values of all slots, (num_slots, heads, columns, dim) each, allocated by the first forward."""

    def __init__(self, cache: "KVCache"):
        super().__init__()
        self.cache = cache

    @property
    def num_columns(self) -> int:
        """Return the columns of a slot. Those beyond the capacity are never written, so on a CPU they take no memory."""
        return whole_blocks(self.cache.capacity, self.cache.key_block)

    def columns(self, entries: Tensor) -> Tensor:
        """Return the columns of these entries of a text."""
        return entries

    @property
    def states(self) -> list[Tensor]:
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            zeros((self.cache.num_slots, new.shape[1], self.num_columns, new.shape[3]), new.dtype, new.device)
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (batch, heads, new, dim) after each slot's text. Return all columns in use, including the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, new = self.cache, key_states.shape[2]
        if cache.uniform_lengths and cache.span is not None and cache.kv_bucket is None:
            first = cache.lengths[0] + cache.num_uncommitted
            for states, written in zip(self.states, (key_states, value_states), strict=True):
                states[cache.span, :, first : first + new] = written
        else:
            self.write(cache.columns(new), key_states, value_states)
        width = cache.width(new)
        cache.used = max(cache.used, width)
        keys, values = (self.read(states, width) for states in self.states)
        return keys, values

    def write(self, columns: Tensor, *new_states: Tensor) -> None:
        """Write keys and values (batch, heads, new, dim) of the rows into columns (batch, new)."""
        # With sharding=layers, some layers are on another device than the cache's indices.
        slots, columns = self.cache.slots.to(new_states[0].device), columns.to(new_states[0].device)
        for states, new in zip(self.states, new_states, strict=True):
            states[slots, :, columns] = new.transpose(1, 2)

    def read(self, states: Tensor, width: int) -> Tensor:
        """Return the first `width` columns of the rows."""
        if self.cache.span is not None:
            return states[self.cache.span, :, :width]
        return states[:, :, :width].index_select(0, self.cache.slots[:, 0].to(states.device))

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move entries (batch, n) of the rows."""
        cache = self.cache
        for states in self.states:
            slots, old, new = (
                index.to(states.device) for index in (cache.slots, self.columns(source), self.columns(target))
            )
            if cache.batch == 1 and cache.kv_bucket is None:  # takes a third of the time
                row = states[cache.rows[0]]
                row.index_copy_(1, new[0], row.index_select(1, old[0]))
            else:
                states[slots, :, new] = states[slots, :, old]

    def written(self, length: int) -> slice:
        """Return the columns that may contain something of a text of this length."""
        return slice(length)

    def erase(self, slot: int, first: int) -> None:
        """Overwrite the entries of a slot from the first one on."""
        for states in self.states:
            states[slot, :, first : self.cache.used] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.width(query_length), 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return self.cache.capacity


class WindowLayer(CacheLayer):
    """Hold the newest entries in a ring, if texts may be longer than it."""

    @property
    def num_columns(self) -> int:
        assert self.cache.sliding is not None
        return min(super().num_columns, self.cache.sliding.ring)

    def columns(self, entries: Tensor) -> Tensor:
        return entries % self.num_columns

    def written(self, length: int) -> slice:
        return slice(self.num_columns)  # in another order than the entries

    def erase(self, slot: int, first: int) -> None:
        assert self.cache.sliding is not None
        last = min(first + self.cache.sliding.nodes, self.cache.capacity)
        for states in self.states:
            entries = torch.arange(first, last, device=states.device)
            states[slot, :, self.columns(entries) if first else slice(None)] = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cache, new, ring = self.cache, key_states.shape[2], self.num_columns
        if cache.width(new) <= ring:
            return super().update(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert cache.sliding is not None
        if new <= cache.sliding.nodes:
            self.write(self.columns(cache.columns(new)), key_states, value_states)
            keys, values = (self.read(states, ring) for states in self.states)
            return keys, values
        assert cache.new_counts is not None, f"{new} entries after a text, in rings for {cache.sliding.nodes}"
        cached = (self.read(states, min(max(cache.lengths), ring)) for states in self.states)
        pairs = zip(cached, (key_states, value_states), strict=True)
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        # If there are fewer, the last one is also written in the place of padding.
        last, n = cache.new_counts, min(new, ring)
        newest = (last - n).clamp(min=0) + torch.arange(n, device=last.device)
        newest = newest.minimum(last - 1).clamp(min=0)
        chosen = newest.to(key_states.device)[:, None, :, None]
        self.write(
            self.columns(cache.seq_lens + newest), *(x.take_along_dim(chosen, 2) for x in (key_states, value_states))
        )
        return keys, values

    def cached_entries(self, new: int) -> Tensor | None:
        """Return (batch, n) int64: the entries in the columns that a forward of new entries sees, negative if a column is
        empty; None if it sees what other layers see."""
        cache, ring = self.cache, self.num_columns
        if cache.width(new) <= ring:
            return None
        assert cache.sliding is not None
        if new <= cache.sliding.nodes:
            return newest_entries(cache.seq_lens + new, ring, ring)
        text = newest_entries(cache.seq_lens, min(max(cache.lengths), ring), ring)
        return torch.cat([text, cache.columns(new)], dim=1)


def newest_entries(ends: Tensor, columns: int, ring: int) -> Tensor:
    """Return (batch, columns) int64: the newest entry before `ends` (batch, 1) in each column of a ring; negative if it is
    empty."""
    return ends - 1 - (ends - 1 - torch.arange(columns, device=ends.device)) % ring
