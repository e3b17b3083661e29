"""Attention of packed training sequences on a GPU, by torch's FlexAttention (Dong et al., arXiv:2412.05496).

Its kernel calls a function of indices to learn what a query sees. A table of tiles of 128 queries and 128 keys lists those
that it may skip and those in which every query sees every key. The tables are made here, once per batch, from where documents
and drafts start. They are smaller than length x length by 128 x 128, and the host does not synchronize with the device.
"""

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.weak import WeakTensorKeyDictionary

from foredraft.heads.attention.masks import first_keys
from foredraft.heads.attention.row_parts import RowParts

TILE = 128
NO_KEY = 2**40  # beyond every key
KERNELS = 64  # shapes and masks that are compiled; beyond that, torch would use a product that keeps all scores
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key), indices -> bool
MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of batches in use, by their settings


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention (batch, heads, queries, dim) of q of that shape over keys and values (batch, kv heads, keys, dim),
    and the log-sums of exponentials (batch, heads, queries) float32. Both have gradients."""
    with torch._dynamo.config.patch(recompile_limit=KERNELS):
        grouped = q.shape[1] != keys.shape[1]
        aux = AuxRequest(lse=True)
        out, aux = compiled()(q, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped, return_aux=aux)
    return out, aux.lse


@functools.cache
def compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def is_supported(q: Tensor, keys: Tensor) -> bool:
    """Return whether FlexAttention can be used: on a GPU where the kernel works."""
    return q.device.type == "cuda" and kernel_available(q.device, q.dtype, q.shape[1], keys.shape[1], q.shape[3])


@functools.cache
def kernel_available(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Return whether the kernel and its gradients run. It may need more shared memory than the GPU has, or a compiler that is
    missing. Then a warning gives the reason, and attention is computed in blocks of matrix products."""
    length = 2 * TILE + 40
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            mask = make_text_mask(torch.arange(length, device=device)[None] // 150 * 150)
            shapes = [(1, count, length, dim) for count in (heads, kv_heads, kv_heads)]
            q, keys, values = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
            out, log_sums = attend(q, keys, values, mask)
            (out.float().sum() + log_sums.sum()).backward()
    except torch.OutOfMemoryError:
        raise  # not a fault of the kernel, and the result of this function is kept for the whole run
    except Exception as error:  # from triton, inductor or a compiler
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"FlexAttention does not work on {device}, so training is slower: {reason}", stacklevel=2)
        return False
    return True


# -- what a query sees ------------------------------------------------------------------------------------------------


def text_mask(doc_starts: Tensor, window: int | None = None, parts: RowParts | None = None) -> BlockMask:
    """Return the mask with which each token sees the text from `doc_starts` (batch, length) int64 to itself, at most
    `window` tokens. parts: as in PackedBatch; then the queries are those of joined parts."""

    def make() -> BlockMask:
        firsts = first_keys(doc_starts, window, parts).clone()
        if parts is None:
            return make_text_mask(firsts)
        return make_part_mask(parts.joined_columns(firsts), parts.joined_columns(parts.columns).clone(), parts.length)

    return cached_mask(doc_starts, ("text", window), make)


def make_text_mask(firsts: Tensor) -> BlockMask:
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= firsts[row, query]) & (key <= query)

    lasts = torch.arange(firsts.shape[1], device=firsts.device).expand_as(firsts)
    return block_mask(firsts, lasts, firsts.shape[1], sees)


