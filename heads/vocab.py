"""A pruned draft vocabulary: the head's own projection covers only tokens that are worth drafting.

Stored as every engine reads it: `d2t` int64 [draft vocab], an *offset* (target id = i + d2t[i]), and `t2d` bool
[vocab]. Callers only ever see target ids.
"""

import torch
from torch import Tensor


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent token ids, ascending. counts: (vocab,) int64; ties go to the lower id."""
    if not 0 < size <= len(counts):
        raise ValueError(f"draft_vocab_size={size} must lie between 1 and the target's vocabulary of {len(counts)}")
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens that `ids` can name."""
    return (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def to_offsets(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of ascending target ids."""
    t2d = torch.zeros(vocab, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return ids - torch.arange(len(ids), device=ids.device), t2d


def from_offsets(d2t: Tensor) -> Tensor:
    """Ascending target ids of a stored d2t."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
