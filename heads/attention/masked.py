"""Scaled dot-product attention with a mask, without copies of the keys and values.

With a mask, transformers' `sdpa` repeats every key/value head for its group of query heads: a copy of the whole context per
layer and step. Folding the group into the query rows gives the same numbers without copies:

    query (batch, groups * kv_heads, rows, dim) -> (batch, kv_heads, groups * rows, dim)

The function is registered under its own name in transformers' interface for attention, so no modeling file changes.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from foredraft.heads.attention.masks import PackedMask
from foredraft.heads.attention.paths import attend_paths
from foredraft.heads.attention.text_attention import SINK_PADDING, attend_part, attend_text, with_sinks
from foredraft.heads.caches.cpu_graphs import live
from foredraft.heads.caches.device import FEWEST_ROWS

NAME = "foredraft"
# Arguments of a model's attention beyond dot products; calls with them go to transformers' own function.
EXTRAS = ("position_bias", "output_attentions")


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return attention (batch, heads, rows, value dim) of query (batch, heads, rows, dim) over key and value (batch,
    kv_heads, keys, dim). mask: (batch, 1 or heads, rows, keys), or grouped by `group_heads`; None for causal attention with
    as many keys as rows. softcap: see `capped_attention`; requires a mask."""
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1)
    if groups > 1:
        query = query.reshape(batch, kv_heads, groups * rows, dim)
        mask = group_heads(mask, groups) if mask.shape[2] == rows else mask
    grouped = groups * rows
    if not query.requires_grad:  # in training, autograd would keep the padded masks
        mask = pad_rows(mask)
    if missing := mask.shape[2] - grouped:
        query = F.pad(query, (0, 0, 0, missing))
    if softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:
        out = capped_attention(query, key, value, mask, scale, softcap)
    return out[:, :, :grouped].reshape(batch, heads, rows, -1)


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float
) -> Tensor:
    """Return attention with the scores softcap * tanh(score / softcap) of Gemma 2, which torch's kernels do not have. mask:
    bool or additive."""
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


def group_heads(mask: Tensor, groups: int) -> Tensor:
    """Reshape a mask (batch, 1 or heads, rows, keys) to (batch, 1 or kv_heads, groups * rows, keys)."""
    mask = mask.expand(-1, groups, -1, -1) if mask.shape[1] == 1 else mask
    return mask.unflatten(1, (-1, groups)).flatten(2, 3)


def pad_rows(mask: Tensor) -> Tensor:
    """Add as many queries as a kernel needs to round each as it does among many. The kernel of a CPU computes blocks of 32 or
    more: in no block may there be fewer than four."""
    rows, multiple = mask.shape[2], FEWEST_ROWS if mask.device.type == "cpu" else 1
    missing = max(-rows % multiple, FEWEST_ROWS - rows)
    return F.pad(mask, (0, 0, 0, missing)) if missing else mask


@live(returns_values=False)
def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface for a frozen model, without dropout. `query`: (batch, heads, rows, dim).
    Returns (batch, rows, heads, dim)."""
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    rows, keys = query.shape[2], key.shape[2]
    if attention_mask is None and (softcap is not None or (sinks is not None and rows != keys)):
        # The queries are the last ones of the keys' text.
        attention_mask = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    if (attention_mask is None and sinks is None) or any(kwargs.get(name) is not None for name in EXTRAS):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    if isinstance(attention_mask, PackedMask):
        packed = attention_mask
        out = attend_text(query, key, value, packed.starts, packed.window, scaling, sinks, packed.parts)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask is None:
        return attend_part(query, key, value, None, scaling, sinks).transpose(1, 2).contiguous(), None
    groups, trees = query.shape[1] // key.shape[1], vars(attention_mask).get("paths")
    if sinks is not None:
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        query, key, value = with_sinks(query, key, value, sinks, scaling)

    def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return attend(query, key, value, grouped_mask(mask, groups, sinks is not None), scaling, softcap)

    out = attend_masked(query, key, value, attention_mask)
    if trees is not None:
        out = attend_paths(out, query, key, value, trees, attend_masked)
    return (out if sinks is None else out[..., :-SINK_PADDING]).transpose(1, 2).contiguous(), None


def grouped_mask(mask: Tensor, groups: int, with_sink: bool) -> Tensor:
    """Return `group_heads` of a mask, whose last key is a sink that all see, with `pad_rows`. It is made once and kept by the
    mask, which the layers of a forward share."""
    made = vars(mask).setdefault("grouped", {})
    if (groups, with_sink) in made:
        return made[groups, with_sink]
    whole = F.pad(mask, (0, 1), value=float(mask.dtype == torch.bool)) if with_sink else mask
    grouped = pad_rows(group_heads(whole, groups) if groups > 1 else whole)
    if grouped is not mask:  # which would keep itself
        made[groups, with_sink] = grouped
    return grouped


def take_masks(model: PreTrainedModel) -> None:
    """Let a model's attention accept any mask. Raises ValueError if its implementation only supports causal masks."""
    named = model.config._attn_implementation
    # transformers uses eager attention for these, since its sdpa supports neither sinks nor soft caps.
    is_ours = not model._supports_sdpa and model._supports_attention_backend
    is_ours = is_ours and (has_sinks(model) or has_soft_caps(model))
    if named == "sdpa" or (named == "eager" and is_ours):
        model.set_attn_implementation(NAME)
    elif named not in (NAME, "eager"):
        raise ValueError(
            f"attn_implementation={named} does not support the mask of a draft tree: load the target with "
            "attn_implementation=sdpa"
        )


def has_sinks(model: PreTrainedModel) -> bool:
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def has_soft_caps(model: PreTrainedModel) -> bool:
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


AttentionInterface.register(NAME, grouped_sdpa)
AttentionMaskInterface.register(NAME, sdpa_mask)
