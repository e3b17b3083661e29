"""A batch: the sequences that are decoded together, with the target's cache, the sampler and the drafter's next input.
Sequences join after their prompts were prefilled, and leave when they have finished."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache
from foredraft.heads.target.cache import bucket, to_device
from foredraft.heads.target.cuda_graphs import captures, power_of_two
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only, pad_accepted, select
from foredraft.inference.prefill import LastPositions, Prompts
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import Request, SequenceState, StoppingCriteria
from foredraft.inference.target_sampler import TargetSampler
from foredraft.inference.trace import Trace, trace_sequences
from foredraft.inference.verify import Validity, Verifier

# Cache entries after its text that a new sequence gets, up to its limit: most texts end long before that.
INITIAL_ENTRIES = 1024


class RequestOutput(NamedTuple):
    """Report what one step did for a request."""

    request: Request
    tokens: list[int]  # new tokens of its text: accepted drafts and the next bonus token, up to the end of the text
    accepted: int | None  # number of accepted drafts; None if the step prefilled the prompt
    nodes: int  # number of nodes of the tree, including the bonus token
    finish_reason: str | None  # see SequenceState
    trace: Trace | None = None  # only if the request asks for a trace
    depth: int = 0  # maximum depth of the step's tree


class Batch:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        max_cache_tokens: int | None,
        drafter_share: float = 0.0,
    ):
        """Initialize an empty batch. The parameters are those of `Engine`."""
        self.target, self.drafter = target, drafter
        self.verifier, self.max_cache_tokens, self.drafter_share = verifier, max_cache_tokens, drafter_share
        self.sequences: list[SequenceState] = []  # by slot
        self.cache: TargetCache | None = None
        self.captured = target.supports_trees and captures(target.device, target.supports_cuda_graphs)
        # With CUDA graphs, the number of slots is a power of two. This sequence fills the unused slots.
        nothing = Request([0], max_new_tokens=0)
        self.padding = SequenceState(nothing, [0], StoppingCriteria(target, nothing), finish_reason="padding")
        self.sampler: TargetSampler
        self.accepted: Accepted  # the next input of the drafter
        # Which sequences have finished, on the host and on the device (batch, 1).
        self.ended: tuple[list[bool], Tensor] | None = None

    def unfinished(self) -> list[int]:
        """Return the slots of the sequences that have not finished."""
        return [slot for slot, sequence in enumerate(self.sequences) if sequence.finish_reason is None]

    def mask_finished(self, counts: Tensor) -> Tensor:
        """Return counts (batch,) as (batch, 1), with 0 for finished sequences. The mask is copied to the device on change."""
        ended = [sequence.finish_reason is not None for sequence in self.sequences]
        if not any(ended):
            return counts[:, None]
        if self.ended is None or self.ended[0] != ended:
            self.ended = ended, to_device(ended, counts.device)[:, None].bool()
        return counts[:, None].masked_fill(self.ended[1], 0)

    def capacity(self, sequences: Sequence[SequenceState]) -> int:
        """Return the number of cache entries that each sequence of such a batch may need in the end."""
        longest = max(len(sequence.request.prompt) + sequence.stopping.budget for sequence in sequences)
        return longest + 2 * self.drafter.nodes  # the accepted path of the last step, then its tree

    def max_entries(self, sequences: Sequence[SequenceState]) -> int:
        """Return the number of cache entries that these sequences together may need in the end."""
        return self.total_entries([self.capacity([sequence]) for sequence in sequences])

    def total_entries(self, finals: Sequence[int]) -> int:
        """Return the number of entries of all layers, for sequences of the final lengths `finals`."""
        longest = max(finals, default=0)
        drafters = self.drafter.cached_drafters
        even = len(finals) * max((drafter.cache_entries(longest) for drafter in drafters), default=0)
        target = len(finals) * self.num_entries(longest)
        return math.ceil(target + self.drafter_share * (max(even, target) - target))

    def max_text_tokens(self) -> int | None:
        """Return the maximum length of a text that fits into the cache, in tokens; None without a limit."""
        most = self.max_cache_tokens
        if most is None:
            return None
        lengths = range(1, (self.target.context or most) + 1)
        return bisect_right(lengths, most, key=lambda length: self.total_entries([length + 2 * self.drafter.nodes]))

    def num_entries(self, entries: int) -> int:
        """Convert the length of a sequence to the number of entries of all layers that take the same memory."""
        sliding = self.target.sliding(self.drafter.nodes)
        return entries + self.target.state_entries if sliding is None else sliding.num_entries(entries)

    def current_capacity(self, sequences: Sequence[SequenceState]) -> int:
        """Return the number of entries that each sequence gets for now."""
        longest = max(len(sequence.text) for sequence in sequences)
        room = min(self.capacity(sequences), longest + 2 * self.drafter.nodes + INITIAL_ENTRIES)
        return self.round_capacity(room, len(sequences))

    def round_capacity(self, capacity: int, count: int) -> int:
        """Round up the capacity of `count` sequences. CUDA graphs are lost when it changes, so with graphs it is a power of
        two, if memory allows that."""
        rounded, most = bucket(capacity), self.max_cache_tokens
        return rounded if self.captured and (most is None or count * self.num_entries(rounded) <= most) else capacity

    def grow_cache(self) -> None:
        """Extend the capacity (twofold) if the next tree may not fit, and drop finished sequences. This discards captured
        graphs, at little cost: they depend on the width of the cache, and most would not be used again anyway."""
        cache = self.open_cache()
        if max(cache.lengths) + 2 * self.drafter.nodes > cache.capacity:
            needed = self.capacity([self.sequences[slot] for slot in self.unfinished()])
            order = self.plan_slots([])
            self.rearrange(order, [], self.round_capacity(min(needed, 2 * cache.capacity), len(order)))

    def open_cache(self) -> TargetCache:
        assert self.cache is not None, "a step without a sequence"
        return self.cache

    def join(self, prompts: Prompts, last: LastPositions) -> list[RequestOutput]:
        """Sample the first tokens of prefilled prompts, and add the sequences that do not end with them."""
        first_tokens, traces = self.sample_first_tokens(prompts, last)
        outputs = []
        for sequence, token in zip(prompts.sequences, first_tokens, strict=True):
            if sequence.finish_reason is not None:  # canceled during the prefill
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
        """Return the first token after each prompt (None if a logit was NaN), and traces."""
        sequences, logits = prompts.sequences, last.output.logits
        sampler = self.new_sampler(sequences)
        tree = bonus_only(Accepted(last.tokens, last.output.aux_hidden_states, [1] * len(sequences), []))
        cache = prompts.cache
        verification, outcome = sampler.verify(logits, tree, None, 0, cache.seq_lens, cache.graphs)
        pairs = zip(outcome.valid, outcome.tokens, strict=True)
        chosen = [None if valid == Validity.INVALID else tokens[0] for valid, tokens in pairs]
        return chosen, trace_sequences(sequences, tree, verification, logits)

    def add(self, prompts: Prompts, new: list[int], aux_hidden_states: Tensor) -> None:
        """Add the prefilled sequences with the indices `new` to the batch. aux_hidden_states: (sequences, 1, width), of the
        positions before their bonus tokens."""
        sequences = [prompts.sequences[number] for number in new]
        order = self.plan_slots(sequences)
        slots = [slot for slot, old in enumerate(order) if old is None][: len(new)]
        if self.cache is None:
            whole = len(new) == len(prompts.sequences)
            self.cache = prompts.cache if whole else self.new_cache(len(new), self.current_capacity(sequences))
            self.sequences, self.sampler = sequences, self.new_sampler(sequences)
            self.drafter.begin(len(new), self.cache.capacity, self.sampler.sampling)
        else:
            self.rearrange(order, sequences)
        for mine, theirs in zip(self.caches(), [prompts.cache, *prompts.caches], strict=True):
            if mine is not theirs:
                mine.copy_from(slots, theirs, new)
        bonus_tokens = aux_hidden_states.new_tensor([[sequence.text[-1]] for sequence in sequences], dtype=torch.int64)
        texts = [sequence.text for sequence in sequences]
        fresh = Accepted(bonus_tokens, aux_hidden_states[new], [1] * len(new), texts)
        self.accepted = fresh if len(new) == len(self.sequences) else scatter_accepted(self.accepted, slots, fresh)

    def caches(self) -> list[Any]:
        """Return the target's cache and those of its drafters."""
        return [self.cache, *(drafter.cache for drafter in self.drafter.cached_drafters)]

    def plan_slots(self, arriving: Sequence[SequenceState]) -> list[int | None]:
        """Return the old slot of each sequence of the next batch, or None for a new sequence. New sequences take the slots of
        finished ones. The last sequences move into slots that are still free. With CUDA graphs, the number of slots is
        filled up to a power of two with None, if memory allows it."""
        order = [None if sequence.finish_reason else slot for slot, sequence in enumerate(self.sequences)]
        count, most = len(order) - order.count(None) + len(arriving), self.max_cache_tokens
        if self.captured and count:
            needed = power_of_two(count) * self.num_entries(self.current_capacity([*self.sequences, *arriving]))
            count = power_of_two(count) if most is None or needed <= most else count
        if count >= len(order):
            return order + [None] * (count - len(order))
        for _ in range(len(order) - count):
            last = order.pop()
            if last is not None:
                order[order.index(None)] = last
        return order

    @torch.inference_mode()
    def drop_finished(self) -> None:
        """Remove finished sequences. Called before a step."""
        order = self.plan_slots([])
        same = [None if sequence is self.padding else slot for slot, sequence in enumerate(self.sequences)]
        if order and order != same:
            self.rearrange(order, [])

    def rearrange(
        self, order: list[int | None], arriving: Sequence[SequenceState], capacity: int | None = None
    ) -> None:
        """Reorder the batch: slot i gets the sequence of slot order[i], or the next arriving one (or padding) for None.
        capacity: entries of each sequence; None retains the current number."""
        for slot, sequence in enumerate(self.sequences):
            if sequence.finish_reason == "error" and slot not in order:  # no mask hides its NaN from the next one
                for cache in self.caches():
                    cache.erase(slot)
        new = iter(arriving)
        self.sequences = [next(new, self.padding) if old is None else self.sequences[old] for old in order]
        capacity = self.retained_capacity(len(order)) if capacity is None else capacity
        self.open_cache().reorder(order, capacity, self.max_cache_tokens)
        self.sampler = self.new_sampler(self.sequences)
        self.drafter.select_sequences(order, capacity, self.sampler.sampling)
        self.accepted = select(self.accepted, order)._replace(text=[sequence.text for sequence in self.sequences])

    def new_prompt_cache(self, sequences: Sequence[SequenceState]) -> TargetCache:
        """Return a cache to prefill new sequences: the batch's future cache if it has none."""
        if self.cache is None:
            return self.new_cache(len(sequences), self.current_capacity(sequences))
        longest = max(len(sequence.text) for sequence in sequences)
        return self.target.new_cache(len(sequences), longest, self.drafter.nodes)

    def new_cache(self, batch: int, capacity: int) -> TargetCache:
        return self.target.acquire_cache(batch, capacity, self.drafter.nodes)

    def store_prefixes(self, prefixes: PrefixCache, namespace: int, stepped: Sequence[bool]) -> None:
        """Store the texts that ended in this step in the prefix cache, because conversations continue from them."""
        lags = [self.open_cache().lag, *(drafter.cache_lag for drafter in self.drafter.cached_drafters)]
        for slot, sequence in enumerate(self.sequences):
            if stepped[slot] and sequence.finish_reason in ("stop", "length"):
                prefixes.store(namespace, sequence.text, self.caches(), lags, slot)

    def retained_capacity(self, count: int) -> int:
        """Return the current capacity if it is sufficient and `count` sequences of it fit into memory, else a new one."""
        room, kept = self.current_capacity(self.sequences), self.open_cache().capacity
        fits = self.max_cache_tokens is None or count * self.num_entries(kept) <= self.max_cache_tokens
        enough = max(len(sequence.text) for sequence in self.sequences) + 2 * self.drafter.nodes
        return kept if fits and enough <= kept else room

    def end_invalid(self, valid: Sequence[int], nodes: int) -> list[RequestOutput]:
        """End the sequences with NaN logits, and erase their cache entries, because no mask hides a NaN."""
        failed = []
        for slot, (sequence, validity) in enumerate(zip(self.sequences, valid, strict=True)):
            if validity == Validity.INVALID and sequence.finish_reason is None:
                sequence.finish_reason = "error"
                self.open_cache().erase(slot)
                failed.append(RequestOutput(sequence.request, [], None, nodes, "error"))
        return failed

    def new_sampler(self, sequences: Sequence[SequenceState]) -> TargetSampler:
        return TargetSampler(self.verifier, sequences, self.target.vocab_size, self.target.device)


def scatter_accepted(accepted: Accepted, slots: Sequence[int], fresh: Accepted) -> Accepted:
    """Return `accepted` with the sequences of `fresh` in these slots."""
    accepted, fresh = pad_accepted(accepted, fresh.tokens.shape[1]), pad_accepted(fresh, accepted.tokens.shape[1])
    accepted.tokens[slots], accepted.aux_hidden_states[slots] = fresh.tokens, fresh.aux_hidden_states
    for slot, count, text in zip(slots, fresh.counts, fresh.text, strict=True):
        accepted.counts[slot], accepted.text[slot] = count, text
    return accepted
