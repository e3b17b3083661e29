"""Attention of a recurrent head in training: step i attends over the text (keys of step 0) and over its own draft steps.

A draft that began i positions back sees the text up to there, and one key of every later step (heads/eagle3.py has the
picture). With every draft moved to the position where it began, that is causal attention over the text, and one more key per
later step: the two are joined by their sums of exponentials, as ring attention joins its parts (Liu et al.,
arXiv:2310.01889). Scores are not kept for the backward pass, which computes them again from one number per query, as
FlashAttention does (Dao et al., arXiv:2205.14135, section 3.1): memory grows with the length of a row, not with its square.
On a GPU the text's part is FlexAttention's (heads/flex.py).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from foredraft.heads import flex
from foredraft.heads.target.attention import additive_mask

BLOCK = 256  # queries that attend at a time, where documents do not attend one by one


def at_start(k: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, kv heads, length, dim) of a step, each moved to the position where its draft began."""
    return (k.roll(-step, 2), v.roll(-step, 2)) if step else (k, v)


@torch.compiler.disable  # its loops over documents or blocks would be compiled one by one
def attend_steps(q: Tensor, steps: list[tuple[Tensor, Tensor]], doc_starts: Tensor) -> Tensor:
    """q (batch, heads, length, dim) of step i = len(steps) - 1; steps: of all so far, as `at_start` gives them; doc_starts
    (batch, length) int64, where the document of each token begins. Returns (batch, heads, length, dim)."""
    (keys, values), drafted = steps[0], steps[1:]
    dtype = values.dtype  # under autocast, rotary positions may have promoted the others
    q, keys = q.to(dtype), keys.to(dtype)
    if not drafted:
        return attend_text(q, keys, values, doc_starts)
    own = *(k.to(dtype) for k, _ in drafted), *(v for _, v in drafted)
    q = q.roll(-len(drafted), 2)
    if by_document(q) and not flex.serves(q, keys):
        attended = StepAttention.apply(q, keys, values, doc_starts, *own)
    else:
        attended = joined(*text_by_block(q, keys, values, doc_starts), q, own)[0]
    return attended.roll(len(drafted), 2)


