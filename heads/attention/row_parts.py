"""Context parallelism: N processes share each row of a batch, so that none holds a whole row.

A row has 2 N equal parts. Process r holds parts r and 2 N - 1 - r, so that all attend to equally much text (zig-zag, as Llama
3 was trained: arXiv:2407.21783, section 3.3.2). Two processes share a row of 16 columns, with a margin of 2:

    process 0    [0 1 2 3] 4 5        10 11 [12 13 14 15]
    process 1    2 3 [4 5 6 7] 8 9    6 7 [8 9 10 11] 12 13

The parts of a process are sequences of its batch. On both sides each has a margin of its neighbors' columns, for which it
repeats what they compute: a draft reads a few hidden states and tokens before and after its own. So only the keys and
values of the text travel between processes.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def columns_of(length: int, processes: int, margin: int) -> Tensor:
    """Return (processes, 2, width) int64: the columns of a row that each process holds. Margins of the first and last part
    lie outside the row."""
    size, first = length // (2 * processes), torch.arange(processes)
    parts = torch.stack([first, 2 * processes - 1 - first], dim=1)
    return parts[..., None] * size + torch.arange(-margin, size + margin)


class RowParts(NamedTuple):
    """Locate the parts of rows that a process holds, two of each row, as sequences of width columns."""

    columns: Tensor  # (2 * batch, width) int64: where a token stands in its row; the next one inside for those outside
    starts: Tensor  # (2 * batch, width) int64: first column of its document
    margin: int  # columns on both sides that neighbors hold
    length: int  # of a row
    group: dist.ProcessGroup  # the processes that share the rows

    def join(self, x: Tensor) -> Tensor:
        """Lay the two parts of each row side by side: (2 * batch, n, width, ...) becomes (batch, n, 2 * width, ...)."""
        return x.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3)

    def split(self, x: Tensor) -> Tensor:
        """Undo `join`."""
        return x.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)

    def joined_columns(self, x: Tensor) -> Tensor:
        """Lay what is known of the columns of two parts side by side: (2 * batch, n) becomes (batch, 2 * n)."""
        return x.unflatten(0, (-1, 2)).flatten(1)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (batch, kv heads, length, dim) of whole rows from those (2 * batch, kv heads, width, dim)
        of the parts that this process holds. All processes of the group must call this, and its backward pass."""
        return GatherParts.apply(keys, self), GatherParts.apply(values, self)


class GatherParts(torch.autograd.Function):
    """Exchange the parts of rows. A key's gradient is the sum over the processes whose queries see it."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx: Any, x: Tensor, parts: RowParts) -> Tensor:
        ctx.parts = parts
        own = parts.join(x[:, :, parts.margin : -parts.margin]).contiguous()
        every = [torch.empty_like(own) for _ in range(parts.group.size())]
        dist.all_gather(every, own, group=parts.group)
        early, late = zip(*(both.chunk(2, dim=2) for both in every), strict=True)
        return torch.cat([*early, *reversed(late)], dim=2)

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts, count = ctx.parts, ctx.parts.group.size()
        pieces = gradient.chunk(2 * count, dim=2)
        pairs = [torch.cat([pieces[rank], pieces[-1 - rank]], dim=2) for rank in range(count)]
        own = torch.empty_like(pairs[0])
        dist.reduce_scatter(own, pairs, group=parts.group)
        return F.pad(parts.split(own), (0, 0, parts.margin, parts.margin)), None
