"""A pruned draft vocabulary: the head's projection covers only frequent tokens.

Files store it as every engine reads it: `d2t` int64 [draft vocab], an *offset* (target id = i + d2t[i]), and `t2d` bool
[vocab]. Callers see only target ids.
"""

import torch
from torch import Tensor


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent token ids, ascending. counts: (vocab,) int64; ties go to the lower id."""
    if not 0 < size <= len(counts):
        raise ValueError(
            f"draft_vocab_size={size} must lie between 1 and {len(counts)}, the size of the target's vocabulary"
        )
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Return the share of the counted tokens that `ids` covers. counts: (vocab,) int64."""
    return (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def to_offsets(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return d2t (draft vocab,) int64 and t2d (vocab,) bool of ascending target ids."""
    t2d = torch.zeros(vocab, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return ids - torch.arange(len(ids), device=ids.device), t2d


def from_offsets(d2t: Tensor) -> Tensor:
    """Return the ascending target ids of a stored d2t."""
    return d2t + torch.arange(len(d2t), device=d2t.device)
