"""How many tokens fit into the slots of the server's caches."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.heads.target import Target
from foredraft.heads.target.cache import KVCache
from foredraft.heads.target.stacked_cache import StackedCache
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, select_layers
from foredraft.inference.sampling import Sampling, SamplingParams

FREE_SHARE = 0.9  # of a GPU's free memory: the rest is for forwards
STATES = (
    4  # copies of a text's recurrent states: its slot's, those before and after a forward, and those rolled back to
)


class SlotBytes(NamedTuple):
    entry: int  # bytes of a token
    fixed: int  # bytes of a slot of any length: rings of sliding layers, recurrent states, entries of a tree


def slot_tokens(
    target: Target, drafters: Sequence[Drafter | None], num_slots: int, cache_gib: float | None
) -> int | None:
    """Return the entries of each slot, if an engine per drafter with `num_slots` slots may use `cache_gib`; None is what the
    device has. None for targets without a limit. Raises ValueError for a cache that cannot be limited, or is too small."""
    most = max(1 if drafter is None else drafter.nodes for drafter in drafters)
    context = None if target.context is None else target.context + 2 * most
    if not (target.supports_trees or target.supports_ragged):
        if cache_gib is not None:
            raise ValueError(
                f"cache_gib: {target.name} keeps a separate cache per text, which cannot be limited: use max_num_seqs instead"
            )
        return context
    if cache_gib is not None:
        size = cache_gib * 2**30
    elif target.device.type == "cuda":
        size = FREE_SHARE * torch.cuda.mem_get_info(target.device)[0]
    else:  # memory that is not written is not used, so each engine may have all of it
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * len(drafters)
    parts = [slot_bytes(target, drafter) for drafter in drafters]
    left = size / num_slots - sum(part.fixed for part in parts)
    tokens = int(left / max(1, sum(part.entry for part in parts)))
    if tokens <= 2 * most:
        raise ValueError(
            f"cache_gib={cache_gib} is too small for {len(drafters)} times max_num_seqs={num_slots} texts: reduce "
            "max_num_seqs, or increase it"
        )
    return tokens if context is None else min(tokens, context)


@torch.inference_mode()
def slot_bytes(target: Target, drafter: Drafter | None) -> SlotBytes:
    """Return the bytes of a slot in all layers of target and drafter, measured by a forward over one token."""
    drafter = drafter or NoDrafter()
    cache = target.new_cache(1, 1, drafter.nodes)
    assert isinstance(cache, KVCache)
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    accepted = Accepted(token, target.forward(token, cache=cache, layers=drafter.layers).aux_hidden_states, [1], [[0]])
    entry = fixed = 0
    for key, block in cache.blocks.items():
        size = block.nbytes // block.shape[4]
        if key[0]:
            assert cache.sliding is not None
            fixed += size * cache.sliding.ring
        else:
            entry += size
    fixed += STATES * cache.state_bytes if isinstance(cache, StackedCache) else 0
    for cached in drafter.cached_drafters:
        cached.begin(1, 1, Sampling.of([SamplingParams()], target.vocab_size, target.device))
        cached.prefill(select_layers(accepted, drafter.layers, cached.layers))
        size = sum(block.nbytes // block.shape[4] for block in cached.open_cache().blocks.values())
        entry, fixed = entry + size, fixed + size * cached.cache_entries(0)
    return SlotBytes(entry, fixed)
