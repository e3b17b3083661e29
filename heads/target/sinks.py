"""Attention sinks (gpt-oss): a number per head that takes its share of the softmax and adds nothing to the output."""

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 8  # numbers of a head more: kernels want multiples of 8


def with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Wider by `PADDING`, with a first key that adds nothing to the output and takes its share of each head's softmax, by
    its score (heads,). That is a further number of the queries, and of the keys but 1 in the first and 0: heads of a group
    share keys, and all heads a mask."""
    own = (sinks / scale).to(query.dtype)[:, None, None].expand(len(query), -1, query.shape[2], 1)
    key, value = F.pad(key, (0, PADDING, 1, 0)), F.pad(value, (0, PADDING, 1, 0))
    key[:, :, 0, query.shape[3]] = 1
    return F.pad(torch.cat([query, own], dim=3), (0, PADDING - 1)), key, value
