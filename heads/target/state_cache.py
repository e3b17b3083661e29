"""The model's own cache, for targets whose layers cannot branch: decoding by chains goes over it.

Recurrent layers keep one state, which a forward moves on and which nothing takes back; others mask or compress their keys by
column. So the cache holds the *computed* tokens, and a forward of drafts starts from a fork of it, which takes its place if
all of the drafts are accepted:

    text        t t t t t t t a a r         t computed: in the state    a uncommitted: accepted since, not yet in the state
    a forward                 a a r d d d   r the bonus token, d a chain of drafts, on a fork; no mask but the model's own

With too many uncommitted tokens of a lone sequence, the next step drafts nothing: a forward of the bonus token alone computes
them all (`needs_catch_up`).

longrope rotates a text by other angles from some length on (`Target.rope_boundary`), so there it is computed again: sequence
by sequence, as a batch in one cache could not be.

What cannot continue from a cache (`Target.supports_caching`) is decoded token by token, as transformers' own generate does.

Where every layer can drop its newest entries (chunked or sparse attention, short convolutions) the fork is cropped instead,
and nothing is ever uncommitted. transformers' assisted generation does only that, and so cannot draft for recurrent layers.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from foredraft.heads.target.cuda_graphs import CudaGraphs
from foredraft.heads.target.output import TargetOutput
from foredraft.heads.target.stacked_cache import MAX_UNCOMMITTED, SlotState, StackedCache, can_crop, stacks

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Of `supports_chains`: how many tokens, and how far logits may differ, as a share of their largest. In half precision only
# what is grossly wrong can be distinguished from rounding.
PROBE, TOLERANCE = 12, {torch.float32: 1e-4}
# Attributes of transformers' layers that are only ever replaced by longer ones, never written into: forks share them.
SHARED = {"keys", "values", "indexer_keys"}


class StateCache:
    """One own cache of the model per slot, and one forward for each. Where one forward for all gives the same
    (`Target.supports_ragged`), those of a batch lie in one cache (heads/target/stacked_cache.py).

    The same interface as heads/target/cache.py's, as far as decoding uses it. lengths, seq_lens: as there.
    """

    kv_bucket: int | None = None
    entries = 0  # a state has no room to be counted

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
        """Has a lone sequence so many uncommitted tokens that they are to be computed? A forward of the bonus token alone
        does that, and gains a token, where one before the next chain's gains none."""
        alone = self.batch == 1 and self.stack is None and self.slots[0].state is not None
        return alone and self.slots[0].num_uncommitted > MAX_UNCOMMITTED

    def set_bucket(self, room: int) -> None:
        """Nothing is captured here."""

    def clear(self) -> None:
        self.reorder([None] * self.batch, self.capacity)

    def reorder(self, slots: list[int | None], capacity: int, most: int | None = None) -> None:
        """As `KVCache.reorder`, but a state has no room to be counted."""
        if self.stack is not None:
            if any(slot is not None for slot in slots):
                self.stack.reorder(slots, capacity + MAX_UNCOMMITTED)
            else:
                self.stack = None
        self.batch, self.capacity = len(slots), capacity
        lengths = [0 if slot is None else self.lengths[slot] for slot in slots]
        self.slots = [SlotState() if slot is None else self.slots[slot] for slot in slots]
        self.set_lengths(lengths)

    def erase(self, slot: int) -> None:
        """Forget all that a slot holds, whose sequence has ended."""
        self.slots[slot] = SlotState(finished=True)
        if self.stack is not None:
            self.stack.erase(slot)

    def erase_uncommitted(self, slot: int) -> None:
        """Rejected drafts of a lone sequence were in a fork, which is gone."""
        if self.stack is not None:
            self.stack.erase_uncommitted(slot)

    def copy_from(self, slots: list[int], other: "StateCache", others: list[int]) -> None:
        """These slots, which are empty, become these `others` of another cache."""
        lengths = [*self.lengths]
        for slot, theirs in zip(slots, others, strict=True):
            self.slots[slot], lengths[slot] = other.slots[theirs], other.lengths[theirs]
        self.set_lengths(lengths)

    def mask(self, among: Tensor) -> Tensor:
        """As it is: what a token of a chain sees, the model's own masks say."""
        return among

    def prefill(
        self, target: "Target", tokens: Tensor, lengths: Sequence[int], layers: Sequence[int] = ()
    ) -> TargetOutput:
        """As `Target.prefill`: whole prompts, or of a target that supports chains a part of each."""
        outputs = []
        for slot, row, length in zip(self.slots, tokens, lengths, strict=True):
            if slot.text is None:
                slot.text = row[None, :length]
                outputs.append(self.prefill_slot(slot, target, layers))
            else:
                outputs.append(slot.extend(target, row[None, :length], layers))
        return as_batch(outputs, max(lengths))

    def prefill_slot(self, slot: SlotState, target: "Target", layers: Sequence[int] = ()) -> TargetOutput:
        """A forward of the whole text into a new state."""
        assert slot.text is not None
        if not target.supports_caching:
            output, slot.state = target.generate_next(slot.text)
            return output
        output, slot.state = target.forward_from(slot.text, 0, None, layers, keep_logits=1)
        slot.num_computed_tokens = 0 if slot.state is None else slot.text.shape[1]
        if can_crop(slot.state):
            slot.state.activate_past_recording()
        return output

    def forward_chains(self, target: "Target", tokens: Tensor, layers: Sequence[int] = ()) -> TargetOutput:
        """A forward of drafts (batch, nodes), a chain per slot after its text. What it gives of finished slots means
        nothing."""
        if self.stack is None and self.batch > 1 and target.supports_ragged:
            own = next(slot.state for slot in self.slots if slot.state is not None)
            self.stack = StackedCache(own, self.batch, self.capacity + MAX_UNCOMMITTED, self.device)
        if self.stack is not None:
            return self.stack.forward_chains(target, self.slots, tokens, layers)
        outputs = [self.forward_chain(slot, target, tokens[i : i + 1], layers) for i, slot in enumerate(self.slots)]
        return as_batch(outputs, tokens.shape[1])

    def forward_chain(self, slot: SlotState, target: "Target", tokens: Tensor, layers: Sequence[int]) -> TargetOutput:
        nodes = tokens.shape[1]
        if slot.finished:
            zeros = torch.zeros(1, nodes, target.vocab_size, dtype=target.dtype, device=self.device)
            return TargetOutput(zeros, zeros.new_zeros(1, nodes, len(layers) and len(layers) * target.hidden_size))
        assert slot.text is not None
        if not target.supports_caching:
            assert nodes == 1, target.why_no_trees
            output, state = target.generate_next(torch.cat([slot.text, tokens], dim=1), slot.state)
            slot.newest = state, tokens, 1
            return output
        length, boundary = slot.text.shape[1], target.rope_boundary
        real = nodes if target.context is None else min(nodes, target.context - length)  # the rest is never kept
        # Drafts beyond the boundary are computed with the whole text, which they rotate otherwise; nothing of that is kept.
        early = real if boundary is None or length > boundary else min(real, boundary - length)
        if boundary is not None and slot.num_computed_tokens <= boundary < length:
            self.prefill_slot(slot, target)
        elif nodes > 1 and slot.state is not None and slot.num_uncommitted > MAX_UNCOMMITTED:
            _, slot.state = target.forward_from(
                slot.text[:, slot.num_computed_tokens :], slot.num_computed_tokens, slot.state, keep_logits=1
            )
            slot.num_computed_tokens = length
        # A lone bonus token is always accepted, so what it does to the state may stay.
        state, parts = slot.state if nodes == 1 else fork(slot.state), []
        if early:
            new = torch.cat([slot.text[:, slot.num_computed_tokens :], tokens[:, :early]], dim=1)
            output, state = target.forward_from(new, slot.num_computed_tokens, state, layers, keep_logits=early)
            parts.append((output, early))
        slot.newest = state, tokens, early
        if early < real:
            whole = torch.cat([slot.text, tokens[:, :real]], dim=1)
            parts.append((target.forward_from(whole, 0, None, layers, keep_logits=real - early)[0], real - early))
        logits, aux_hidden_states = (
            torch.cat([output[kind][:, -count:] for output, count in parts], dim=1) for kind in (0, 1)
        )
        rest = (0, 0, 0, nodes - real)
        return parts[0][0]._replace(logits=pad(logits, rest), aux_hidden_states=pad(aux_hidden_states, rest))

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Keep the first nodes of every slot's chain, as many as `path[slot]` names; none means that it has ended."""
        for slot, nodes in zip(self.slots, path, strict=True):
            assert nodes == list(range(len(nodes))), f"{nodes} is no chain's path"
            slot.finished = slot.finished or not nodes
            if not slot.finished and self.stack is None:
                slot.commit(len(nodes))
        if self.stack is not None:
            self.stack.commit_chains(self.slots, [len(nodes) for nodes in path])
        self.set_lengths([length + len(nodes) for length, nodes in zip(self.lengths, path, strict=True)])


def as_batch(outputs: Sequence[TargetOutput], length: int) -> TargetOutput:
    """Outputs of forwards of one sequence each, their hidden states padded on the right."""
    states = [output.aux_hidden_states for output in outputs]
    padded = [pad(state, (0, 0, 0, length - state.shape[1])) for state in states]
    return TargetOutput(torch.cat([output.logits for output in outputs]), torch.cat(padded))


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
    """As `Target.supports_chains`, measured on a few random tokens."""
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
    """As `Target.supports_ragged`, measured as above."""
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
        pairs = zip(alone, drafts, strict=True)
        if not alike(at_once, torch.cat([cache.forward_chains(target, chain[None]).logits for cache, chain in pairs])):
            return False
        together.commit([list(range(count)) for count in counts])
        for cache, count in zip(alone, counts, strict=True):
            cache.commit([list(range(count))])
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
    return True


def alike(ours: Tensor, theirs: Tensor) -> bool:
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    return bool(difference < TOLERANCE.get(theirs.dtype, 0.1))


def fork(state: Any) -> Any:
    """A cache to go on from, while this one stays as it is. Keys and values are shared: forwards concatenate, which makes new
    ones. States that are written into are copied; they do not grow with the text."""
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
