"""A preallocated key/value cache with a length per row, which unmodified transformers models write into.

Columns of a row: `lengths[row]` entries of accepted text, then whatever the latest read wrote, then nothing.

    row 0   [ t t t t t t t | n n n . . . . . ]      t accepted text, n the newest read (a tree, or text)
    row 1   [ t t t t | n n n . . . . . . . . ]      . never written, or stale: no mask admits it

`keep` moves the accepted entries of the newest read behind the text and lengthens the rows. Rejected entries need no
clearing: the next read overwrites or masks them. Layers of one shape and device share one block of memory, so keeping
a path is one gather and one scatter for all of them, and its cost does not depend on the context.

It lives in `heads` because an autoregressive head drafts over the same cache that the target reads over.
"""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class Slots(CacheLayerMixin):
    """One layer's share of a KVCache."""

    def __init__(self, cache: "KVCache", index: int):
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self.cache.block(self.index, key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (batch, heads, new, dim) behind each row's text; return all columns in use, the new ones included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        cache, new = self.cache, key_states.shape[2]
        if cache.even:
            first = cache.lengths[0] + cache.pending
            self.keys[:, :, first : first + new] = key_states
            self.values[:, :, first : first + new] = value_states
        else:
            rows, columns = cache.rows, cache.columns(new)
            self.keys[rows, :, columns] = key_states.transpose(1, 2)
            self.values[rows, :, columns] = value_states.transpose(1, 2)
        width = cache.width(new)
        return self.keys[:, :, :width], self.values[:, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.width(query_length), 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths)

    def get_max_length(self) -> int:
        return self.cache.capacity


class KVCache(Cache):
    """Room for `capacity` entries in each of `batch` rows of `layers` layers.

    lengths: entries of accepted text per row, known on the host, so that no step has to ask the device for them.
    pending: entries behind the text that the next read shall not overwrite: a head drafts level by level.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device | str):
        super().__init__(layers=[Slots(self, i) for i in range(layers)])
        self.batch, self.capacity, self.device = batch, capacity, torch.device(device)
        self.blocks: dict[tuple, Tensor] = {}
        self.rows = torch.arange(batch, device=self.device)[:, None]
        self.set_lengths([0] * batch)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths, self.pending = lengths, 0
        self.even = min(lengths) == max(lengths)
        self.starts = torch.tensor(lengths, device=self.device)[:, None]  # (batch, 1)

    def width(self, new: int) -> int:
        """Columns that a read of `new` entries sees: up to the longest row's newest entry."""
        width = max(self.lengths) + self.pending + new
        assert width <= self.capacity, f"{width} entries in a cache of {self.capacity}"
        return width

    def columns(self, new: int) -> Tensor:
        """(batch, new): where each row's newest entries go."""
        return self.starts + torch.arange(self.pending, self.pending + new, device=self.device)

    def block(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's keys and values, a view into the block that layers of its shape share."""
        same = keys.shape[1:2] == values.shape[1:2] and keys.shape[3] == values.shape[3]
        shapes = [(keys, None)] if same else [(keys, "keys"), (values, "values")]
        views = []
        for states, name in shapes:
            key = (states.shape[1], states.shape[3], states.dtype, states.device, name)
            if key not in self.blocks:
                # A model that mixes shapes reserves its later layers twice; the pages are not touched until written.
                size = (len(self.layers), 2 if same else 1, self.batch, states.shape[1], self.capacity, states.shape[3])
                self.blocks[key] = torch.zeros(size, dtype=states.dtype, device=states.device)
            views += list(self.blocks[key][layer])
        return views[0], views[1]

    def mask(self, among: Tensor) -> Tensor:
        """What a read of new entries may see: all accepted text of its row, and of the pending and new entries what
        `among` (batch or 1, new, pending + new) says. Bool (batch, new, width).

            text        new
            1 1 1 . .   1 . .      row of entry 0 (a root)
            1 1 1 . .   1 1 .      its child
            1 1 1 . .   1 . 1      another
        """
        new, behind = among.shape[-2:]
        among = among.expand(self.batch, -1, -1)
        if self.even:
            return torch.cat([among.new_ones(self.batch, new, self.lengths[0]), among], -1)
        offset = torch.arange(self.width(new), device=self.device) - self.starts  # (batch, width)
        inside = (offset >= 0) & (offset < behind)
        seen = among.gather(2, offset.clamp(0, behind - 1)[:, None, :].expand(-1, new, -1))
        return (offset < 0)[:, None, :] | (inside[:, None, :] & seen)

    def keep(self, path: list[list[int]]) -> None:
        """Keep entries `path[row]` (ascending) of the newest read, in this order, behind the row's text."""
        counts = [len(nodes) for nodes in path]
        longest = max(counts)
        if any(nodes[-1] != len(nodes) - 1 for nodes in path if nodes):  # else they lie in their places already
            padded = [nodes + [longest - 1] * (longest - len(nodes)) for nodes in path]
            source = self.starts + torch.tensor(padded, device=self.device)
            target = self.columns(longest)
            for block in self.blocks.values():
                if self.batch == 1:
                    first = self.lengths[0]
                    kept = block.index_select(4, source[0].to(block.device))
                    block[..., first : first + longest, :] = kept
                else:
                    rows = self.rows.to(block.device)
                    kept = block[:, :, rows, :, source.to(block.device)]
                    block[:, :, rows, :, target.to(block.device)] = kept
        self.set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)
