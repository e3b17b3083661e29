"""The sequences that are decoded together, and what goes with them: the target's cache, the sampler, and what the drafter
gets next. Sequences join with their prompts prefilled, and leave when they have ended."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foredraft.heads.target import Target, TargetCache
from foredraft.heads.target.cache import to_device
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only, select
from foredraft.inference.prefill import LastPositions, Prompts
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import Request, SequenceState
from foredraft.inference.target_sampler import TargetSampler
from foredraft.inference.trace import Trace, trace_sequences
from foredraft.inference.verify import Validity, Verifier, to_host

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


class Batch:
    def __init__(self, target: Target, drafter: Drafter, verifier: Verifier, max_cache_tokens: int | None):
        """As `Engine` has them."""
        self.target, self.drafter = target, drafter
        self.verifier, self.max_cache_tokens = verifier, max_cache_tokens
        self.sequences: list[SequenceState] = []  # by slot
        self.cache: TargetCache | None = None
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

    def room(self, sequences: Sequence[SequenceState]) -> int:
        """Entries that each gets for now."""
        longest = max(len(sequence.text) for sequence in sequences)
        return min(self.capacity(sequences), longest + 2 * self.drafter.nodes + ROOM)

    def make_room(self) -> None:
        """Before a step: twice as many entries, where the next tree may not fit. What was captured is lost; since captured
        forwards see powers of two of columns, it is little that the texts would have used again."""
        cache = self.open_cache()
        if max(cache.lengths) + 2 * self.drafter.nodes > cache.capacity:
            staying = self.unfinished()
            needed = self.capacity([self.sequences[slot] for slot in staying])
            self.keep_sequences(staying, min(needed, 2 * cache.capacity))

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
        verification, validity = sampler.verify(logits, tree, None, 0, cache.seq_lens, cache.graphs)
        valid, _, _, new = to_host(verification, validity)
        chosen = [None if one == Validity.INVALID else tokens[0] for one, tokens in zip(valid, new, strict=True)]
        return chosen, trace_sequences(sequences, tree, verification, logits)

    def add(self, prompts: Prompts, new: list[int], aux_hidden_states: Tensor) -> None:
        """These of the prefilled sequences join the batch, in the slots of finished ones as far as there are any, so that
        nothing of the others is copied. aux_hidden_states: (sequences, 1, width), of the positions before their bonus
        tokens."""
        sequences = [prompts.sequences[number] for number in new]
        order, slots = self.assign_slots(sequences)
        failed = [one for one in slots if one < len(self.sequences) and self.sequences[one].finish_reason == "error"]
        arriving = iter(sequences)
        self.sequences = [next(arriving) if old is None else self.sequences[old] for old in order]
        self.sampler = self.new_sampler(self.sequences)
        begun = self.cache is not None
        if self.cache is None and len(new) == len(prompts.sequences):
            self.cache = prompts.cache
        else:
            cache: Any = self.reorder(order)
            for slot in failed:  # run again after it ended, it may have left NaN again, which no mask hides
                cache.erase(slot)
            cache.copy_from(slots, prompts.cache, new)
        capacity, sampling = self.open_cache().capacity, self.sampler.sampling
        if begun:
            self.drafter.select_sequences(order, capacity, sampling)
        else:
            self.drafter.begin(len(order), capacity, sampling)
        for drafter, cache in zip(self.drafter.cached_drafters, prompts.caches, strict=True):
            assert drafter.cache is not None
            for slot in failed:
                drafter.cache.erase(slot)
            drafter.cache.copy_from(slots, cache, new)
        bonus_tokens = aux_hidden_states.new_tensor([[one.text[-1]] for one in sequences], dtype=torch.int64)
        fresh = Accepted(bonus_tokens, aux_hidden_states[new], [1] * len(new), [one.text for one in sequences])
        if self.open_cache().graphs.active:  # as wide as what a step gives: one graph drafts after both
            fresh = widened(fresh, 1 + self.drafter.depth)
        self.accepted = fresh if len(new) == len(order) else placed(select(self.accepted, order), slots, fresh)

    def assign_slots(self, sequences: Sequence[SequenceState]) -> tuple[list[int | None], list[int]]:
        """Which of its sequences the batch will be, None being a new one, and the slots of these new ones, ascending.
        Finished sequences beyond those stay too, unless they would be half of the batch, or take memory that there is not."""
        staying = self.unfinished()
        needed = len(staying) + len(sequences)
        count, most = max(len(self.sequences), needed), self.max_cache_tokens
        if 2 * needed <= count or (most is not None and count * self.room([*self.sequences, *sequences]) > most):
            return [*staying, *[None] * len(sequences)], list(range(len(staying), needed))
        slots = [slot for slot in range(count) if slot not in staying][: len(sequences)]
        return [None if slot in slots else slot for slot in range(count)], slots

    @torch.inference_mode()
    def drop_finished(self) -> None:
        """Between steps: finished sequences leave even if nobody joins, where they are half of the batch or more. Not on a
        device that replays recordings, which know this batch and cost more than the sequences do."""
        staying = self.unfinished()
        if not staying or 2 * len(staying) > len(self.sequences) or self.open_cache().graphs.active:
            return
        self.keep_sequences(staying, self.kept_capacity(len(staying)))

    def keep_sequences(self, staying: list[int], capacity: int) -> None:
        """The batch becomes that of these sequences, with room for `capacity` entries each."""
        self.sequences = [self.sequences[slot] for slot in staying]
        order: list[int | None] = [*staying]
        self.open_cache().reorder(order, capacity)
        self.sampler = self.new_sampler(self.sequences)
        self.drafter.select_sequences(order, capacity, self.sampler.sampling)
        self.accepted = select(self.accepted, order)

    def new_prompt_cache(self, sequences: Sequence[SequenceState]) -> TargetCache:
        """For sequences that are to join: the batch's own where there is none yet."""
        if self.cache is None:
            return self.target.acquire_cache(len(sequences), self.room(sequences))
        return self.target.new_cache(len(sequences), max(len(sequence.text) for sequence in sequences))

    def store_prefixes(self, prefixes: PrefixCache, namespace: int, stepped: Sequence[bool]) -> None:
        """Texts that have ended in this step go into the prefix cache: a conversation continues from them."""
        drafters = self.drafter.cached_drafters
        caches: Any = [self.cache, *(drafter.cache for drafter in drafters)]
        lags = [0, *(drafter.cache_lag for drafter in drafters)]
        for slot, sequence in enumerate(self.sequences):
            if stepped[slot] and sequence.finish_reason in ("stop", "length"):
                prefixes.store(namespace, sequence.text, caches, lags, slot)

    def reorder(self, slots: list[int | None]) -> TargetCache:
        """The cache for a batch of the sequences in these slots, None being a new one."""
        if self.cache is None:
            self.cache = self.target.acquire_cache(len(slots), self.room(self.sequences))
        else:
            self.cache.reorder(slots, self.kept_capacity(len(slots)))
        return self.cache

    def kept_capacity(self, count: int) -> int:
        """Entries for each of so many sequences: what there is, as long as it is enough and memory allows it."""
        room, kept = self.room(self.sequences), self.open_cache().capacity
        fits = self.max_cache_tokens is None or count * kept <= self.max_cache_tokens
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


def widened(accepted: Accepted, width: int) -> Accepted:
    """Padded on the right."""
    more = max(0, width - accepted.tokens.shape[1])
    return accepted._replace(
        tokens=pad(accepted.tokens, (0, more)), aux_hidden_states=pad(accepted.aux_hidden_states, (0, 0, 0, more))
    )


def placed(accepted: Accepted, slots: Sequence[int], fresh: Accepted) -> Accepted:
    """The same with these sequences in these slots."""
    accepted, fresh = widened(accepted, fresh.tokens.shape[1]), widened(fresh, accepted.tokens.shape[1])
    accepted.tokens[slots], accepted.aux_hidden_states[slots] = fresh.tokens, fresh.aux_hidden_states
    for slot, count, text in zip(slots, fresh.counts, fresh.text, strict=True):
        accepted.counts[slot], accepted.text[slot] = count, text
    return accepted
