"""What tokens of packed rows see, without a mask of length x length.

    row      a a a a b b b . .      a token sees its own document up to itself, and with a window no further back than that
    starts   0 0 0 0 4 4 4 7 7      padding counts as a document

On a GPU FlexAttention takes all rows at once (heads/flex.py), on a CPU each document attends by itself. A GPU without that
kernel has the mask after all.
"""

from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads import flex
from foredraft.heads.target.ragged_tensor import OnDemand
from foredraft.heads.target.sinks import PADDING, with_sinks

QUERIES = 1024  # that attend at a time where there is a window: no mask is larger than QUERIES x (QUERIES + window)


class PackedMask(OnDemand):
    """(batch, 1, length, length) in `dtype`, added to scores. starts: (batch, length) int64, the column at which the document
    of each token begins; window: columns that a token sees, its own counted; None for no limit."""

    starts: Tensor
    window: int | None

    @staticmethod
    def __new__(cls, starts: Tensor, dtype: torch.dtype, window: int | None) -> "PackedMask":
        batch, length = starts.shape
        return torch.Tensor._make_wrapper_subclass(cls, (batch, 1, length, length), dtype=dtype, device=starts.device)

    def __init__(self, starts: Tensor, dtype: torch.dtype, window: int | None):
        self.starts, self.window = starts, window

    def seen(self) -> Tensor:
        """(batch, 1, length, length) bool."""
        columns = torch.arange(self.starts.shape[1], device=self.starts.device)
        seen = (columns >= flex.first_keys(self.starts, self.window)[..., None]) & (columns <= columns[:, None])
        return seen[:, None]

    def dense(self) -> Tensor:
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.starts.device)
        return zeros.masked_fill_(~self.seen(), torch.finfo(self.dtype).min)

    @cached_property
    def documents(self) -> list[list[tuple[int, int]]]:
        """Of each row, where its documents begin and end."""
        length = self.starts.shape[1]
        begins: list[list[int]] = [[] for _ in self.starts]
        for row, column in (self.starts == torch.arange(length, device=self.starts.device)).nonzero().tolist():
            begins[row].append(column)
        return [list(pairwise([*columns, length])) for columns in begins]


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PackedMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query (batch, heads, length, dim); key, value (batch, kv_heads, length, dim); sinks (heads,). Returns (batch, heads,
    length, value dim)."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # which rotary positions may have promoted under autocast
    if key.shape == value.shape and flex.serves(query, key):
        out, lse = flex.attend(query, key, value, flex.text_mask(mask.starts, mask.window), scale)
        return out if sinks is None else out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)
    if query.device.type != "cpu":  # which would have to be waited for, to know its documents
        return attend_part(query, key, value, mask.seen(), scale, sinks)
    if all(len(documents) == 1 for documents in mask.documents):
        return attend_document(query, key, value, mask.window, scale, sinks)
    rows = []
    for row, documents in enumerate(mask.documents):
        parts = []
        for begin, end in documents:
            here = slice(row, row + 1), slice(None), slice(begin, end)
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
    for begin in range(0, length, QUERIES):
        end, first = min(begin + QUERIES, length), max(0, begin - window + 1)
        back = columns[begin:end, None] - columns[first:end]
        seen = (back >= 0) & (back < window)
        inputs = query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]
        parts.append(attend_part(*inputs, seen, scale, sinks))
    return torch.cat(parts, dim=2)


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """mask: (queries, keys) bool, or one per row, (batch, 1, queries, keys), or None: causal."""
    grouped = query.shape[1] != key.shape[1]
    if sinks is not None:
        scale = query.shape[3] ** -0.5 if scale is None else scale  # that of the unpadded numbers
        query, key, value = with_sinks(query, key, value, sinks, scale)
        if mask is None:
            query = F.pad(query, (0, 0, 1, 0))  # a first row keeps the diagonal in its place
    if sinks is not None and mask is not None:
        mask = F.pad(mask, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out if sinks is None else out[:, :, mask is None :, :-PADDING]
