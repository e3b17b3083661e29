"""A cache of text prefixes, so that requests with the same prefix need not prefill it again: a shared system prompt, or the
conversation so far.

Texts are divided into blocks of `block` tokens. A block is found by its tokens and the previous block (like vLLM's hashes
and SGLang's radix tree), and tokens are compared one by one: no text ever gets the keys of another. It contains copies of the
entries of the target's cache and of the drafter's cache, where each entry depends on the next token:

    tokens            0 1 2 3 | 4 5 6 7 | 8 9 ...
    target's entries  0 1 2 3 | 4 5 6 7 |                  with rotary positions, which are the same in every text
    a head's entries  0 1 2   | 3 4 5 6 |                  entry 3 is computed from position 3 and token 4

For sliding-window layers (heads/target/sliding_cache.py), a block contains the entries that existed when it was stored. A
text can continue from a block if all blocks within the window before its end are whole.

For recurrent layers, a block contains the states before its last token, if a forward ended there. So the prefill of a prompt
stops at its last whole block, and where it departs from a cached text (`Prompts.stops`).
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.heads.target.cache import KVCache

BLOCK = 32


@dataclass(eq=False)
class Block:
    number: int  # unique
    tokens: tuple[int, ...]
    states: list[dict[tuple, Tensor]]  # of the target's and the drafters' caches, from `KVCache.copy_out`
    is_whole: bool  # whether it includes the entries and states of sliding and recurrent layers

    @property
    def bytes(self) -> int:
        states = sum(part.numel() * part.element_size() for states in self.states for part in states.values())
        return states + 8 * len(self.tokens)


class PrefixCache:
    """Store prefixes. Engines of one target may share it; each finds only its own texts, by its namespace."""

    def __init__(self, max_bytes: int, block: int = BLOCK):
        self.max_bytes, self.block = max_bytes, block
        self.numbers = itertools.count()
        # By the number of the previous block (or the namespace) and the tokens. The least recently used block is first, and
        # later blocks of a text precede earlier ones, so that eviction never leaves a block without its predecessor.
        self.blocks: OrderedDict[tuple[int, tuple[int, ...]], Block] = OrderedDict()
        self.bytes = 0
        self.looked_up = self.hits = 0  # numbers of tokens

    def new_namespace(self) -> int:
        return next(self.numbers)

    def keys(self, namespace: int, text: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Return the keys of the cached blocks at the start of the text."""
        keys: list[tuple[int, tuple[int, ...]]] = []
        number = namespace
        for start in range(0, len(text) - self.block + 1, self.block):
            key = number, tuple(text[start : start + self.block])
            if key not in self.blocks:
                break
            keys.append(key)
            number = self.blocks[key].number
        return keys

    def num_cached(self, namespace: int, text: Sequence[int]) -> int:
        """Return the number of tokens in the cached blocks at the start of the text."""
        return len(self.keys(namespace, text)) * self.block

    def find(self, namespace: int, text: Sequence[int], window: int = 0) -> list[Block]:
        """Return the longest run of cached blocks that the text can continue from. window: number of tokens before its end
        whose blocks must be whole."""
        keys = self.keys(namespace, text)
        usable = run = 0
        for count, key in enumerate(keys, start=1):
            run = run + 1 if self.blocks[key].is_whole else 0
            usable = count if run * self.block >= min(window, count * self.block) else usable
        keys = keys[:usable]
        self.touch(keys)
        self.looked_up += len(text)
        self.hits += len(keys) * self.block
        return [self.blocks[key] for key in keys]

    def store(
        self, namespace: int, text: Sequence[int], caches: Sequence[KVCache], lags: Sequence[int], row: int
    ) -> None:
        """Store the new blocks of a text, whose entries are in `row` of these caches. lags: the number of entries that each
        cache is behind the tokens."""
        cached = min(
            [len(text), *(cache.lengths[row] + cache_lag for cache, cache_lag in zip(caches, lags, strict=True))]
        )
        keys, number = list[tuple[int, tuple[int, ...]]](), namespace
        for start in range(0, cached - self.block + 1, self.block):
            end = start + self.block
            keys.append((number, tuple(text[start:end])))
            known, is_whole = self.blocks.get(keys[-1]), caches[0].contains(row, start, end)
            if known is None or is_whole > known.is_whole:
                states = [
                    cache.copy_out(row, max(0, start - cache_lag), end - cache_lag)
                    for cache, cache_lag in zip(caches, lags, strict=True)
                ]
                number = next(self.numbers) if known is None else known.number
                self.blocks[keys[-1]] = Block(number, keys[-1][1], states, is_whole)
                self.bytes += self.blocks[keys[-1]].bytes - (0 if known is None else known.bytes)
            number = self.blocks[keys[-1]].number
        self.touch(keys)
        while self.bytes > self.max_bytes:
            self.bytes -= self.blocks.popitem(last=False)[1].bytes

    def forget(self, namespace: int, text: Sequence[int]) -> None:
        """Delete the cached blocks at the start of the text."""
        for key in self.keys(namespace, text):
            self.bytes -= self.blocks.pop(key).bytes

    def touch(self, keys: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        for key in reversed(keys):
            self.blocks.move_to_end(key)
