"""The form in which a model takes a mask of ours: 4D, cut to its sliding windows, added to the scores."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from foredraft.heads.target.attention import additive_mask
from foredraft.heads.target.packed_mask import PackedMask


class Masks(NamedTuple):
    window: int | None  # tokens that its layers of sliding attention see
    mixed: bool  # has it layers without one too?

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
        held: Tensor | None = None,
    ) -> Any:
        """mask: (batch, length, keys) bool. positions (batch, length) and key_positions (batch, keys), int64, are needed
        where there is a window. held: as by `KVCache.held`. Returns (batch, 1, length, keys) in `dtype`, by kind of layer
        where they are mixed."""
        if self.window is None:
            return additive_mask(mask[:, None], dtype)
        assert positions is not None and key_positions is not None, "a sliding window needs both sides' positions"
        near = mask
        if held is not None:
            index = held.clamp(min=0)
            near = mask.gather(2, index[:, None].expand(-1, mask.shape[1], -1)) & (held >= 0)[:, None]
            key_positions = key_positions.gather(1, index)
        # A comparison, not a difference: of length x keys numbers there are bools alone.
        near = near & (positions[:, :, None] < (key_positions + self.window)[:, None, :])
        if not self.mixed:
            return additive_mask(near[:, None], dtype)
        return {
            "full_attention": additive_mask(mask[:, None], dtype),
            "sliding_attention": additive_mask(near[:, None], dtype),
        }

    def packed(self, starts: Tensor, dtype: torch.dtype) -> Any:
        """As `__call__`, of packed rows whose tokens' documents begin at columns `starts` (batch, length) int64."""
        full, near = (PackedMask(starts, dtype, window) for window in (None, self.window))
        return {"full_attention": full, "sliding_attention": near} if self.mixed else near
