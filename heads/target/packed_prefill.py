"""Prompts of several lengths in one row, none of them padded.

row      a a a a b b b c c c c c c       each attends by itself (packed_mask.py)
cache    slot 0   [ a a a a . . . ]
         slot 1   [ b b b . . . . ]      and its entries go where those of a padded row would
         slot 2   [ c c c c c c . ]
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import Cache

from foredraft.heads.target.cache import CacheLayer, KVCache


class PackedLayer(CacheLayer):
    cache: "PackedPrompts"

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        layer = self.cache.slots.layers[self.index]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        for slot, (begin, end) in enumerate(zip(self.cache.begins, self.cache.ends, strict=True)):
            layer.keys[slot, :, : end - begin] = key_states[0, :, begin:end]
            layer.values[slot, :, : end - begin] = value_states[0, :, begin:end]
        return key_states, value_states


class PackedPrompts(Cache):
    """What a forward over the row writes into, in place of the empty cache of its slots."""

    def __init__(self, slots: KVCache, tokens: Tensor, lengths: Sequence[int]):
        """tokens: (slots, longest) int64, padded on the right."""
        super().__init__(layers=[PackedLayer(self, number) for number in range(len(slots.layers))])
        self.slots, device = slots, tokens.device
        self.ends = list(accumulate(lengths))
        self.begins = [0, *self.ends[:-1]]
        columns, counts = torch.arange(tokens.shape[1], device=device), torch.tensor(lengths, device=device)
        begins = torch.tensor(self.begins, device=device)
        self.tokens = tokens[columns < counts[:, None]][None]  # (1, all)
        self.starts = begins.repeat_interleave(counts)[None]  # (1, all): where each one's prompt begins
        self.positions = torch.arange(self.ends[-1], device=device) - self.starts
        self.last = begins + counts - 1  # (slots,)
        # (slots, longest): where its tokens are in the row.
        self.places = (begins[:, None] + columns).clamp(max=self.ends[-1] - 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
