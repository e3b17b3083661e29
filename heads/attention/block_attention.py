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

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foredraft.heads.attention import flex
from foredraft.heads.attention.masked import attend
from foredraft.heads.attention.masks import additive_mask
from foredraft.heads.attention.row_parts import RowParts
from foredraft.heads.base import PackedBatch

QUERIES, FEWEST, ENTRIES = 256, 32, 1 << 19  # of a chunk: queries at most and at least, entries of its mask at most


@dataclass(frozen=True, eq=False)
class Blocks:
    """Locate the drafts of a packed batch in its rows."""

    first: Tensor  # (rows, n) int64: first column of the draft's document
    last: Tensor  # (rows, n) int64: column at which the draft starts; -1 for none
    block_size: int
    length: int  # of a row
    everywhere: bool  # does a draft start at every position of the text?
    parts: RowParts | None = None  # as in PackedBatch

    @classmethod
    def of(cls, text: PackedBatch, block_size: int) -> "Blocks":
        if text.anchors is None:
            return cls.everywhere_in(text.document_starts(), text.parts, block_size)
        starts, parts = text.anchors, text.parts
        first = text.document_starts().gather(1, starts.clamp(min=0))
        if parts is None:
            return cls(first, starts, block_size, text.row_length, False)
        last = torch.where(starts < 0, -1, parts.columns.gather(1, starts.clamp(min=0)))
        return cls(parts.joined_columns(first), parts.joined_columns(last), block_size, parts.length, False, parts)

    @classmethod
    def everywhere_in(cls, doc_starts: Tensor, parts: RowParts | None, block_size: int = 1) -> "Blocks":
        """Let a draft start at every position of a text. doc_starts: as `PackedBatch.document_starts` returns them."""
        length = doc_starts.shape[1]
        if parts is None:
            every = torch.arange(length, device=doc_starts.device).expand_as(doc_starts)
            return cls(doc_starts, every, block_size, length, True)
        first, last = parts.joined_columns(doc_starts), parts.joined_columns(parts.columns)
        return cls(first, last, block_size, parts.length, False, parts)

    def spans(self, window: int | None) -> list[tuple[int, int]]:
        """Return for each chunk of blocks the columns of the text that its blocks see: the first, and the one after the
        last."""
        if self.everywhere and self.last.device.type != "cpu":  # needs no synchronization with the device
            return [(0, min(start + self.chunk, self.length)) for start in range(0, self.length, self.chunk)]
        seen = self.first if window is None else self.first.maximum(self.last + 2 - window)
        seen = seen.masked_fill(self.last < 0, self.length)
        begins = torch.stack([part.min() for part in seen.split(self.chunk, dim=1)])
        ends = torch.stack([part.max() for part in self.last.split(self.chunk, dim=1)]) + 1
        return [(begin, end) for begin, end in torch.stack([begins.minimum(ends), ends], dim=1).tolist()]

    @property
    def chunk(self) -> int:
        """Return how many blocks attend at a time."""
        return max(1, min(QUERIES, max(FEWEST, ENTRIES // self.length)) // self.block_size)


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
    text (rows, kv heads, row length, dim) and of the blocks (batch, kv heads, n * block_size, dim). window: visible
    positions, the query's own included."""
    parts = blocks.parts
    if parts is not None:
        q, block_kv = parts.join(q), (parts.join(block_kv[0]), parts.join(block_kv[1]))
    # Under autocast rotary positions may have promoted queries and keys.
    dtype = text[1].dtype
    q, pairs = q.to(dtype), [(a.to(dtype), b.to(dtype)) for a, b in zip(text, block_kv, strict=True)]
    if flex.is_supported(q, pairs[0][0]):
        keys, values = (torch.cat(pair, dim=2) for pair in pairs)
        sees = flex.blocks_mask(blocks.first, blocks.last, blocks.block_size, blocks.length, causal, window)
        attended = flex.attend(q, keys, values, sees)[0]
    else:
        inside = intra_block_mask(blocks.block_size, causal, window, q.device)
        attended = attend_by_chunk(q, pairs[0], pairs[1], blocks, inside, window)
    return attended if parts is None else parts.split(attended)


def attend_by_chunk(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    blocks: Blocks,
    inside: Tensor,
    window: int | None = None,
) -> Tensor:
    """Return attention of blocks' queries over keys and values of the text and of the blocks, without FlexAttention. inside:
    (queries of a block, keys of a block) bool."""
    parts = []
    for number, (begin, end) in reversed(list(enumerate(blocks.spans(window)))):
        # The last chunk, often the longest, is first, and each reuses the memory of the one before it: growing chunks would
        # leave holes in the C library's heap, together as large as length x length.
        chosen = slice(number * blocks.chunk, (number + 1) * blocks.chunk)
        rows, columns = (slice(chosen.start * count, chosen.stop * count) for count in inside.shape)
        chunk_kv = (part for text, own in (keys, values) for part in (text[:, :, begin:end], own[:, :, columns]))
        seen = blocks.first[:, chosen] - begin, blocks.last[:, chosen] - begin
        inputs = q[:, :, rows], *chunk_kv, *seen, inside, window
        parts.append(checkpoint(attend_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts[::-1], dim=2)


def attend_chunk(
    q: Tensor,
    keys: Tensor,
    own_keys: Tensor,
    values: Tensor,
    own_values: Tensor,
    first: Tensor,
    last: Tensor,
    inside: Tensor,
    window: int | None,
) -> Tensor:
    """Return attention of a chunk of blocks over the text that they see, and themselves. first, last: columns of `keys`."""
    mask = chunk_mask(first, last, inside, keys.shape[2], window)
    keys, values = torch.cat([keys, own_keys], dim=2), torch.cat([values, own_values], dim=2)
    return attend(q, keys, values, additive_mask(mask[:, None], q.dtype))


def chunk_mask(first: Tensor, last: Tensor, inside: Tensor, end: int, window: int | None) -> Tensor:
    """Return (batch, queries, end + keys) bool: what the queries of blocks see of the text and of the blocks' keys."""
    batch, count = first.shape
    queries, columns = len(inside), torch.arange(end, device=first.device)
    seen = ((columns >= first[..., None]) & (columns <= last[..., None]))[:, :, None].expand(-1, -1, queries, -1)
    if window is not None:
        positions = last[..., None] + 1 + torch.arange(queries, device=first.device)
        seen = seen & (positions[..., None] - columns < window)
    own_blocks = torch.eye(count, dtype=torch.bool, device=first.device)[:, None, :, None] & inside[:, None, :]
    own_blocks = own_blocks.flatten(2, 3).flatten(0, 1).expand(batch, -1, -1)
    return torch.cat([seen.flatten(1, 2), own_blocks], dim=-1)
