"""Attention of a recurrent head in training: step i attends over the text (keys of step 0) and over its own draft steps.

A draft that began i slots back sees the text up to there, and one key of every later step (heads/eagle3.py has the picture).
Scores are not kept for the backward pass, which recomputes them from one number per query, as FlashAttention does (Dao et
al., arXiv:2205.14135, section 3.1): memory grows with the length of a row, not with its square. Queries are processed in
blocks, each over the text up to its own end, so half of all scores are never computed; the mask of a block is made where it
is used.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from heads.target.attention import added, made_again

BLOCK = 256  # queries that attend at a time
MASK_PENALTY = 1e30  # subtracted from a score that the mask forbids


@torch.compiler.disable  # its loops over blocks would be compiled one by one
def attend_steps(q: Tensor, steps: list[tuple[Tensor, Tensor]], doc_starts: Tensor) -> Tensor:
    """q (batch, heads, length, dim) of step i = len(steps) - 1; steps: keys and values (batch, kv heads, length, dim) of all
    so far; doc_starts (batch, length) int64, where the document of each slot begins. Returns (batch, heads, length, dim)."""
    (keys, values), drafted = steps[0], steps[1:]
    dtype = values.dtype  # under autocast, rotary positions may have promoted the others
    q, keys = q.to(dtype), keys.to(dtype)
    if not drafted:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        parts = []
        for rows, end in blocks(q.shape[2]):
            with made_again([partial(text_mask, doc_starts, rows, dtype)]) as (mask,):
                parts.append(
                    F.scaled_dot_product_attention(q[:, :, rows], keys[:, :, :end], values[:, :, :end], attn_mask=mask)
                )
        return torch.cat(parts[::-1], dim=2)
    ages = range(len(drafted) - 1, -1, -1)
    draft_keys, draft_values = (
        torch.stack([pair[which].roll(age, 2) for age, pair in zip(ages, drafted, strict=True)], dim=3)
        for which in (0, 1)
    )
    return StepAttention.apply(q, keys, values, draft_keys.to(dtype), draft_values, doc_starts)


def text_mask(doc_starts: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(batch, 1, rows, keys) to be added to the scores of step 0."""
    return added(seen_text(doc_starts, rows, rows.stop)[:, None], dtype)


def seen_text(doc_starts: Tensor, rows: slice, end: int, steps_back: int = 0) -> Tensor:
    """(batch, rows, end) bool: the text that queries see whose drafts began `steps_back` slots earlier."""
    device, length = doc_starts.device, doc_starts.shape[1]
    begins = torch.arange(rows.start - steps_back, rows.stop - steps_back, device=device) % length
    columns = torch.arange(end, device=device)
    return (columns >= doc_starts[:, begins, None]) & (columns <= begins[:, None])


