"""Slots: fixed places in the caches of target and drafters. Each contains one text, and is allocated once.

    slot 0   [ t t t t t t t n n . . . ]   the batch: sequences that are decoded together are in the first slots
    slot 1   [ t t t t n n . . . . . . ]
    slot 2   [ p p p . . . . . . . . . ]   a prompt that is being prefilled, whole or in chunks between decoding steps
    slot 3   [ t t t t t t t t t . . . ]   free, with the text of a sequence that has ended

A new sequence takes a free slot. If another slot has a text with the same beginning, its entries are used again: a
conversation so far, a system prompt, or the prompt of several answers. Drafters with a cache process each chunk of a prompt
right after the target, so only the bonus token is left when a sequence joins the batch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.caches.cuda_graphs import CudaGraphs, power_of_two
from foredraft.heads.caches.kv_cache import KVCache, to_device
from foredraft.heads.target_model import Target, TargetCache, TargetOutput
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only, scatter, select, select_layers
from foredraft.inference.request import Request, SequenceState
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.inference.target_sampler import TargetSampler
from foredraft.inference.trace import Trace, trace_sequences
from foredraft.inference.verify import Validity

COMPARED = 64  # tokens that are compared at a time


class RequestOutput(NamedTuple):
    request: Request
    tokens: list[int]  # new tokens of its text: accepted drafts and the next bonus token, up to the end of the text
    accepted: int | None  # number of accepted drafts; None if the step prefilled the prompt
    nodes: int  # number of nodes of the tree, including the bonus token
    finish_reason: str | None  # see SequenceState
    trace: Trace | None = None  # only if the request asks for a trace
    depth: int = 0  # maximum depth of the step's tree


@dataclass(eq=False)
class Slot:
    index: int  # in the caches
    sequence: SequenceState | None = None  # the sequence that took it last
    is_prefilling: bool = False
    taken: int = 0  # when, as a count

    @property
    def is_free(self) -> bool:
        return not self.is_prefilling and (self.sequence is None or self.sequence.finish_reason is not None)

    @property
    def text(self) -> list[int]:
        return [] if self.sequence is None else self.sequence.text


class Prompts:
    """Hold sequences that are prefilled together: several that fit into one chunk, or a single long one."""

    def __init__(self, slots: list[Slot]):
        self.slots = slots
        self.sequences = [slot.sequence for slot in slots if slot.sequence is not None]

    def unfinished(self) -> bool:
        return any(sequence.finish_reason is None for sequence in self.sequences)


class Slots:
    def __init__(self, target: Target, drafter: Drafter):
        """Initialize without memory."""
        self.target, self.drafter = target, drafter
        self.looked_up = self.hits = 0  # tokens of prompts, and those whose entries were used again
        self.clock = itertools.count(1)
        # With CUDA graphs, the batch is a power of two. This sequence fills the unused slots.
        self.padding = SequenceState(Request([0], max_new_tokens=0), target)
        self.padding.finish_reason = "padding"
        self.sampler: TargetSampler
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, and give the memory back."""
        self.cache: TargetCache | None = None
        self.capacity = 0  # entries of each slot
        self.slots: list[Slot] = []
        self.sequences: list[SequenceState] = []  # the batch, by slot
        self.accepted: Accepted | None = None  # the next input of the drafter

    def allocate(self, count: int, capacity: int) -> None:
        """Allocate at least `count` slots of `capacity` entries."""
        self.reset()
        count = power_of_two(count) if self.target.capabilities.captures else count
        cache = self.target.acquire_cache(count, capacity, self.drafter.nodes)
        self.capacity = cache.capacity if isinstance(cache, KVCache) else capacity
        greedy = Sampling.of([SamplingParams()] * count, self.target.vocab_size, self.target.device)
        self.drafter.begin(count, self.capacity, greedy)
        self.cache, self.slots = cache, [Slot(index) for index in range(count)]

    def open_cache(self) -> TargetCache:
        assert self.cache is not None, "a step without a sequence"
        return self.cache

    def caches(self) -> list[Any]:
        """Return the target's cache and those of its drafters."""
        return [self.open_cache(), *(drafter.open_cache() for drafter in self.drafter.cached_drafters)]

    def use(self, rows: Sequence[int] | None = None) -> None:
        """Let forwards compute these slots; None means the batch."""
        for cache in self.caches():
            cache.use(range(len(self.sequences)) if rows is None else rows)

    def unfinished(self) -> list[int]:
        """Return the slots of the sequences that are decoded and have not finished."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence.finish_reason is None]

    def free(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_free]

    def choose(self, sequence: SequenceState, reuse: bool) -> Slot:
        """Give the sequence a free slot. reuse: with the longest available beginning of its text, in place if it continues
        the slot's text, otherwise as a copy in the slot that was taken the longest time ago."""
        text = sequence.text
        slot = min(self.free(), key=lambda slot: slot.taken)
        source = max(self.slots, key=lambda slot: self.num_shared(slot, text)) if reuse else slot
        length = self.num_shared(source, text) if reuse else 0
        if length and source.is_free and text[: len(source.text)] == source.text:
            slot = source
        for cache, lag in zip(self.caches(), self.lags(), strict=True):
            entries = length and length + 1 - lag
            if slot is source or length == 0:
                cache.truncate(slot.index, entries)
            else:
                cache.copy(source.index, slot.index, entries)
        self.looked_up, self.hits = self.looked_up + len(text), self.hits + length
        slot.sequence, slot.is_prefilling, slot.taken = sequence, True, next(self.clock)
        return slot

    def lags(self) -> list[int]:
        """Return how many entries each cache may be behind the tokens that it can be continued from. The last token is
        always prefilled, since each position's aux hidden states are combined with the token after it."""
        return [1, *(drafter.cache_lag for drafter in self.drafter.cached_drafters)]

    def num_shared(self, slot: Slot, text: list[int]) -> int:
        """Return the number of entries of the target in a slot that this text can continue from."""
        lengths = [cache.slot_lengths[slot.index] for cache in self.caches()]
        ends = (length + lag for length, lag in zip(lengths, self.lags(), strict=True))
        known = min(common_length(slot.text, text), *ends) - 1
        return known if known > 0 and self.open_cache().can_rewind(lengths[0], known) else 0

    def will_share(self, sequence: SequenceState, others: Sequence[SequenceState]) -> bool:
        """Return whether prefilling one of the others will give at least half of what is missing of this text. The shared
        part must be most of the other text, too: a long text with only a common system prompt is not waited for."""
        text, cache = sequence.text, self.open_cache()
        alike = [(other.text, common_length(other.text, text) - 1) for other in others]
        alike = [(other, end) for other, end in alike if end > 0 and cache.can_rewind(len(other), end)]
        done = [slot for slot in self.slots if alike and not slot.is_prefilling]
        known = max((self.num_shared(slot, text) for slot in done), default=0)
        return any(2 * (end - known) >= max(len(text), len(other)) - known for other, end in alike)

    @torch.inference_mode()
    def release(self, prompts: Prompts) -> None:
        """End the prefill of prompts. Slots of sequences that were canceled, or ended by NaN logits, are erased."""
        for slot, sequence in zip(prompts.slots, prompts.sequences, strict=True):
            slot.is_prefilling = False
            if sequence.finish_reason in ("cancelled", "error"):
                self.erase(slot)

    def erase(self, slot: Slot) -> None:
        """Overwrite all entries of a slot: no mask hides its NaN from the next sequence."""
        for cache in self.caches():
            cache.erase(slot.index)
        slot.sequence = None

    def prefill(self, prompts: Prompts, most: int | None) -> TargetOutput | None:
        """Prefill one more chunk of at most `most` tokens of all sequences (at least one each). Return logits (sequences, 1,
        vocab) and aux hidden states (sequences, 1, width) of their last tokens; None until all are done."""
        self.use([slot.index for slot in prompts.slots])
        cache, sequences, device = self.open_cache(), prompts.sequences, self.target.device
        done, lengths = cache.lengths, [len(sequence.text) for sequence in sequences]
        rest = [end - start for end, start in zip(lengths, done, strict=True)]
        width = max(rest) if most is None else min(max(rest), max(1, most // len(rest)))
        counts = [min(width, count) for count in rest]
        parts = [sequence.text[start : start + width + 1] for sequence, start in zip(sequences, done, strict=True)]
        text = torch.tensor([part + [0] * (width + 1 - len(part)) for part in parts], device=device)
        output = self.target.prefill(text[:, :width], counts, cache, self.drafter.layers)
        cache.set_lengths([start + count for start, count in zip(done, counts, strict=True)])
        # Drafters combine each position's aux hidden states with the token after it. The prompt's last one has none yet.
        ends = zip(cache.lengths, lengths, counts, strict=True)
        paired = [count - (count > 0 and end == length) for end, length, count in ends]
        if pairs := max(paired):
            texts = [sequence.text for sequence in sequences]
            accepted = Accepted(text[:, 1 : pairs + 1], output.aux_hidden_states[:, :pairs], paired, texts)
            for drafter in self.drafter.cached_drafters:
                drafter.prefill(select_layers(accepted, self.drafter.layers, drafter.layers))
        if cache.lengths != lengths:
            return None
        last = text.new_tensor(counts)[:, None] - 1
        hidden = output.aux_hidden_states
        hidden = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1]))
        return TargetOutput(output.logits, hidden)

    def join(self, prompts: Prompts, last: TargetOutput) -> list[RequestOutput]:
        """Sample the first tokens of prefilled prompts, and add the sequences that do not end with them."""
        sequences = prompts.sequences
        texts = [sequence.text for sequence in sequences]
        tokens = to_device([[text[-1]] for text in texts], self.target.device)
        tree = bonus_only(Accepted(tokens, last.aux_hidden_states, [1] * len(texts), texts))
        not_captured = CudaGraphs(self.target.device, enabled=False)
        sampler, starts = TargetSampler(sequences, self.target), self.open_cache().seq_lens
        verification, outcome = sampler.verify(last.logits, tree, None, 0, starts, not_captured)
        traces = trace_sequences(sequences, tree, verification, last.logits)
        outputs, joining, numbers = [], [], []
        for number, (slot, sequence) in enumerate(zip(prompts.slots, sequences, strict=True)):
            if sequence.finish_reason is not None:  # canceled during the prefill
                continue
            if outcome.valid[number] == Validity.INVALID:
                sequence.finish_reason = "error"
            added = [] if sequence.finish_reason else sequence.extend(outcome.tokens[number][:1])
            trace = traces.get(sequence.request)
            outputs.append(RequestOutput(sequence.request, added, None, 1, sequence.finish_reason, trace))
            if sequence.finish_reason is None:
                joining.append(slot)
                numbers.append(number)
        self.release(prompts)
        if joining:
            self.add(joining, last.aux_hidden_states[numbers])
        return outputs

    def add(self, joining: list[Slot], aux_hidden_states: Tensor) -> None:
        """Add prefilled sequences to the batch. aux_hidden_states: (sequences, 1, width), of the positions before their
        bonus tokens."""
        texts = [slot.text for slot in joining]
        bonus_tokens = aux_hidden_states.new_tensor([[text[-1]] for text in texts], dtype=torch.int64)
        fresh = Accepted(bonus_tokens, aux_hidden_states, [1] * len(texts), texts)
        if self.accepted is None:
            self.accepted = fresh
        order = next_rows(self.sequences, len(joining), self.target.capabilities.captures)
        rows = [row for row, old in enumerate(order) if old is None][: len(joining)]
        self.rearrange(order, joining)
        self.accepted = fresh if len(rows) == len(order) else scatter(self.accepted, rows, fresh)

    @torch.inference_mode()
    def drop_finished(self) -> None:
        """Remove finished sequences from the batch. Called before a step."""
        order = next_rows(self.sequences, 0, self.target.capabilities.captures)
        same = [None if sequence is self.padding else row for row, sequence in enumerate(self.sequences)]
        if order and order != same:
            self.rearrange(order, [])

    def rearrange(self, order: list[int | None], arriving: Sequence[Slot]) -> None:
        """Reorder the batch: row i gets the sequence of row order[i], or the next arriving one (or padding) for None."""
        sequences = [self.padding if old is None else self.sequences[old] for old in order]
        for row, old in enumerate(order):
            if old is not None:
                self.swap(row, old)
        free = (row for row, old in enumerate(order) if old is None)
        for row, slot in zip(free, arriving, strict=False):
            self.swap(row, slot.index)
            sequences[row] = slot.sequence or self.padding
        assert self.accepted is not None
        self.sequences, self.sampler = sequences, TargetSampler(sequences, self.target)
        self.drafter.select_sequences(order, self.capacity, self.sampler.sampling)
        self.accepted = select(self.accepted, order)._replace(text=[sequence.text for sequence in sequences])

    def swap(self, one: int, other: int) -> None:
        if one == other:
            return
        for cache in self.caches():
            cache.swap(one, other)
        self.slots[one], self.slots[other] = self.slots[other], self.slots[one]
        self.slots[one].index, self.slots[other].index = one, other

    def end_invalid(self, valid: Sequence[int], nodes: int) -> list[RequestOutput]:
        """End the sequences with NaN logits, and erase their slots."""
        failed = []
        for slot, (sequence, validity) in enumerate(zip(self.sequences, valid, strict=True)):
            if validity == Validity.INVALID and sequence.finish_reason is None:
                sequence.finish_reason = "error"
                self.erase(self.slots[slot])
                failed.append(RequestOutput(sequence.request, [], None, nodes, "error"))
        return failed


def next_rows(sequences: Sequence[SequenceState], arriving: int, powers_of_two: bool) -> list[int | None]:
    """Return the old row of each sequence of the next batch, or None for a new sequence. New sequences take the rows of
    finished ones. The last sequences move into rows that are still free. powers_of_two: fill up the rows with None, for CUDA
    graphs."""
    order = [None if sequence.finish_reason else row for row, sequence in enumerate(sequences)]
    count = len(order) - order.count(None) + arriving
    count = power_of_two(count) if powers_of_two else count
    if count >= len(order):
        return order + [None] * (count - len(order))
    for _ in range(len(order) - count):
        last = order.pop()
        if last is not None:
            order[order.index(None)] = last
    return order


def common_length(text: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that both texts start with."""
    most = min(len(text), len(other))
    starts = range(0, most, COMPARED)
    start = next((at for at in starts if text[at : at + COMPARED] != other[at : at + COMPARED]), most)
    pairs = zip(text[start : start + COMPARED], other[start : start + COMPARED], strict=False)
    return start + next((number for number, (one, two) in enumerate(pairs) if one != two), min(COMPARED, most - start))
