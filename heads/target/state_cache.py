"""The model's own cache, for targets whose layers cannot branch: what decoding by chains reads over.

Recurrent layers keep one state, which a read moves on and which nothing takes back; others mask or compress their keys by
place. So the cache stands at a *committed* position, and a read of drafts goes on from a fork of it, which becomes the
committed one if all that was read is accepted:

    text      t t t t t t t a a r         t committed: in the state    a pending: accepted since, not yet in the state
    a read                  a a r d d d   r the root, d a chain of drafts, on a fork; no mask but the model's own

Where every layer can drop its newest entries (chunked or sparse attention, short convolutions) the fork is cropped instead,
and nothing is ever pending. transformers' assisted generation does only that, and so cannot draft for recurrent layers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from heads.target.cuda_graphs import CudaGraphs

if TYPE_CHECKING:
    from heads.target.model import Reading, Target

# Accepted tokens that are read again with every chain, at most; then one read commits them.
MAX_PENDING = 16
# Attributes of transformers' layers that are only ever replaced by longer ones, never written into: forks share them.
SHARED = {"keys", "values", "indexer_keys"}
# Exactly these: a subclass may keep more of the text than `crop` knows of (DeepSeek V4's compressed entries).
CROPPABLE = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer, DummyLayer}


@dataclass
class RowState:
    """How far one row has been read."""

    state: Any = None  # the model's own cache; None before its first read, and for a model that keeps none
    committed: int = 0  # tokens in it
    pending: Tensor | None = None  # (1, n): accepted since
    newest: Any = None  # the state after the newest read of drafts, and what was read: (1, pending + nodes)
    finished: bool = False


class StateCache:
    """One own cache of the model per row, read row by row: a row is read as it would be alone.

    The same interface as heads/target/cache.py's, as far as decoding uses it. lengths, starts: as there.
    """

    kv_bucket: int | None = None

    def __init__(self, batch: int, capacity: int, device: torch.device | str):
        self.batch, self.capacity, self.device = batch, capacity, torch.device(device)
        self.graphs = CudaGraphs(self.device, enabled=False)
        self.rows = [RowState() for _ in range(batch)]
        self.set_lengths([0] * batch)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.starts = torch.tensor(lengths, device=self.device)[:, None]

    def set_bucket(self, room: int) -> None:
        """Nothing is captured here."""

    def clear(self) -> None:
        self.rearrange([None] * self.batch, self.capacity)

    def rearrange(self, rows: list[int | None], capacity: int) -> None:
        self.batch, self.capacity = len(rows), capacity
        lengths = [0 if row is None else self.lengths[row] for row in rows]
        self.rows = [RowState() if row is None else self.rows[row] for row in rows]
        self.set_lengths(lengths)

    def erase(self, row: int) -> None:
        """Forget all that a row holds, which has ended."""
        self.rows[row] = RowState(finished=True)

    def narrow(self, first: int, count: int) -> "StateCache":
        """A cache of some rows that lie side by side; its lengths are its own, 0 at first."""
        if (first, count) == (0, self.batch):
            return self
        part = StateCache(count, self.capacity, self.device)
        part.rows = self.rows[first : first + count]
        return part

    def mask(self, among: Tensor) -> Tensor:
        """As it is: what a token of a chain sees, the model's own masks say."""
        return among

    def read_prompt(self, number: int, target: "Target", tokens: Tensor, layers: Sequence[int]) -> "Reading":
        """Read (1, length) as the beginning of a row; the last position's logits."""
        row = self.rows[number]
        reading, row.state = target.read_on(tokens, 0, None, layers, keep_logits=1)
        row.committed, row.pending = tokens.shape[1], tokens[:, :0]
        if row.state is None:
            row.committed, row.pending = 0, tokens
        elif can_crop(row.state):
            row.state.activate_past_recording()
        return reading

    def read_chains(self, target: "Target", tokens: Tensor, layers: Sequence[int]) -> list["Reading"]:
        """Read drafts (batch, nodes), a chain per row after its text. Finished rows are not read: zeros."""
        return [self.read_chain(row, target, tokens[i : i + 1], layers) for i, row in enumerate(self.rows)]

    def read_chain(self, row: RowState, target: "Target", tokens: Tensor, layers: Sequence[int]) -> "Reading":
        nodes = tokens.shape[1]
        if row.finished:
            return target.blank_reading(nodes, layers)
        pending = tokens[:, :0] if row.pending is None else row.pending
        if row.state is not None and pending.shape[1] > MAX_PENDING:
            _, row.state = target.read_on(pending, row.committed, row.state, (), keep_logits=1)
            row.committed, pending = row.committed + pending.shape[1], pending[:, :0]
        row.pending = pending
        every = torch.cat([pending, tokens], dim=1)
        if target.context is not None:  # what lies beyond is never kept
            every = every[:, : target.context - row.committed]
        # A lone root is always accepted, so what it does to the state may stay.
        state = row.state if nodes == 1 else fork(row.state)
        real = every.shape[1] - pending.shape[1]
        reading, state = target.read_on(every, row.committed, state, layers, keep_logits=real)
        row.newest = state, every
        logits, features = reading.logits[:, -real:], reading.features[:, pending.shape[1] :]
        return reading._replace(
            logits=pad(logits, (0, 0, 0, nodes - real)), features=pad(features, (0, 0, 0, nodes - real))
        )

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None) -> None:
        """Keep the first nodes of every row's chain, as many as `path[row]` names; none means that the row has ended."""
        for row, nodes in zip(self.rows, path, strict=True):
            assert nodes == list(range(len(nodes))), f"{nodes} is no chain's path"
            row.finished = row.finished or not nodes
            if not row.finished:
                self.keep(row, len(nodes))
        self.set_lengths([length + len(nodes) for length, nodes in zip(self.lengths, path, strict=True)])

    def keep(self, row: RowState, count: int) -> None:
        assert row.pending is not None and row.newest is not None
        (state, every), row.newest = row.newest, None
        rejected = every.shape[1] - row.pending.shape[1] - count
        if state is not None and (rejected == 0 or can_crop(state)):
            if can_crop(state):
                state.crop(-rejected)  # also where it is 0: a window drops what it no longer needs
            row.state, row.committed, row.pending = state, row.committed + every.shape[1] - rejected, every[:, :0]
        else:
            row.pending = every[:, : every.shape[1] - rejected]


def can_crop(state: Any) -> bool:
    """Can its newest entries be dropped without a trace?"""
    return isinstance(state, Cache) and all(type(layer) in CROPPABLE for layer in state.layers) and state.is_croppable


def fork(state: Any) -> Any:
    """A cache that can be read on from, while this one stays as it is. Keys and values are shared: reads concatenate, which
    makes new ones. States that are written into are copied; they do not grow with the text."""
    if not isinstance(state, Cache):
        return copy.deepcopy(state)
    twin = copy.copy(state)
    twin.layers = [copy.copy(layer) for layer in state.layers]
    for layer in twin.layers:
        for name, value in vars(layer).items():
            if name not in SHARED and isinstance(value, Tensor | dict):
                vars(layer)[name] = cloned(value)
    return twin


def cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
