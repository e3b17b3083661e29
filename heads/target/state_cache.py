"""The model's own cache, for targets whose layers cannot branch: what decoding by chains reads over.

Recurrent layers keep one state, which a read moves on and which nothing takes back; others mask or compress their keys by
place. So the cache stands at a *committed* position, and a read of drafts starts from a fork of it, which becomes the
committed one if all that was read is accepted:

    text      t t t t t t t a a r         t committed: in the state    a pending: accepted since, not yet in the state
    a read                  a a r d d d   r the root, d a chain of drafts, on a fork; no mask but the model's own

With too much pending of a lone row, the next step drafts nothing: a read of the root alone commits it all (`needs_catch_up`).

longrope rotates a text by other angles from some length on (`Target.rope_boundary`), so there it is read again: row by row,
as a batch in one cache could not be.

What cannot continue from a cache (`Target.supports_caching`) is decoded token by token, as transformers' own generate does.

Where every layer can drop its newest entries (chunked or sparse attention, short convolutions) the fork is cropped instead,
and nothing is ever pending. transformers' assisted generation does only that, and so cannot draft for recurrent layers.
"""

import copy
from collections.abc import Sequence
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

from foredraft.heads.target.cuda_graphs import CudaGraphs
from foredraft.heads.target.output import TargetOutput
from foredraft.heads.target.stacked_cache import MAX_UNCOMMITTED, SlotState, StackedCache, stacks

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Of `supports_chains`: how many tokens, and how far logits may differ, as a share of their largest. In half precision only
# what is grossly wrong can be distinguished from rounding.
PROBE, TOLERANCE = 12, {torch.float32: 1e-4}
# Attributes of transformers' layers that are only ever replaced by longer ones, never written into: forks share them.
SHARED = {"keys", "values", "indexer_keys"}
# Exactly these: a subclass may keep more of the text than `crop` knows of (DeepSeek V4's compressed entries).
CROPPABLE = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer, DummyLayer}


