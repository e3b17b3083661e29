"""Masks of packed sequences, without a mask of length x length.

    tokens   a a a a b b b . .      a token sees its own document up to itself, and with a window no further back than that
    starts   0 0 0 0 4 4 4 7 7      padding counts as a document

On a GPU FlexAttention processes all sequences at once (flex.py); on a CPU each document attends separately. Only
a GPU without that kernel needs the full mask.
"""

from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from foredraft.heads.attention import flex
from foredraft.heads.attention.sinks import PADDING, with_sinks

QUERIES = 1024  # processed at a time with a window: no mask is larger than QUERIES x (QUERIES + window)


class OnDemand(Tensor):
    """Represent a tensor. Everything except our attention gets the tensor that `dense()` makes."""

    def dense(self) -> Tensor:
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, OnDemand) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class PackedMask(OnDemand):
    """Represent a mask (batch, 1, length, length) in `dtype` that is added to scores. starts: (batch, length) int64, the
    first column of each token's document. window: columns that a token sees, its own included; None for no limit."""

    starts: Tensor
    window: int | None

    @staticmethod
    def __new__(cls, starts: Tensor, dtype: torch.dtype, window: int | None) -> "PackedMask":
        batch, length = starts.shape
        return torch.Tensor._make_wrapper_subclass(cls, (batch, 1, length, length), dtype=dtype, device=starts.device)

    def __init__(self, starts: Tensor, dtype: torch.dtype, window: int | None):
        self.starts, self.window = starts, window

    def seen(self) -> Tensor:
        """Return the mask (batch, 1, length, length) bool."""
        columns = torch.arange(self.starts.shape[1], device=self.starts.device)
        seen = (columns >= flex.first_keys(self.starts, self.window)[..., None]) & (columns <= columns[:, None])
        return seen[:, None]

    def dense(self) -> Tensor:
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.starts.device)
        return zeros.masked_fill_(~self.seen(), torch.finfo(self.dtype).min)

    @cached_property
    def documents(self) -> list[list[tuple[int, int]]]:
        """Return the first column and the end of each document, for each sequence."""
        length = self.starts.shape[1]
        starts: list[list[int]] = [[] for _ in self.starts]
        for row, column in (self.starts == torch.arange(length, device=self.starts.device)).nonzero().tolist():
            starts[row].append(column)
        return [list(pairwise([*columns, length])) for columns in starts]


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention (batch, heads, length, value dim) of query (batch, heads, length, dim) over key and value (batch,
    kv_heads, length, dim). sinks: (heads,)."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions may have promoted them under autocast
    if key.shape == value.shape and flex.is_supported(query, key):
        out, lse = flex.attend(query, key, value, flex.text_mask(mask.starts, mask.window), scale)
        return out if sinks is None else out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)
    if query.device.type != "cpu":  # the documents would require a synchronization
        return attend_part(query, key, value, mask.seen(), scale, sinks)
    if all(len(documents) == 1 for documents in mask.documents):
        return attend_document(query, key, value, mask.window, scale, sinks)
    rows = []
    for row, documents in enumerate(mask.documents):
        parts = []
        for start, end in documents:
            here = slice(row, row + 1), slice(None), slice(start, end)
            parts.append(attend_document(query[here], key[here], value[here], mask.window, scale, sinks))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def attend_document(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    length = query.shape[2]
    if window is None or length <= window:
        return attend_part(query, key, value, None, scale, sinks)
    columns, parts = torch.arange(length, device=query.device), []
    for start in range(0, length, QUERIES):
        end, first = min(start + QUERIES, length), max(0, start - window + 1)
        back = columns[start:end, None] - columns[first:end]
        seen = (back >= 0) & (back < window)
        inputs = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        parts.append(attend_part(*inputs, seen, scale, sinks))
    return torch.cat(parts, dim=2)


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend with one mask. mask: (queries, keys) bool, or one for each sequence, (batch, 1, queries, keys), or None for
    causal."""
    grouped = query.shape[1] != key.shape[1]
    if sinks is not None:
        scale = query.shape[3] ** -0.5 if scale is None else scale  # of the unpadded dimension
        query, key, value = with_sinks(query, key, value, sinks, scale)
        if mask is None:
            query = F.pad(query, (0, 0, 1, 0))  # a first row keeps the diagonal in place
    if sinks is not None and mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out if sinks is None else out[:, :, mask is None :, :-PADDING]
