"""How many texts, and of which length, fit into the memory of the server's caches."""

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from foredraft.heads.caches.cuda_graphs import power_of_two
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.caches.layers import WindowLayer
from foredraft.heads.caches.stacked_cache import StackedCache
from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter, select_layers
from foredraft.inference.sampling import Sampling, SamplingParams

log = logging.getLogger("foredraft.serve")

FREE_SHARE = 0.9  # of a GPU's free memory: the rest is for forwards
RAM_SHARE = 0.5  # of a computer's memory: the rest is for weights, forwards and other programs
SLOTS, TOKENS = 4, 8192  # slots that are kept if each has room for this many tokens, even if the longest text has more
# Copies of a text's recurrent states: its slot's, those before and after a forward, and those rolled back to.
STATES = 4


class SlotLimits(NamedTuple):
    num_slots: int  # of each engine
    entries: int | None  # of each slot; None without a limit


class SlotBytes(NamedTuple):
    entry: int  # bytes of a token
    fixed: int  # bytes of a slot of any length: rings of sliding layers, recurrent states, entries of a tree


def slot_limits(
    target: Target, drafters: Sequence[Drafter | None], max_num_seqs: int, cache_gib: float | None
) -> SlotLimits:
    """Return the slots of an engine per drafter, at most `max_num_seqs` each, if all may use `cache_gib`; None is
    FREE_SHARE or RAM_SHARE. Every slot has room for the longest text of the target: if memory is short, there are fewer
    slots. With less than SLOTS of them, slots are shortened instead, down to TOKENS. Only a text that does not fit is
    refused. Raises ValueError for a cache that cannot be limited, or is too small."""
    trees = 2 * max(1 if drafter is None else drafter.nodes for drafter in drafters)
    longest = None if target.context is None else target.context + trees
    if not target.capabilities.batched:
        if cache_gib is not None:
            reason = f"{target.name} keeps a separate cache per text, which cannot be limited"
            raise ValueError(f"cache_gib: {reason}: use max_num_seqs instead")
        return SlotLimits(max_num_seqs, longest)
    size = memory_for_caches(target) if cache_gib is None else cache_gib * 2**30
    parts = [slot_bytes(target, drafter) for drafter in drafters]
    entry, fixed = max(1, sum(part.entry for part in parts)), sum(part.fixed for part in parts)

    def allocated(count: int) -> int:
        """Return the number of slots for a batch: with CUDA graphs it is filled up to a power of two."""
        return power_of_two(count) if target.capabilities.captures else count

    def most(count: int, entries: int) -> int:
        """Return how many slots of `entries` fit, at most `count` and at least one."""
        while count > 1 and allocated(count) * (entries * entry + fixed) > size:
            count -= 1
        return count

    count = max_num_seqs
    if longest is not None:
        count = most(max_num_seqs, longest)
        if count < SLOTS:
            count = most(min(SLOTS, max_num_seqs), min(longest, TOKENS + trees))
    entries = int((size / allocated(count) - fixed) / entry)
    if entries <= trees:
        raise ValueError(
            f"cache_gib={cache_gib} is too small for {count} texts in {len(drafters)} engines: increase it, or reduce "
            "max_num_seqs"
        )
    entries = entries if longest is None else min(entries, longest)
    if count < max_num_seqs:
        log.warning(
            f"the caches have room for {count} texts of {entries - trees} tokens at a time, not for "
            f"max_num_seqs={max_num_seqs}: set a smaller target.context, or a larger cache_gib"
        )
    return SlotLimits(count, entries)


def memory_for_caches(target: Target) -> float:
    """Return the bytes that all caches may use by default."""
    if target.device.type == "cuda":
        return FREE_SHARE * torch.cuda.mem_get_info(target.device)[0]
    return RAM_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.inference_mode()
def slot_bytes(target: Target, drafter: Drafter | None) -> SlotBytes:
    """Return the bytes of a slot in all layers of target and drafter, measured by a forward over one token."""
    drafter = drafter or NoDrafter()
    cache = target.new_cache(1, 1, drafter.nodes)
    assert isinstance(cache, KVCache)
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    accepted = Accepted(token, target.forward(token, cache=cache, layers=drafter.layers).aux_hidden_states, [1], [[0]])
    entry = fixed = 0
    for layer in cache.kv_layers:
        size = sum(states.nbytes // states.shape[2] for states in layer.states)
        if isinstance(layer, WindowLayer):
            assert cache.sliding is not None
            fixed += size * cache.sliding.ring
        else:
            entry += size
    fixed += STATES * cache.state_bytes if isinstance(cache, StackedCache) else 0
    for cached in drafter.cached_drafters:
        cached.begin(1, 1, Sampling.of([SamplingParams()], target.vocab_size, target.device))
        cached.prefill(select_layers(accepted, drafter.layers, cached.layers))
        layers = cached.open_cache().kv_layers
        size = sum(states.nbytes // states.shape[2] for layer in layers for states in layer.states)
        entry, fixed = entry + size, fixed + size * cached.cache_entries(0)
    return SlotBytes(entry, fixed)
