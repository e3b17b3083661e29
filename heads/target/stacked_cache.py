"""Rows of one batch that are read together, where each would else be read alone (heads/target/state_cache.py).

Keys and values lie in columns, as in heads/target/cache.py, and a mask of ours says what each row sees. Recurrent states lie
side by side; no mask keeps padding out of them, so a state that has read padding is not kept:

    row 0    a r d d d            its state has read what is its own: kept if all is accepted
    row 1    a a a r d d d        the longest
    row 2    r d d d . . .        its state has read padding: the one from before is taken back

Rows with too many pending tokens commit as many as the least of them has, so that there is no padding.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from foredraft.heads.target.cache import CacheLayer, KVCache
from foredraft.heads.target.output import TargetOutput

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Accepted tokens that are read again with every chain, at most; then one read commits them. Fewer commit more often, more
# make every read longer; of 4, 8, 16 and 32 none is ahead in all of greedy, sampled, alone and in a batch, and 16 is within
# 2 % of the best alone, where chains pay (scripts/bench/README.md, "Chains on a hybrid").
MAX_UNCOMMITTED = 16
# Exactly these: a subclass may keep more than keys, values and states.
RECURRENT = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
STACKED = RECURRENT | {DynamicLayer, DummyLayer}


@dataclass
class SlotState:
    """How far one row has been read."""

    text: Tensor | None = None  # (1, n): all accepted tokens
    state: Any = None  # the model's own cache; None before its first read, in a stack, and for a model that keeps none
    num_computed_tokens: int = 0  # tokens of the text that are in it
    newest: Any = None  # of its newest read: the state after the drafts, the drafts (1, nodes), how many it has read
    finished: bool = False

    @property
    def num_uncommitted(self) -> int:
        return 0 if self.finished or self.text is None else self.text.shape[1] - self.num_computed_tokens


def stacks(state: Any, target: "Target") -> bool:
    """May rows with such caches be read together? Not where a mask is more than causal, or keys are more than keys."""
    if not isinstance(state, Cache) or target.rope_boundary is not None or target.window is not None:
        return False
    kinds = {type(layer) for layer in state.layers}
    return bool(kinds & RECURRENT) and kinds <= STACKED


class BothLayer(LinearAttentionLayer, CacheLayer):
    """Of a layer that has attention and recurrence side by side."""

    def __init__(self, cache: KVCache, index: int, own: LinearAttentionLayer):
        self.__dict__.update(vars(own))  # what its states are
        CacheLayer.__init__(self, cache, index)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        kind = CacheLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class StackedCache(KVCache):
    """lengths: of what is committed. Its `layers` are of KVCache where the model keeps keys, and else its own."""

    def __init__(self, own: Cache, batch: int, capacity: int, device: torch.device):
        """own: the cache of any row, which says what the layers are."""
        # Memory of its own for each layer that keeps keys: most keep none.
        super().__init__(len(own.layers), batch, capacity, device, one_device=False)
        self.recurrent: list[dict[int, Any]] = []  # every layer's tensors, (batch, ...)
        for number, layer in enumerate(own.layers):
            if isinstance(layer, LinearAttentionLayer):
                mine = BothLayer(self, number, layer) if isinstance(layer, DynamicLayer) else copy.copy(layer)
                mine.record_past = False
                mine.conv_states, mine.recurrent_states = (
                    {key: None if state is None else state.new_zeros(batch, *state.shape[1:]) for key, state in states}
                    for states in own_states(layer)
                )
                self.recurrent += [mine.conv_states, mine.recurrent_states]
                self.layers[number] = mine
            elif not isinstance(layer, DynamicLayer):
                self.layers[number] = layer
        self.newest: tuple[list[Tensor] | None, Tensor, list[bool]] | None = None
        self.has_keys = any(isinstance(layer, DynamicLayer) for layer in own.layers)

    def states(self) -> list[Tensor]:
        return [state for states in self.recurrent for state in states.values() if state is not None]

    def stack_states(self, number: int, row: SlotState) -> None:
        """A row's own cache becomes its rows here."""
        for mine, own in zip(self.layers, row.state.layers, strict=True):
            if isinstance(own, DynamicLayer) and own.is_initialized:
                if not mine.is_initialized:
                    mine.lazy_initialization(own.keys, own.values)
                mine.keys[number, :, : row.num_computed_tokens] = own.keys[0]
                mine.values[number, :, : row.num_computed_tokens] = own.values[0]
            if isinstance(own, LinearAttentionLayer):
                for place, states in zip((mine.conv_states, mine.recurrent_states), own_states(own), strict=True):
                    for key, state in states:
                        if state is not None:
                            place[key][number] = state[0]
        row.state = None

    def reorder(self, rows: list[int | None], capacity: int) -> None:
        super().reorder(rows, capacity)
        new, old = [n for n, row in enumerate(rows) if row is not None], [row for row in rows if row is not None]
        for states in self.recurrent:
            for key, state in states.items():
                if state is not None:
                    states[key] = state.new_zeros(len(rows), *state.shape[1:])
                    states[key][new] = state[old]

    def erase(self, row: int) -> None:
        super().erase(row)
        for state in self.states():
            state[row] = 0

    def read(
        self, target: "Target", tokens: Tensor, rows: Sequence[SlotState], layers: Sequence[int] = (), keep: int = 1
    ) -> TargetOutput:
        """Tokens (batch, length) after what each row has committed."""
        self.set_lengths([row.num_computed_tokens for row in rows])
        mask = self.causal_mask(tokens.shape[1]) if self.has_keys else None
        return target.forward_from(tokens, self.seq_lens, self, layers, keep, mask)[0]

    def catch_up(self, target: "Target", rows: Sequence[SlotState]) -> None:
        """One read for the rows that have too much."""
        count = min((row.num_uncommitted for row in rows if row.num_uncommitted > MAX_UNCOMMITTED), default=0)
        if count == 0:
            return
        before, tokens = self.clone_states(), torch.zeros(len(rows), count, dtype=torch.int64, device=self.device)
        for number, row in enumerate(rows):
            if row.num_uncommitted >= count:
                assert row.text is not None
                tokens[number] = row.text[0, row.num_computed_tokens : row.num_computed_tokens + count]
        self.read(target, tokens, rows)
        ready = [row.num_uncommitted >= count for row in rows]
        self.restore(before, ready)
        for row, moved in zip(rows, ready, strict=True):
            row.num_computed_tokens += count * moved

    def forward_chains(
        self, target: "Target", rows: Sequence[SlotState], tokens: Tensor, layers: Sequence[int]
    ) -> TargetOutput:
        """As `StateCache.forward_chains`."""
        for number, row in enumerate(rows):
            if row.state is not None:
                self.stack_states(number, row)
        self.catch_up(target, rows)
        nodes, pending = tokens.shape[1], [row.num_uncommitted for row in rows]
        wide = max(pending)
        every = tokens.new_zeros(len(rows), wide + nodes)
        for number, row in enumerate(rows):
            if row.text is not None and not row.finished:
                every[number, : row.num_uncommitted] = row.text[0, row.num_computed_tokens :]
                every[number, row.num_uncommitted : row.num_uncommitted + nodes] = tokens[number]
        whole = [row.finished or row.num_uncommitted == wide for row in rows]
        # Lone roots are always accepted, so what they do to the states may stay.
        before = None if nodes == 1 and all(whole) else self.clone_states()
        few = min(pending)
        reading = self.read(target, every, rows, layers, wide + nodes - few)
        self.newest = before, tokens, whole
        where = (
            torch.tensor(pending, device=self.device)[:, None, None] + torch.arange(nodes, device=self.device)[:, None]
        )
        logits, aux_hidden_states = (
            part.gather(1, (where - skipped).expand(-1, -1, part.shape[-1]))
            for part, skipped in ((reading.logits, few), (reading.aux_hidden_states, 0))
        )
        return TargetOutput(logits, aux_hidden_states)

    def keep(self, rows: Sequence[SlotState], counts: Sequence[int]) -> None:
        """The first `counts` nodes of the newest read are accepted; 0 for a row that has ended."""
        assert self.newest is not None
        (before, tokens, whole), self.newest = self.newest, None
        kept = [done and count in (0, tokens.shape[1]) for done, count in zip(whole, counts, strict=True)]
        for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                assert row.text is not None
                row.text = torch.cat([row.text, tokens[number : number + 1, :count]], dim=1)
                row.num_computed_tokens = row.text.shape[1] if kept[number] else row.num_computed_tokens
        self.restore(before, kept)
        self.set_lengths([row.num_computed_tokens for row in rows])

    def clone_states(self) -> list[Tensor]:
        return [state.clone() for state in self.states()]

    def restore(self, before: list[Tensor] | None, kept: list[bool]) -> None:
        """States of rows that are not kept become what they were."""
        others = [number for number, keep in enumerate(kept) if not keep]
        if others and before is not None:
            for state, old in zip(self.states(), before, strict=True):
                state[others] = old[others]


def own_states(layer: LinearAttentionLayer) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Its convolutions' inputs, without more of the past than they need, and its recurrent states."""
    convolutions = [
        (key, None if state is None else state[..., -layer.conv_kernel_size[key] :])
        for key, state in layer.conv_states.items()
    ]
    return convolutions, list(layer.recurrent_states.items())
