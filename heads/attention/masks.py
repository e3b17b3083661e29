"""Convert our masks to the form that a model takes: 4D, cut to its sliding windows, added to the scores."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from foredraft.heads.attention.masked import additive_mask
from foredraft.heads.attention.packed_mask import PackedMask


class Masks(NamedTuple):
    window: int | None  # tokens that sliding attention sees
    mixed: bool  # are there layers without a window, too?

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Masks":
        types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", None) is False:
            window = None
        if types is not None and "sliding_attention" not in types:
            window = None  # a config may name a window that none of its layers uses
        return cls(window, mixed=window is not None and types is not None)

    def __call__(
        self,
        mask: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        cached_entries: Tensor | None = None,
    ) -> Any:
        """Convert a mask (batch, length, keys) bool. positions (batch, length) and key_positions (batch, keys), int64, are
        needed with a window. cached_entries: see `KVCache.cached_entries`. Returns (batch, 1, length, keys) in `dtype`, by
        kind of layer if they are mixed."""
        if self.window is None:
            return additive_mask(mask[:, None], dtype)
        assert positions is not None and key_positions is not None, "a sliding window needs both sides' positions"
        near = mask
        if cached_entries is not None:
            index = cached_entries.clamp(min=0)
            near = mask.gather(2, index[:, None].expand(-1, mask.shape[1], -1)) & (cached_entries >= 0)[:, None]
            key_positions = key_positions.gather(1, index)
        # A comparison instead of a difference: only bools have length x keys entries.
        near = near & (positions[:, :, None] < (key_positions + self.window)[:, None, :])
        if not self.mixed:
            return additive_mask(near[:, None], dtype)
        return {
            "full_attention": additive_mask(mask[:, None], dtype),
            "sliding_attention": additive_mask(near[:, None], dtype),
        }

    def packed(self, starts: Tensor, dtype: torch.dtype) -> Any:
        """Return the masks of packed sequences whose tokens' documents start at columns `starts` (batch, length) int64."""
        full, near = (PackedMask(starts, dtype, window) for window in (None, self.window))
        return {"full_attention": full, "sliding_attention": near} if self.mixed else near
