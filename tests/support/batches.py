"""Random tokens as training reads them and as decoding starts with them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.base import PackedBatch
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.train.data.packing import Document, Packed

PROMPT = torch.randint(1, 300, (30,), generator=torch.Generator().manual_seed(1)).tolist()


def prompt(length: int, seed: int = 0) -> Tensor:
    """Return (1, length) random tokens."""
    return torch.randint(1, 300, (1, length), generator=torch.Generator().manual_seed(seed))


def packed(*rows: Sequence[int], low: int = 1, high: int = 300) -> PackedBatch:
    """Return sequences of documents of these lengths, padded to the longest, with random tokens from `low` to `high`."""
    tokens = torch.randint(low, high, (len(rows), max(map(sum, rows))))
    documents, positions = torch.full_like(tokens, -1), torch.zeros_like(tokens)
    for row, lengths in enumerate(rows):
        documents[row, : sum(lengths)] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions[row, : sum(lengths)] = torch.cat([torch.arange(length) for length in lengths])
    return PackedBatch(tokens, documents >= 0, documents, positions)


def batch(*lengths: int) -> PackedBatch:
    """Return one sequence of documents of these lengths."""
    return packed(lengths)


def documents(*lengths: int, prompt: int = 3) -> list[Document]:
    return [
        Document(torch.randint(1, 300, (length,)).tolist(), [place >= prompt for place in range(length)])
        for length in lengths
    ]


def batch_of(packed: Packed) -> dict[str, Tensor]:
    """Return all sequences of `packed` as one batch."""
    rows = [packed[row] for row in range(len(packed))]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def states_of(cache: KVCache) -> list[Tensor]:
    """Return the keys and values (num_slots, heads, columns, dim) of all layers."""
    return [states for layer in cache.kv_layers for states in layer.states]


def filled(target: Target, texts: Sequence[list[int]], capacity: int, nodes: int = 1) -> Any:
    """Return a cache with the texts, all of which one forward read. nodes: of the trees that follow."""
    longest, lengths = max(map(len, texts)), [len(text) for text in texts]
    cache = target.new_cache(len(texts), capacity, nodes=nodes)
    target.prefill(torch.tensor([text + [0] * (longest - len(text)) for text in texts]), lengths, cache)
    cache.set_lengths(lengths)
    return cache
