"""Scaled dot-product attention for a masked read, without copies of the keys and values.

With a mask, transformers' `sdpa` repeats every key/value head for its group of query heads: a copy of the whole
context per layer and step. Folding the group into the query rows gives the same numbers and copies nothing:

    query (batch, groups * kv_heads, rows, dim) -> (batch, kv_heads, groups * rows, dim)

It is registered under a name of its own, which is transformers' door for this; no modelling file changes.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "foretoken"
# What a model may hand its attention beyond plain dot products; those calls go to transformers' own function.
EXTRAS = ("softcap", "s_aux", "position_bias", "output_attentions")


def fold(query: Tensor, mask: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Query and mask with the query heads of one key/value head laid out as rows of it."""
    batch, heads, rows, dim = query.shape
    groups = heads // kv_heads
    if groups == 1:
        return query, mask
    query = query.reshape(batch, kv_heads, groups * rows, dim)
    if mask.shape[1] == 1:
        mask = mask.expand(-1, groups, -1, -1)
        return query, mask.reshape(mask.shape[0], 1, groups * rows, mask.shape[-1])
    return query, mask.reshape(mask.shape[0], kv_heads, groups * rows, mask.shape[-1])


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention signature. `query` (batch, heads, rows, dim); returns (batch, rows, heads, dim)."""
    if attention_mask is None or any(kwargs.get(name) is not None for name in EXTRAS):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    batch, heads, rows, _ = query.shape
    query, mask = fold(query, attention_mask, key.shape[1])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)
