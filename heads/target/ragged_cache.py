"""Sequences of very different lengths in one batch, so that none pays for the longest.

Those of like length form a cohort, a KVCache as long as the longest of its own. A forward runs over all sequences together;
attention alone goes cohort by cohort:

    cohort 0   [ t t t t | n n . ]
               [ t t t | n n . . ]
    cohort 1   [ t t t t t t t t t t t t t t t | n n . ]

A cohort grows alone, and whoever is prefilled where there is none of its length brings a cohort along: nothing is copied.
Within a cohort, attention goes by spans of neighbours that are about as long, each up to its longest: views of that memory.
Captured forwards know one width and one block of memory, so there a batch stays one KVCache.
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

SHORT, RATIO = 1024, 1.25  # entries that are alike whatever they are; above, the longest over the shortest of a cohort
# Entries x heads x dim that attention must be spared for one more call of it: what a call takes on a CPU (20 microseconds,
# in which a layer of 3 heads of 64 reads so many).
CALL_COST = 1 << 16
Span = tuple[slice, int]  # neighbouring slots, and the length of the longest


class Need(NamedTuple):
    """Entries of one sequence."""

    now: int  # for its next step
    room: int  # that it gets when its cohort gets new memory
    final: int  # that it may come to need

    @property
    def cohort(self) -> tuple[int, int]:
        """Sequences of one are alike: now, and in what they may come to."""
        return size_class(self.room), size_class(self.final)


def size_class(entries: int) -> int:
    return max(0, math.ceil(math.log(entries / SHORT, RATIO)))


def most_entries(finals: Sequence[int], weigh: Callable[[int], int]) -> int:
    """Of all cohorts together, at any time, of sequences that may come to need so many. weigh: as `KVCache.weigh`."""
    longest = max(finals, default=0)
    return sum(weigh(min(math.ceil(SHORT * RATIO ** size_class(final)), longest)) for final in finals)


def spans(lengths: Sequence[int], least: float) -> list[Span]:
    """Of neighbours, cut as long as that spares so many entries of padding."""
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
                cohort.layers[self.index].update(key_states[mine], value_states[mine])
                for cohort, mine in zip(cache.cohorts, cache.rows, strict=True)
            ]
        keys, values = ([*parts] for parts in zip(*both, strict=True))
        return cache.by_span(keys, 2), cache.by_span(values, 2)


class RaggedCache(Cache):
    """The same interface as heads/target/cache.py's, as far as the engine uses it. lengths, seq_lens: as there."""

    kv_bucket: int | None = None
    lag = 0

    def __init__(self, first: KVCache, final: int):
        """first: the cohort that it begins with. final: entries that the longest of it may come to need."""
        super().__init__(layers=[RaggedLayer(self, number) for number in range(len(first.layers))])
        self.device, self.graphs = first.device, CudaGraphs(first.device, enabled=False)
        self.cohorts, self.final_classes, self.members = [first], [size_class(final)], [[*range(first.batch)]]
        self.awaited: list[int] = []  # slots of the batch that no cohort has
        self.note_members()

    def note_members(self) -> None:
        """members: which slots the rows of each cohort are."""
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
        if cohort.sliding is not None:  # of which layers hold different entries
            return [(slice(0, cohort.batch), max(cohort.lengths))]
        longest, block = max(cohort.lengths), cohort.key_block  # what a span is spared are whole blocks of keys
        return spans([longest - (longest - length) // block * block for length in cohort.lengths], CALL_COST / width)

    def by_span(self, tensors: list[Tensor], dim: int, fill: float = 0.0) -> Tensor:
        """Of the cohorts' tensors, whose dimension `dim` goes over what a forward sees, the part that each span sees."""
        if self.is_one and len(self.spans[0]) == 1:
            return tensors[0]
        parts, rows = [], []
        for tensor, cohort, mine, cuts in zip(tensors, self.cohorts, self.rows, self.spans, strict=True):
            for slots, length in cuts:
                size = tensor.shape[dim] - (max(cohort.lengths) - length)
                parts.append(tensor[slots].narrow(dim, 0, size) if len(cuts) > 1 else tensor)
                rows.append(slots if self.is_one else mine[slots])
        return RaggedTensor(parts, rows, dim, fill)

    @property
    def entries(self) -> int:
        """That memory is reserved for."""
        return sum(cohort.entries for cohort in self.cohorts)

    @property
    def capacity(self) -> int:
        return max((cohort.capacity for cohort in self.cohorts), default=0)

    @property
    def blocks(self) -> dict[Any, Tensor]:
        return {(number, key): block for number, one in enumerate(self.cohorts) for key, block in one.blocks.items()}

    def is_short(self, needs: Sequence[Need]) -> bool:
        """Is there a sequence whose next step does not fit?"""
        return any(needs[slot].now > cohort.capacity for slot, (cohort, _) in self.places.items())

    def reorder(self, slots: list[int | None], needs: Sequence[Need], free: int | None = None) -> None:
        """The batch becomes these of its slots, None being an arriving sequence. These join a cohort of like length, unless
        there is none, or its memory would grow by more than `free` entries: then `copy_from` brings a new one."""
        self.awaited, self.needs = [new for new, old in enumerate(slots) if old is None], needs
        home = self.home(free)
        cohorts: list[KVCache] = []
        classes: list[int] = []
        members: list[list[int]] = []
        for cohort, final_class, mine in zip(self.cohorts, self.final_classes, self.members, strict=True):
            rows = {slot: row for row, slot in enumerate(mine)}
            new = [slot for slot, old in enumerate(slots) if old in rows or (old is None and cohort is home)]
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
        if home is not None:
            self.awaited = []
        if not self.awaited:
            self.note_members()

    def home(self, free: int | None) -> KVCache | None:
        """The cohort of sequences like the awaited ones."""
        if not self.awaited:
            return None
        mine = [self.needs[slot] for slot in self.awaited]
        longest = Need(*map(max, zip(*mine, strict=True)))
        for cohort, final_class, slots in zip(self.cohorts, self.final_classes, self.members, strict=True):
            capacity = cohort.capacity if longest.now <= cohort.capacity else longest.room
            fits = free is None or (len(slots) + len(mine)) * cohort.weigh(capacity) - cohort.entries <= free
            if (size_class(cohort.capacity), final_class) == longest.cohort and fits:
                return cohort
        return None

    def trim(self) -> None:
        """Give back the memory of slots that are not in use."""
        for cohort in self.cohorts:
            if cohort.max_batch > cohort.batch:
                cohort.resize([*range(cohort.batch)], cohort.capacity, cohort.batch)

    def copy_from(self, slots: list[int], other: KVCache, others: list[int]) -> None:
        """These slots, which are empty, become these `others` of another cache. Where no cohort awaits them and all of it
        comes, it becomes a cohort itself."""
        if other in self.cohorts:  # the first one
            return
        if self.awaited:
            longest, cohort = Need(*map(max, zip(*(self.needs[slot] for slot in slots), strict=True))), other
            if others != [*range(other.batch)]:
                cohort = other.like(len(others), longest.room)
                cohort.copy_from([*range(len(others))], other, others)
            elif longest.now > other.capacity:
                other.reorder([*others], longest.room)
            self.cohorts.append(cohort)
            self.final_classes.append(size_class(longest.final))
            self.members.append(slots)
            self.awaited = []
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

    def holds(self, slot: int, start: int, end: int) -> bool:
        cohort, row = self.places[slot]
        return cohort.holds(row, start, end)

    def set_bucket(self, room: int) -> None:
        """Nothing is captured here."""

    def mask(self, among: Tensor) -> Tensor | list[Tensor]:
        """As `KVCache.mask`, of each cohort where there are several; among: (batch, new, new)."""
        if self.is_one:
            return self.cohorts[0].mask(among)
        return [cohort.mask(among[mine]) for cohort, mine in zip(self.cohorts, self.rows, strict=True)]

    def attention_mask(self, masks: Masks, mask: Tensor | list[Tensor], dtype: torch.dtype, positions: Tensor) -> Any:
        """As `KVCache.attention_mask`."""
        masked = [mask] if isinstance(mask, Tensor) else mask
        made = [
            cohort.attention_mask(masks, part, dtype, positions if self.is_one else positions[mine])
            for cohort, mine, part in zip(self.cohorts, self.rows, masked, strict=True)
        ]
        hidden = torch.finfo(dtype).min
        if not isinstance(made[0], dict):
            return self.by_span(made, 3, hidden)
        return {kind: self.by_span([one[kind] for one in made], 3, hidden) for kind in made[0]}

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """As `KVCache.commit`."""
        for (cohort, slots), mine in zip(self.pairs(), self.rows, strict=True):
            both = [part if part is None or self.is_one else part[mine] for part in (padded_path, counts)]
            cohort.commit([path[slot] for slot in slots], *both)
        self.note_lengths()
