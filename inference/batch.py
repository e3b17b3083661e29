"""The sequences that are decoded together, and what goes with them: the target's cache, the sampler, and what the drafter
gets next. Sequences join with their prompts prefilled, and leave when they have ended."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache
from foredraft.heads.target.cache import KVCache, bucket, to_device
from foredraft.heads.target.cuda_graphs import captures, power_of_two
from foredraft.heads.target.ragged_cache import Need, RaggedCache, most_entries
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only, select, widened
from foredraft.inference.prefill import LastPositions, Prompts
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import Request, SequenceState, StoppingCriteria
from foredraft.inference.target_sampler import TargetSampler
from foredraft.inference.trace import Trace, trace_sequences
from foredraft.inference.verify import Validity, Verifier

# Entries after its text that a sequence begins with, if its limit allows so many: most texts end long before that.
ROOM = 1024


class RequestOutput(NamedTuple):
    """What one step gave a request."""

    request: Request
    tokens: list[int]  # added to its text: accepted drafts and the next bonus token, less what the end cut off
    accepted: int | None  # drafts accepted; None where the step prefilled its prompt
    nodes: int  # of the tree, the bonus token counted
    finish_reason: str | None  # as a SequenceState has it
    trace: Trace | None = None  # where the request asks for one
    depth: int = 0  # most levels that the step's tree may have
    forwards: int = 1  # of the target


class Batch:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        max_cache_tokens: int | None,
        drafter_share: float = 0.0,
    ):
        """As `Engine` has them."""
        self.target, self.drafter = target, drafter
        self.verifier, self.max_cache_tokens, self.drafter_share = verifier, max_cache_tokens, drafter_share
        self.sequences: list[SequenceState] = []  # by slot
        self.cache: TargetCache | None = None
        # May sequences of different lengths lie in memory of their own (heads/target/ragged_cache.py)?
        self.ragged = target.supports_ragged_cache
        self.captured = target.supports_trees and captures(target.device, target.supports_cuda_graphs)
        # Where steps are captured, a batch has a power of two of slots, of which this takes those that no sequence has.
        nothing = Request([0], max_new_tokens=0)
        self.padding = SequenceState(nothing, [0], StoppingCriteria(target, nothing), finish_reason="padding")
        self.prompt_entries = 0  # of the target's cache, in which prompts are prefilled
        self.sampler: TargetSampler
        self.accepted: Accepted  # what the drafter gets next
        self.ended: tuple[list[bool], Tensor] | None = (
            None  # which sequences had, and the same on the device (batch, 1)
        )

    def unfinished(self) -> list[int]:
        """Slots of the sequences that go on."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence.finish_reason is None]

    def of_unfinished(self, counts: Tensor) -> Tensor:
        """counts (batch,) as (batch, 1), 0 of sequences that have ended. They are copied to the device when one more has."""
        ended = [sequence.finish_reason is not None for sequence in self.sequences]
        if not any(ended):
            return counts[:, None]
        if self.ended is None or self.ended[0] != ended:
            self.ended = ended, to_device(ended, counts.device)[:, None].bool()
        return counts[:, None].masked_fill(self.ended[1], 0)

    def capacity(self, sequences: Sequence[SequenceState]) -> int:
        """Entries that each sequence of a batch of these may come to need."""
        longest = max(len(sequence.request.prompt) + sequence.stopping.budget for sequence in sequences)
        return longest + 2 * self.drafter.nodes  # the last tree, after what the last path kept

    def most_entries(self, sequences: Sequence[SequenceState]) -> int:
        """That these sequences may come to need together."""
        return self.weigh_all([self.capacity([sequence]) for sequence in sequences])

    def weigh_all(self, finals: Sequence[int]) -> int:
        """Entries of all layers that sequences may come to need together, each of which may come to need so many."""
        longest = max(finals, default=0)
        even = len(finals) * max((one.room(longest) for one in self.drafter.cached_drafters), default=0)
        target = most_entries(finals, self.weigh) if self.ragged else len(finals) * self.weigh(longest)
        return math.ceil(target + self.drafter_share * (max(even, target) - target))

    def most_tokens(self) -> int | None:
        """Of a text that the cache has room for; None where there is no limit."""
        most = self.max_cache_tokens
        if most is None:
            return None
        lengths = range(1, (self.target.context or most) + 1)
        return bisect_right(lengths, most, key=lambda length: self.weigh_all([length + 2 * self.drafter.nodes]))

    def weigh(self, entries: int) -> int:
        """Entries of all layers that take as many bytes as a sequence of so many."""
        sliding = self.target.sliding(self.drafter.nodes)
        return entries + self.target.state_entries if sliding is None else sliding.weigh(entries)

    def need(self, sequence: SequenceState) -> Need:
        now = len(sequence.text) + 2 * self.drafter.nodes
        return Need(now, self.room([sequence]), self.capacity([sequence]))

    def are_alike(self, one: SequenceState, other: SequenceState) -> bool:
        """Will they lie in the same memory?"""
        return not self.ragged or self.need(one).cohort == self.need(other).cohort

    def room(self, sequences: Sequence[SequenceState]) -> int:
        """Entries that each gets for now."""
        longest = max(len(sequence.text) for sequence in sequences)
        room = min(self.capacity(sequences), longest + 2 * self.drafter.nodes + ROOM)
        return self.rounded(room, len(sequences))

    def rounded(self, capacity: int, count: int) -> int:
        """Entries for each of so many sequences. What was captured is lost whenever they change, so there they are a power of
        two if memory allows that."""
        rounded, most = bucket(capacity), self.max_cache_tokens
        return rounded if self.captured and (most is None or count * self.weigh(rounded) <= most) else capacity

    def make_room(self) -> None:
        """Before a step: twice as many entries, where the next tree may not fit, and no finished sequences. What was captured
        is lost; since captured forwards see powers of two of columns, it is little that the texts would have used again."""
        cache = self.open_cache()
        if isinstance(cache, RaggedCache):
            if cache.is_short([self.need(sequence) for sequence in self.sequences]):
                self.rearrange(self.arranged([]), [])
        elif max(cache.lengths) + 2 * self.drafter.nodes > cache.capacity:
            needed = self.capacity([self.sequences[slot] for slot in self.unfinished()])
            order = self.arranged([])
            self.rearrange(order, [], self.rounded(min(needed, 2 * cache.capacity), len(order)))

    def open_cache(self) -> TargetCache:
        assert self.cache is not None, "a step without a sequence"
        return self.cache

    def join(self, prompts: Prompts, last: LastPositions) -> list[RequestOutput]:
        """The sequences of prefilled prompts get their first tokens, and join where their texts continue."""
        first_tokens, traces = self.sample_first_tokens(prompts, last)
        outputs = []
        for sequence, token in zip(prompts.sequences, first_tokens, strict=True):
            if sequence.finish_reason is not None:  # cancelled meanwhile
                continue
            if token is None:
                sequence.finish_reason = "error"
            added = [] if token is None else sequence.extend([token])
            trace = traces.get(sequence.request)
            outputs.append(RequestOutput(sequence.request, added, None, 1, sequence.finish_reason, trace))
        new = [number for number, sequence in enumerate(prompts.sequences) if sequence.finish_reason is None]
        if new:
            self.add(prompts, new, last.output.aux_hidden_states)
        return outputs

    def sample_first_tokens(
        self, prompts: Prompts, last: LastPositions
    ) -> tuple[list[int | None], dict[Request, Trace]]:
        """The first token after each prompt, None where a logit was not a number, and traces."""
        sequences, logits = prompts.sequences, last.output.logits
        sampler = self.new_sampler(sequences)
        tree = bonus_only(Accepted(last.tokens, last.output.aux_hidden_states, [1] * len(sequences), []))
        cache = prompts.cache
        verification, outcome = sampler.verify(logits, tree, None, 0, cache.seq_lens, cache.graphs)
        pairs = zip(outcome.valid, outcome.tokens, strict=True)
        chosen = [None if valid == Validity.INVALID else tokens[0] for valid, tokens in pairs]
        return chosen, trace_sequences(sequences, tree, verification, logits)

    def add(self, prompts: Prompts, new: list[int], aux_hidden_states: Tensor) -> None:
        """These of the prefilled sequences join the batch. aux_hidden_states: (sequences, 1, width), of the positions before
        their bonus tokens."""
        sequences = [prompts.sequences[number] for number in new]
        order = self.arranged(sequences)
        slots = [slot for slot, old in enumerate(order) if old is None][: len(new)]
        if self.cache is None:
            whole = len(new) == len(prompts.sequences)
            self.cache = prompts.cache if whole else self.new_cache(len(new), self.room(sequences))
            if self.ragged and isinstance(self.cache, KVCache):
                self.cache = RaggedCache(self.cache, self.capacity(sequences))
            self.sequences, self.sampler = sequences, self.new_sampler(sequences)
            self.drafter.begin(len(new), self.cache.capacity, self.sampler.sampling)
        else:
            self.rearrange(order, sequences)
        for mine, theirs in zip(self.caches(), [prompts.cache, *prompts.caches], strict=True):
            if mine is not theirs:
                mine.copy_from(slots, theirs, new)
        bonus_tokens = aux_hidden_states.new_tensor([[one.text[-1]] for one in sequences], dtype=torch.int64)
        fresh = Accepted(bonus_tokens, aux_hidden_states[new], [1] * len(new), [one.text for one in sequences])
        self.accepted = fresh if len(new) == len(self.sequences) else placed(self.accepted, slots, fresh)

    def caches(self) -> list[Any]:
        """The target's, and those of its drafters that have one."""
        return [self.cache, *(drafter.cache for drafter in self.drafter.cached_drafters)]

    def arranged(self, arriving: Sequence[SequenceState]) -> list[int | None]:
        """Which of its sequences the batch will be by slot, None being an arriving one: these take the slots of finished
        ones, and the last sequences take those that are left. Where steps are captured, for each size of the batch, a power
        of two of slots is filled up with None, unless there is no memory for it."""
        order = [None if one.finish_reason else slot for slot, one in enumerate(self.sequences)]
        count, most = len(order) - order.count(None) + len(arriving), self.max_cache_tokens
        if (
            self.captured
            and count
            and (most is None or power_of_two(count) * self.weigh(self.room([*self.sequences, *arriving])) <= most)
        ):
            count = power_of_two(count)
        if count >= len(order):
            return order + [None] * (count - len(order))
        for _ in range(len(order) - count):
            last = order.pop()
            if last is not None:
                order[order.index(None)] = last
        return order

    @torch.inference_mode()
    def drop_finished(self) -> None:
        """Before a step: finished sequences leave."""
        order = self.arranged([])
        same = [None if one is self.padding else slot for slot, one in enumerate(self.sequences)]
        if order and order != same:
            self.rearrange(order, [])

    def rearrange(
        self, order: list[int | None], arriving: Sequence[SequenceState], capacity: int | None = None
    ) -> None:
        """The batch becomes that of these of its slots, None being an arriving sequence or none, with room for `capacity`
        entries each, or what there is."""
        for slot, one in enumerate(self.sequences):
            if one.finish_reason == "error" and slot not in order:  # a NaN, which no mask hides from who comes here
                for cache in self.caches():
                    cache.erase(slot)
        new = iter(arriving)
        self.sequences = [next(new, self.padding) if old is None else self.sequences[old] for old in order]
        cache = self.open_cache()
        if isinstance(cache, RaggedCache):
            most = self.max_cache_tokens
            needs = [self.need(sequence) for sequence in self.sequences]
            cache.reorder(order, needs, None if most is None else most - cache.entries - self.prompt_entries)
            capacity = max(cache.capacity, *(needs[slot].room for slot, old in enumerate(order) if old is None), 0)
        else:
            capacity = self.kept_capacity(len(order)) if capacity is None else capacity
            cache.reorder(order, capacity, self.max_cache_tokens)
        self.sampler = self.new_sampler(self.sequences)
        self.drafter.select_sequences(order, capacity, self.sampler.sampling)
        self.accepted = select(self.accepted, order)._replace(text=[one.text for one in self.sequences])

    def new_prompt_cache(self, sequences: Sequence[SequenceState]) -> TargetCache:
        """For sequences that are to join: the batch's own where there is none yet, or where there is none of their length."""
        room, most = self.room(sequences), self.max_cache_tokens
        asked = self.prompt_entries + len(sequences) * self.weigh(room)
        if most is not None and isinstance(self.cache, RaggedCache) and self.cache.entries + asked > most:
            self.give_back()
        if self.cache is None or self.ragged:
            return self.new_cache(len(sequences), room)
        longest = max(len(sequence.text) for sequence in sequences)
        return self.target.new_cache(len(sequences), longest, self.drafter.nodes)

    def new_cache(self, batch: int, capacity: int) -> TargetCache:
        return self.target.acquire_cache(batch, capacity, self.drafter.nodes)

    def give_back(self) -> None:
        """The memory of finished sequences, and of slots that are free."""
        assert isinstance(self.cache, RaggedCache)
        self.drop_finished()
        if self.unfinished():
            self.cache.trim()
        else:
            self.sequences, self.cache = [], None

    def store_prefixes(self, prefixes: PrefixCache, namespace: int, stepped: Sequence[bool]) -> None:
        """Texts that have ended in this step go into the prefix cache: a conversation continues from them."""
        lags = [self.open_cache().lag, *(drafter.cache_lag for drafter in self.drafter.cached_drafters)]
        for slot, sequence in enumerate(self.sequences):
            if stepped[slot] and sequence.finish_reason in ("stop", "length"):
                prefixes.store(namespace, sequence.text, self.caches(), lags, slot)

    def kept_capacity(self, count: int) -> int:
        """Entries for each of so many sequences: what there is, as long as it is enough and memory allows it."""
        room, kept = self.room(self.sequences), self.open_cache().capacity
        fits = self.max_cache_tokens is None or count * self.weigh(kept) <= self.max_cache_tokens
        enough = max(len(sequence.text) for sequence in self.sequences) + 2 * self.drafter.nodes
        return kept if fits and enough <= kept else room

    def fail(self, valid: Sequence[int], nodes: int) -> list[RequestOutput]:
        """Sequences whose logits are not numbers end here. Nothing of them stays in the cache: no mask hides a NaN."""
        failed = []
        for slot, (sequence, one) in enumerate(zip(self.sequences, valid, strict=True)):
            if one == Validity.INVALID and sequence.finish_reason is None:
                sequence.finish_reason = "error"
                self.open_cache().erase(slot)
                failed.append(RequestOutput(sequence.request, [], None, nodes, "error"))
        return failed

    def new_sampler(self, sequences: Sequence[SequenceState]) -> TargetSampler:
        return TargetSampler(self.verifier, sequences, self.target.vocab_size, self.target.device)


def placed(accepted: Accepted, slots: Sequence[int], fresh: Accepted) -> Accepted:
    """The same with these sequences in these slots."""
    accepted, fresh = widened(accepted, fresh.tokens.shape[1]), widened(fresh, accepted.tokens.shape[1])
    accepted.tokens[slots], accepted.aux_hidden_states[slots] = fresh.tokens, fresh.aux_hidden_states
    for slot, count, text in zip(slots, fresh.counts, fresh.text, strict=True):
        accepted.counts[slot], accepted.text[slot] = count, text
    return accepted
