"""The recurrent states of a batch in one cache, with the keys that some layers keep.

Keys and values lie in columns, as in heads/target/cache.py. Every layer has one tensor per recurrent state, (batch, ...), and
one with the past that its convolution needs. A forward of drafts leaves the states after all of them, and the means to roll
them back to any token: the inputs of the convolution, and the call of the recurrence (heads/target/recurrent_ops.py). So
nothing is copied before a forward, and no token is computed twice:

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

from foredraft.heads.target import recurrent_ops
from foredraft.heads.target.cache import CacheLayer, KVCache
from foredraft.heads.target.state_cache import DummyLayer

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Only these types: a subclass may keep more than keys, values and states.
RECURRENT = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
STACKED = RECURRENT | {DynamicLayer, DummyLayer}


def stacks(state: Any, target: "Target") -> bool:
    """Return whether such caches can be stacked. This is not possible if a mask is more than causal, or a layer keeps more
    than keys."""
    if not isinstance(state, Cache) or target.rope_boundary is not None or target.window is not None:
        return False
    kinds = {type(layer) for layer in state.layers}
    return bool(kinds & RECURRENT) and kinds <= STACKED


class StateLayer(LinearAttentionLayer):
    """Hold a layer's states and replace them where transformers' layer writes into them. `supports_ragged` detects models
    that write into them directly."""

    def __init__(self, layer: LinearAttentionLayer, batch: int):
        self.__dict__.update(vars(layer))  # describes its states
        self.record_past = False
        sizes = {key: size for key, size in layer.conv_kernel_size.items() if size is not None}
        self.conv_states: dict[int, Any] = {
            key: state if state is None else state.new_zeros(batch, *state.shape[1:-1], sizes[key])
            for key, state in layer.conv_states.items()
        }
        self.recurrent_states: dict[int, Any] = {
            key: state if state is None else state.new_zeros(batch, *state.shape[1:])
            for key, state in layer.recurrent_states.items()
        }
        # Of the newest forward: inputs of the convolutions, with the past that they need, and calls of recurrences.
        self.inputs: dict[int, Tensor] = {}
        self.calls: dict[int, recurrent_ops.Call | None] = {}

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        before = self.conv_states[state_idx]
        inputs = torch.cat([before, conv_states.to(before.dtype)], dim=-1)
        if recurrent_ops.CONTEXT.records:
            self.inputs[state_idx] = inputs
        count = conv_states.shape[-1] if recurrent_ops.CONTEXT.counts is None else recurrent_ops.CONTEXT.counts
        self.conv_states[state_idx] = past(inputs, count, before.shape[-1])
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if recurrent_ops.CONTEXT.records:
            self.calls[state_idx], recurrent_ops.CONTEXT.newest = recurrent_ops.CONTEXT.newest, None
        state = recurrent_states.to(self.recurrent_states[state_idx].dtype)
        self.recurrent_states[state_idx] = state
        return state

    def roll_back(self, counts: Tensor) -> None:
        """Return to the states after the first counts (batch, 1) int64 tokens of the newest forward."""
        for key, inputs in self.inputs.items():
            self.conv_states[key] = past(inputs, counts, self.conv_states[key].shape[-1])
        for key, call in self.calls.items():
            assert call is not None, "a recurrence that is not supported"
            self.recurrent_states[key] = call.until(counts)()[1].to(self.recurrent_states[key].dtype)


def past(inputs: Tensor, count: int | Tensor, size: int) -> Tensor:
    """Return the last `size` of a convolution's inputs (batch, channels, size + new) up to the first `count` new ones;
    count is (batch, 1) if it differs."""
    if isinstance(count, int):
        return inputs[..., count : count + size]
    columns = count.to(inputs.device)[:, None] + torch.arange(size, device=inputs.device)
    return inputs.take_along_dim(columns, -1)


class BothLayer(StateLayer, CacheLayer):
    """Serve a layer with both attention and recurrence."""

    def __init__(self, cache: KVCache, index: int, layer: LinearAttentionLayer, batch: int):
        StateLayer.__init__(self, layer, batch)
        CacheLayer.__init__(self, cache, index)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        kind = CacheLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class StackedCache(KVCache):
    """Hold KVCache's layers where the model keeps keys, StateLayers where it has states, and otherwise its own layers."""

    lag = 1

    def __init__(self, state: Cache, batch: int, capacity: int, device: torch.device, state_entries: int = 0):
        """Allocate the cache. state: any cache of the model, which determines the kinds of layers. state_entries: as in
        `Target`."""
        # Each layer with keys has its own memory, since most layers have none.
        super().__init__(len(state.layers), batch, capacity, device, one_device=False)
        self.state_entries = state_entries
        self.states: list[StateLayer] = []
        for number, layer in enumerate(state.layers):
            if isinstance(layer, LinearAttentionLayer):
                both = isinstance(layer, DynamicLayer)
                self.layers[number] = BothLayer(self, number, layer, batch) if both else StateLayer(layer, batch)
                self.states.append(self.layers[number])
            elif not isinstance(layer, DynamicLayer):
                self.layers[number] = layer
        self.has_keys = any(isinstance(layer, DynamicLayer) for layer in state.layers)

    def num_entries(self, capacity: int) -> int:
        return capacity + self.state_entries

    @property
    def state_bytes(self) -> int:
        """Return the size of all states of all slots."""
        return sum(states[key].nbytes for _, states, key in self.tensors())

    def tensors(self) -> Iterator[tuple[tuple, dict[int, Any], int]]:
        """Yield the name of every state, and the dict and key that hold it."""
        for number, layer in enumerate(self.states):
            for kind, states in enumerate((layer.conv_states, layer.recurrent_states)):
                yield from (((number, kind, key), states, key) for key, state in states.items() if state is not None)

    @property
    def can_roll_back(self) -> bool:
        """Return whether every recurrence in a forward of drafts is supported."""
        return all(call is not None for layer in self.states for call in layer.calls.values())

    def watched(self, new: int) -> AbstractContextManager[None]:
        """Watch a forward of this many new tokens: padding of prompts changes no state, and calls of drafts are recorded."""
        self.new = new
        return recurrent_ops.watched(self.new_counts, records=self.new_counts is None and new > 1)

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Accept the first nodes of chains, as `KVCache.commit` does."""
        before = self.seq_lens
        super().commit(path, padded_path, counts)
        for layer in self.states:
            if any(0 < len(nodes) < self.new for nodes in path):
                layer.roll_back(self.seq_lens - before)
            layer.inputs, layer.calls = {}, {}

    def attention_mask(self, *args: Any) -> Any:
        return super().attention_mask(*args) if self.has_keys else None

    def reorder(self, slots: list[int | None], capacity: int, max_entries: int | None = None) -> None:
        super().reorder(slots, capacity, max_entries)
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

    def contains(self, slot: int, start: int, end: int) -> bool:
        """Return whether the states are those after all of its text but the last token."""
        return end == self.lengths[slot] + self.lag

    def copy_out(self, slot: int, start: int, end: int) -> dict[tuple, Tensor]:
        """Copy entries as `KVCache.copy_out` does, and the states if they are those after entry `end` - 1."""
        copies = super().copy_out(slot, start, end)
        if end == self.lengths[slot]:
            copies |= {name: states[key][slot].clone() for name, states, key in self.tensors()}
        return copies

    def copy_in(self, slot: int, pieces: list[dict[tuple, Tensor]], end: int) -> None:
        names = {name: (states, key) for name, states, key in self.tensors()}
        super().copy_in(slot, [{k: v for k, v in piece.items() if k not in names} for piece in pieces], end)
        for name, (states, key) in names.items():
            states[key][slot] = pieces[-1][name]
