"""The recurrent states of a batch in one cache, with the keys that some layers keep.

Keys and values lie in columns, as in kv_cache.py. Every layer has one tensor per recurrent state, (batch, ...), and
one with the past that its convolution needs. A forward of drafts leaves the states after all of them, and the means to roll
them back to any token: the inputs of the convolution, and the call of the recurrence (heads/caches/recurrent_ops.py). So
nothing is copied before a forward, and no token is computed twice:

    text        t t t t t a | d d d .      a is accepted, d rejected drafts: the states are those after a
                            ^ `commit`
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from foredraft.heads.caches import recurrent_ops
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.caches.layers import CacheLayer
from foredraft.heads.caches.state_cache import DummyLayer

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target

# Only these types: a subclass may keep more than keys, values and states.
RECURRENT = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
STACKED = RECURRENT | {DynamicLayer, DummyLayer}


def stacks(state: Any, target: "Target") -> bool:
    """Return whether such caches can be stacked. This is not possible if a mask is more than causal, or a layer keeps more
    than keys."""
    if not isinstance(state, Cache) or target.capabilities.rope_boundary is not None or target.masks.window is not None:
        return False
    kinds = {type(layer) for layer in state.layers}
    return bool(kinds & RECURRENT) and kinds <= STACKED


class StateLayer(LinearAttentionLayer):
    """Hold a layer's states and replace them where transformers' layer writes into them. `Capabilities.state` detects models
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

    def __init__(self, cache: KVCache, layer: LinearAttentionLayer, batch: int):
        StateLayer.__init__(self, layer, batch)
        CacheLayer.__init__(self, cache)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        kind = CacheLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class StackedCache(KVCache):
    """Hold KVCache's layers where the model keeps keys, StateLayers where it has states, and otherwise its own layers."""

    def __init__(self, state: Cache, num_slots: int, capacity: int, device: torch.device):
        """Allocate the cache. state: any cache of the model, which determines the kinds of layers."""
        self.states: list[StateLayer] = []
        self.stored: dict[tuple, Tensor] = {}  # the states (num_slots, ...) of slots that are not rows, by name
        super().__init__(len(state.layers), num_slots, capacity, device)
        for number, layer in enumerate(state.layers):
            if isinstance(layer, LinearAttentionLayer):
                both = isinstance(layer, DynamicLayer)
                self.layers[number] = BothLayer(self, layer, num_slots) if both else StateLayer(layer, num_slots)
                self.states.append(self.layers[number])
            elif not isinstance(layer, DynamicLayer):
                self.layers[number] = layer
        self.has_keys = any(isinstance(layer, DynamicLayer) for layer in state.layers)

    @property
    def state_bytes(self) -> int:
        """Return the size of the states of all rows."""
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

    def use(self, rows: Sequence[int]) -> None:
        if self.states and list(rows) != self.rows:
            self.store()
            for name, states, key in self.tensors():
                states[key] = self.stored[name][list(rows)]
        super().use(rows)

    def store(self) -> None:
        """Return the states of the rows to their slots, until the next `use`."""
        for name, states, key in self.tensors():
            if self.rows == [*range(self.num_slots)]:
                self.stored[name] = states[key]
            elif self.rows:
                self.stored[name][self.rows] = states[key]
        self.rows = []

    def swap(self, one: int, other: int) -> None:
        self.store()
        super().swap(one, other)
        for states in self.stored.values():
            states[[one, other]] = states[[other, one]]

    def copy(self, source: int, slot: int, length: int) -> None:
        super().copy(source, slot, length)  # `truncate` stores the states
        for states in self.stored.values():
            states[slot] = states[source]

    def truncate(self, slot: int, length: int) -> None:
        self.store()
        super().truncate(slot, length)
        for states in self.stored.values() if length == 0 else ():
            states[slot] = 0

    def erase(self, slot: int) -> None:
        super().erase(slot)
        for name, states, key in self.tensors():
            if slot in self.rows:
                states[key][self.rows.index(slot)] = 0
            else:
                self.stored[name][slot] = 0

    def can_rewind(self, length: int, earlier: int) -> bool:
        """Return whether nothing changes: states cannot go back."""
        return earlier == length
