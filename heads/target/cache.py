"""A preallocated key/value cache with a length per slot, into which unmodified transformers models write.

The first `batch` slots are in use; others are free for sequences that join.
Columns of a slot: `lengths[slot]` entries of computed text, then those of the newest forward, then nothing.

    slot 0   [ t t t t t t t | n n n . . . . . ]      t computed text, n the newest forward (a tree, or text)
    slot 1   [ t t t t | n n n . . . . . . . . ]      . never written, or stale: masked

`commit` moves the accepted entries of the newest forward after the text, and lengthens the slots. Rejected entries need no
clearing: the next forward overwrites or masks them. Layers of one shape and device share a few blocks of memory, so
accepting a path is one gather and one scatter for many layers, and its cost does not depend on the context.

It is part of `heads` because autoregressive heads draft with such caches too.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from foredraft.heads.target.cuda_graphs import CudaGraphs, power_of_two
from foredraft.heads.target.device import upload
from foredraft.heads.target.masks import Masks

MIN_BUCKET = 256  # smallest number of columns that a forward of fixed shapes sees
BLOCKS = 4  # shared by layers of one shape: while a cache grows, one block exists twice
# On a CPU a forward after a text sees a multiple of this many columns. Attention processes keys in blocks of this size, so
# all its products have one shape, and a row has the same bits regardless of its batch. A smaller last block would be
# summed in another order.
KEY_BLOCK = 512


def bucket(entries: int) -> int:
    """Return at least this many columns, rounded to a power of two so that there are few graphs."""
    return max(MIN_BUCKET, power_of_two(entries))


def key_block(device: torch.device) -> int:
    return KEY_BLOCK if device.type == "cpu" else 1


def whole_blocks(entries: int, block: int) -> int:
    """Return the smallest multiple of `block` that is at least `entries`."""
    return -(-entries // block) * block


def to_device(numbers: Any, device: torch.device) -> Tensor:
    """Upload integers of the host, in lists of lists, as int64, without waiting for the work that runs on the device."""
    return upload(torch.tensor(numbers, dtype=torch.int64), device)


class CacheLayer(CacheLayerMixin):
    """Give one layer access to its part of a KVCache."""

    def __init__(self, cache: "KVCache", index: int):
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.block(self.index, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (batch, heads, new, dim) after each slot's text. Return all columns in use, including the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        cache, new = self.cache, key_states.shape[2]
        if cache.uniform_lengths and cache.kv_bucket is None:
            first = cache.lengths[0] + cache.num_uncommitted
            self.keys[:, :, first : first + new] = key_states
            self.values[:, :, first : first + new] = value_states
        else:
            # With sharding=layers, some layers are on another device than the cache's indices.
            slots, columns = (index.to(self.keys.device) for index in (cache.slots, cache.columns(new)))
            self.keys[slots, :, columns] = key_states.transpose(1, 2)
            self.values[slots, :, columns] = value_states.transpose(1, 2)
        width = cache.width(new)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.width(query_length), 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return self.cache.capacity


class KVCache(Cache):
    """Hold `capacity` entries in each of `max_batch` slots of `layers` layers, of which `batch` slots are in use.

    lengths: computed tokens per slot, on the host, so that no step has to ask the device for them.
    num_uncommitted: entries after them that the next forward must not overwrite: a head drafts level by level.
    new_counts: (batch, 1) int64, the real entries of a forward of prompts; None in other forwards.
    seq_lens: (batch, 1) int64, the lengths on the device.
    kv_bucket: None if forwards see the columns up to the longest slot's newest entry. If they are to be captured
    (cuda_graphs.py), they see this number of columns, and only `seq_lens` determines where the text ends.
    """

    sliding: Any = None  # the settings of a SlidingCache
    lag = 0  # 1 if a block of the prefix cache stores the recurrent states before its last token
    new_counts: Tensor | None

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        device: torch.device | str,
        capture: bool = False,
        one_device: bool = True,
    ):
        """Allocate the cache. capture: should forwards be captured, if the device supports it? one_device: False if the
        layers are on several devices. Then each layer has its own memory, or every device would reserve that of all
        layers."""
        super().__init__(layers=[CacheLayer(self, i) for i in range(layers)])
        self.slides = [False] * layers  # which layers only keep the newest entries (sliding_cache.py)
        self.device, self.capture, self.one_device = torch.device(device), capture, one_device
        self.key_block = key_block(self.device)
        self.blocks: dict[tuple, Tensor] = {}
        self.kv_bucket: int | None = None
        self.allocate(batch, capacity)
        self.use(batch)
        self.clear()

    def allocate(self, max_batch: int, capacity: int) -> None:
        self.max_batch, self.capacity = max_batch, capacity
        self.graphs = CudaGraphs(self.device, self.capture)  # captured graphs refer to addresses
        self.all_slots = torch.arange(max_batch, device=self.device)[:, None]
        self.all_seq_lens = torch.zeros(max_batch, 1, dtype=torch.int64, device=self.device)

    @property
    def entries(self) -> int:
        """Return the number of entries with reserved memory."""
        return self.max_batch * self.num_entries(self.capacity)

    def num_entries(self, capacity: int) -> int:
        """Return the number of entries of all layers with as many bytes as a slot of this capacity."""
        return capacity

    def empty_like(self, batch: int, capacity: int) -> "KVCache":
        """Return an empty cache for the same layers."""
        return KVCache(len(self.layers), batch, capacity, self.device)

    def columns_in(self, key: tuple) -> int:
        """Return the columns of each slot in the block of this key. Those beyond `capacity` are never written, so on a CPU
        they take no memory."""
        return whole_blocks(self.capacity, self.key_block)

    def columns_of(self, key: tuple, entries: Tensor) -> Tensor:
        """Return the columns of these entries of a text in the block of this key."""
        return entries

    def use(self, batch: int) -> None:
        """Use this number of slots. What was captured for the same number before stays."""
        self.batch, self.slots, self.static_seq_lens = batch, self.all_slots[:batch], self.all_seq_lens[:batch]
        for layer in self.layers:
            layer.is_initialized = False  # its views show other slots
            if isinstance(layer, CacheLayer):
                layer.keys, layer.values = None, None  # type: ignore[assignment]  # or their memory would stay

    def reorder(self, slots: list[int | None], capacity: int, max_entries: int | None = None) -> None:
        """Make these slots the batch, None for an empty one, with room for `capacity` entries. A sequence is copied if its
        slot changes. If entries or slots grow, all are copied, and captured graphs are lost. Slots are doubled then, if
        that makes at most `most` entries in total."""
        lengths = [0 if slot is None else self.lengths[slot] for slot in slots]
        moved = [(new, old) for new, old in enumerate(slots) if old is not None and old != new]
        if capacity != self.capacity or len(slots) > self.max_batch:
            max_batch = self.max_batch if len(slots) <= self.max_batch else max(len(slots), 2 * self.max_batch)
            max_batch = (
                max_batch
                if max_entries is None or max_batch * self.num_entries(capacity) <= max_entries
                else len(slots)
            )
            self.resize(slots, capacity, max_batch)
        else:
            for block in self.blocks.values():
                copies = [block[:, :, old, :, : lengths[new]].clone() for new, old in moved]
                for (new, _), copy in zip(moved, copies, strict=True):
                    block[:, :, new, :, : lengths[new]] = copy
            if len(slots) != self.batch:
                self.use(len(slots))
        self.kv_bucket = None
        self.set_lengths(lengths)

    def resize(self, slots: list[int | None], capacity: int, max_batch: int) -> None:
        """Allocate other memory for `max_batch` slots of `capacity` entries, of which these become the first. This happens
        block by block, and each frees the previous one, which must not be referenced elsewhere."""
        self.allocate(max_batch, capacity)
        self.use(len(slots))
        for key in list(self.blocks):
            block = self.blocks[key]
            layers, pair, _, heads, _, dim = block.shape
            self.blocks[key] = block.new_zeros(layers, pair, max_batch, heads, self.columns_in(key), dim)
            for new, old in enumerate(slots):
                if old is not None:
                    length = self.lengths[old]
                    self.blocks[key][:, :, new, :, :length] = block[:, :, old, :, :length]

    def erase(self, slot: int) -> None:
        """Overwrite all entries of a slot."""
        for block in self.blocks.values():
            block[:, :, slot] = 0

    def erase_uncommitted(self, slot: int) -> None:
        """Overwrite the entries after a slot's text."""
        for block in self.blocks.values():
            block[:, :, slot, :, self.lengths[slot] :] = 0

    def copy_from(self, slots: list[int], other: "KVCache", others: list[int]) -> None:
        """Copy slots `others` of another cache to these empty slots."""
        lengths = [*self.lengths]
        for slot, theirs in zip(slots, others, strict=True):
            lengths[slot] = other.lengths[theirs]
            for key, block in other.blocks.items():
                self.block_like(key, block[:, :, 0])[:, :, slot, :, : lengths[slot]] = block[
                    :, :, theirs, :, : lengths[slot]
                ]
        self.set_lengths(lengths)

    def block_like(self, key: tuple, states: Tensor) -> Tensor:
        """Return the block of this key, or make it for states (layers, 1 or 2, heads, entries, dim)."""
        if key not in self.blocks:
            layers, pair, heads, _, dim = states.shape
            self.blocks[key] = states.new_zeros(layers, pair, self.max_batch, heads, self.columns_in(key), dim)
        return self.blocks[key]

    def copy_out(self, slot: int, start: int, end: int) -> dict[tuple, Tensor]:
        """Copy a slot's entries start .. end - 1, (layers, 1 or 2, heads, entries, dim) each."""
        return {key: block[:, :, slot, :, start:end].clone() for key, block in self.blocks.items()}

    def contains(self, slot: int, start: int, end: int) -> bool:
        """Return whether a block of these tokens of its text can be continued from."""
        return True

    def copy_in(self, slot: int, pieces: list[dict[tuple, Tensor]], end: int) -> None:
        """Write results of `copy_out`, one after the other, up to the slot's entry `end` - 1."""
        for key in pieces[0]:
            states = torch.cat([piece[key] for piece in pieces], dim=3)
            self.block_like(key, states)[:, :, slot, :, : states.shape[3]] = states

    def clear(self) -> None:
        """Forget all text. Captured graphs stay."""
        self.kv_bucket = None
        self.set_lengths([0] * self.batch)

    def set_lengths(self, lengths: list[int], seq_lens: Tensor | None = None) -> None:
        """Set the lengths of all slots. seq_lens: the same (batch, 1) if the device has them, otherwise they are
        uploaded."""
        self.lengths, self.num_uncommitted, self.new_counts = lengths, 0, None
        self.newest_columns: tuple[tuple[int, int], Tensor] | None = None
        self.uniform_lengths = min(lengths) == max(lengths)
        self.seq_lens = to_device(lengths, self.device)[:, None] if seq_lens is None else seq_lens
        if self.graphs.active:  # captured graphs read them from one address
            self.seq_lens = self.static_seq_lens.copy_(self.seq_lens)

    def rewind(self) -> None:
        """Return to the state of the last `set_lengths`: a captured function starts with this."""
        self.num_uncommitted = 0
        if self.kv_bucket is not None:
            self.seq_lens = self.static_seq_lens

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
        """Return the columns that a forward of `new` entries sees: whole key blocks after a text. In an empty cache these
        are just the new entries, since no mask hides what follows them (see `causal_mask`)."""
        if self.kv_bucket is not None:
            return self.kv_bucket
        width = max(self.lengths) + self.num_uncommitted + new
        assert width <= self.capacity, f"{width} entries in a cache of {self.capacity}"
        return width if self.is_empty else whole_blocks(width, self.key_block)

    @property
    def is_empty(self) -> bool:
        return not any(self.lengths) and self.num_uncommitted == 0

    def columns(self, new: int) -> Tensor:
        """Return (batch, new) int64, the columns of each slot's newest entries. Every layer calls this; captured graphs
        compute it at each replay."""
        key = self.num_uncommitted, new
        if self.newest_columns is None or self.newest_columns[0] != key or self.kv_bucket is not None:
            first, after = self.num_uncommitted, self.num_uncommitted + new
            self.newest_columns = key, self.seq_lens + torch.arange(first, after, device=self.device)
        return self.newest_columns[1]

    def key_positions(self, positions: Tensor) -> Tensor:
        """Return the positions (batch, width) of all columns that a forward of new entries at positions (batch, new)
        sees."""
        new = positions.shape[1]
        columns = torch.arange(self.width(new), device=self.device).repeat(len(positions), 1)
        return columns.scatter(1, self.columns(new), positions)

    def block(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return this layer's keys and values, views of the block that layers of its shape share."""
        same = keys.shape[1:2] == values.shape[1:2] and keys.shape[3] == values.shape[3]
        shapes = [(keys, None)] if same else [(keys, "keys"), (values, "values")]
        views = []
        slides = self.slides[layer]
        alike, before = self.slides.count(slides), self.slides[:layer].count(slides)
        per_block = -(-alike // BLOCKS) if self.one_device else 1
        number, place = divmod(before, per_block)
        for states, name in shapes:
            key = (slides, states.shape[1], states.shape[3], states.dtype, states.device, name, number)
            if key not in self.blocks:
                # A model that mixes shapes reserves its later layers twice.
                count = min(per_block, alike - number * per_block)
                size = (count, 2 if same else 1, self.max_batch, states.shape[1], self.columns_in(key), states.shape[3])
                self.blocks[key] = torch.zeros(size, dtype=states.dtype, device=states.device)
            views += list(self.blocks[key][place, :, : self.batch])
        return views[0], views[1]

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
        keys = None if masks.window is None else self.key_positions(positions)
        return masks(mask, dtype, positions, keys, self.cached_entries(positions.shape[1]))

    def cached_entries(self, new: int) -> Tensor | None:
        """Return (batch, n) int64: the entries in the columns that a forward of new entries sees in sliding layers,
        negative if a column is empty; None if these layers see what all layers see."""
        return None

    def causal_mask(self, new: int) -> Tensor | None:
        """Return the mask (batch, new, width) bool of a forward of `new` consecutive tokens. None if nothing is cached:
        causal attention is equivalent, and the mask of a long prompt would be its length squared."""
        if self.is_empty and self.kv_bucket is None:
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
            self.graphs("commit", self.move_entries, padded_path)
        elif any(nodes[-1] != len(nodes) - 1 for nodes in path if nodes):  # otherwise they are already in place
            self.move_entries(padded_path[:, :longest])
        lengths = [length + len(nodes) for length, nodes in zip(self.lengths, path, strict=True)]
        self.set_lengths(lengths, self.seq_lens + counts)

    def move_entries(self, path: Tensor) -> None:
        """Move entries (batch, n) of the newest forward after the text."""
        source, target, new = self.seq_lens + path, self.columns(path.shape[1]), path.shape[1]
        for key, block in self.blocks.items():
            slides = key[0]
            if self.batch == 1 and self.kv_bucket is None and not slides:
                first = self.lengths[0]  # a slice costs less than an index
                block = block[:, :, :1]
                block[..., first : first + new, :] = block.index_select(4, source[0].to(block.device))
            else:
                new_columns, old_columns, slots = (
                    index.to(block.device)
                    for index in (self.columns_of(key, target), self.columns_of(key, source), self.slots)
                )
                block[:, :, slots, :, new_columns] = block[:, :, slots, :, old_columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)