class StateCache:
    """One own cache of the model per row, read row by row: a row is read as it would be alone. Where the model reads rows
    together as it reads them alone (`Target.supports_ragged`), those of a batch lie in one (heads/target/stacked_cache.py).

    The same interface as heads/target/cache.py's, as far as decoding uses it. lengths, starts: as there.
    """

    kv_bucket: int | None = None

    def __init__(self, batch: int, capacity: int, device: torch.device | str):
        self.batch, self.capacity, self.device = batch, capacity, torch.device(device)
        self.graphs = CudaGraphs(self.device, enabled=False)
        self.slots = [SlotState() for _ in range(batch)]
        self.stack: StackedCache | None = None
        self.set_lengths([0] * batch)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.seq_lens = torch.tensor(lengths, device=self.device)[:, None]

    @property
    def needs_catch_up(self) -> bool:
        """Is so much pending of a lone row that it is to be committed? The read of a root alone does that, and gains a token,
        where a read before the next chain's gains none."""
        alone = self.batch == 1 and self.stack is None and self.slots[0].state is not None
        return alone and self.slots[0].num_uncommitted > MAX_UNCOMMITTED

    def set_bucket(self, room: int) -> None:
        """Nothing is captured here."""

    def clear(self) -> None:
        self.reorder([None] * self.batch, self.capacity)

    def reorder(self, rows: list[int | None], capacity: int) -> None:
        if self.stack is not None:
            if any(row is not None for row in rows):
                self.stack.reorder(rows, capacity + MAX_UNCOMMITTED)
            else:
                self.stack = None
        self.batch, self.capacity = len(rows), capacity
        lengths = [0 if row is None else self.lengths[row] for row in rows]
        self.slots = [SlotState() if row is None else self.slots[row] for row in rows]
        self.set_lengths(lengths)

    def erase(self, row: int) -> None:
        """Forget all that a row holds, which has ended."""
        self.slots[row] = SlotState(finished=True)
        if self.stack is not None:
            self.stack.erase(row)

    def erase_uncommitted(self, row: int) -> None:
        """Rejected drafts of a lone row were in a fork, which is gone."""
        if self.stack is not None:
            self.stack.erase_uncommitted(row)

    def copy_from(self, places: list[int], other: "StateCache", rows: list[int]) -> None:
        """The rows in these places, which are empty, become these of another cache's rows."""
        lengths = [*self.lengths]
        for place, row in zip(places, rows, strict=True):
            self.slots[place], lengths[place] = other.slots[row], other.lengths[row]
        self.set_lengths(lengths)

    def mask(self, among: Tensor) -> Tensor:
        """As it is: what a token of a chain sees, the model's own masks say."""
        return among

    def prefill(
        self, target: "Target", tokens: Tensor, lengths: Sequence[int], layers: Sequence[int] = ()
    ) -> TargetOutput:
        """As `Target.prefill`."""
        for number, (row, length) in enumerate(zip(self.slots, lengths, strict=True)):
            row.text = tokens[number : number + 1, :length]
        return as_batch([self.prefill_slot(row, target, layers) for row in self.slots], max(lengths))

    def prefill_slot(self, row: SlotState, target: "Target", layers: Sequence[int] = ()) -> TargetOutput:
        """Read the whole text into a new state."""
        assert row.text is not None
        if not target.supports_caching:
            reading, row.state = target.generate_next(row.text)
            return reading
        reading, row.state = target.forward_from(row.text, 0, None, layers, keep_logits=1)
        row.num_computed_tokens = 0 if row.state is None else row.text.shape[1]
        if can_crop(row.state):
            row.state.activate_past_recording()
        return reading

    def forward_chains(self, target: "Target", tokens: Tensor, layers: Sequence[int] = ()) -> TargetOutput:
        """Read drafts (batch, nodes), a chain per row after its text. What it gives of finished rows means nothing."""
        if self.stack is None and self.batch > 1 and target.supports_ragged:
            own = next(row.state for row in self.slots if row.state is not None)
            self.stack = StackedCache(own, self.batch, self.capacity + MAX_UNCOMMITTED, self.device)
        if self.stack is not None:
            return self.stack.forward_chains(target, self.slots, tokens, layers)
        readings = [self.forward_chain(row, target, tokens[i : i + 1], layers) for i, row in enumerate(self.slots)]
        return as_batch(readings, tokens.shape[1])

    def forward_chain(self, row: SlotState, target: "Target", tokens: Tensor, layers: Sequence[int]) -> TargetOutput:
        nodes = tokens.shape[1]
        if row.finished:
            zeros = torch.zeros(1, nodes, target.vocab_size, dtype=target.dtype, device=self.device)
            return TargetOutput(zeros, zeros.new_zeros(1, nodes, len(layers) and len(layers) * target.hidden_size))
        assert row.text is not None
        if not target.supports_caching:
            assert nodes == 1, target.why_no_trees
            reading, state = target.generate_next(torch.cat([row.text, tokens], dim=1), row.state)
            row.newest = state, tokens, 1
            return reading
        length, boundary = row.text.shape[1], target.rope_boundary
        real = nodes if target.context is None else min(nodes, target.context - length)  # the rest is never kept
        # Drafts beyond the boundary are read with the whole text, which they rotate otherwise; nothing of that is kept.
        early = real if boundary is None or length > boundary else min(real, boundary - length)
        if boundary is not None and row.num_computed_tokens <= boundary < length:
            self.prefill_slot(row, target)
        elif nodes > 1 and row.state is not None and row.num_uncommitted > MAX_UNCOMMITTED:
            _, row.state = target.forward_from(
                row.text[:, row.num_computed_tokens :], row.num_computed_tokens, row.state, keep_logits=1
            )
            row.num_computed_tokens = length
        # A lone root is always accepted, so what it does to the state may stay.
        state, parts = row.state if nodes == 1 else fork(row.state), []
        if early:
            every = torch.cat([row.text[:, row.num_computed_tokens :], tokens[:, :early]], dim=1)
            reading, state = target.forward_from(every, row.num_computed_tokens, state, layers, keep_logits=early)
            parts.append((reading, early))
        row.newest = state, tokens, early
        if early < real:
            whole = torch.cat([row.text, tokens[:, :real]], dim=1)
            parts.append((target.forward_from(whole, 0, None, layers, keep_logits=real - early)[0], real - early))
        logits, aux_hidden_states = (
            torch.cat([reading[kind][:, -count:] for reading, count in parts], dim=1) for kind in (0, 1)
        )
        rest = (0, 0, 0, nodes - real)
        return parts[0][0]._replace(logits=pad(logits, rest), aux_hidden_states=pad(aux_hidden_states, rest))

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Keep the first nodes of every row's chain, as many as `path[row]` names; none means that the row has ended."""
        for row, nodes in zip(self.slots, path, strict=True):
            assert nodes == list(range(len(nodes))), f"{nodes} is no chain's path"
            row.finished = row.finished or not nodes
            if not row.finished and self.stack is None:
                self.keep(row, len(nodes))
        if self.stack is not None:
            self.stack.keep(self.slots, [len(nodes) for nodes in path])
        self.set_lengths([length + len(nodes) for length, nodes in zip(self.lengths, path, strict=True)])

    def keep(self, row: SlotState, count: int) -> None:
        assert row.text is not None and row.newest is not None
        (state, tokens, read), row.newest = row.newest, None
        row.text = torch.cat([row.text, tokens[:, :count]], dim=1)
        if state is not None and (read == count or (read > count and can_crop(state))):
            if can_crop(state):
                state.crop(count - read)  # also where it is 0: a window drops what it no longer needs
            row.state, row.num_computed_tokens = state, row.text.shape[1]


