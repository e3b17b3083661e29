"""The rows that are decoded together, and what goes with them: the target's cache, the sampler, and what the drafter reads
next. Rows join with their prompts read, and leave when they have ended."""

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
from foredraft.inference.target_sampler import RuleSampler, TargetSampler
from foredraft.inference.trace import Trace, trace_rows
from foredraft.inference.verify import to_host

# Entries after its text that a row begins with, if its limit allows so many: most texts end long before that.
ROOM = 1024


class Output(NamedTuple):
    """What one step gave a request."""

    request: Request
    tokens: list[int]  # added to its text: accepted drafts and the bonus, less what the end cut off
    accepted: int | None  # drafts accepted; None where the step read its prompt
    nodes: int  # of the tree, the root counted
    finish_reason: str | None  # as a Row has it
    trace: Trace | None = None  # where the request asks for one
    depth: int = 0  # most levels that the step's tree may have


class Batch:
    def __init__(self, target: Target, drafter: Drafter, rule: str, lossless: bool, max_cache_tokens: int | None):
        """As `Engine` has them."""
        self.target, self.drafter = target, drafter
        self.rule, self.lossless, self.max_cache_tokens = rule, lossless, max_cache_tokens
        self.rows: list[SequenceState] = []
        self.cache: TargetCache | None = None
        self.sampler: TargetSampler
        self.accepted: Accepted  # what the drafter reads next
        self.ended: tuple[list[bool], Tensor] | None = None  # which rows had, and the same on the device (batch, 1)

    def unfinished(self) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row.finish_reason is None]

    def of_unfinished(self, counts: Tensor) -> Tensor:
        """counts (batch,) as (batch, 1), 0 in rows that have ended. They are copied to the device when one more has."""
        ended = [row.finish_reason is not None for row in self.rows]
        if not any(ended):
            return counts[:, None]
        if self.ended is None or self.ended[0] != ended:
            self.ended = ended, to_device(ended, counts.device)[:, None].bool()
        return counts[:, None].masked_fill(self.ended[1], 0)

    def capacity(self, rows: Sequence[SequenceState]) -> int:
        """Entries that each row of a batch of these may come to need."""
        longest = max(len(row.request.prompt) + row.stopping.budget for row in rows)
        return longest + 2 * self.drafter.nodes  # the last tree, after what the last path kept

    def room(self, rows: Sequence[SequenceState]) -> int:
        """Entries that each gets for now."""
        longest = max(len(row.text) for row in rows)
        return min(self.capacity(rows), longest + 2 * self.drafter.nodes + ROOM)

    def make_room(self) -> None:
        """Before a step: twice as many entries, where the next tree may not fit. What was captured is lost; since captured
        reads see powers of two of columns, it is little that the texts would have used again."""
        cache = self.open_cache()
        if max(cache.lengths) + 2 * self.drafter.nodes > cache.capacity:
            staying = self.unfinished()
            needed = self.capacity([self.rows[number] for number in staying])
            self.keep_rows(staying, min(needed, 2 * cache.capacity))

    def open_cache(self) -> TargetCache:
        assert self.cache is not None, "a step without a row"
        return self.cache

    def join(self, prompts: Prompts, last: LastPositions) -> list[Output]:
        """The rows of prompts that have been read get their first tokens, and join where their texts continue."""
        chosen, traces = self.first_tokens(prompts, last)
        outputs = []
        for row, token in zip(prompts.rows, chosen, strict=True):
            if row.finish_reason is not None:  # cancelled meanwhile
                continue
            if token is None:
                row.finish_reason = "error"
            added = [] if token is None else row.extend([token])
            outputs.append(Output(row.request, added, None, 1, row.finish_reason, traces.get(row.request)))
        new = [number for number, row in enumerate(prompts.rows) if row.finish_reason is None]
        if new:
            self.add(prompts, new, last.reading.aux_hidden_states)
        return outputs

    def first_tokens(self, prompts: Prompts, last: LastPositions) -> tuple[list[int | None], dict[Request, Trace]]:
        """The first token after each prompt, None where a logit was not a number, and traces."""
        sampler, rows, logits = self.new_sampler(prompts.rows), prompts.rows, last.reading.logits
        bonus_tokens = bonus_only(Accepted(last.tokens, last.reading.aux_hidden_states, [1] * len(rows), []))
        gumbel = sampler.gumbel(prompts.cache.seq_lens, 1)
        verification, broken = sampler.verify(logits, bonus_tokens, gumbel, 0, prompts.cache.graphs)
        bad, _, _, written = to_host(verification, broken)
        chosen = [None if is_bad else tokens[0] for is_bad, tokens in zip(bad, written, strict=True)]
        return chosen, trace_rows(rows, bonus_tokens, verification, logits)

    def add(self, prompts: Prompts, new: list[int], aux_hidden_states: Tensor) -> None:
        """These of the rows that have been read join the batch, in the places of finished ones as far as there are any, so
        that nothing of the others is copied. features: (rows, 1, width), of the positions before their roots."""
        rows = [prompts.rows[number] for number in new]
        order, places = self.places_for(rows)
        failed = [place for place in places if place < len(self.rows) and self.rows[place].finish_reason == "error"]
        arriving = iter(rows)
        self.rows = [next(arriving) if old is None else self.rows[old] for old in order]
        self.sampler = self.new_sampler(self.rows)
        begun = self.cache is not None
        if self.cache is None and len(new) == len(prompts.rows):
            self.cache = prompts.cache
        else:
            cache: Any = self.reorder(order)
            for place in failed:  # read again after it ended, it may have left NaN again, which no mask hides
                cache.erase(place)
            cache.copy_from(places, prompts.cache, new)
        capacity, sampling = self.open_cache().capacity, self.sampler.sampling
        if begun:
            self.drafter.select_sequences(order, capacity, sampling)
        else:
            self.drafter.begin(len(order), capacity, sampling)
        for reader, cache in zip(self.drafter.cached_drafters, prompts.caches, strict=True):
            assert reader.cache is not None
            for place in failed:
                reader.cache.erase(place)
            reader.cache.copy_from(places, cache, new)
        bonus_tokens = aux_hidden_states.new_tensor([[row.text[-1]] for row in rows], dtype=torch.int64)
        fresh = Accepted(bonus_tokens, aux_hidden_states[new], [1] * len(new), [row.text for row in rows])
        if self.open_cache().graphs.active:  # as wide as what a step gives: one graph drafts after both
            fresh = widened(fresh, 1 + self.drafter.depth)
        self.accepted = fresh if len(new) == len(order) else placed(select(self.accepted, order), places, fresh)

    def places_for(self, rows: Sequence[SequenceState]) -> tuple[list[int | None], list[int]]:
        """Which of its rows the batch will be, None being a new one, and where these new ones will be, ascending. Finished
        rows beyond those stay too, unless they would be half of the batch, or take memory that there is not."""
        staying = self.unfinished()
        needed = len(staying) + len(rows)
        count, most = max(len(self.rows), needed), self.max_cache_tokens
        if 2 * needed <= count or (most is not None and count * self.room([*self.rows, *rows]) > most):
            return [*staying, *[None] * len(rows)], list(range(len(staying), needed))
        places = [number for number in range(count) if number not in staying][: len(rows)]
        return [None if number in places else number for number in range(count)], places

    @torch.inference_mode()
    def drop_finished(self) -> None:
        """Between steps: finished rows leave even if nobody joins, where they are half of the batch or more. Not on a device
        that replays recordings, which know this batch and cost more than the rows do."""
        staying = self.unfinished()
        if not staying or 2 * len(staying) > len(self.rows) or self.open_cache().graphs.active:
            return
        self.keep_rows(staying, self.kept_capacity(len(staying)))

    def keep_rows(self, staying: list[int], capacity: int) -> None:
        """The batch becomes that of these rows, with room for `capacity` entries each."""
        self.rows = [self.rows[number] for number in staying]
        order: list[int | None] = [*staying]
        self.open_cache().reorder(order, capacity)
        self.sampler = self.new_sampler(self.rows)
        self.drafter.select_sequences(order, capacity, self.sampler.sampling)
        self.accepted = select(self.accepted, order)

    def cache_for_prompts(self, rows: Sequence[SequenceState]) -> TargetCache:
        """For rows that are to join: the batch's own where there is none yet."""
        if self.cache is None:
            return self.target.acquire_cache(len(rows), self.room(rows))
        return self.target.new_cache(len(rows), max(len(row.text) for row in rows))

    def keep(self, prefixes: PrefixCache, root: int, stepped: Sequence[bool]) -> None:
        """Texts that have ended in this step go into the prefix cache: a conversation continues from them."""
        for number, row in enumerate(self.rows):
            if stepped[number] and row.finish_reason in ("stop", "length"):
                cached_drafters = self.drafter.cached_drafters
                caches: Any = [self.cache, *(reader.cache for reader in cached_drafters)]
                prefixes.store(root, row.text, caches, [0, *(reader.cache_lag for reader in cached_drafters)], number)

    def reorder(self, rows: list[int | None]) -> TargetCache:
        """The cache for a batch of these of its rows, None being a new one."""
        if self.cache is None:
            self.cache = self.target.acquire_cache(len(rows), self.room(self.rows))
        else:
            self.cache.reorder(rows, self.kept_capacity(len(rows)))
        return self.cache

    def kept_capacity(self, count: int) -> int:
        """Entries for each of so many rows, which are `rows` now: what there is, as long as memory allows it."""
        room = self.room(self.rows)
        kept = max(room, self.open_cache().capacity)
        return room if self.max_cache_tokens is not None and count * kept > self.max_cache_tokens else kept

    def fail(self, bad: Sequence[bool], nodes: int) -> list[Output]:
        """Rows whose logits are not numbers end here. Nothing of them stays in the cache: no mask hides a NaN."""
        failed = []
        for number, (row, is_bad) in enumerate(zip(self.rows, bad, strict=True)):
            if is_bad and row.finish_reason is None:
                row.finish_reason = "error"
                self.open_cache().erase(number)
                failed.append(Output(row.request, [], None, nodes, "error"))
        return failed

    def new_sampler(self, rows: Sequence[SequenceState]) -> TargetSampler:
        facts = rows, self.target.vocab_size, self.target.device
        return TargetSampler(*facts) if self.rule == "coupled" else RuleSampler(self.rule, self.lossless, *facts)


def widened(accepted: Accepted, width: int) -> Accepted:
    """Padded on the right."""
    more = max(0, width - accepted.tokens.shape[1])
    return accepted._replace(
        tokens=pad(accepted.tokens, (0, more)), aux_hidden_states=pad(accepted.aux_hidden_states, (0, 0, 0, more))
    )


def placed(accepted: Accepted, places: Sequence[int], fresh: Accepted) -> Accepted:
    """The same with these rows in these places."""
    accepted, fresh = widened(accepted, fresh.tokens.shape[1]), widened(fresh, accepted.tokens.shape[1])
    accepted.tokens[places], accepted.aux_hidden_states[places] = fresh.tokens, fresh.aux_hidden_states
    for place, count, text in zip(places, fresh.counts, fresh.text, strict=True):
        accepted.counts[place], accepted.text[place] = count, text
    return accepted