def make_part_mask(firsts: Tensor, lasts: Tensor, length: int) -> BlockMask:
    """Return the mask of queries whose own columns are `lasts`, not their places, so that the kernel reads them."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= firsts[row, query]) & (key <= lasts[row, query])

    return block_mask(firsts, lasts, length, sees)


def blocks_mask(
    first: Tensor, last: Tensor, block_size: int, length: int, causal: bool, window: int | None
) -> BlockMask:
    """Return the mask of blocks (batch, n * block_size) whose drafts start at `last` (batch, n) int64, -1 for none, in
    documents that start at `first`. They see `length` tokens of the text and then themselves (batch, length + n *
    block_size); `causal` and `window` as in `heads.attention.block_attention.attend_blocks`."""
    settings = (block_size, length, causal, window)
    return cached_mask(last, settings, lambda: make_blocks_mask(first.clone(), last.clone(), *settings))


def make_blocks_mask(
    first: Tensor, last: Tensor, block_size: int, length: int, causal: bool, window: int | None
) -> BlockMask:
    firsts, lasts = (x.repeat_interleave(block_size, 1) for x in (first, last))
    queries = torch.arange(lasts.shape[1], device=last.device)
    if window is not None:
        firsts = torch.maximum(firsts, lasts + queries % block_size + 2 - window)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        text = (key >= firsts[row, query]) & (key <= lasts[row, query])
        offset = key - length
        block = offset // block_size == query // block_size
        if causal:
            block = block & (offset <= query)
        if window is not None:
            block = block & (query - offset < window)
        return torch.where(offset < 0, text, block)

    starts = length + queries // block_size * block_size
    return block_mask(firsts, lasts, length + len(queries), sees, extra_keys=(starts, starts + block_size - 1))


def cached_mask(batch: Tensor, settings: Hashable, make: Callable[[], BlockMask]) -> BlockMask:
    """Return the result of `make`, cached as long as the tensor `batch` lives. `make` must not refer to the tensor, or
    that would live for ever."""
    masks = MASKS.setdefault(batch, {})
    if settings not in masks:
        masks[settings] = make()
    return masks[settings]


# -- tables -----------------------------------------------------------------------------------------------------------


def block_mask(
    firsts: Tensor, lasts: Tensor, keys: int, sees: Sees, extra_keys: tuple[Tensor, Tensor] | None = None
) -> BlockMask:
    """Build a mask and its tables. firsts, lasts (batch, queries): the keys that each query sees, none if the first is
    after the last. extra_keys: first and last (queries,) of further keys."""
    starts = torch.arange(-(-keys // TILE), device=firsts.device) * TILE
    ends = starts + TILE - 1
    nothing = firsts > lasts
    seen = overlapping_tiles(firsts.masked_fill(nothing, NO_KEY), lasts.masked_fill(nothing, -1), starts, ends)
    if extra_keys is not None:
        seen = seen | overlapping_tiles(extra_keys[0][None], extra_keys[1][None], starts, ends)
    # A tile that extends beyond the last query is not full.
    full = (starts >= tiles(firsts, NO_KEY).amax(-1)[..., None]) & (ends <= tiles(lasts, -1).amin(-1)[..., None])
    tables = tile_indices(seen & ~full), tile_indices(full)
    return BlockMask.from_kv_blocks(
        *tables[0], *tables[1], BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(firsts.shape[1], keys)
    )


def overlapping_tiles(firsts: Tensor, lasts: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return (batch, tiles of queries, tiles of keys) bool: does the span from the first to the last key of a tile's queries,
    each (batch, queries), overlap the keys from `starts` to `ends`?"""
    return (starts <= tiles(lasts, -1).amax(-1)[..., None]) & (ends >= tiles(firsts, NO_KEY).amin(-1)[..., None])


def tiles(x: Tensor, beyond: int) -> Tensor:
    """Reshape (batch, queries) to (batch, tiles, TILE), padded with `beyond`."""
    return F.pad(x, (0, -x.shape[1] % TILE), value=beyond).unflatten(1, (-1, TILE))


def tile_indices(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number (batch, 1, tiles of queries) of chosen tiles of keys, and their indices first; int32."""
    chosen = chosen[:, None]
    return chosen.sum(-1, dtype=torch.int32), chosen.int().argsort(dim=-1, descending=True, stable=True).int()
