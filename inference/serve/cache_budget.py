"""The number of tokens that the server's caches may contain."""

import torch

from foredraft.heads.target import Target
from foredraft.heads.target.cache import BLOCKS, KVCache
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, select_layers


def cache_budget(target: Target, drafter: Drafter | None, size: int, tenants: int = 1) -> tuple[int, float]:
    """Return the capacity in tokens of each engine's cache, and the share of the drafter in a token's bytes. There is an
    engine per tenant and one without drafts; together they may use `size` bytes. Raises ValueError for an unknown cache."""
    # Prompts have caches of their own, and a growing cache exists twice: one block at a time for the target, all of the
    # drafter's.
    target_bytes = cache_bytes_per_token(target, None)
    drafter_bytes = 3 * (cache_bytes_per_token(target, drafter) - target_bytes)
    growing = target_bytes * (2 + 1 / BLOCKS)
    return int(size / ((tenants + 1) * growing + tenants * drafter_bytes)), drafter_bytes / (growing + drafter_bytes)


@torch.inference_mode()
def cache_bytes_per_token(target: Target, drafter: Drafter | None) -> int:
    """Return the bytes of a token in all layers of target and drafter, without recurrent states, measured by a forward over
    one token. Raises ValueError for targets that decode texts one by one."""
    drafter, cache = drafter or NoDrafter(), target.new_cache(1, 1)
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"cache_gib: {target.name} keeps a separate cache per text, which cannot be limited: use max_num_seqs instead"
        )
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    accepted = Accepted(token, target.forward(token, cache=cache, layers=drafter.layers).aux_hidden_states, [1], [[0]])
    caches = [cache]
    for cached in drafter.cached_drafters:
        caches.append(cached.new_cache(1, 1))
        cached.prefill(select_layers(accepted, drafter.layers, cached.layers), caches[-1])
    counted = sum(block.nbytes // block.shape[4] for cache in caches for block in cache.blocks.values())
    return max(1, counted)  # recurrent states have no entries; `Target.state_entries` counts them
