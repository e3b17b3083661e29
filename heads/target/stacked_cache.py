"""The texts of a batch in one cache of recurrent states, and of the keys that some layers keep.

Keys and values lie in columns, as in heads/target/cache.py. Every layer has one tensor per recurrent state, (batch, ...), and
one of what its convolution needs of the past. A forward of drafts leaves the states after all of them, and what takes these
back to any token: the inputs of the convolution, and the call of the recurrence (heads/target/rules.py). So nothing is copied
before a forward, and no token is computed by two:

    text        t t t t t a | d d d .      a is accepted, d rejected drafts: the states are those after a
                            ^ `commit`
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from foredraft.heads.target import rules
from foredraft.heads.target.cache import CacheLayer, KVCache
from foredraft.heads.target.state_cache import DummyLayer

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Exactly these: a subclass may keep more than keys, values and states.
RECURRENT = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
STACKED = RECURRENT | {DynamicLayer, DummyLayer}


def stacks(state: Any, target: "Target") -> bool:
    """May such caches become one? Not where a mask is more than causal, or keys are more than keys."""
    if not isinstance(state, Cache) or target.rope_boundary is not None or target.window is not None:
        return False
    kinds = {type(layer) for layer in state.layers}
    return bool(kinds & RECURRENT) and kinds <= STACKED


class StateLayer(LinearAttentionLayer):
    """States are replaced where transformers' layer writes into them. `supports_ragged` finds models that write into them
    themselves."""

    def __init__(self, own: LinearAttentionLayer, batch: int):
        self.__dict__.update(vars(own))  # what its states are
        self.record_past = False
        sizes = {key: size for key, size in own.conv_kernel_size.items() if size is not None}
        self.conv_states: dict[int, Any] = {
            key: state if state is None else state.new_zeros(batch, *state.shape[1:-1], sizes[key])
            for key, state in own.conv_states.items()
        }
        self.recurrent_states: dict[int, Any] = {
            key: state if state is None else state.new_zeros(batch, *state.shape[1:])
            for key, state in own.recurrent_states.items()
        }
        # Of the newest forward: inputs of the convolutions, with what they need of the past before them, and calls.
        self.inputs: dict[int, Tensor] = {}
        self.calls: dict[int, rules.Call | None] = {}

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        before = self.conv_states[state_idx]
        whole = torch.cat([before, conv_states.to(before.dtype)], dim=-1)
        if rules.NOW.records:
            self.inputs[state_idx] = whole
        count = conv_states.shape[-1] if rules.NOW.counts is None else rules.NOW.counts
        self.conv_states[state_idx] = past(whole, count, before.shape[-1])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if rules.NOW.records:
            self.calls[state_idx], rules.NOW.newest = rules.NOW.newest, None
        state = recurrent_states.to(self.recurrent_states[state_idx].dtype)
        self.recurrent_states[state_idx] = state
        return state

    def go_back(self, counts: Tensor) -> None:
        """To the states after the first counts (batch, 1) int64 tokens of the newest forward."""
        for key, whole in self.inputs.items():
            self.conv_states[key] = past(whole, counts, self.conv_states[key].shape[-1])
        for key, call in self.calls.items():
            assert call is not None, "a recurrence that is not known"
            self.recurrent_states[key] = call.until(counts)()[1].to(self.recurrent_states[key].dtype)


def past(whole: Tensor, count: int | Tensor, size: int) -> Tensor:
    """The last `size` of a convolution's inputs (batch, channels, size + new) before and among the first `count` new ones,
    (batch, 1) where they differ."""
    if isinstance(count, int):
        return whole[..., count : count + size]
    columns = count.to(whole.device)[:, None] + torch.arange(size, device=whole.device)
    return whole.take_along_dim(columns, -1)


class BothLayer(StateLayer, CacheLayer):
    """Of a layer that has attention and recurrence side by side."""

    def __init__(self, cache: KVCache, index: int, own: LinearAttentionLayer, batch: int):
        StateLayer.__init__(self, own, batch)
        CacheLayer.__init__(self, cache, index)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        kind = CacheLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class StackedCache(KVCache):
    """Its `layers` are of KVCache where the model keeps keys, StateLayers where it has states, and else its own."""

    lag = 1

    def __init__(self, own: Cache, batch: int, capacity: int, device: torch.device, state_entries: int = 0):
        """own: any cache of the model's own, which says what the layers are. state_entries: as `Target` has them."""
        # Memory of its own for each layer that keeps keys: most keep none.
        super().__init__(len(own.layers), batch, capacity, device, one_device=False)
        self.state_entries = state_entries
        self.states: list[StateLayer] = []
        for number, layer in enumerate(own.layers):
            if isinstance(layer, LinearAttentionLayer):
                both = isinstance(layer, DynamicLayer)
                self.layers[number] = BothLayer(self, number, layer, batch) if both else StateLayer(layer, batch)
                self.states.append(self.layers[number])
            elif not isinstance(layer, DynamicLayer):
                self.layers[number] = layer
        self.has_keys = any(isinstance(layer, DynamicLayer) for layer in own.layers)

    def weigh(self, capacity: int) -> int:
        return capacity + self.state_entries

    @property
    def state_bytes(self) -> int:
        """Of all states of all slots."""
        return sum(states[key].nbytes for _, states, key in self.tensors())

    def tensors(self) -> Iterator[tuple[tuple, dict[int, Any], int]]:
        """Of every state its name, and where it stands."""
        for number, layer in enumerate(self.states):
            for kind, states in enumerate((layer.conv_states, layer.recurrent_states)):
                yield from (((number, kind, key), states, key) for key, state in states.items() if state is not None)

    @property
    def can_go_back(self) -> bool:
        """After a forward of drafts: is every recurrence in it known?"""
        return all(call is not None for layer in self.states for call in layer.calls.values())

    def watched(self, new: int) -> AbstractContextManager[None]:
        """Around a forward of so many new tokens: padding of prompts changes no state, and of drafts calls are recorded."""
        self.new = new
        return rules.watched(self.new_counts, records=self.new_counts is None and new > 1)

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """As `KVCache.commit`, of chains."""
        before = self.seq_lens
        super().commit(path, padded_path, counts)
        for layer in self.states:
            if any(0 < len(nodes) < self.new for nodes in path):
                layer.go_back(self.seq_lens - before)
            layer.inputs, layer.calls = {}, {}

    def attention_mask(self, *args: Any) -> Any:
        return super().attention_mask(*args) if self.has_keys else None

    def reorder(self, slots: list[int | None], capacity: int, most: int | None = None) -> None:
        super().reorder(slots, capacity, most)
        order = torch.tensor([0 if slot is None else slot for slot in slots])
        for _, states, key in self.tensors():
            states[key] = states[key][order.to(states[key].device)]

    def copy_from(self, slots: list[int], other: KVCache, others: list[int]) -> None:
        assert isinstance(other, StackedCache)
        super().copy_from(slots, other, others)
        for (_, mine, key), (_, theirs, _) in zip(self.tensors(), other.tensors(), strict=True):
            mine[key][slots] = theirs[key][others]

    def erase(self, slot: int) -> None:
        super().erase(slot)
        for _, states, key in self.tensors():
            states[key][slot] = 0

    def holds(self, slot: int, start: int, end: int) -> bool:
        """The states are those after all of its text but the last token."""
        return end == self.lengths[slot] + self.lag

    def copy_out(self, slot: int, start: int, end: int) -> dict[tuple, Tensor]:
        """As `KVCache.copy_out`, and the states, if they are those after entry `end` - 1."""
        copies = super().copy_out(slot, start, end)
        if end == self.lengths[slot]:
            copies |= {name: states[key][slot].clone() for name, states, key in self.tensors()}
        return copies

    def copy_in(self, slot: int, pieces: list[dict[tuple, Tensor]], end: int) -> None:
        names = {name: (states, key) for name, states, key in self.tensors()}
        super().copy_in(slot, [{k: v for k, v in piece.items() if k not in names} for piece in pieces], end)
        for name, (states, key) in names.items():
            states[key][slot] = pieces[-1][name]
