"""Convert our masks to the form that a model takes: 4D, cut to its sliding windows, added to the scores."""

import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig

from foredraft.heads.attention.row_parts import RowParts


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a mask (bool) adds to scores. Attention would compute this in every layer and keep it for gradients. It
    is finite, so that a row without visible keys does not become NaN."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def first_keys(doc_starts: Tensor, window: int | None, parts: RowParts | None = None) -> Tensor:
    """Return (batch, length) int64: the first key that each token of packed documents sees. doc_starts: (batch, length)
    int64, the first column of each token's document. window: columns that a token sees, its own included; None: no limit."""
    if window is None:
        return doc_starts
    columns = torch.arange(doc_starts.shape[1], device=doc_starts.device) if parts is None else parts.columns
    return doc_starts.maximum(columns + 1 - window)


def within_window(mask: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Limit a mask (batch, length, keys) bool over a cache, in which key k has position k, to the `window` keys up to each
    query's own. positions: (batch, length). Keys of drafts stand after the text, and are never too far back."""
    if window is None or mask.shape[-1] <= window:
        return mask
    # A comparison instead of a difference: only bools have length x keys entries.
    return mask & (positions[..., None] < torch.arange(mask.shape[-1], device=mask.device) + window)


def text_mask(doc_starts: Tensor, window: int | None = None) -> Tensor:
    """Return (batch, 1, length, length) bool: what tokens of packed documents see."""
    columns = torch.arange(doc_starts.shape[1], device=doc_starts.device)
    return ((columns >= first_keys(doc_starts, window)[..., None]) & (columns <= columns[:, None]))[:, None]


class PackedMask(Tensor):
    """Represent a mask (batch, 1, length, length) in `dtype` that is added to scores, without memory of that size.

        tokens   a a a a b b b . .      a token sees its own document up to itself, with a window no further back
        starts   0 0 0 0 4 4 4 7 7      padding counts as a document

    Everything except our attention (heads/attention/text_attention.py) gets the tensor that `dense` makes."""

    starts: Tensor  # (batch, length) int64, the first column of each token's document
    window: int | None
    parts: RowParts | None  # as in PackedBatch; only our attention can use them

    @staticmethod
    def __new__(cls, starts: Tensor, dtype: torch.dtype, *args: Any) -> "PackedMask":
        batch, length = starts.shape
        return torch.Tensor._make_wrapper_subclass(cls, (batch, 1, length, length), dtype=dtype, device=starts.device)

    def __init__(self, starts: Tensor, dtype: torch.dtype, window: int | None, parts: RowParts | None = None):
        self.starts, self.window, self.parts = starts, window, parts

    def dense(self) -> Tensor:
        if self.parts is not None:
            raise ValueError("the target's attention cannot read parts of rows: set context_parallel=1")
        return additive_mask(text_mask(self.starts, self.window), self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, PackedMask) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def knows_windows(model: nn.Module) -> bool:
    """Return whether the code of a model reads `sliding_window`. A config may have the word although its model ignores it."""
    files = {type(part).__module__ for part in model.modules()}
    return any(mentions_windows(name) for name in files if not name.startswith("torch."))


@functools.cache
def mentions_windows(module: str) -> bool:
    try:
        return "sliding_window" in inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return True


class Masks(NamedTuple):
    window: int | None  # tokens that sliding attention sees
    mixed: bool  # are there layers without a window, too?

    @classmethod
    def of(cls, config: PreTrainedConfig, model: nn.Module) -> "Masks":
        types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", None) is False or not knows_windows(model):
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
        needed with a window. cached_entries: see `WindowLayer.cached_entries`. Returns (batch, 1, length, keys) in `dtype`,
        by kind of layer if they are mixed."""
        if self.window is None:
            return additive_mask(mask[:, None], dtype)
        assert positions is not None and key_positions is not None, "a sliding window needs both sides' positions"
        near = mask
        if cached_entries is not None:
            index = cached_entries.clamp(0, mask.shape[2] - 1)  # padding may follow the last entry
            near = mask.gather(2, index[:, None].expand(-1, mask.shape[1], -1)) & (cached_entries >= 0)[:, None]
            key_positions = key_positions.gather(1, index)
        # A comparison instead of a difference: only bools have length x keys entries.
        near = near & (positions[:, :, None] < (key_positions + self.window)[:, None, :])
        sliding = additive_mask(near[:, None], dtype)
        if not self.mixed:
            return sliding
        return {"full_attention": additive_mask(mask[:, None], dtype), "sliding_attention": sliding}

    def packed(self, starts: Tensor, dtype: torch.dtype, parts: RowParts | None = None) -> Any:
        """Return the masks of packed sequences whose tokens' documents start at columns `starts` (batch, length) int64."""
        full, near = (PackedMask(starts, dtype, window, parts) for window in (None, self.window))
        return {"full_attention": full, "sliding_attention": near} if self.mixed else near
