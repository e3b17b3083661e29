"""Attention of a block drafter in training: all blocks of a sequence at once, each over the text before it and itself.

    text 0 1 2 3 4 | block 0 | block 1        drafts start at positions 1 and 3, blocks of three positions; x = visible
    block 0, position 0  x x . . . | x x x | . . .      causal inside the block:   position 0   x . .
             position 1  x x . . . | x x x | . . .                                position 1   x x .
    block 1, position 0  x x x x . | . . . | x x x                                 position 2   x x x

A block sees its own document up to where its draft starts, and with a window no further back than that. Blocks are processed
in chunks, over the text up to the last of them, so no mask is ever as large as all blocks times all text. A block without a
start sees itself and does not count. Memory grows linearly with the length: a chunk's keys, values and mask are computed
again in the backward pass. On a GPU FlexAttention processes all blocks at once (heads/attention/flex.py).
"""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from foredraft.heads.attention import flex
from foredraft.heads.attention.masked import additive_mask, attend, group_heads, recomputed
from foredraft.heads.base import PackedBatch

QUERIES = 256  # of a chunk


@dataclass(frozen=True, eq=False)
class Blocks:
    """Locate the drafts of a packed batch."""

    first: Tensor  # (batch, n) int64: first column of the draft's document
    last: Tensor  # (batch, n) int64: column at which the draft starts; -1 for none
    block_size: int
    length: int  # of the text
    everywhere: bool  # does a draft start at every position of the text?

    @classmethod
    def of(cls, text: PackedBatch, block_size: int) -> "Blocks":
        length, rows = text.tokens.shape[1], len(text.tokens)
        every = torch.arange(length, device=text.tokens.device).expand(rows, -1)
        last = every if text.anchors is None else text.anchors
        return cls(text.document_starts().gather(1, last.clamp(min=0)), last, block_size, length, text.anchors is None)

    @cached_property
    def ends(self) -> list[int]:
        """Return for each chunk of blocks how much text its blocks see."""
        size = blocks_at_a_time(self.block_size)
        if self.everywhere:  # needs no synchronization with the device
            return [min(start + size, self.length) for start in range(0, self.length, size)]
        return text_ends(self.last, size, self.length)


def blocks_at_a_time(block_size: int) -> int:
    return max(1, QUERIES // block_size)


def text_ends(last: Tensor, size: int, length: int) -> list[int]:
    """Return how much text each chunk of `size` blocks sees."""
    return (torch.stack([part.max() for part in last.split(size, dim=1)]) + 1).tolist()


def intra_block_mask(block_size: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return (block_size, block_size) bool: what each position sees inside its block."""
    steps = torch.arange(block_size, device=device)
    back = steps[:, None] - steps
    seen = torch.ones_like(back, dtype=torch.bool) if not causal else back >= 0
    return seen if window is None else seen & (back < window)


@torch.compiler.disable  # as for heads.attention.step_attention.attend_steps
def attend_blocks(
    q: Tensor,
    text: tuple[Tensor, Tensor],
    block_kv: tuple[Tensor, Tensor],
    blocks: Blocks,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Return attention (batch, heads, n * block_size, dim) of blocks' queries q of that shape over keys and values of the
    text (batch, kv heads, length, dim) and of the blocks (batch, kv heads, n * block_size, dim). window: visible positions,
    the query's own included."""
    # Under autocast rotary positions may have promoted queries and keys.
    dtype, groups = text[1].dtype, q.shape[1] // text[0].shape[1]
    q, pairs = q.to(dtype), [(a.to(dtype), b.to(dtype)) for a, b in zip(text, block_kv, strict=True)]
    if flex.is_supported(q, pairs[0][0]):
        every = [torch.cat(pair, dim=2) for pair in pairs]
        sees = flex.blocks_mask(blocks.first, blocks.last, blocks.block_size, blocks.length, causal, window)
        return flex.attend(q, every[0], every[1], sees)[0]
    inside = intra_block_mask(blocks.block_size, causal, window, q.device)
    size = blocks_at_a_time(blocks.block_size)
    parts = []
    for number, end in reversed(list(enumerate(blocks.ends))):  # longest first, as in step_attention.py
        chosen = slice(number * size, (number + 1) * size)
        rows = slice(chosen.start * blocks.block_size, chosen.stop * blocks.block_size)
        spans = blocks.first[:, chosen], blocks.last[:, chosen]
        makers = [partial(concat_context, *pair, end, rows) for pair in pairs]
        makers.append(partial(additive_chunk_mask, *spans, inside, end, window, dtype, groups))
        with recomputed(makers) as (keys, values, mask):
            parts.append(attend(q[:, :, rows], keys, values, mask))
    return torch.cat(parts[::-1], dim=2)


def concat_context(text: Tensor, block_states: Tensor, end: int, rows: slice) -> Tensor:
    """Concatenate keys or values of the text up to `end` with these rows of the blocks."""
    return torch.cat([text[:, :, :end], block_states[:, :, rows]], dim=2)


def additive_chunk_mask(
    first: Tensor, last: Tensor, inside: Tensor, end: int, window: int | None, dtype: torch.dtype, groups: int
) -> Tensor:
    """Return the mask that `attend` adds to scores, for its groups of heads."""
    return group_heads(additive_mask(chunk_mask(first, last, inside, end, window)[:, None], dtype), groups)


def chunk_mask(first: Tensor, last: Tensor, inside: Tensor, end: int, window: int | None) -> Tensor:
    """Return (batch, count * block_size, end + count * block_size) bool: what `count` blocks see of text and themselves."""
    (batch, count), block_size, columns = first.shape, len(inside), torch.arange(end, device=first.device)
    seen = ((columns >= first[..., None]) & (columns <= last[..., None]))[:, :, None].expand(-1, -1, block_size, -1)
    if window is not None:
        positions = last[..., None] + 1 + torch.arange(block_size, device=first.device)
        seen = seen & (positions[..., None] - columns < window)
    own_blocks = torch.eye(count, dtype=torch.bool, device=first.device)[:, None, :, None] & inside[:, None, :]
    own_blocks = own_blocks.reshape(count * block_size, count * block_size).expand(batch, -1, -1)
    return torch.cat([seen.flatten(1, 2), own_blocks], dim=-1)