class StepAttention(torch.autograd.Function):
    """Softmax attention over the text's keys and values, and for each query over those of its own slot, (batch, kv heads,
    length, later steps, dim). Heads that share a key/value head form a group: (batch, kv heads, group, ...).

    Exponentials are to base 2, which costs a quarter of `exp` on a CPU; the scores are scaled to match."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, draft_keys: Tensor, draft_values: Tensor, doc_starts: Tensor
    ):
        queries = q.unflatten(1, (keys.shape[1], -1))
        draft = draft_scores(queries, draft_keys)
        out, norms = torch.empty_like(queries), draft.new_empty(draft.shape[:-1])
        for rows, end in blocks(q.shape[2]):
            scores = text_scores(queries, keys, doc_starts, draft_keys.shape[3], rows, end)
            top = torch.maximum(scores.amax(-1), draft[:, :, :, rows].amax(-1))[..., None]
            scores.sub_(top).exp2_()
            draft_weights = (draft[:, :, :, rows] - top).exp2()
            total = scores.sum(-1, keepdim=True) + draft_weights.sum(-1, keepdim=True)
            attended = weighted_sum(scores.to(q.dtype), values[:, :, :end]) + draft_sum(
                draft_weights.to(q.dtype), draft_values[:, :, rows]
            )
            out[:, :, :, rows] = attended / total
            norms[:, :, :, rows] = (top + total.log2())[..., 0]
        ctx.save_for_backward(q, keys, values, draft_keys, draft_values, doc_starts, out, norms)
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        q, keys, values, draft_keys, draft_values, doc_starts, out, norms = ctx.saved_tensors
        queries, out_gradient = (x.unflatten(1, (keys.shape[1], -1)) for x in (q, gradient))
        scale = q.shape[-1] ** -0.5
        # Softmax: a score's gradient is its weight times (the weight's gradient - this mean, one per query).
        mean_gradient = (out_gradient * out).sum(-1, dtype=norms.dtype)[..., None]
        weights = (draft_scores(queries, draft_keys) - norms[..., None]).exp2()
        score_gradient = (weights * (draft_dots(out_gradient, draft_values) - mean_gradient) * scale).to(q.dtype)
        queries_gradient = draft_sum(score_gradient, draft_keys)
        draft_keys_gradient, draft_values_gradient = (
            draft_sum_transposed(score_gradient, queries),
            draft_sum_transposed(weights.to(q.dtype), out_gradient),
        )
        keys_gradient, values_gradient = (torch.zeros_like(x, dtype=norms.dtype) for x in (keys, values))
        for rows, end in blocks(q.shape[2]):
            weights = text_scores(queries, keys, doc_starts, draft_keys.shape[3], rows, end)
            weights.sub_(norms[:, :, :, rows, None]).exp2_()
            block_gradient = out_gradient[:, :, :, rows].flatten(2, 3)
            values_gradient[:, :, :end] += weights.to(q.dtype).flatten(2, 3).mT @ block_gradient
            score_gradient = (block_gradient @ values[:, :, :end].mT).view_as(weights)
            score_gradient = (score_gradient - mean_gradient[:, :, :, rows]).mul_(scale).mul_(weights).to(q.dtype)
            queries_gradient[:, :, :, rows] += weighted_sum(score_gradient, keys[:, :, :end])
            keys_gradient[:, :, :end] += score_gradient.flatten(2, 3).mT @ queries[:, :, :, rows].flatten(2, 3)
        gradients = (
            queries_gradient.flatten(1, 2),
            keys_gradient.to(q.dtype),
            values_gradient.to(q.dtype),
            draft_keys_gradient,
            draft_values_gradient,
        )
        return *gradients, None


def blocks(length: int) -> list[tuple[slice, int]]:
    """(queries, keys that any of them may see), from the last on: each finds room where the one before it lay, while growing
    ones would leave holes in the C library's heap, as large together as length x length."""
    starts = reversed(range(0, length, BLOCK))
    return [(slice(start, end := min(start + BLOCK, length)), end) for start in starts]


def text_scores(queries: Tensor, keys: Tensor, doc_starts: Tensor, steps_back: int, rows: slice, end: int) -> Tensor:
    """(batch, kv heads, group, rows, end) in float32 at least, of queries whose drafts began `steps_back` slots earlier."""
    block = scaled(queries[:, :, :, rows])
    scores = (block.flatten(2, 3) @ keys[:, :, :end].mT).unflatten(2, block.shape[2:4])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    seen = seen_text(doc_starts, rows, end, steps_back)
    penalty = seen.to(scores.dtype).sub_(1).mul_(MASK_PENALTY)  # adding costs a quarter of masked_fill
    return scores.add_(penalty[:, None, None])


def scaled(queries: Tensor) -> Tensor:
    return queries * (queries.shape[-1] ** -0.5 / math.log(2))


def draft_scores(queries: Tensor, draft_keys: Tensor) -> Tensor:
    """(batch, kv heads, group, length, later steps), as `text_scores`."""
    return draft_dots(scaled(queries), draft_keys)


def draft_dots(x: Tensor, states: Tensor) -> Tensor:
    """x (batch, kv heads, group, rows, dim) times each row's own states (batch, kv heads, rows, steps, dim)."""
    products = [
        (x * step[:, :, None]).sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)) for step in states.unbind(3)
    ]
    return torch.stack(products, dim=-1)


def weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """Weights (batch, kv heads, group, rows, keys) over states (batch, kv heads, keys, dim)."""
    return (weights.flatten(2, 3) @ states).unflatten(2, weights.shape[2:4])


def draft_sum(weights: Tensor, states: Tensor) -> Tensor:
    """Weights (batch, kv heads, group, rows, steps) over each row's own states (batch, kv heads, rows, steps, dim)."""
    pairs = zip(weights.split(1, -1), states.unbind(3), strict=True)
    return sum(weight * step[:, :, None] for weight, step in pairs)


def draft_sum_transposed(weights: Tensor, x: Tensor) -> Tensor:
    """The transpose of `draft_sum`: (batch, kv heads, rows, steps, dim)."""
    return torch.stack([(weight * x).sum(2) for weight in weights.split(1, -1)], dim=3)
