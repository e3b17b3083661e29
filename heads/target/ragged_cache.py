"""Sequences of very different lengths in one batch, without padding to the longest.

Sequences of similar length form a cohort, a KVCache as long as its longest sequence. A forward processes all sequences
together, and only attention processes each cohort separately:

    cohort 0   [ t t t t | n n . ]
               [ t t t | n n . . ]
    cohort 1   [ t t t t t t t t t t t t t t t | n n . ]

A cohort grows independently. A prefilled sequence without a cohort of its length brings its own, so nothing is copied. Within
a cohort, attention processes spans of neighbors of similar length, each up to its longest, as views of that memory.
Captured forwards have one width and one block of memory, so there a batch stays one KVCache.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from foredraft.heads.target.cache import CacheLayer, KVCache, to_device
from foredraft.heads.target.cuda_graphs import CudaGraphs
from foredraft.heads.target.masks import Masks
from foredraft.heads.target.ragged_tensor import RaggedTensor

SHORT, RATIO = 1024, 1.25  # lengths up to SHORT are one class; above, the longest over the shortest of a cohort
# Smallest saving, in entries x heads x dim, that is worth one more call of attention. A call costs 20 microseconds on a
# CPU, in which a layer of 3 heads of 64 reads this many.
CALL_COST = 1 << 16
Span = tuple[slice, int]  # neighboring slots, and the length of the longest


class CacheDemand(NamedTuple):
    """Hold the cache entries that one sequence needs."""

    now: int  # for its next step
    room: int  # when its cohort is reallocated
    final: int  # at most

    @property
    def cohort(self) -> tuple[int, int]:
        """Return the size classes of its cohort: now, and at most."""
        return size_class(self.room), size_class(self.final)


def size_class(entries: int) -> int:
    return max(0, math.ceil(math.log(entries / SHORT, RATIO)))


def most_entries(finals: Sequence[int], num_entries: Callable[[int], int]) -> int:
    """Bound the entries of all cohorts at any time, for sequences of these final lengths. num_entries:
    `KVCache.num_entries`."""
    longest = max(finals, default=0)
    return sum(num_entries(min(math.ceil(SHORT * RATIO ** size_class(final)), longest)) for final in finals)


def spans(lengths: Sequence[int], least: float) -> list[Span]:
    """Split neighbors into spans as long as a cut saves more than `least` entries of padding."""
    count, longest = len(lengths), max(lengths)
    left, right = list(accumulate(lengths, max)), list(accumulate(reversed(lengths), max))
    sizes = {cut: cut * left[cut - 1] + (count - cut) * right[count - cut - 1] for cut in range(1, count)}
    cut = min(sizes, key=sizes.__getitem__, default=0)
    if not cut or count * longest - sizes[cut] <= least:
        return [(slice(0, count), longest)]
    rest = [(slice(cut + one.start, cut + one.stop), length) for one, length in spans(lengths[cut:], least)]
    return [*spans(lengths[:cut], least), *rest]


class RaggedLayer(CacheLayer):
    cache: "RaggedCache"

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        cache = self.cache
        if cache.is_one:
            both = [cache.cohorts[0].layers[self.index].update(key_states, value_states)]
        else:
            both = [
                cohort.layers[self.index].update(key_states[batch_rows], value_states[batch_rows])
                for cohort, batch_rows in zip(cache.cohorts, cache.rows, strict=True)
            ]
        keys, values = ([*parts] for parts in zip(*both, strict=True))
        return cache.by_span(keys, 2), cache.by_span(values, 2)


class RaggedCache(Cache):
    """Implement the part of KVCache's interface that the engine uses, over cohorts."""

    kv_bucket: int | None = None
    lag = 0

    def __init__(self, first: KVCache, final: int):
        """Start with one cohort. final: entries that its longest sequence may need."""
        super().__init__(layers=[RaggedLayer(self, number) for number in range(len(first.layers))])
        self.device, self.graphs = first.device, CudaGraphs(first.device, enabled=False)
        self.cohorts, self.final_classes, self.members = [first], [size_class(final)], [[*range(first.batch)]]
        self.unplaced_slots: list[int] = []  # slots of the batch without a cohort
        self.note_members()

    def note_members(self) -> None:
        """Update what follows from `members`, the slots of each cohort's rows."""
        self.batch = sum(map(len, self.members))
        self.is_one = self.members == [[*range(self.batch)]]
        self.rows = [to_device(slots, self.device) for slots in self.members]
        self.places = {slot: (cohort, row) for cohort, slots in self.pairs() for row, slot in enumerate(slots)}
        self.note_lengths()

    def pairs(self) -> list[tuple[KVCache, list[int]]]:
        return list(zip(self.cohorts, self.members, strict=True))

    def note_lengths(self) -> None:
        self.lengths = [0] * self.batch
        for cohort, slots in self.pairs():
            for slot, length in zip(slots, cohort.lengths, strict=True):
                self.lengths[slot] = length
        self.seq_lens = self.cohorts[0].seq_lens if self.is_one else to_device(self.lengths, self.device)[:, None]
        self.spans = [self.spans_of(cohort) for cohort in self.cohorts]

    def spans_of(self, cohort: KVCache) -> list[Span]:
        width = max((heads * dim for _, heads, dim, *_ in cohort.blocks), default=1)
        if cohort.sliding is not None:  # its layers have different entries
            return [(slice(0, cohort.batch), max(cohort.lengths))]
        longest, block = max(cohort.lengths), cohort.key_block  # a span saves whole blocks of keys
        return spans([longest - (longest - length) // block * block for length in cohort.lengths], CALL_COST / width)

    def by_span(self, tensors: list[Tensor], dim: int, fill: float = 0.0) -> Tensor:
        """Return the part that each span sees of the cohorts' tensors, whose dimension `dim` covers what a forward sees."""
        if self.is_one and len(self.spans[0]) == 1:
            return tensors[0]
        parts, rows = [], []
        for tensor, cohort, batch_rows, cuts in zip(tensors, self.cohorts, self.rows, self.spans, strict=True):
            for slots, length in cuts:
                size = tensor.shape[dim] - (max(cohort.lengths) - length)
                parts.append(tensor[slots].narrow(dim, 0, size) if len(cuts) > 1 else tensor)
                rows.append(slots if self.is_one else batch_rows[slots])
        return RaggedTensor(parts, rows, dim, fill)

    @property
    def entries(self) -> int:
        """Return the number of entries with reserved memory."""
        return sum(cohort.entries for cohort in self.cohorts)

    @property
    def capacity(self) -> int:
        return max((cohort.capacity for cohort in self.cohorts), default=0)

    @property
    def blocks(self) -> dict[Any, Tensor]:
        return {(number, key): block for number, one in enumerate(self.cohorts) for key, block in one.blocks.items()}

    def is_short(self, needs: Sequence[CacheDemand]) -> bool:
        """Return whether the next step of a sequence does not fit."""
        return any(needs[slot].now > cohort.capacity for slot, (cohort, _) in self.places.items())

    def reorder(self, slots: list[int | None], needs: Sequence[CacheDemand], free: int | None = None) -> None:
        """Make these slots the batch, None for an arriving sequence. Arriving sequences join a cohort of similar length. If
        none exists, or its memory would grow by more than `free` entries, `copy_from` brings a new one."""
        self.unplaced_slots, self.needs = [new for new, old in enumerate(slots) if old is None], needs
        joined = self.find_cohort(free)
        cohorts: list[KVCache] = []
        classes: list[int] = []
        members: list[list[int]] = []
        for cohort, final_class, cohort_slots in zip(self.cohorts, self.final_classes, self.members, strict=True):
            rows = {slot: row for row, slot in enumerate(cohort_slots)}
            new = [slot for slot, old in enumerate(slots) if old in rows or (old is None and cohort is joined)]
            if new:
                order = [rows.get(old) for old in (slots[slot] for slot in new)]
                capacity = cohort.capacity
                if max(needs[slot].now for slot in new) > capacity:
                    capacity = max(needs[slot].room for slot in new)
                    if free is not None:
                        self.trim()
                cohort.reorder(order, capacity, None if free is None else 0)
                cohorts.append(cohort)
                classes.append(final_class)
                members.append(new)
        self.cohorts, self.final_classes, self.members = cohorts, classes, members
        if joined is not None:
            self.unplaced_slots = []
        if not self.unplaced_slots:
            self.note_members()

    def find_cohort(self, free: int | None) -> KVCache | None:
        """Return the cohort of sequences similar to the unplaced ones, if its memory may grow."""
        if not self.unplaced_slots:
            return None
        needs = [self.needs[slot] for slot in self.unplaced_slots]
        longest = CacheDemand(*map(max, zip(*needs, strict=True)))
        for cohort, final_class, slots in zip(self.cohorts, self.final_classes, self.members, strict=True):
            capacity = cohort.capacity if longest.now <= cohort.capacity else longest.room
            fits = free is None or (len(slots) + len(needs)) * cohort.num_entries(capacity) - cohort.entries <= free
            if (size_class(cohort.capacity), final_class) == longest.cohort and fits:
                return cohort
        return None

    def trim(self) -> None:
        """Free the memory of slots that are not in use."""
        for cohort in self.cohorts:
            if cohort.max_batch > cohort.batch:
                cohort.resize([*range(cohort.batch)], cohort.capacity, cohort.batch)

    def copy_from(self, slots: list[int], other: KVCache, others: list[int]) -> None:
        """Copy slots `others` of another cache to these empty slots. If no cohort takes them and all of that cache is
        copied, it becomes a cohort itself."""
        if other in self.cohorts:  # the first one
            return
        if self.unplaced_slots:
            longest, cohort = CacheDemand(*map(max, zip(*(self.needs[slot] for slot in slots), strict=True))), other
            if others != [*range(other.batch)]:
                cohort = other.empty_like(len(others), longest.room)
                cohort.copy_from([*range(len(others))], other, others)
            elif longest.now > other.capacity:
                other.reorder([*others], longest.room)
            self.cohorts.append(cohort)
            self.final_classes.append(size_class(longest.final))
            self.members.append(slots)
            self.unplaced_slots = []
            return self.note_members()
        for slot, theirs in zip(slots, others, strict=True):
            cohort, row = self.places[slot]
            cohort.copy_from([row], other, [theirs])
        self.note_lengths()

    def erase(self, slot: int) -> None:
        cohort, row = self.places[slot]
        cohort.erase(row)

    def erase_uncommitted(self, slot: int) -> None:
        cohort, row = self.places[slot]
        cohort.erase_uncommitted(row)

    def copy_out(self, slot: int, start: int, end: int) -> dict[tuple, Tensor]:
        cohort, row = self.places[slot]
        return cohort.copy_out(row, start, end)

    def contains(self, slot: int, start: int, end: int) -> bool:
        cohort, row = self.places[slot]
        return cohort.contains(row, start, end)

    def set_bucket(self, room: int) -> None:
        """Do nothing: there are no captured forwards."""

    def mask(self, among: Tensor) -> Tensor | list[Tensor]:
        """Return `KVCache.mask`, of each cohort if there are several. among: (batch, new, new)."""
        if self.is_one:
            return self.cohorts[0].mask(among)
        return [cohort.mask(among[batch_rows]) for cohort, batch_rows in zip(self.cohorts, self.rows, strict=True)]

    def attention_mask(self, masks: Masks, mask: Tensor | list[Tensor], dtype: torch.dtype, positions: Tensor) -> Any:
        """Convert a mask as `KVCache.attention_mask` does."""
        masked = [mask] if isinstance(mask, Tensor) else mask
        masks_by_cohort = [
            cohort.attention_mask(masks, part, dtype, positions if self.is_one else positions[batch_rows])
            for cohort, batch_rows, part in zip(self.cohorts, self.rows, masked, strict=True)
        ]
        hidden = torch.finfo(dtype).min
        if not isinstance(masks_by_cohort[0], dict):
            return self.by_span(masks_by_cohort, 3, hidden)
        return {
            kind: self.by_span([by_kind[kind] for by_kind in masks_by_cohort], 3, hidden) for kind in masks_by_cohort[0]
        }

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Accept paths as `KVCache.commit` does."""
        for (cohort, slots), batch_rows in zip(self.pairs(), self.rows, strict=True):
            both = [part if part is None or self.is_one else part[batch_rows] for part in (padded_path, counts)]
            cohort.commit([path[slot] for slot in slots], *both)
        self.note_lengths()
