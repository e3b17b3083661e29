"""Attention of a recurrent head's lesson: step i over the text (keys of step 0) and over its draft's steps since.

A step that began i slots back sees the text up to there, and one key of every later step (heads/eagle3.py has the picture).
Scores are not kept for the backward, which makes them anew from one number a query, as FlashAttention does (Dao et al.,
arXiv:2205.14135, section 3.1): memory grows with the length of a row, not with its square. Queries go block by block, each
over the text up to its own end: half of all scores are never made.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 256  # queries that attend at a time
UNSEEN = 1e30  # what a score loses where the mask forbids it


def attend_steps(q: Tensor, steps: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """q (batch, heads, length, dim) of step i = len(steps) - 1; steps: keys and values (batch, kv heads, length, dim) of all
    so far; mask (batch, length, length) bool, of step 0. Returns (batch, heads, length, dim)."""
    (keys, values), drafted = steps[0], steps[1:]
    if not drafted:
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, rows], keys[:, :, :end], values[:, :, :end], attn_mask=mask[:, None, rows, :end]
            )
            for rows, end in blocks(q.shape[2])
        ]
        return torch.cat(parts, dim=2)
    ages = range(len(drafted) - 1, -1, -1)
    own_keys, own_values = (
        torch.stack([pair[which].roll(age, 2) for age, pair in zip(ages, drafted, strict=True)], dim=3)
        for which in (0, 1)
    )
    dtype = values.dtype  # under autocast, applying positions may have made more of the others
    return Attend.apply(q.to(dtype), keys.to(dtype), values, own_keys.to(dtype), own_values, mask)


class Attend(torch.autograd.Function):
    """Softmax attention over the text's keys and values, and for each query over those of its own slot, (batch, kv heads,
    length, later steps, dim). The heads that share a key/value head lie side by side: (batch, kv heads, group, ...).

    All exponentials are to the base of 2, which costs a quarter of `exp` on a CPU; scores are scaled to suit."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, mask: Tensor):
        queries = q.unflatten(1, (keys.shape[1], -1))
        own = own_scores(queries, own_keys)
        out, norms = torch.empty_like(queries), own.new_empty(own.shape[:-1])
        for rows, end in blocks(q.shape[2]):
            scores = text_scores(queries, keys, mask, own_keys.shape[3], rows, end)
            top = torch.maximum(scores.amax(-1), own[:, :, :, rows].amax(-1))[..., None]
            scores.sub_(top).exp2_()
            beside = (own[:, :, :, rows] - top).exp2()
            total = scores.sum(-1, keepdim=True) + beside.sum(-1, keepdim=True)
            gained = over(scores.to(q.dtype), values[:, :, :end]) + side(beside.to(q.dtype), own_values[:, :, rows])
            out[:, :, :, rows] = gained / total
            norms[:, :, :, rows] = (top + total.log2())[..., 0]
        ctx.save_for_backward(q, keys, values, own_keys, own_values, mask, out, norms)
        return out.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        q, keys, values, own_keys, own_values, mask, out, norms = ctx.saved_tensors
        queries, given = (x.unflatten(1, (keys.shape[1], -1)) for x in (q, gradient))
        scale = q.shape[-1] ** -0.5
        # A weight's gradient less this, which is the same for all weights of a query, is its score's (the softmax's rule).
        common = (given * out).sum(-1, dtype=norms.dtype)[..., None]
        weights = (own_scores(queries, own_keys) - norms[..., None]).exp2()
        moved = (weights * (dots(given, own_values) - common) * scale).to(q.dtype)
        for_queries = side(moved, own_keys)
        for_own_keys, for_own_values = spread(moved, queries), spread(weights.to(q.dtype), given)
        for_keys, for_values = (torch.zeros_like(x, dtype=norms.dtype) for x in (keys, values))
        for rows, end in blocks(q.shape[2]):
            weights = text_scores(queries, keys, mask, own_keys.shape[3], rows, end)
            weights.sub_(norms[:, :, :, rows, None]).exp2_()
            arrived = given[:, :, :, rows].flatten(2, 3)
            for_values[:, :, :end] += weights.to(q.dtype).flatten(2, 3).mT @ arrived
            moved = (arrived @ values[:, :, :end].mT).view_as(weights)
            moved = (moved - common[:, :, :, rows]).mul_(scale).mul_(weights).to(q.dtype)
            for_queries[:, :, :, rows] += over(moved, keys[:, :, :end])
            for_keys[:, :, :end] += moved.flatten(2, 3).mT @ queries[:, :, :, rows].flatten(2, 3)
        back = for_queries.flatten(1, 2), for_keys.to(q.dtype), for_values.to(q.dtype), for_own_keys, for_own_values
        return *back, None


def blocks(length: int) -> Iterator[tuple[slice, int]]:
    """(queries, keys that any of them may see)."""
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        yield slice(start, end), end


def text_scores(queries: Tensor, keys: Tensor, mask: Tensor, shift_right: int, rows: slice, end: int) -> Tensor:
    """(batch, kv heads, group, rows, end) in float32 at least, of queries that began `later` slots back."""
    some = scaled(queries[:, :, :, rows])
    scores = (some.flatten(2, 3) @ keys[:, :, :end].mT).unflatten(2, some.shape[2:4])
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    began = torch.arange(rows.start - shift_right, rows.stop - shift_right, device=mask.device) % mask.shape[1]
    unseen = mask[:, began, :end].to(scores.dtype).sub_(1).mul_(UNSEEN)  # added: a quarter of what filling in costs
    return scores.add_(unseen[:, None, None])


def scaled(queries: Tensor) -> Tensor:
    return queries * (queries.shape[-1] ** -0.5 / math.log(2))


def own_scores(queries: Tensor, own_keys: Tensor) -> Tensor:
    """(batch, kv heads, group, length, later steps), as `text_scores`."""
    return dots(scaled(queries), own_keys)


def dots(x: Tensor, own: Tensor) -> Tensor:
    """Of x (batch, kv heads, group, rows, dim) with each row's own states (batch, kv heads, rows, steps, dim)."""
    found = [(x * one[:, :, None]).sum(-1, dtype=torch.promote_types(x.dtype, torch.float32)) for one in own.unbind(3)]
    return torch.stack(found, dim=-1)


def over(weights: Tensor, states: Tensor) -> Tensor:
    """Weights (batch, kv heads, group, rows, keys) over states (batch, kv heads, keys, dim)."""
    return (weights.flatten(2, 3) @ states).unflatten(2, weights.shape[2:4])


def side(weights: Tensor, own: Tensor) -> Tensor:
    """Weights (batch, kv heads, group, rows, steps) over each row's own states (batch, kv heads, rows, steps, dim)."""
    pairs = zip(weights.split(1, -1), own.unbind(3), strict=True)
    return sum(weight * one[:, :, None] for weight, one in pairs)


def spread(weights: Tensor, x: Tensor) -> Tensor:
    """Its transpose: (batch, kv heads, rows, steps, dim)."""
    return torch.stack([(weight * x).sum(2) for weight in weights.split(1, -1)], dim=3)
