"""Attention sinks (gpt-oss): a score per head that takes part in the softmax and adds nothing to the output."""

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 8  # added to the head dimension: kernels need multiples of 8


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Widen heads by `PADDING` and add a first key that takes part in each head's softmax with its score (heads,) and adds
    nothing to the output. The score is an extra dimension of the queries; keys have 1 there in the first position and 0
    elsewhere, because heads of a group share keys, and all heads share a mask."""
    scores = (sinks / scale).to(query.dtype)[:, None, None].expand(len(query), -1, query.shape[2], 1)
    key, value = F.pad(key, (0, PADDING, 1, 0)), F.pad(value, (0, PADDING, 1, 0))
    key[:, :, 0, query.shape[3]] = 1
    return F.pad(torch.cat([query, scores], dim=3), (0, PADDING - 1)), key, value
