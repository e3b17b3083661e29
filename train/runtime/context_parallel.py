"""context_parallel=N: the rows that N processes would read one each are read one after the other by all of them together.

    processes        0       1                             0             1
    context_parallel=1    row 0 | row 1     =2    first    parts of row 0 in both
                                                  then     parts of row 1 in both

A step learns the same rows with the same loss, and a process holds 1 / N of a row's activations at a time. What of a row
lies where, and how attention sees all of it: heads/attention/row_parts.py.
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foredraft.heads.attention.row_parts import columns_of
from foredraft.heads.base import PackedBatch
from foredraft.train.runtime import distributed

ANCHORS = 32  # at least, of a part
TIMEOUT = datetime.timedelta(minutes=30)  # accelerate's own, for what accelerators exchange
REACH = 2  # columns beyond its depth that a draft reads: the bonus token and the teacher of its last label position


class ContextParallel:
    """Hold the groups of neighboring processes of which this one's shares rows."""

    def __init__(self, count: int):
        ranks = [range(first, first + count) for first in range(0, distributed.world_size(), count)]
        hosts: dict[str, Any] = {"backend": "gloo", "timeout": distributed.TIMEOUT}
        groups = [(dist.new_group([*some], timeout=TIMEOUT), dist.new_group([*some], **hosts)) for some in ranks]
        self.count, mine = count, distributed.rank() // count
        self.ranks, (self.device_group, self.host_group) = ranks[mine], groups[mine]

    def exchange(self, batch: dict[str, Any], depth: int) -> list[dict[str, Any]]:
        """Return this process's parts of the batches of all processes of its group, in the order of the processes. batch: on
        the host, with the anchors of its whole rows. depth: of the head."""
        margin, length = depth + REACH, batch["tokens"].shape[1]
        cut = [sendable(cut_rows(batch, columns, margin)) for columns in columns_of(length, self.count, margin)]
        found: list[dict[str, Any]] = []
        for source in self.ranks:
            box: list[Any] = [None]
            mine = source == distributed.rank()
            dist.scatter_object_list(box, cut if mine else None, src=source, group=self.host_group)
            box[0]["parts"] |= {"margin": margin, "length": length, "group": self.device_group}
            found.append(received(box[0]))
        return found


def cut_rows(batch: dict[str, Any], columns: Tensor, margin: int) -> dict[str, Any]:
    """Return the parts of rows that one process holds. columns: (2, width) int64, as `columns_of` returns them."""
    text = PackedBatch.of(batch)
    rows, length = text.tokens.shape
    nearest = columns.clamp(0, length - 1)
    inside = (columns == nearest).repeat(rows, 1)
    of_tokens = batch.keys() - {"anchors", "label_positions", "multiple_documents"}
    found: dict[str, Any] = {name: cut(batch[name], nearest) for name in of_tokens}
    found["parts"] = {"columns": nearest.repeat(rows, 1), "starts": cut(text.document_starts(), nearest)}
    found["documents"] = found["documents"].masked_fill(~inside, -1)
    found["loss_mask"] = found["loss_mask"] & inside
    if text.anchors is not None:
        return found | {"anchors": cut_anchors(text.anchors, columns, margin)}
    named = columns[0] - columns[0, margin] - 2  # of the tokens that drafts of this part name, by label position
    found["loss_mask"] &= (named >= 0) & (named < columns.shape[1] - 2 * margin)
    return found


def cut(x: Tensor, columns: Tensor) -> Tensor:
    """Return (2 * batch, width, ...) of x (batch, length, ...). columns: (2, width) int64."""
    return x[:, columns].flatten(0, 1)


def cut_anchors(anchors: Tensor, columns: Tensor, margin: int) -> Tensor:
    """Return (2 * batch, n) of anchors (batch, more): those that start in a part, in its own columns."""
    begins = (anchors[:, None] - columns[:, :1]).flatten(0, 1)
    own = (anchors >= 0).repeat_interleave(2, 0) & (begins >= margin) & (begins < columns.shape[1] - margin)
    return begins.masked_fill(~own, -1).sort(1).values[:, -rounded_up(int(own.sum(1).max())) :]


def rounded_up(count: int) -> int:
    """Return one of four numbers of anchors for each power of two: each number has its own compiled kernels."""
    step = max(ANCHORS, 1 << max(0, count.bit_length() - 3))
    return max(1, -(-count // step)) * step


def sendable(part: dict[str, Any]) -> dict[str, Any]:
    """Replace float8 tensors (hidden_states.dtype=float8), which cannot be pickled, by their bytes."""
    float8 = [name for name, x in part.items() if isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn]
    return part | {name: part[name].view(torch.uint8) for name in float8} | {"float8": float8}


def received(part: dict[str, Any]) -> dict[str, Any]:
    """Undo `sendable`."""
    return part | {name: part[name].view(torch.float8_e4m3fn) for name in part.pop("float8")}
