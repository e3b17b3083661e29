"""Prefixes of earlier texts, so that a request that begins alike need not prefill them again: a shared system prompt, or the
conversation so far.

A text is cut into blocks of `block` tokens. A block is found by its own tokens and the block before it (vLLM's hash blocks;
SGLang's radix tree keeps the same), compared token by token: no text ever gets the keys of another. It holds copies of the
entries of the target's cache, and of its drafter's, whose last entry needs the token after it:

    tokens            0 1 2 3 | 4 5 6 7 | 8 9 ...
    target's entries  0 1 2 3 | 4 5 6 7 |                  rotated by their position, which is the same in every text
    a head's entries  0 1 2   | 3 4 5 6 |                  entry 3 is made of position 3 and token 4

Of sliding layers (heads/target/sliding_cache.py) a block has what they still held when it was stored. A text continues from a
block if those in the window before its end have that.

Of recurrent layers a block has the states before its last token, where a forward ended there: a prompt's prefill stops at its
last whole block, and where it parts from a text that is known (`Prompts.stops`).
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
    number: int  # never used again
    tokens: tuple[int, ...]
    states: list[dict[tuple, Tensor]]  # of the target's cache and of each of its drafter's, as `KVCache.copy_out` gives
    is_whole: bool  # does that include what sliding and recurrent layers keep?

    @property
    def bytes(self) -> int:
        states = sum(part.numel() * part.element_size() for states in self.states for part in states.values())
        return states + 8 * len(self.tokens)


class PrefixCache:
    """May be shared by engines of one target; each finds what it stored itself, under a namespace of its own."""

    def __init__(self, max_bytes: int, block: int = BLOCK):
        self.max_bytes, self.block = max_bytes, block
        self.numbers = itertools.count()
        # By the number of the block before it, or the namespace, and its tokens. The least recently used stands first, a
        # block always before the one that precedes it in a text: so what is dropped has nothing after it.
        self.blocks: OrderedDict[tuple[int, tuple[int, ...]], Block] = OrderedDict()
        self.bytes = 0
        self.looked_up = self.hits = 0  # tokens

    def new_namespace(self) -> int:
        return next(self.numbers)

    def keys(self, namespace: int, text: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """Keys of the blocks that the text begins with."""
        keys: list[tuple[int, tuple[int, ...]]] = []
        number = namespace
        for start in range(0, len(text) - self.block + 1, self.block):
            key = number, tuple(text[start : start + self.block])
            if key not in self.blocks:
                break
            keys.append(key)
            number = self.blocks[key].number
        return keys

    def num_known(self, namespace: int, text: Sequence[int]) -> int:
        """Tokens of the blocks that the text begins with."""
        return len(self.keys(namespace, text)) * self.block

    def find(self, namespace: int, text: Sequence[int], window: int = 0) -> list[Block]:
        """The longest sequence of blocks that the text begins with and can continue from. window: tokens before its end whose
        blocks must be whole."""
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
        """Keep what is not kept yet of a text, of which `row` of these caches has the entries. lags: by how many entries
        each of the caches stays behind the tokens."""
        cached = min(
            [len(text), *(cache.lengths[row] + cache_lag for cache, cache_lag in zip(caches, lags, strict=True))]
        )
        keys, number = list[tuple[int, tuple[int, ...]]](), namespace
        for start in range(0, cached - self.block + 1, self.block):
            end = start + self.block
            keys.append((number, tuple(text[start:end])))
            known, is_whole = self.blocks.get(keys[-1]), caches[0].holds(row, start, end)
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
        """Drop the blocks that the text begins with."""
        for key in self.keys(namespace, text):
            self.bytes -= self.blocks.pop(key).bytes

    def touch(self, keys: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        for key in reversed(keys):
            self.blocks.move_to_end(key)
