"""Prefill the prompts of new requests, whole or in chunks between the steps of the running requests.

    prompt    h h h h h h h h | a a a a | b b b b | c c        h: from the prefix cache; a, b, c: prefilled chunk by chunk

The sequences have separate caches until they join the batch. Drafters with a cache process each chunk right after the
target, so only the bonus token is left when a sequence joins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache, TargetOutput
from foredraft.heads.target.cache import KVCache
from foredraft.inference.drafters.base import Accepted, Drafter, select_layers
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import SequenceState


class LastPositions(NamedTuple):
    """Hold the outputs at the last tokens of prefilled prompts."""

    tokens: Tensor  # (sequences, 1) int64
    output: TargetOutput  # logits (sequences, 1, vocab), aux hidden states (sequences, 1, width)


class Prompts:
    """Prefill some sequences together: several that fit into one chunk, or a single long one."""

    def __init__(self, sequences: Sequence[SequenceState], target: Target, drafter: Drafter, cache: TargetCache):
        """Start with the target's `cache`, which is empty and large enough for the texts."""
        self.sequences, self.target, self.drafter, self.cache = sequences, target, drafter, cache
        self.lengths = [len(sequence.text) for sequence in sequences]
        self.cached_drafters = drafter.cached_drafters
        self.caches = [drafter.new_cache(len(sequences), max(self.lengths)) for drafter in self.cached_drafters]
        self.lags = [cache.lag, *(drafter.cache_lag for drafter in self.cached_drafters)]
        self.stops = [self.lengths]  # lengths at which forwards must end, in order

    def unfinished(self) -> bool:
        return any(sequence.finish_reason is None for sequence in self.sequences)

    def load_prefixes(self, prefixes: PrefixCache, namespace: int) -> None:
        """Load the cached prefixes of the texts. The last token is always prefilled, since each position's aux hidden states
        are combined with the token after it."""
        assert isinstance(self.cache, KVCache)
        if self.cache.lag:
            self.stops = [*self.block_ends(prefixes, namespace), self.lengths]
        window = self.target.window or self.cache.lag
        hits = [prefixes.find(namespace, sequence.text, window) for sequence in self.sequences]
        lengths = [max(0, sum(len(block.tokens) for block in blocks) - 1) for blocks in hits]
        # In a batch, the padding of a short sequence may follow the prefix of a long one.
        room = 1 + max(lengths) + max(whole - length for whole, length in zip(self.lengths, lengths, strict=True))
        for number, (cache, lag) in enumerate(zip([self.cache, *self.caches], self.lags, strict=True)):
            cache.reorder(list(range(cache.batch)), max(cache.capacity, room))
            for row, blocks in enumerate(hits):
                if blocks:
                    cache.copy_in(row, [block.states[number] for block in blocks], lengths[row] + 1 - lag)
            # A drafter's entries end where the blocks end; the target's entries end one before.
            cache.set_lengths([length and length + 1 - lag if number else length for length in lengths])

    def block_ends(self, prefixes: PrefixCache, namespace: int) -> list[list[int]]:
        """Return the lengths at which recurrent states are stored: at the end of the cached and of all whole blocks."""
        known = [len(prefixes.keys(namespace, sequence.text)) * prefixes.block for sequence in self.sequences]
        whole = [length - length % prefixes.block for length in self.lengths]
        return [[max(0, end - self.cache.lag) for end in ends] for ends in (known, whole)]

    def store_prefixes(self, prefixes: PrefixCache, namespace: int) -> None:
        """Store the prefilled part of the prompts in the prefix cache."""
        caches: Any = [self.cache, *self.caches]
        for row, sequence in enumerate(self.sequences):
            if sequence.finish_reason != "error":
                prefixes.store(namespace, sequence.text, caches, self.lags, row)
            else:  # earlier chunks may have been stored
                prefixes.forget(namespace, sequence.text)

    def prefill(self, most: int | None) -> LastPositions | None:
        """Prefill one more chunk of at most `most` tokens of all sequences (at least one each). None until all are done."""
        done, device = self.cache.lengths, self.target.device
        rests = ([max(0, end - start) for end, start in zip(ends, done, strict=True)] for ends in self.stops)
        rest = next(rest for rest in rests if any(rest))
        width = max(rest) if most is None else min(max(rest), max(1, most // len(rest)))
        counts = [min(width, count) for count in rest]
        parts = [sequence.text[start : start + width + 1] for sequence, start in zip(self.sequences, done, strict=True)]
        text = torch.tensor([part + [0] * (width + 1 - len(part)) for part in parts], device=device)
        output = self.target.prefill(text[:, :width], counts, self.cache, self.drafter.layers)
        self.cache.set_lengths([start + count for start, count in zip(done, counts, strict=True)])
        self.prefill_drafters(text[:, 1:], output.aux_hidden_states, counts)
        if self.cache.lengths != self.lengths:
            return None
        last = text.new_tensor(counts)[:, None] - 1
        hidden = output.aux_hidden_states
        hidden = hidden.gather(1, last[:, :, None].expand(-1, -1, hidden.shape[-1]))
        return LastPositions(text.gather(1, last), TargetOutput(output.logits, hidden))

    def prefill_drafters(self, following: Tensor, aux_hidden_states: Tensor, counts: Sequence[int]) -> None:
        """Prefill the drafters with the chunk: each position's aux hidden states (sequences, n, width) with the token after
        it (sequences, n). The token after the last one of the prompt is not known yet."""
        ends = zip(self.cache.lengths, self.lengths, counts, strict=True)
        counts = [count - (end == length) for end, length, count in ends]
        width = max(counts)
        if width == 0:
            return
        texts = [sequence.text for sequence in self.sequences]
        accepted = Accepted(following[:, :width], aux_hidden_states[:, :width], counts, texts)
        for drafter, cache in zip(self.cached_drafters, self.caches, strict=True):
            drafter.prefill(select_layers(accepted, self.drafter.layers, drafter.layers), cache)
