"""Sequences of one batch in one cache of the model's own, where each would else have one (heads/target/state_cache.py).

Keys and values lie in columns, as in heads/target/cache.py, and a mask of ours says what each slot sees. Recurrent states lie
side by side; no mask keeps padding out of them, so a state that padding went through is not kept:

    slot 0    a r d d d            its state holds nothing but its own: kept if all is accepted
    slot 1    a a a r d d d        the longest
    slot 2    r d d d . . .        padding went through its state: the one from before is restored

Slots with too many uncommitted tokens compute as many as the least of them has, so that there is no padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from foredraft.heads.target.cache import CacheLayer, KVCache
from foredraft.heads.target.output import TargetOutput

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Accepted tokens that are computed again with every chain, at most; then one forward computes them for good. Fewer do that
# more often, more make every forward longer; of 4, 8, 16 and 32 none is ahead in all of greedy, sampled, alone and in a
# batch, and 16 is within 2 % of the best alone, where chains pay (scripts/bench/README.md, "Chains on a hybrid").
MAX_UNCOMMITTED = 16
# Exactly these: a subclass may keep more than keys, values and states.
RECURRENT = {LinearAttentionLayer, LinearAttentionAndFullAttentionLayer}
STACKED = RECURRENT | {DynamicLayer, DummyLayer}
# Exactly these: a subclass may keep more of the text than `crop` knows of (DeepSeek V4's compressed entries).
CROPPABLE = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer, DummyLayer}


@dataclass
class SlotState:
    """One slot: its text, and how much of it is computed."""

    text: Tensor | None = None  # (1, n): all accepted tokens
    state: Any = (
        None  # the model's own cache; None before its first forward, in a stack, and for a model that keeps none
    )
    num_computed_tokens: int = 0  # tokens of the text that are in it
    newest: Any = None  # of its newest forward: the state after the drafts, the drafts (1, nodes), how many are in it
    finished: bool = False

    @property
    def num_uncommitted(self) -> int:
        return 0 if self.finished or self.text is None else self.text.shape[1] - self.num_computed_tokens

    def extend(self, target: "Target", tokens: Tensor, layers: Sequence[int]) -> TargetOutput:
        """A forward of text (1, length) that follows, and of what is not computed before it."""
        assert self.text is not None
        self.text = torch.cat([self.text, tokens], dim=1)
        new = self.text[:, self.num_computed_tokens :]
        output, self.state = target.forward_from(new, self.num_computed_tokens, self.state, layers, keep_logits=1)
        if self.state is not None:
            self.num_computed_tokens = self.text.shape[1]
        if can_crop(self.state):
            self.state.crop(0)  # a window drops what it no longer needs
        return output._replace(aux_hidden_states=output.aux_hidden_states[:, -tokens.shape[1] :])

    def commit(self, count: int) -> None:
        """Keep the first `count` drafts of its newest forward."""
        assert self.text is not None and self.newest is not None
        (state, tokens, drafts), self.newest = self.newest, None
        self.text = torch.cat([self.text, tokens[:, :count]], dim=1)
        if state is not None and (drafts == count or (drafts > count and can_crop(state))):
            if can_crop(state):
                state.crop(count - drafts)  # also where it is 0: a window drops what it no longer needs
            self.state, self.num_computed_tokens = state, self.text.shape[1]


def can_crop(state: Any) -> bool:
    """Can its newest entries be dropped without a trace?"""
    return isinstance(state, Cache) and all(type(layer) in CROPPABLE for layer in state.layers) and state.is_croppable


def stacks(state: Any, target: "Target") -> bool:
    """May such caches become one? Not where a mask is more than causal, or keys are more than keys."""
    if not isinstance(state, Cache) or target.rope_boundary is not None or target.window is not None:
        return False
    kinds = {type(layer) for layer in state.layers}
    return bool(kinds & RECURRENT) and kinds <= STACKED


class StateLayer(LinearAttentionLayer):
    """States are replaced where transformers' layer writes into them: those from before need no copy. `supports_ragged` finds
    models that write into them themselves."""

    def __init__(self, own: LinearAttentionLayer):
        self.__dict__.update(vars(own))  # what its states are

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        before = self.conv_states[state_idx]
        whole = torch.cat([before, conv_states.to(before.dtype)], dim=-1)
        self.conv_states[state_idx] = whole[..., -before.shape[-1] :]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        state = recurrent_states.to(self.recurrent_states[state_idx].dtype)
        self.recurrent_states[state_idx] = state
        return state


class BothLayer(StateLayer, CacheLayer):
    """Of a layer that has attention and recurrence side by side."""

    def __init__(self, cache: KVCache, index: int, own: LinearAttentionLayer):
        StateLayer.__init__(self, own)
        CacheLayer.__init__(self, cache, index)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        kind = CacheLayer if keys_and_values else LinearAttentionLayer
        kind.lazy_initialization(self, *keys_and_values, **states)


class StackedCache(KVCache):
    """lengths: of what is computed. Its `layers` are of KVCache where the model keeps keys, and else its own."""

    def __init__(self, own: Cache, batch: int, capacity: int, device: torch.device):
        """own: the cache of any slot, which says what the layers are."""
        # Memory of its own for each layer that keeps keys: most keep none.
        super().__init__(len(own.layers), batch, capacity, device, one_device=False)
        self.recurrent: list[dict[int, Any]] = []  # every layer's tensors, (batch, ...)
        for number, layer in enumerate(own.layers):
            if isinstance(layer, LinearAttentionLayer):
                mine = BothLayer(self, number, layer) if isinstance(layer, DynamicLayer) else StateLayer(layer)
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

    def stack_states(self, number: int, slot: SlotState) -> None:
        """A slot's own cache becomes its part of this one."""
        for mine, own in zip(self.layers, slot.state.layers, strict=True):
            if isinstance(own, DynamicLayer) and own.is_initialized:
                if not mine.is_initialized:
                    mine.lazy_initialization(own.keys, own.values)
                mine.keys[number, :, : slot.num_computed_tokens] = own.keys[0]
                mine.values[number, :, : slot.num_computed_tokens] = own.values[0]
            if isinstance(own, LinearAttentionLayer):
                for ours, states in zip((mine.conv_states, mine.recurrent_states), own_states(own), strict=True):
                    for key, state in states:
                        if state is not None:
                            ours[key][number] = state[0]
        slot.state = None

    def reorder(self, slots: list[int | None], capacity: int, most: int | None = None) -> None:
        super().reorder(slots, capacity, most)
        new, old = [n for n, slot in enumerate(slots) if slot is not None], [slot for slot in slots if slot is not None]
        for states in self.recurrent:
            for key, state in states.items():
                if state is not None:
                    states[key] = state.new_zeros(len(slots), *state.shape[1:])
                    states[key][new] = state[old]

    def erase(self, slot: int) -> None:
        super().erase(slot)
        for state in self.states():
            state[slot] = 0

    def forward(
        self, target: "Target", tokens: Tensor, slots: Sequence[SlotState], layers: Sequence[int] = (), keep: int = 1
    ) -> TargetOutput:
        """Of tokens (batch, length) after those that each slot has computed."""
        self.set_lengths([slot.num_computed_tokens for slot in slots])
        mask = self.causal_mask(tokens.shape[1]) if self.has_keys else None
        return target.forward_from(tokens, self.seq_lens, self, layers, keep, mask)[0]

    def catch_up(self, target: "Target", slots: Sequence[SlotState]) -> None:
        """One forward for the slots that have too many uncommitted tokens."""
        count = min((slot.num_uncommitted for slot in slots if slot.num_uncommitted > MAX_UNCOMMITTED), default=0)
        if count == 0:
            return
        before, tokens = self.states(), torch.zeros(len(slots), count, dtype=torch.int64, device=self.device)
        for number, slot in enumerate(slots):
            if slot.num_uncommitted >= count:
                assert slot.text is not None
                tokens[number] = slot.text[0, slot.num_computed_tokens : slot.num_computed_tokens + count]
        self.forward(target, tokens, slots)
        ready = [slot.num_uncommitted >= count for slot in slots]
        self.restore(before, ready)
        for slot, moved in zip(slots, ready, strict=True):
            slot.num_computed_tokens += count * moved

    def forward_chains(
        self, target: "Target", slots: Sequence[SlotState], tokens: Tensor, layers: Sequence[int]
    ) -> TargetOutput:
        """As `StateCache.forward_chains`."""
        for number, slot in enumerate(slots):
            if slot.state is not None:
                self.stack_states(number, slot)
        self.catch_up(target, slots)
        nodes, uncommitted = tokens.shape[1], [slot.num_uncommitted for slot in slots]
        few, wide = min(uncommitted), max(uncommitted)
        new = tokens.new_zeros(len(slots), wide + nodes)
        for number, slot in enumerate(slots):
            if slot.text is not None and not slot.finished:
                new[number, : slot.num_uncommitted] = slot.text[0, slot.num_computed_tokens :]
                new[number, slot.num_uncommitted : slot.num_uncommitted + nodes] = tokens[number]
        whole = [slot.finished or slot.num_uncommitted == wide for slot in slots]
        # Lone bonus tokens are always accepted, so what they do to the states may stay.
        before = None if nodes == 1 and all(whole) else self.states()
        output = self.forward(target, new, slots, layers, wide + nodes - few)
        self.newest = before, tokens, whole
        where = torch.tensor(uncommitted, device=self.device)[:, None, None]
        where = where + torch.arange(nodes, device=self.device)[:, None]
        logits, aux_hidden_states = (
            part.gather(1, (where - skipped).expand(-1, -1, part.shape[-1]))
            for part, skipped in ((output.logits, few), (output.aux_hidden_states, 0))
        )
        return TargetOutput(logits, aux_hidden_states)

    def commit_chains(self, slots: Sequence[SlotState], counts: Sequence[int]) -> None:
        """The first `counts` nodes of the newest forward are accepted; 0 for a slot that has ended."""
        assert self.newest is not None
        (before, tokens, whole), self.newest = self.newest, None
        kept = [done and count in (0, tokens.shape[1]) for done, count in zip(whole, counts, strict=True)]
        for number, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if count:
                assert slot.text is not None
                slot.text = torch.cat([slot.text, tokens[number : number + 1, :count]], dim=1)
                slot.num_computed_tokens = slot.text.shape[1] if kept[number] else slot.num_computed_tokens
        self.restore(before, kept)
        self.set_lengths([slot.num_computed_tokens for slot in slots])

    def restore(self, before: list[Tensor] | None, kept: list[bool]) -> None:
        """States of slots that are not kept become what they were."""
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
