"""A preallocated key/value cache with a length per slot, into which unmodified transformers models write.

Slots are allocated once. A forward computes some of them, its `rows` (`KVCache.use`). Columns of a slot:
`slot_lengths[slot]` entries of computed text, then those of the newest forward, then nothing.

    slot 0   [ t t t t t t t | n n n . . . . . ]      t computed text, n the newest forward (a tree, or text)
    slot 1   [ t t t t | n n n . . . . . . . . ]      . never written, or stale: masked

`commit` moves the accepted entries of the newest forward after the text, and lengthens the slots. Rejected entries need no
clearing: the next forward overwrites or masks them. Layers hold the memory (heads/caches/layers.py).

It is part of `heads` because autoregressive heads draft with such caches too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from foredraft.heads.attention.masks import Masks
from foredraft.heads.caches.cpu_graphs import live
from foredraft.heads.caches.cuda_graphs import CudaGraphs, power_of_two
from foredraft.heads.caches.device import upload
from foredraft.heads.caches.layers import CacheLayer, Sliding, WindowLayer, whole_blocks

MIN_BUCKET = 256  # smallest number of columns that a forward of fixed shapes sees
# On a CPU attention processes keys in blocks of this many columns. A forward after a text sees whole blocks, and a last one
# that may be cut to some smaller widths (key_widths.py), so a row has the same bits regardless of its batch. Blocks of other
# widths are summed in another order.
KEY_BLOCK = 512


def bucket(entries: int) -> int:
    """Return at least this many columns, rounded to a power of two so that there are few graphs."""
    return max(MIN_BUCKET, power_of_two(entries))


def key_block(device: torch.device) -> int:
    return KEY_BLOCK if device.type == "cpu" else 1


def to_device(numbers: Any, device: torch.device) -> Tensor:
    """Upload integers of the host, in lists of lists, as int64, without waiting for the work that runs on the device."""
    return upload(torch.tensor(numbers, dtype=torch.int64), device)


class KVCache(Cache):
    """Hold `capacity` entries in each of `num_slots` slots of `layers` layers. Forwards compute the `batch` slots `rows`.

    slot_lengths: computed tokens per slot, on the host, so that no step has to ask the device for them.
    lengths: the same, only of the rows.
    num_uncommitted: entries after them that the next forward must not overwrite: a head drafts level by level.
    new_counts: (batch, 1) int64, the real entries of a forward of prompts; None in other forwards.
    seq_lens: (batch, 1) int64, the lengths on the device.
    span: the rows as a slice if they are neighbors, else None.
    used: the columns that any forward has seen. On a CPU, those after them take no memory.
    short_widths: numbers of columns to which the last block may be cut, ascending.
    keeps_bits: does a token get the same bits however its text was computed (`Capabilities.keeps_bits`)?
    kv_bucket: None if forwards see the columns up to the longest slot's newest entry. If they are to be captured
    (cuda_graphs.py), they see this number of columns, and only `seq_lens` determines where the text ends.
    """

    new_counts: Tensor | None

    def __init__(
        self,
        layers: int,
        num_slots: int,
        capacity: int,
        device: torch.device | str,
        capture: bool = False,
        keeps_bits: bool = False,
        sliding: Sliding | None = None,
        short_widths: Sequence[int] = (),
    ):
        """Describe the cache, whose memory is allocated by its first forward. capture: should forwards be captured, if the
        device supports it? sliding: which layers keep only what their window reaches."""
        self.sliding, windows = sliding, frozenset() if sliding is None else sliding.layers
        super().__init__(layers=[(WindowLayer if i in windows else CacheLayer)(self) for i in range(layers)])
        self.device, self.capture, self.keeps_bits = torch.device(device), capture, keeps_bits
        self.key_block = key_block(self.device)
        self.short_widths = [width for width in short_widths if width < self.key_block]
        self.kv_bucket: int | None = None
        self.num_slots, self.capacity = num_slots, capacity
        self.graphs = CudaGraphs(self.device, self.capture)
        self.all_slots = torch.arange(num_slots, device=self.device)[:, None]
        self.all_seq_lens = torch.zeros(num_slots, 1, dtype=torch.int64, device=self.device)  # captured graphs read it
        self.slot_lengths, self.used = [0] * num_slots, 0
        self.rows: list[int] = []
        self.use(range(num_slots))

    def use(self, rows: Sequence[int]) -> None:
        """Let forwards compute these slots, in this order. Captured ones compute the first slots."""
        if list(rows) == self.rows:
            return
        self.rows, self.batch, first = list(rows), len(rows), rows[0]
        self.span = slice(first, first + len(rows)) if self.rows == [*range(first, first + len(rows))] else None
        self.slots = to_device(self.rows, self.device)[:, None] if self.span is None else self.all_slots[self.span]
        self.kv_bucket = None
        self.set_lengths([self.slot_lengths[slot] for slot in rows])

    def truncate(self, slot: int, length: int) -> None:
        """Forget all but the first `length` entries of a slot."""
        self.slot_lengths[slot], self.rows = length, []

    @property
    def kv_layers(self) -> list[CacheLayer]:
        """Return the layers with keys and values that a forward has allocated."""
        return [layer for layer in self.layers if isinstance(layer, CacheLayer) and layer.is_initialized]

    def swap(self, one: int, other: int) -> None:
        """Swap the contents of two slots."""
        lengths = self.slot_lengths
        lengths[one], lengths[other] = lengths[other], lengths[one]
        for layer in self.kv_layers:
            columns = layer.written(max(lengths[one], lengths[other]))
            for states in layer.states:
                first, second = states[one, :, columns], states[other, :, columns]
                saved = first.clone()
                first.copy_(second)
                second.copy_(saved)
        self.rows = []

    def copy(self, source: int, slot: int, length: int) -> None:
        """Copy the first `length` entries of a slot to another one."""
        for layer in self.kv_layers:
            for states in layer.states:
                states[slot, :, layer.written(length)] = states[source, :, layer.written(length)]
        self.truncate(slot, length)

    def can_rewind(self, length: int, earlier: int) -> bool:
        """Return whether a slot of `length` entries can be truncated to an `earlier` length: rings must still contain the
        window before it, and rejected drafts may have replaced older entries."""
        rings = self.sliding
        if rings is None or rings.ring >= self.capacity:
            return True
        return max(0, earlier - rings.window) >= length + rings.nodes - rings.ring

    def erase(self, slot: int) -> None:
        """Overwrite all entries of a slot."""
        for layer in self.kv_layers:
            layer.erase(slot, 0)

    def erase_uncommitted(self, slot: int) -> None:
        """Overwrite the entries after a slot's text."""
        for layer in self.kv_layers:
            layer.erase(slot, self.slot_lengths[slot])

    def clear(self) -> None:
        """Forget all text. Captured graphs stay."""
        self.slot_lengths, self.rows = [0] * self.num_slots, []
        self.use(range(self.num_slots))

    def set_lengths(self, lengths: list[int], seq_lens: Tensor | None = None) -> None:
        """Set the lengths of all rows. seq_lens: the same (batch, 1) if the device has them, otherwise they are
        uploaded."""
        self.lengths, self.num_uncommitted, self.new_counts = lengths, 0, None
        for slot, length in zip(self.rows, lengths, strict=True):
            self.slot_lengths[slot] = length
        self.newest_columns: tuple[tuple[int, int], Tensor] | None = None
        self.uniform_lengths = min(lengths) == max(lengths)
        self.seq_lens = to_device(lengths, self.device)[:, None] if seq_lens is None else seq_lens
        if self.graphs.active and self.span is not None and self.span.start == 0:
            # Captured graphs read them from one address.
            self.seq_lens = self.all_seq_lens[self.span].copy_(self.seq_lens)

    def rewind(self) -> None:
        """Return to the state of the last `set_lengths`: a captured function starts with this."""
        self.num_uncommitted = 0
        if self.kv_bucket is not None:
            self.seq_lens = self.all_seq_lens[: self.batch]

    def extend(self, lengths: list[int], counts: Tensor) -> None:
        """Lengthen slots to `lengths`, by counts (batch, 1). In captured functions this lasts only until the next
        `set_lengths`, since it must happen on the device and must not change what another replay starts from."""
        seq_lens = self.seq_lens + counts
        if self.kv_bucket is None:
            self.set_lengths(lengths, seq_lens)
        else:
            self.seq_lens = seq_lens

    def set_bucket(self, room: int) -> None:
        """Prepare a captured forward of at most `room` entries."""
        if self.graphs.active:
            entries = max(self.lengths) + room
            assert entries <= self.capacity, f"{entries} entries in a cache of {self.capacity}"
            self.kv_bucket = min(self.capacity, bucket(entries))

    def width(self, new: int) -> int:
        """Return the columns that a forward of `new` entries sees: whole key blocks, or just the new entries where no mask
        hides what follows them (see `causal_mask`)."""
        if self.kv_bucket is not None:
            return self.kv_bucket
        width = min(max(self.lengths) + self.num_uncommitted + new, self.capacity)
        if self._is_empty and not self.keeps_bits:
            return width
        before = whole_blocks(width, self.key_block) - self.key_block  # columns of the blocks before the last one
        return before + next((short for short in self.short_widths if short >= width - before), self.key_block)

    @property
    def _is_empty(self) -> bool:
        return not any(self.lengths) and self.num_uncommitted == 0

    def columns(self, new: int) -> Tensor:
        """Return (batch, new) int64, the columns of each row's newest entries. Every layer calls this; captured graphs
        compute it at each replay. Padding of a row that has less text than others may follow the last column."""
        key = self.num_uncommitted, new
        if self.newest_columns is None or self.newest_columns[0] != key or self.kv_bucket is not None:
            first, after = self.num_uncommitted, self.num_uncommitted + new
            columns = self.seq_lens + torch.arange(first, after, device=self.device)
            self.newest_columns = key, columns.clamp(max=self.capacity - 1) if self.kv_bucket is None else columns
        return self.newest_columns[1]

    def mask(self, among: Tensor) -> Tensor:
        """Return what a forward of new entries sees, (batch, new, width) bool: all computed text of its slot, and of the
        uncommitted and new entries those in `among` (batch or 1, new, num_uncommitted + new).

            text        new
            1 1 1 . .   1 . .      what entry 0 sees (a bonus token)
            1 1 1 . .   1 1 .      its child
            1 1 1 . .   1 . 1      another
        """
        new, following = among.shape[-2:]
        among = among.expand(self.batch, -1, -1)
        if self.uniform_lengths and self.kv_bucket is None:
            seen = torch.cat([among.new_ones(self.batch, new, self.lengths[0]), among], -1)
            return pad(seen, (0, self.width(new) - seen.shape[-1]))
        offset = torch.arange(self.width(new), device=self.device) - self.seq_lens  # (batch, width)
        inside = (offset >= 0) & (offset < following)
        seen = among.gather(2, offset.clamp(0, following - 1)[:, None, :].expand(-1, new, -1))
        return (offset < 0)[:, None, :] | (inside[:, None, :] & seen)

    def attention_mask(self, masks: Masks, mask: Tensor, dtype: torch.dtype, positions: Tensor) -> Any:
        """Convert a mask by `masks` for positions (batch, new)."""
        if masks.window is None:
            return masks(mask, dtype)
        new = positions.shape[1]
        columns = torch.arange(self.width(new), device=self.device).repeat(self.batch, 1)
        key_positions = columns.scatter(1, self.columns(new), positions)
        rings = next((layer for layer in self.layers if isinstance(layer, WindowLayer)), None)
        cached_entries = None if rings is None else rings.cached_entries(new)
        return masks(mask, dtype, positions, key_positions, cached_entries)

    def causal_mask(self, new: int) -> Tensor | None:
        """Return the mask (batch, new, width) bool of a forward of `new` consecutive tokens. None if nothing is cached:
        causal attention is equivalent, and the mask of a long prompt would be its length squared. It rounds differently,
        however."""
        if self._is_empty and self.kv_bucket is None and not self.keeps_bits:
            return None
        return self.mask(torch.ones(1, new, new, dtype=torch.bool, device=self.device).tril())

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Keep entries `path[slot]` (ascending) of the newest forward, in this order, after the slot's text. padded_path:
        the same on the device, (batch, n) int64, with arbitrary padding; counts: (batch, 1) int64, lengths of the paths.
        Both are uploaded if they are omitted."""
        longest = max(map(len, path))
        if padded_path is None:
            padded_path = to_device([nodes + [0] * (longest - len(nodes)) for nodes in path], self.device)
        if counts is None:
            counts = to_device([[len(nodes)] for nodes in path], self.device)
        if self.kv_bucket is not None:
            self.graphs("commit", self._move_entries, padded_path)
        elif any(nodes[-1] != len(nodes) - 1 for nodes in path if nodes):  # otherwise they are already in place
            self._move_entries(padded_path[:, :longest])
        lengths = [length + len(nodes) for length, nodes in zip(self.lengths, path, strict=True)]
        self.set_lengths(lengths, self.seq_lens + counts)

    def _move_entries(self, path: Tensor) -> None:
        """Move entries (batch, n) of the newest forward after the text."""
        source, target = self.seq_lens + path, self.columns(path.shape[1])
        for layer in self.kv_layers:
            layer.move(source, target)

    @live(returns_values=True)
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)
