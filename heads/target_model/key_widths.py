"""How few columns of a cache a forward on a CPU may see if a text keeps its bits when it grows, and next to longer texts."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
from transformers import PreTrainedModel

from foredraft.heads.attention import masked
from foredraft.heads.attention.masks import additive_mask
from foredraft.heads.caches.device import device_name
from foredraft.heads.caches.kv_cache import KEY_BLOCK
from foredraft.heads.target_model.cache_directory import measured_once

CANDIDATES = range(32, KEY_BLOCK, 32)  # on a Zen 4, those from 224 to 352 do not give the bits of 512
DIMS, ROWS = (32, 64, 128, 256), (4, 12, 32, 200)  # sizes of heads, and numbers of queries, that are measured


def short_widths(model: PreTrainedModel) -> list[int]:
    """Return the numbers of keys below KEY_BLOCK that give a row the bits of KEY_BLOCK keys on this machine, ascending. Sinks
    are one more key, so with them there are none."""
    if model.device.type != "cpu" or model.config._attn_implementation != masked.NAME or masked.has_sinks(model):
        return []
    return measured_widths(model.dtype, 30.0 if masked.has_soft_caps(model) else None)


@cache
def measured_widths(dtype: torch.dtype, softcap: float | None) -> list[int]:
    """Return `short_widths` as measured now or before."""
    about = {"device": device_name(torch.device("cpu")), "torch": torch.__version__, "dtype": str(dtype)}
    about |= {"softcap": str(softcap), "candidates": str(CANDIDATES)}

    def measure() -> list[int]:
        widths = list(CANDIDATES)
        for dim, rows in product(DIMS, ROWS):
            widths = widths_like_block(widths, dim, rows, dtype, softcap)
        return widths

    return list(measured_once("widths", about, measure))


@torch.inference_mode()
def widths_like_block(
    widths: Sequence[int], dim: int, rows: int, dtype: torch.dtype, softcap: float | None
) -> list[int]:
    """Return those of these numbers of keys over which attention has the bits of KEY_BLOCK keys of which the further ones
    are hidden. A kernel may sum fewer keys in other groups, and rounding hides most of the differences."""
    heads, generator = max(1, min(4096 // dim, 65_536 // (rows * dim))), torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, n, dim, generator=generator).to(dtype) for n in (rows, KEY_BLOCK, KEY_BLOCK)
    )
    alike = []
    for width in widths:
        seen = width - torch.arange(rows) * min(95, width - 1) // rows  # a text grows to the width
        mask = additive_mask((torch.arange(KEY_BLOCK) < seen[:, None])[None, None], dtype)
        cut, whole = (
            masked.attend(query, key[:, :, :n], value[:, :, :n], mask[..., :n], softcap=softcap)
            for n in (width, KEY_BLOCK)
        )
        if torch.equal(cut, whole):
            alike.append(width)
    return alike
