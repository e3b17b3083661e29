"""How few columns of a cache a forward on a CPU may see if a text keeps its bits when it grows, and next to longer texts."""

from functools import cache

import torch
from transformers import PreTrainedModel

from foredraft.heads.attention import masked
from foredraft.heads.attention.masks import additive_mask
from foredraft.heads.caches.device import device_name
from foredraft.heads.caches.kv_cache import KEY_BLOCK
from foredraft.heads.target_model.cache_directory import measured_before, remember

CANDIDATES = (128, 256, 384)  # on a Zen 4, 128 and 384 give the bits of 512, and 256 does not
DIMS = (32, 64, 128, 256)  # of heads that are measured


def short_widths(model: PreTrainedModel) -> list[int]:
    """Return the numbers of keys below KEY_BLOCK that give a row the same bits on this machine. Sinks are one more key, so
    with them there are none."""
    if model.device.type != "cpu" or model.config._attn_implementation != masked.NAME or masked.has_sinks(model):
        return []
    return measured_widths(model.dtype, 30.0 if masked.has_soft_caps(model) else None)


@cache
def measured_widths(dtype: torch.dtype, softcap: float | None) -> list[int]:
    """Return `short_widths` as measured now or before."""
    about = {"device": device_name(torch.device("cpu")), "torch": torch.__version__, "dtype": str(dtype)}
    about["softcap"] = str(softcap)
    found: list[int] | None = measured_before("widths", about)
    if found is None:
        found = [width for width in CANDIDATES if all(is_like_block(width, dim, dtype, softcap) for dim in DIMS)]
        remember("widths", about, found)
    return found


@torch.inference_mode()
def is_like_block(width: int, dim: int, dtype: torch.dtype, softcap: float | None) -> bool:
    """Return whether attention over `width` keys has the bits of KEY_BLOCK keys of which the further ones are hidden. A
    kernel may sum fewer keys in other groups. Rounding hides most of the differences, so a million numbers are compared."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4096 // dim, n, dim) for n in (32, KEY_BLOCK, KEY_BLOCK))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for rows in (4, 8, 12, 32):
        for seen in (width - 77, width - 30, width - 5, width):
            mask = additive_mask((torch.arange(KEY_BLOCK) < seen).expand(1, 1, rows, -1), dtype)
            inputs = [(query[:, :, :rows], key[:, :, :n], value[:, :, :n], mask[..., :n]) for n in (width, KEY_BLOCK)]
            if not torch.equal(*(masked.attend(*each, softcap=softcap) for each in inputs)):
                return False
    return True
