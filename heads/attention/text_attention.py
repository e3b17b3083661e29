"""Causal attention of packed sequences, each token over its own document, without a mask of length x length.

On a GPU FlexAttention processes all sequences at once (flex.py); on a CPU each document attends separately. Only a GPU
without that kernel needs the full mask.

Sinks (gpt-oss) are a score per head that takes part in the softmax and adds nothing to the output.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads.attention import flex
from foredraft.heads.attention.masks import first_keys, text_mask
from foredraft.heads.attention.row_parts import RowParts

QUERIES = 1024  # processed at a time with a window: no mask is larger than QUERIES x (QUERIES + window)
FEWEST, ENTRIES = 64, 1 << 20  # queries of parts of rows that are processed at a time, and entries of their mask
SINK_PADDING = 8  # added to the head dimension: kernels need multiples of 8
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # of query, key, value and mask, as `attend_part`


def attend_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    parts: RowParts | None = None,
) -> Tensor:
    """Return attention (batch, heads, length, value dim) of query (batch, heads, length, dim) over key and value (batch,
    kv_heads, length, dim). starts, window: as in `masks.first_keys`. sinks: (heads,). parts: as in PackedBatch."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary positions may have promoted them under autocast
    attend = partial(attend_part, scale=scale, sinks=sinks)
    if parts is not None:
        (key, value), query = parts.gather(key, value), parts.join(query)
    if key.shape == value.shape and flex.is_supported(query, key):
        out, lse = flex.attend(query, key, value, flex.text_mask(starts, window, parts), scale)
        out = out if sinks is None else out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)
    elif parts is not None:
        first, last = (parts.joined_columns(x) for x in (first_keys(starts, window, parts), parts.columns))
        out = attend_spans(query, key, value, first, last, attend)
    elif query.device.type == "cpu":
        rows = []
        for row, spans in enumerate(documents(starts)):
            q, k, v = (x[row : row + 1] for x in (query, key, value))
            found = [attend_document(q[:, :, at], k[:, :, at], v[:, :, at], window, attend) for at in spans]
            rows.append(torch.cat(found, dim=2))
        out = torch.cat(rows)
    else:  # the documents would require a synchronization
        out = attend(query, key, value, text_mask(starts, window))
    return out if parts is None else parts.split(out)


def attend_spans(query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor, attend: Attend) -> Tensor:
    """Attend from each query to the keys from `first` to `last`, (batch, queries) int64, some queries at a time."""
    out, count = [], max(FEWEST, ENTRIES // key.shape[2])
    for start in range(0, query.shape[2], count):
        here = slice(start, start + count)
        begin, end = int(first[:, here].min()), int(last[:, here].max()) + 1
        columns = torch.arange(begin, end, device=query.device)
        seen = (columns >= first[:, here, None]) & (columns <= last[:, here, None])
        out.append(attend(query[:, :, here], key[:, :, begin:end], value[:, :, begin:end], seen[:, None]))
    return torch.cat(out, dim=2)


def documents(starts: Tensor) -> list[list[slice]]:
    """Return the columns of each document, for each sequence."""
    length = starts.shape[1]
    first_columns = [row.nonzero()[:, 0].tolist() for row in starts == torch.arange(length)]
    return [[slice(*bounds) for bounds in pairwise([*columns, length])] for columns in first_columns]


def attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with one mask: (queries, keys) bool, or one for each sequence, (batch, 1, queries, keys), or None for causal."""
    grouped = query.shape[1] != key.shape[1]
    if sinks is not None:
        scale = query.shape[3] ** -0.5 if scale is None else scale  # of the unpadded dimension
        query, key, value = with_sinks(query, key, value, sinks, scale, first=mask is None)
        if mask is None:
            query = F.pad(query, (0, 0, 1, 0))  # a first row keeps the diagonal in place
        else:
            mask = F.pad(mask, (0, 1), value=True)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out if sinks is None else out[:, :, mask is None :, :-SINK_PADDING]


def attend_document(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, attend: Attend = attend_part
) -> Tensor:
    """Attend causally inside a document, in parts if it is longer than the window."""
    length = query.shape[2]
    if window is None or length <= window:
        return attend(query, key, value, None)
    columns, parts = torch.arange(length, device=query.device), []
    for start in range(0, length, QUERIES):
        end, first = min(start + QUERIES, length), max(0, start - window + 1)
        back = columns[start:end, None] - columns[first:end]
        seen = (back >= 0) & (back < window)
        parts.append(attend(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], seen))
    return torch.cat(parts, dim=2)


def with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, first: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Widen heads by `SINK_PADDING` and add a key, the first or the last one, that takes part in each head's softmax with its
    score (heads,) and adds nothing to the output. The score is an extra dimension of the queries; keys have 1 there in that
    position and 0 elsewhere, because heads of a group share keys, and all heads share a mask."""
    scores = (sinks / scale).to(query.dtype)[:, None, None].expand(len(query), -1, query.shape[2], 1)
    more = (0, SINK_PADDING, int(first), int(not first))
    key, value = F.pad(key, more), F.pad(value, more)
    key[:, :, 0 if first else -1, query.shape[3]] = 1
    return F.pad(torch.cat([query, scores], dim=3), (0, SINK_PADDING - 1)), key, value
