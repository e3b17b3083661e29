"""Attention of packed training rows on a GPU, by torch's FlexAttention (Dong et al., arXiv:2412.05496).

Its kernel asks a function of indices what a query sees, and a table of tiles, of 128 queries and 128 keys, which of them it
may skip and in which it need not ask. The tables are made here, once per batch, from where documents and drafts begin:
they are smaller than length x length by 128 x 128, and the host waits for nothing.
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

TILE = 128
NEVER = 2**40  # beyond every key
KERNELS = 64  # of so many shapes and masks; for more, torch would fall back to a product that keeps all scores
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key), indices -> bool
MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of batches in use, by the settings of each


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """q (batch, heads, queries, dim); keys and values (batch, kv heads, keys, dim). Returns what q sees, (batch, heads,
    queries, dim), and the logs of its sums of exponentials, (batch, heads, queries) in float32; both have gradients."""
    with torch._dynamo.config.patch(recompile_limit=KERNELS):
        out, beside = compiled()(
            q,
            keys,
            values,
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
        )
    return out, beside.lse


@functools.cache
def compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def serves(q: Tensor, keys: Tensor) -> bool:
    """On a GPU, unless the kernel does not work there."""
    return q.device.type == "cuda" and works(q.device, q.dtype, q.shape[1], keys.shape[1], q.shape[3])


@functools.cache
def works(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Does the kernel run, gradients too? It may want more shared memory than a GPU has, or a compiler that is not there:
    then a warning says why, and attention goes by blocks of plain products."""
    length = 2 * TILE + 40
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            mask = make_text_mask(torch.arange(length, device=device)[None] // 150 * 150)
            shapes = [(1, count, length, dim) for count in (heads, kv_heads, kv_heads)]
            q, keys, values = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
            out, log_sums = attend(q, keys, values, mask)
            (out.float().sum() + log_sums.sum()).backward()
    except torch.OutOfMemoryError:
        raise  # this says nothing of the kernel, and what is returned here holds for the whole run
    except Exception as error:  # of triton, inductor or a compiler
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"FlexAttention does not work on {device}, and training is slower without: {reason}", stacklevel=2
        )
        return False
    return True


# -- what a query sees ------------------------------------------------------------------------------------------------


def text_mask(doc_starts: Tensor, window: int | None = None) -> BlockMask:
    """A token of the text sees those from `doc_starts` (batch, length) int64 up to itself, but no more than `window`."""
    return made_once(doc_starts, ("text", window), lambda: make_text_mask(first_keys(doc_starts, window).clone()))


def first_keys(doc_starts: Tensor, window: int | None) -> Tensor:
    """(batch, length) int64: the first that each token of the text sees."""
    if window is None:
        return doc_starts
    return torch.maximum(
        doc_starts, torch.arange(1 - window, 1 - window + doc_starts.shape[1], device=doc_starts.device)
    )


def make_text_mask(firsts: Tensor) -> BlockMask:
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= firsts[row, query]) & (key <= query)

    return block_mask(
        firsts, torch.arange(firsts.shape[1], device=firsts.device).expand_as(firsts), firsts.shape[1], sees
    )


def blocks_mask(
    first: Tensor, last: Tensor, block_size: int, length: int, causal: bool, window: int | None
) -> BlockMask:
    """Blocks (batch, n * block_size), whose drafts begin at `last` (batch, n) int64, -1 for none, in documents that begin at
    `first`, see `length` tokens of the text and themselves, one after the other (batch, length + n * block_size); `causal`
    and `window` as `heads.block_attention.attend_blocks` has them."""
    settings = (block_size, length, causal, window)
    return made_once(last, settings, lambda: make_blocks_mask(first.clone(), last.clone(), *settings))


def make_blocks_mask(
    first: Tensor, last: Tensor, block_size: int, length: int, causal: bool, window: int | None
) -> BlockMask:
    firsts, lasts = (x.repeat_interleave(block_size, 1) for x in (first, last))
    queries = torch.arange(lasts.shape[1], device=last.device)
    if window is not None:
        firsts = torch.maximum(firsts, lasts + queries % block_size + 2 - window)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        text = (key >= firsts[row, query]) & (key <= lasts[row, query])
        own = key - length
        block = own // block_size == query // block_size
        if causal:
            block = block & (own <= query)
        if window is not None:
            block = block & (query - own < window)
        return torch.where(own < 0, text, block)

    begins = length + queries // block_size * block_size
    return block_mask(firsts, lasts, length + len(queries), sees, own=(begins, begins + block_size - 1))


def made_once(batch: Tensor, settings: Hashable, make: Callable[[], BlockMask]) -> BlockMask:
    """What `make` gives, once for a batch, as long as this tensor of it lives; it must not refer to the tensor, or that would
    live for ever."""
    masks = MASKS.setdefault(batch, {})
    if settings not in masks:
        masks[settings] = make()
    return masks[settings]


# -- tables -----------------------------------------------------------------------------------------------------------


def block_mask(
    firsts: Tensor, lasts: Tensor, keys: int, sees: Sees, own: tuple[Tensor, Tensor] | None = None
) -> BlockMask:
    """firsts, lasts (batch, queries): the keys that each query sees, none where the first is after the last; own: first and
    last (queries,) of others that it may see."""
    begins = torch.arange(-(-keys // TILE), device=firsts.device) * TILE
    ends = begins + TILE - 1
    nothing = firsts > lasts
    seen = reached(firsts.masked_fill(nothing, NEVER), lasts.masked_fill(nothing, -1), begins, ends)
    if own is not None:
        seen = seen | reached(own[0][None], own[1][None], begins, ends)
    # A tile that reaches beyond the last query is none of these.
    whole = (begins >= tiles(firsts, NEVER).amax(-1)[..., None]) & (ends <= tiles(lasts, -1).amin(-1)[..., None])
    tables = ordered(seen & ~whole), ordered(whole)
    return BlockMask.from_kv_blocks(
        *tables[0], *tables[1], BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(firsts.shape[1], keys)
    )


def reached(firsts: Tensor, lasts: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
    """(batch, tiles of queries, tiles of keys) bool: does the span from the first to the last key of a tile's queries, each
    (batch, queries), meet the keys from `begins` to `ends`?"""
    return (begins <= tiles(lasts, -1).amax(-1)[..., None]) & (ends >= tiles(firsts, NEVER).amin(-1)[..., None])


def tiles(x: Tensor, beyond: int) -> Tensor:
    """(batch, tiles, TILE) of (batch, queries); beyond: what stands after the last."""
    return F.pad(x, (0, -x.shape[1] % TILE), value=beyond).unflatten(1, (-1, TILE))


def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of (batch, tiles of queries, tiles of keys) bool: how many (batch, 1, tiles of queries), and which, first; int32."""
    chosen = chosen[:, None]
    return chosen.sum(-1, dtype=torch.int32), chosen.int().argsort(dim=-1, descending=True, stable=True).int()
