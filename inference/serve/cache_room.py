"""How many tokens the server's caches may hold."""

import torch

from foredraft.heads.target import Target
from foredraft.heads.target.cache import BLOCKS, KVCache
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, select_layers


def cache_room(target: Target, drafter: Drafter | None, size: int, tenants: int = 1) -> tuple[int, float]:
    """Tokens of each engine's cache, one engine per tenant and a plain one, where all of them together may have `size` bytes;
    and the share of a drafter in a token's bytes. Raises ValueError as `cache_bytes_per_token`."""
    # While the target's cache grows, a block of it is there twice; of a drafter's small one all, and its prompts'.
    plain = cache_bytes_per_token(target, None)
    drafters = 3 * (cache_bytes_per_token(target, drafter) - plain)
    growing = plain * (1 + 1 / BLOCKS)
    return int(size / ((tenants + 1) * growing + tenants * drafters)), drafters / (growing + drafters)


@torch.inference_mode()
def cache_bytes_per_token(target: Target, drafter: Drafter | None) -> int:
    """Of all layers of the target and the drafter, measured by a forward of one token; recurrent states are no part of it.
    Raises ValueError for a target whose texts are decoded one by one."""
    drafter, cache = drafter or NoDrafter(), target.new_cache(1, 1)
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"cache_gib: {target.name} keeps a cache of its own per text, which is not counted; max_num_seqs limits it"
        )
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    accepted = Accepted(token, target.forward(token, cache=cache, layers=drafter.layers).aux_hidden_states, [1], [[0]])
    caches = [cache]
    for cached in drafter.cached_drafters:
        caches.append(cached.new_cache(1, 1))
        cached.prefill(select_layers(accepted, drafter.layers, cached.layers), caches[-1])
    counted = sum(block.nbytes // block.shape[4] for cache in caches for block in cache.blocks.values())
    return max(1, counted)  # states alone, which `Target.state_entries` counts, have no entries
