"""Attention of a recurrent head in training: step i attends to the text (keys of step 0) and to its own draft steps.

A draft that started i positions back sees the text up to there, and one key of every later step (drawn in heads/eagle3.py).
Every draft is moved to the position where it started. Then this is causal attention over the text plus one key per later
step. The two are merged by their log-sums of exponentials, as in ring attention (Liu et al., arXiv:2310.01889). Scores are
not kept for the backward pass, which recomputes them from one number per query, as FlashAttention does (Dao et al.,
arXiv:2205.14135, section 3.1), so memory grows linearly with the length. On a GPU FlexAttention computes the text's part
(heads/attention/flex.py).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from foredraft.heads.attention import flex
from foredraft.heads.attention.masked import additive_mask

BLOCK = 256  # queries that attend at a time, unless documents attend separately


def at_start(k: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Move keys and values (batch, kv heads, length, dim) of a step to the positions where their drafts started."""
    return (k.roll(-step, 2), v.roll(-step, 2)) if step else (k, v)


@torch.compiler.disable  # its loops over documents or blocks would be compiled for each of them
def attend_steps(q: Tensor, steps: list[tuple[Tensor, Tensor]], doc_starts: Tensor) -> Tensor:
    """Return attention (batch, heads, length, dim) of queries q of that shape in step i = len(steps) - 1. steps: keys and
    values of all steps so far, moved by `at_start`. doc_starts: (batch, length) int64, first column of each token's
    document."""
    (keys, values), drafted = steps[0], steps[1:]
    dtype = values.dtype  # under autocast, rotary positions may have promoted the others
    q, keys = q.to(dtype), keys.to(dtype)
    if not drafted:
        return attend_text(q, keys, values, doc_starts)
    own = *(k.to(dtype) for k, _ in drafted), *(v for _, v in drafted)
    q = q.roll(-len(drafted), 2)
    if by_document(q) and not flex.is_supported(q, keys):
        attended = StepAttention.apply(q, keys, values, doc_starts, *own)
    else:
        attended = merge_attention(*text_by_block(q, keys, values, doc_starts), q, own)[0]
    return attended.roll(len(drafted), 2)