def attend_text(q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> Tensor:
    """Of step 0: causal within each document."""
    if flex.serves(q, keys) or not by_document(q):
        return text_by_block(q, keys, values, doc_starts)[0]
    keys, values = repeated(keys, q), repeated(values, q)
    by_row: list[list[Tensor]] = [[] for _ in q]
    for row, columns in documents(doc_starts):
        inputs = q[row, :, columns], keys[row, :, columns], values[row, :, columns]
        by_row[row.start].append(F.scaled_dot_product_attention(*inputs, is_causal=True))
    return torch.cat([torch.cat(outs, dim=2) for outs in by_row])


class StepAttention(torch.autograd.Function):
    """Softmax attention of drafts, each at the position where it began, over the text's keys and values and over those of
    their own later steps, one tensor per step. Heads that share a key/value head form a group: (batch, kv heads, group,
    ...)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor, *drafted: Tensor):
        out, log_sums = joined(*text_by_document(q, keys, values, doc_starts), q, drafted)
        ctx.save_for_backward(q, keys, values, doc_starts, out, log_sums, *drafted)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        q, keys, values, doc_starts, out, log_sums, *drafted = ctx.saved_tensors
        draft_keys, draft_values = halves(drafted)
        # With the log-sums of text and drafts together, the text's part of the gradient is as if there were nothing else.
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


def joined(text: Tensor, text_sums: Tensor, q: Tensor, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What q (batch, heads, length, dim) sees of the text and the logs of its sums of exponentials (batch, heads, length),
    joined with its own later steps."""
    keys, values = halves(drafted)
    queries, text, text_sums = (x.unflatten(1, (keys[0].shape[1], -1)) for x in (q, text, text_sums))
    scores = draft_dots(queries, keys) * q.shape[-1] ** -0.5
    log_sums = torch.logaddexp(text_sums, scores.logsumexp(-1))
    weights = (scores - log_sums[..., None]).exp().to(q.dtype)
    out = text * (text_sums - log_sums).exp()[..., None] + draft_sum(weights, values)
    return out.to(q.dtype).flatten(1, 2), log_sums.flatten(1, 2)


# -- over the text, a document at a time: torch's own attention for a CPU, which gives its log-sums and takes others back ----


def by_document(q: Tensor) -> bool:
    """Elsewhere the boundaries would have to be waited for."""
    return q.device.type == "cpu"


def documents(doc_starts: Tensor) -> Iterator[tuple[slice, slice]]:
    """(row, columns) of every document."""
    length = doc_starts.shape[1]
    for row, begins in enumerate(doc_starts == torch.arange(length)):
        bounds = [*begins.nonzero().flatten().tolist(), length]
        for start, end in pairwise(bounds):
            yield slice(row, row + 1), slice(start, end)


def text_by_document(q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> tuple[Tensor, Tensor]:
    """What q (batch, heads, length, dim) sees of the text, and the logs of its sums of exponentials (batch, heads, length) in
    float32 at least."""
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
    """Those of q, keys and values, where `out` and `log_sums` are of all that q sees, and `gradient` is that of `out`."""
    whole = (gradient, q, repeated(keys, q), repeated(values, q), out, log_sums)
    gradients = tuple(torch.empty_like(q) for _ in range(3))
    for row, columns in documents(doc_starts):
        inputs = (x[row, :, columns] for x in whole)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, True)
        for own, part in zip(gradients, parts, strict=True):
            own[row, :, columns] = part
    return gradients[0], *(x.unflatten(1, (keys.shape[1], -1)).sum(2) for x in gradients[1:])


def repeated(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


# -- over the text, a block of queries at a time --------------------------------------------------------------------------


def text_by_block(q: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor) -> tuple[Tensor, Tensor]:
    """As `text_by_document`, with gradients. On a GPU by FlexAttention; a block's scores are computed again in the
    backward."""
    if flex.serves(q, keys):
        return flex.attend(q, keys, values, flex.text_mask(doc_starts))
    queries = q.unflatten(1, (keys.shape[1], -1))
    parts = []
    for rows, end in blocks(q.shape[2]):
        inputs = queries[:, :, :, rows], keys[:, :, :end], values[:, :, :end], doc_starts, rows
        parts.append(checkpoint(attend_block, *inputs, use_reentrant=False, preserve_rng_state=False))
    out, log_sums = (torch.cat(found[::-1], dim=3).flatten(1, 2) for found in zip(*parts, strict=True))
    return out, log_sums


def attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, doc_starts: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """What queries (batch, kv heads, group, rows, dim) see, and the logs of their sums of exponentials."""
    queries = queries * queries.shape[-1] ** -0.5
    scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores + text_mask(doc_starts, rows, scores.dtype)[:, None]
    log_sums = scores.logsumexp(-1)
    weights = (scores - log_sums[..., None]).exp().to(queries.dtype)
    return (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4]), log_sums


def blocks(length: int) -> list[tuple[slice, int]]:
    """(queries, keys that any of them may see), from the last on: each finds room where the one before it lay, while growing
    ones would leave holes in the C library's heap, as large together as length x length."""
    starts = reversed(range(0, length, BLOCK))
    return [(slice(start, end := min(start + BLOCK, length)), end) for start in starts]


def text_mask(doc_starts: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(batch, 1, rows, keys) to be added to the scores of these rows."""
    columns = torch.arange(rows.stop, device=doc_starts.device)
    return additive_mask(((columns >= doc_starts[:, rows, None]) & (columns <= columns[rows, None]))[:, None], dtype)


# -- over a draft's own later steps, whose states are (batch, kv heads, length, dim) each ------------------------------------


def halves(drafted: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The keys and the values."""
    steps = len(drafted) // 2
    return drafted[:steps], drafted[steps:]


def draft_dots(x: Tensor, states: Sequence[Tensor]) -> Tensor:
    """x (batch, kv heads, group, length, dim) times each position's own states, (..., length, steps) in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.stack([(x * step[:, :, None]).sum(-1, dtype=dtype) for step in states], dim=-1)


def draft_sum(weights: Tensor, states: Sequence[Tensor]) -> Tensor:
    """Weights (batch, kv heads, group, length, steps) over each position's own states."""
    return sum(weight * step[:, :, None] for weight, step in zip(weights.split(1, -1), states, strict=True))


def draft_sum_transposed(weights: Tensor, x: Tensor) -> list[Tensor]:
    """The transpose of `draft_sum`: of every step."""
    return [(weight * x).sum(2) for weight in weights.split(1, -1)]
