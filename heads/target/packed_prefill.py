"""Prompts of several lengths packed in one sequence, without padding.

packed   a a a a b b b c c c c c c       each prompt attends separately (packed_mask.py)
cache    slot 0   [ a a a a . . . ]
         slot 1   [ b b b . . . . ]      entries go to the same places as those of padded prompts
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
        for slot, (start, end) in enumerate(zip(self.cache.first_columns, self.cache.ends, strict=True)):
            layer.keys[slot, :, : end - start] = key_states[0, :, start:end]
            layer.values[slot, :, : end - start] = value_states[0, :, start:end]
        return key_states, value_states


class PackedPrompts(Cache):
    """Receive what a forward over the packed prompts writes, for the empty cache of their slots."""

    def __init__(self, slots: KVCache, tokens: Tensor, lengths: Sequence[int]):
        """Pack tokens (slots, longest) int64, which are padded on the right."""
        super().__init__(layers=[PackedLayer(self, number) for number in range(len(slots.layers))])
        self.slots, device = slots, tokens.device
        self.ends = list(accumulate(lengths))
        self.first_columns = [0, *self.ends[:-1]]
        columns, counts = torch.arange(tokens.shape[1], device=device), torch.tensor(lengths, device=device)
        first_columns = torch.tensor(self.first_columns, device=device)
        self.tokens = tokens[columns < counts[:, None]][None]  # (1, all)
        self.starts = first_columns.repeat_interleave(counts)[None]  # (1, all): first column of each token's prompt
        self.positions = torch.arange(self.ends[-1], device=device) - self.starts
        self.last = first_columns + counts - 1  # (slots,)
        # (slots, longest): the packed columns of its tokens.
        self.places = (first_columns[:, None] + columns).clamp(max=self.ends[-1] - 1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0