def as_batch(readings: Sequence[TargetOutput], length: int) -> TargetOutput:
    """Rows that were read one by one, their features padded on the right."""
    aux_hidden_states = [
        pad(row.aux_hidden_states, (0, 0, 0, length - row.aux_hidden_states.shape[1])) for row in readings
    ]
    return TargetOutput(torch.cat([row.logits for row in readings]), torch.cat(aux_hidden_states))


@torch.no_grad()
def supports_caching(target: "Target") -> bool:
    """Does the target take a token alone after those that its cache holds?"""
    tokens = torch.arange(3, device=target.device)[None]
    _, state = target.forward_from(tokens[:, :2], 0, None)
    try:
        target.forward_from(tokens[:, 2:] if state is not None else tokens, 0 if state is None else 2, state)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # in words of its own (CPM-Ant wants all of the text again)
        return False
    return True


@torch.no_grad()
def supports_chains(target: "Target") -> bool:
    """Does the target read several tokens after a text as it reads them one by one? Measured on a few random tokens."""
    tokens = torch.randint(target.vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(0)).to(target.device)
    text, nodes = tokens[:, : PROBE // 2], PROBE // 2
    together, one_by_one = (StateCache(1, PROBE, target.device) for _ in range(2))
    for cache in (together, one_by_one):
        cache.prefill(target, text, [text.shape[1]])
    try:
        at_once, single = together.forward_chains(target, tokens[:, nodes:]).logits, []
    except torch.OutOfMemoryError:
        raise
    except Exception:  # some take one token at a time over a cache, each in words of its own (ProphetNet)
        return False
    for number in range(nodes, PROBE):
        single.append(one_by_one.forward_chains(target, tokens[:, number : number + 1]).logits)
        one_by_one.commit([[0]])
    return alike(at_once, torch.cat(single, 1))


@torch.no_grad()
def supports_ragged(target: "Target") -> bool:
    """Does the target read rows of several lengths together as it reads each alone? Measured as above."""
    tokens = torch.randint(target.vocab_size, (3, PROBE), generator=torch.Generator().manual_seed(1)).to(target.device)
    lengths, together = [6, 3, 5], StateCache(3, PROBE, target.device)
    alone = [StateCache(1, PROBE, target.device) for _ in lengths]
    for number, length in enumerate(lengths):
        alone[number].prefill(target, tokens[number : number + 1, :length], [length])
    if not stacks(alone[0].slots[0].state, target):
        return False
    together.prefill(target, tokens, lengths)
    together.stack = StackedCache(together.slots[0].state, 3, PROBE + MAX_UNCOMMITTED, together.device)
    for counts in ([1, 3, 2], [2, 3, 1], [1, 1, 1]):
        drafts = torch.stack([row[at : at + 3] for row, at in zip(tokens, lengths, strict=True)])
        at_once = together.forward_chains(target, drafts).logits
        single = torch.cat(
            [cache.forward_chains(target, row[None]).logits for cache, row in zip(alone, drafts, strict=True)]
        )
        if not alike(at_once, single):
            return False
        together.commit([list(range(count)) for count in counts])
        for cache, count in zip(alone, counts, strict=True):
            cache.commit([list(range(count))])
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    return True


def alike(ours: Tensor, theirs: Tensor) -> bool:
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    return bool(difference < TOLERANCE.get(theirs.dtype, 0.1))


def can_crop(state: Any) -> bool:
    """Can its newest entries be dropped without a trace?"""
    return isinstance(state, Cache) and all(type(layer) in CROPPABLE for layer in state.layers) and state.is_croppable


def fork(state: Any) -> Any:
    """A cache that can be read on from, while this one stays as it is. Keys and values are shared: reads concatenate, which
    makes new ones. States that are written into are copied; they do not grow with the text."""
    if not isinstance(state, Cache):
        return copy.deepcopy(state)
    twin = copy.copy(state)
    vars(twin).update({name: cloned(value) for name, value in vars(state).items() if name != "layers"})  # MiniMax's
    twin.layers = [copy.copy(layer) for layer in state.layers]
    for layer in twin.layers:
        for name, value in vars(layer).items():
            if name not in SHARED and isinstance(value, Tensor | dict | list):
                vars(layer)[name] = cloned(value)
    return twin


def cloned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: cloned(part) for key, part in value.items()}
    if isinstance(value, list):
        return [cloned(part) for part in value]
    return value.clone() if isinstance(value, Tensor) else value
