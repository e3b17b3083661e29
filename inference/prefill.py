"""Prefill of the prompts of requests that are to join: whole, or in chunks between the steps of those that are decoded.

    prompt    h h h h h h h h | a a a a | b b b b | c c        h from the prefix cache, a b c prefilled chunk by chunk

The sequences have caches of their own until they join the batch. Drafters with a cache take in each chunk right after the
target, so nothing is left but the bonus token when a sequence joins.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache, TargetOutput
from foredraft.heads.target.cache import KVCache
from foredraft.inference.drafters.base import Accepted, Drafter, share
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import SequenceState


class LastPositions(NamedTuple):
    """Of prompts that have been prefilled, what follows from their last tokens."""

    tokens: Tensor  # (sequences, 1) int64
    output: TargetOutput  # logits (sequences, 1, vocab), aux hidden states (sequences, 1, width)


class Prompts:
    """Some sequences whose texts are prefilled together. Several are short enough for one chunk, a longer one is alone."""

    def __init__(self, sequences: Sequence[SequenceState], target: Target, drafter: Drafter, cache: TargetCache):
        """cache: the target's, empty, with room for their texts."""
        self.sequences, self.target, self.drafter, self.cache = sequences, target, drafter, cache
        self.lengths = [len(sequence.text) for sequence in sequences]
        self.cached_drafters = drafter.cached_drafters
        self.caches = [one.new_cache(len(sequences), max(self.lengths)) for one in self.cached_drafters]
        self.lags = [cache.lag, *(one.cache_lag for one in self.cached_drafters)]
        self.stops = [self.lengths]  # where forwards end, one after the other

    def unfinished(self) -> bool:
        return any(sequence.finish_reason is None for sequence in self.sequences)

    def load_prefixes(self, prefixes: PrefixCache, namespace: int) -> None:
        """Begin after what the prefix cache holds of the texts. Their last token is always prefilled, since a position's aux
        hidden states go with the token after it."""
        assert isinstance(self.cache, KVCache)
        if self.cache.lag:
            self.stops = [*self.block_ends(prefixes, namespace), self.lengths]
        hits = [prefixes.find(namespace, one.text, self.target.window or self.cache.lag) for one in self.sequences]
        lengths = [max(0, sum(len(block.tokens) for block in blocks) - 1) for blocks in hits]
        # In a batch a short sequence's padding may stand after a long one's prefix.
        room = 1 + max(lengths) + max(whole - length for whole, length in zip(self.lengths, lengths, strict=True))
        for number, (cache, lag) in enumerate(zip([self.cache, *self.caches], self.lags, strict=True)):
            cache.reorder(list(range(cache.batch)), max(cache.capacity, room))
            for row, blocks in enumerate(hits):
                if blocks:
                    cache.copy_in(row, [block.states[number] for block in blocks], lengths[row] + 1 - lag)
            # A drafter's entries end at the same place as the blocks do, and the target's one before it.
            cache.set_lengths([length and length + 1 - lag if number else length for length in lengths])

    def block_ends(self, prefixes: PrefixCache, namespace: int) -> list[list[int]]:
        """Before the last tokens of the blocks that are known, and of all whole blocks: states are stored there."""
        known = [len(prefixes.keys(namespace, one.text)) * prefixes.block for one in self.sequences]
        whole = [length - length % prefixes.block for length in self.lengths]
        return [[max(0, end - self.cache.lag) for end in ends] for ends in (known, whole)]

    def store_prefixes(self, prefixes: PrefixCache, namespace: int) -> None:
        """What is prefilled of the prompts goes into the prefix cache."""
        caches: Any = [self.cache, *self.caches]
        for row, sequence in enumerate(self.sequences):
            if sequence.finish_reason != "error":
                prefixes.store(namespace, sequence.text, caches, self.lags, row)
            else:  # of which chunks may have been stored
                prefixes.forget(namespace, sequence.text)

    def prefill(self, most: int | None) -> LastPositions | None:
        """One more chunk, at most so many tokens of all sequences together, or one of each. None until all is done."""
        done, device = self.cache.lengths, self.target.device
        rests = ([max(0, end - start) for end, start in zip(ends, done, strict=True)] for ends in self.stops)
        rest = next(rest for rest in rests if any(rest))
        width = max(rest) if most is None else min(max(rest), max(1, most // len(rest)))
        counts = [min(width, count) for count in rest]
        parts = [one.text[start : start + width + 1] for one, start in zip(self.sequences, done, strict=True)]
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
        """Drafters take the chunk too: each position's aux hidden states (sequences, n, width) with the token after it
        (sequences, n). What follows a prompt's last token is not there yet."""
        ends = zip(self.cache.lengths, self.lengths, counts, strict=True)
        counts = [count - (end == length) for end, length, count in ends]
        width = max(counts)
        if width == 0:
            return
        texts = [sequence.text for sequence in self.sequences]
        accepted = Accepted(following[:, :width], aux_hidden_states[:, :width], counts, texts)
        for drafter, cache in zip(self.cached_drafters, self.caches, strict=True):
            drafter.prefill(share(accepted, self.drafter.layers, drafter.layers), cache)