def attend_text(q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> Tensor:
    """Return attention of step 0, causal within each document."""
    if flex.is_supported(q, keys) or not by_document(q):
        return text_by_block(q, keys, values, doc_starts)[0]
    keys, values = repeated(keys, q), repeated(values, q)
    by_row: list[list[Tensor]] = [[] for _ in q]
    for row, columns in documents(doc_starts):
        inputs = q[row, :, columns], keys[row, :, columns], values[row, :, columns]
        by_row[row.start].append(F.scaled_dot_product_attention(*inputs, is_causal=True))
    return torch.cat([torch.cat(outs, dim=2) for outs in by_row])


class StepAttention(torch.autograd.Function):
    """Compute softmax attention of drafts, each at the position where it started, over the text's keys and values and over
    those of later steps, one tensor per step. Heads that share a key/value head form a group: (batch, kv heads,
    group, ...)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor, *drafted: Tensor):
        out, log_sums = merge_attention(*text_by_document(q, keys, values, doc_starts), q, drafted)
        ctx.save_for_backward(q, keys, values, doc_starts, out, log_sums, *drafted)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        q, keys, values, doc_starts, out, log_sums, *drafted = ctx.saved_tensors
        draft_keys, draft_values = split_kv(drafted)
        # With the log-sums over text and drafts, the text's part of the gradient is computed as if it were alone.
        q_gradient, *others = text_gradients_by_document(gradient, q, keys, values, doc_starts, out, log_sums)
        queries, out_gradient, out, log_sums = (
            x.unflatten(1, (keys.shape[1], -1)) for x in (q, gradient, out, log_sums)
        )
        scale = q.shape[-1] ** -0.5
        weights = (draft_dots(queries, draft_keys) * scale - log_sums[..., None]).exp()
        # Softmax: a score's gradient is its weight times (the weight's gradient - this mean, one per query).
        mean_gradient = (out_gradient * out).sum(-1, dtype=log_sums.dtype)[..., None]
        score_gradient = (weights * (draft_dots(out_gradient, draft_values) - mean_gradient) * scale).to(q.dtype)
        q_gradient += draft_sum(score_gradient, draft_keys).flatten(1, 2)
        key_gradients = draft_sum_transposed(score_gradient, queries)
        value_gradients = draft_sum_transposed(weights.to(q.dtype), out_gradient)
        return q_gradient, *others, None, *key_gradients, *value_gradients


def merge_attention(text: Tensor, text_sums: Tensor, q: Tensor, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention of q (batch, heads, length, dim) over the text, with its log-sums of exponentials (batch, heads,
    length), with attention over q's own later steps."""
    keys, values = split_kv(drafted)
    queries, text, text_sums = (x.unflatten(1, (keys[0].shape[1], -1)) for x in (q, text, text_sums))
    scores = draft_dots(queries, keys) * q.shape[-1] ** -0.5
    log_sums = torch.logaddexp(text_sums, scores.logsumexp(-1))
    weights = (scores - log_sums[..., None]).exp().to(q.dtype)
    out = text * (text_sums - log_sums).exp()[..., None] + draft_sum(weights, values)
    return out.to(q.dtype).flatten(1, 2), log_sums.flatten(1, 2)


# -- over the text, one document at a time: torch's own CPU attention returns its log-sums and takes others back -----------


def by_document(q: Tensor) -> bool:
    """Return whether documents attend separately. Other devices would have to be synchronized for the boundaries."""
    return q.device.type == "cpu"


def documents(doc_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the (row, columns) slices of every document."""
    length = doc_starts.shape[1]
    for row, starts in enumerate(doc_starts == torch.arange(length)):
        bounds = [*starts.nonzero().flatten().tolist(), length]
        for start, end in pairwise(bounds):
            yield slice(row, row + 1), slice(start, end)


def text_by_document(q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention of q (batch, heads, length, dim) over the text, and the log-sums of exponentials (batch, heads,
    length) in at least float32."""
    keys, values = (repeated(x, q) for x in (keys, values))
    out, log_sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for row, columns in documents(doc_starts):
        inputs = (x[row, :, columns] for x in (q, keys, values))
        out[row, :, columns], log_sums[row, :, columns] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, is_causal=True
        )
    return out, log_sums


def text_gradients_by_document(
    gradient: Tensor, q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor, out: Tensor, log_sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, keys and values. `out` and `log_sums` cover all that q sees; `gradient` is that of `out`."""
    tensors = (gradient, q, repeated(keys, q), repeated(values, q), out, log_sums)
    gradients = tuple(torch.empty_like(q) for _ in range(3))
    for row, columns in documents(doc_starts):
        inputs = (x[row, :, columns] for x in tensors)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True)
        for own, part in zip(gradients, parts, strict=True):
            own[row, :, columns] = part
    return gradients[0], *(x.unflatten(1, (keys.shape[1], -1)).sum(2) for x in gradients[1:])


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


# -- over the text, one block of queries at a time ------------------------------------------------------------------------


def text_by_block(q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `text_by_document` with gradients, on a GPU by FlexAttention. A block's scores are recomputed in the backward
    pass."""
    if flex.is_supported(q, keys):
        return flex.attend(q, keys, values, flex.text_mask(doc_starts))
    queries = q.unflatten(1, (keys.shape[1], -1))
    parts = []
    for rows, end in blocks(q.shape[2]):
        inputs = queries[:, :, :, rows], keys[:, :, :end], values[:, :, :end], doc_starts, rows
        parts.append(checkpoint(attend_block, *inputs, use_reentrant=False, preserve_rng_state=False))
    out, log_sums = (torch.cat(results[::-1], dim=3).flatten(1, 2) for results in zip(*parts, strict=True))
    return out, log_sums


def attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return attention of queries (batch, kv heads, group, rows, dim), and the log-sums of exponentials."""
    queries = queries * queries.shape[-1] ** -0.5
    scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores + text_mask(doc_starts, rows, scores.dtype)[:, None]
    log_sums = scores.logsumexp(-1)
    weights = (scores - log_sums[..., None]).exp().to(queries.dtype)
    return (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4]), log_sums


def blocks(length: int) -> list[tuple[slice, int]]:
    """Return (queries, number of visible keys) from the last block on. Each block reuses the memory of the one before it;
    growing blocks would leave holes in the C library's heap, together as large as length x length."""
    starts = reversed(range(0, length, BLOCK))
    return [(slice(start, end := min(start + BLOCK, length)), end) for start in starts]


def text_mask(doc_starts: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return (batch, 1, rows, keys) to be added to the scores of these rows."""
    columns = torch.arange(rows.stop, device=doc_starts.device)
    return additive_mask(((columns >= doc_starts[:, rows, None]) & (columns <= columns[rows, None]))[:, None], dtype)


# -- over a draft's own later steps, whose states are (batch, kv heads, length, dim) each ----------------------------------


def split_kv(drafted: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split alternating halves into keys and values."""
    steps = len(drafted) // 2
    return drafted[:steps], drafted[steps:]


def draft_dots(x: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Multiply x (batch, kv heads, group, length, dim) by each position's own states: (..., length, steps) in at least
    float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.stack([(x * step[:, :, None]).sum(-1, dtype=dtype) for step in states], dim=-1)


def draft_sum(weights: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Sum each position's own states with weights (batch, kv heads, group, length, steps)."""
    return sum(weight * step[:, :, None] for weight, step in zip(weights.split(1, -1), states, strict=True))


def draft_sum_transposed(weights: Tensor, x: Tensor) -> list[Tensor]:
    """Apply the transpose of `draft_sum` for every step."""
    return [(weight * x).sum(2) for weight in weights.split(1, -1)]
