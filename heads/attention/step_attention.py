"""Attention of a recurrent head in training: step i attends to the text (keys of step 0) and to its own draft steps.

A draft that started i positions back sees the text up to there, and one key of every later step (drawn in heads/eagle3.py).
Every draft is moved to the position where it started. Then this is causal attention over the text plus one key per later
step. The two are merged by their log-sums of exponentials, as in ring attention (Liu et al., arXiv:2310.01889). Scores over
the text are not kept for the backward pass, which recomputes them, so memory grows linearly with the length. On a GPU
FlexAttention computes the text's part (heads/attention/flex.py).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from foredraft.heads.attention import flex
from foredraft.heads.attention.block_attention import Blocks, attend_by_chunk
from foredraft.heads.attention.row_parts import RowParts
from foredraft.heads.attention.text_attention import documents
from foredraft.heads.base import PackedBatch

PADDING = 16  # dimensions added to heads: the kernel's products have such widths


def at_start(k: Tensor, v: Tensor, step: int, text: PackedBatch) -> tuple[Tensor, Tensor]:
    """Move keys and values (batch, kv heads, length, dim) of a step to the positions where their drafts started. Those of
    step 0 are the text's, of whole rows."""
    return (k.roll(-step, 2), v.roll(-step, 2)) if step else text.whole_rows(k, v)


@torch.compiler.disable  # its loops over documents or blocks would be compiled for each of them
def attend_steps(
    q: Tensor,
    steps: list[tuple[Tensor, Tensor]],
    doc_starts: Tensor,
    parts: RowParts | None = None,
    window: int | None = None,
) -> Tensor:
    """Return attention (batch, heads, length, dim) of queries q of that shape in step i = len(steps) - 1. steps: keys and
    values of all steps so far, moved by `at_start`. doc_starts: (batch, length) int64, first column of each token's
    document, which is the same tensor in all steps. parts: as in PackedBatch. window: positions that a query sees, its own
    and those of its draft's earlier steps included."""
    (keys, values), drafted = steps[0], steps[1:]
    dtype = values.dtype  # under autocast, rotary positions may have promoted the others
    q, keys = q.to(dtype).roll(-len(drafted), 2), keys.to(dtype)
    if parts is not None:
        q, drafted = parts.join(q), [(parts.join(k), parts.join(v)) for k, v in drafted]
    # The query of step i stands i positions after the text.
    near = None if window is None else window - len(drafted)
    if flex.is_supported(q, keys):
        out, log_sums = flex.attend(q, keys, values, flex.text_mask(doc_starts, near, parts))
        out = merge_attention(out, log_sums, q, drafted)
    elif parts is None and near is None and by_document(q):
        repeated = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        out, log_sums = TextAttention.apply(q, *repeated, doc_starts)
        out = merge_attention(out, log_sums, q, drafted)
    else:  # a block with one query for each token, and its later steps as keys
        blocks = Blocks.everywhere_in(doc_starts, parts)
        none = [(keys[:, :, :0], values[:, :, :0])]
        own_keys, own_values = (
            torch.stack(later, dim=3).flatten(2, 3).to(dtype) for later in zip(*(drafted or none), strict=True)
        )
        inside = doc_starts.new_ones(1, len(drafted)).bool()
        from_block = None if near is None else near + 1  # a block stands one column after the text
        out = attend_by_chunk(q, (keys, own_keys), (values, own_values), blocks, inside, from_block)
    return (out if parts is None else parts.split(out)).roll(len(drafted), 2)


def merge_attention(text: Tensor, text_sums: Tensor, q: Tensor, drafted: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge attention of q (batch, heads, length, dim) over the text, with its log-sums of exponentials (batch, heads,
    length), with attention over q's own later steps, whose keys and values are (batch, kv heads, length, dim)."""
    if not drafted:
        return text
    steps = [(k.to(q.dtype)[:, :, None], v[:, :, None]) for k, v in drafted]
    # Heads that share a key/value head form a group: (batch, kv heads, group, length, ...).
    queries, text, text_sums = (x.unflatten(1, (drafted[0][0].shape[1], -1)) for x in (q, text, text_sums))
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = torch.stack([(queries * k).sum(-1, dtype=dtype) for k, _ in steps], dim=-1) * q.shape[-1] ** -0.5
    log_sums = torch.logaddexp(text_sums, scores.logsumexp(-1))
    weights = (scores - log_sums[..., None]).exp().to(q.dtype)
    out = text * (text_sums - log_sums).exp()[..., None]
    out = out + sum(weight * v for weight, (_, v) in zip(weights.split(1, -1), steps, strict=True))
    return out.to(q.dtype).flatten(1, 2)


def by_document(q: Tensor) -> bool:
    """Return whether documents attend separately. Other devices would have to be synchronized for the boundaries."""
    return q.device.type == "cpu"


class TextAttention(torch.autograd.Function):
    """Return causal attention of q over keys and values (batch, heads, length, dim) of the text, one document at a time, and
    its log-sums of exponentials (batch, heads, length). Both have gradients.

    torch's kernel for CPUs returns the log-sums, and has no gradient for them. Another dimension gives it, in which values
    are 1, the output counts as 0, and the output's gradient is that of the log-sum: the gradient of a score is its weight
    times (gradient * values - gradient * output)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> tuple[Tensor, Tensor]:
        out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for here in spans(doc_starts):
            inputs = (x[here] for x in (q, keys, values))
            out[here], log_sums[here] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, is_causal=True
            )
        ctx.save_for_backward(q, keys, values, doc_starts, out, log_sums)
        return out, log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, log_sums_gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, doc_starts, out, log_sums = ctx.saved_tensors
        gradients, dim = tuple(torch.empty_like(q) for _ in range(3)), q.shape[3]
        wide = [F.pad(x, (0, PADDING)) for x in (gradient, q, keys, values, out)]
        wide[0][..., dim], wide[3][..., dim] = log_sums_gradient, 1
        for here in spans(doc_starts):
            inputs = (x[here] for x in (*wide, log_sums))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, 0.0, True, scale=dim**-0.5
            )
            for total, part in zip(gradients, parts, strict=True):
                total[here] = part[..., :dim]
        return *gradients, None


def spans(doc_starts: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the (row, heads, columns) of every document."""
    for row, columns in enumerate(documents(doc_starts)):
        yield from ((slice(row, row + 1), slice(None), span) for span in columns)
