"""The model's own cache, for targets that support neither trees nor stacked states (stacked_cache.py). They decode chains.

Recurrent layers have one state, which a forward advances and which cannot be rolled back. Other layers mask or compress their
keys by column. If every layer can drop its newest entries (chunked or sparse attention, short convolutions), rejected drafts
are cropped. Otherwise a forward of drafts uses a copy of the cache, which replaces it if all of the drafts are accepted:

    text        t t t t t t t a a r         t computed: in the state    a uncommitted: accepted since, not yet in the state
    a forward                 a a r d d d   r the bonus token, d a chain of drafts; only with the model's own mask

If there are too many uncommitted tokens, a separate forward computes them before the next chain.

longrope rotates a text by other angles from some length on (`Capabilities.rope_boundary`), so there it is computed again. A
batch in one cache could not do that for single sequences.

A target that cannot continue from a cache (`Capabilities.caching`) is decoded token by token, as in transformers'
generate.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from foredraft.heads.caches.cuda_graphs import CudaGraphs
from foredraft.heads.target_model.logits import TargetOutput

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target

# Largest number of accepted tokens that are computed again with every chain. A smaller one computes them separately more
# often, a larger one makes every forward longer.
MAX_UNCOMMITTED = 16
# A layer without any state. Before 5.23, transformers uses a LinearAttentionLayer that stays empty.
DummyLayer: type = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)
# Only these types: a subclass may keep more of the text than `crop` handles (DeepSeek V4's compressed entries).
CROPPABLE = {DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, LinearAttentionLayer, DummyLayer}


@dataclass
class SlotState:
    """Hold the text of one slot, and how much of it is computed."""

    text: Tensor | None = None  # (1, n): all accepted tokens
    state: Any = None  # the model's own cache; None before its first forward, and for a model without one
    num_computed_tokens: int = 0  # tokens of the text in the state
    newest: Any = None  # of its newest forward: the state, the drafts (1, nodes), the number of tokens in the state
    finished: bool = False

    def compute(self, target: "Target", layers: Sequence[int] = ()) -> TargetOutput:
        """Run a forward of the part of the text that is not computed."""
        assert self.text is not None
        new, is_first = self.text[:, self.num_computed_tokens :], self.state is None
        output, self.state = target.forward_from(new, self.num_computed_tokens, self.state, layers, keep_logits=1)
        self.num_computed_tokens = 0 if self.state is None else self.text.shape[1]
        if can_crop(self.state):
            self.state.activate_past_recording() if is_first else self.state.crop(
                0
            )  # a window drops what it does not need
        return output

    def commit(self, count: int) -> None:
        """Accept the first `count` drafts of its newest forward."""
        assert self.text is not None and self.newest is not None
        (state, tokens, computed), self.newest = self.newest, None
        self.text = torch.cat([self.text, tokens[:, :count]], dim=1)
        rejected = max(0, computed - self.text.shape[1])
        if state is not None and (rejected == 0 or can_crop(state)):
            if can_crop(state):
                state.crop(-rejected)  # also if it is 0: a window drops what it no longer needs
            self.state, self.num_computed_tokens = state, computed - rejected


class StateCache:
    """Hold the model's own cache for each slot, with one forward for each. It implements the part of KVCache's interface
    that decoding uses. lengths, seq_lens: as there."""

    kv_bucket: int | None = None

    def __init__(self, num_slots: int, device: torch.device | str):
        self.num_slots, self.device = num_slots, torch.device(device)
        self.graphs = CudaGraphs(self.device, enabled=False)
        self.all_slots, self.slot_lengths = [SlotState() for _ in range(num_slots)], [0] * num_slots
        self.use(range(num_slots))

    def use(self, rows: Sequence[int]) -> None:
        """Let forwards compute these slots, as `KVCache.use` does."""
        self.rows, self.slots = list(rows), [self.all_slots[slot] for slot in rows]
        self.set_lengths([self.slot_lengths[slot] for slot in rows])

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        for slot, length in zip(self.rows, lengths, strict=True):
            self.slot_lengths[slot] = length
        self.seq_lens = torch.tensor(lengths, device=self.device)[:, None]

    def set_bucket(self, room: int) -> None:
        """Do nothing: there are no captured forwards."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget the text of a slot. Parts of it cannot be kept: see `can_rewind`."""
        self.all_slots[slot], self.slot_lengths[slot] = SlotState(), 0

    def swap(self, one: int, other: int) -> None:
        states, lengths = self.all_slots, self.slot_lengths
        states[one], states[other] = states[other], states[one]
        lengths[one], lengths[other] = lengths[other], lengths[one]

    def can_rewind(self, length: int, earlier: int) -> bool:
        return False

    def erase(self, slot: int) -> None:
        """Forget the state of a slot whose sequence has ended."""
        self.all_slots[slot] = SlotState(finished=True)
        self.use(self.rows)

    def erase_uncommitted(self, slot: int) -> None:
        """Do nothing: rejected drafts are gone."""

    def mask(self, among: Tensor) -> Tensor:
        """Return `among` unchanged: the model's own masks determine what a token of a chain sees."""
        return among

    def prefill(
        self, target: "Target", tokens: Tensor, lengths: Sequence[int], layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run a forward of whole prompts as `Target.prefill` does, or of parts if the target supports chains."""
        outputs = []
        for slot, row, length in zip(self.slots, tokens, lengths, strict=True):
            new = row[None, :length]
            slot.text = new if slot.text is None else torch.cat([slot.text, new], dim=1)
            if target.capabilities.caching:
                output = slot.compute(target, layers)
            else:
                output, slot.state = generate_next(target, slot.text)
            outputs.append(output._replace(aux_hidden_states=output.aux_hidden_states[:, -length:]))
        return as_batch(outputs, max(lengths))

    def forward_chains(self, target: "Target", tokens: Tensor, layers: Sequence[int] = ()) -> TargetOutput:
        """Run a forward of drafts (batch, nodes), a chain per slot after its text. The output of finished slots is
        undefined."""
        outputs = [self.forward_chain(slot, target, tokens[i : i + 1], layers) for i, slot in enumerate(self.slots)]
        return as_batch(outputs, tokens.shape[1])

    def forward_chain(self, slot: SlotState, target: "Target", tokens: Tensor, layers: Sequence[int]) -> TargetOutput:
        nodes = tokens.shape[1]
        if slot.finished:
            zeros = torch.zeros(1, nodes, target.vocab_size, dtype=target.dtype, device=self.device)
            return TargetOutput(zeros, zeros.new_zeros(1, nodes, len(layers) and len(layers) * target.hidden_size))
        assert slot.text is not None
        if not target.capabilities.caching:
            assert nodes == 1, target.capabilities.why
            output, state = generate_next(target, torch.cat([slot.text, tokens], dim=1), slot.state)
            slot.newest = state, tokens, slot.text.shape[1] + 1
            return output
        length, boundary = slot.text.shape[1], target.capabilities.rope_boundary
        real = nodes if target.context is None else min(nodes, target.context - length)  # the rest is never accepted
        # Drafts beyond the boundary are computed with the whole text, rotated by the other angles; that state is discarded.
        early = real if boundary is None or length > boundary else min(real, boundary - length)
        crosses = boundary is not None and slot.num_computed_tokens <= boundary < length
        if crosses:
            slot.state, slot.num_computed_tokens = None, 0
        if crosses or (nodes > 1 and slot.state is not None and length - slot.num_computed_tokens > MAX_UNCOMMITTED):
            slot.compute(target)
        # A single bonus token is always accepted, so it may change the state.
        state, parts = slot.state if nodes == 1 or can_crop(slot.state) else copy.deepcopy(slot.state), []
        computed = length + early if early else slot.num_computed_tokens
        if early:
            new = torch.cat([slot.text[:, slot.num_computed_tokens :], tokens[:, :early]], dim=1)
            output, state = target.forward_from(new, slot.num_computed_tokens, state, layers, keep_logits=early)
            parts.append((output, early))
        slot.newest = state, tokens, computed
        if early < real:
            text = torch.cat([slot.text, tokens[:, :real]], dim=1)
            parts.append((target.forward_from(text, 0, None, layers, keep_logits=real - early)[0], real - early))
        logits, aux_hidden_states = (
            torch.cat([output[kind][:, -count:] for output, count in parts], dim=1) for kind in (0, 1)
        )
        rest = (0, 0, 0, nodes - real)
        return parts[0][0]._replace(logits=pad(logits, rest), aux_hidden_states=pad(aux_hidden_states, rest))

    def commit(self, path: list[list[int]], padded_path: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Accept the first nodes of every slot's chain, the number of nodes in `path[slot]`; 0 means that it has ended."""
        for slot, nodes in zip(self.slots, path, strict=True):
            assert nodes == list(range(len(nodes))), f"{nodes} is not the path of a chain"
            slot.finished = slot.finished or not nodes
            if not slot.finished:
                slot.commit(len(nodes))
        self.set_lengths([length + len(nodes) for length, nodes in zip(self.lengths, path, strict=True)])


def can_crop(state: Any) -> bool:
    """Return whether its newest entries can be dropped without a trace."""
    # A cache with its own `crop` keeps more than its layers do (MiniMax), which `is_croppable` only reports since 5.23.
    if not isinstance(state, Cache) or type(state).crop is not Cache.crop:
        return False
    return all(type(layer) in CROPPABLE for layer in state.layers) and state.is_croppable


def as_batch(outputs: Sequence[TargetOutput], length: int) -> TargetOutput:
    """Concatenate outputs of forwards of single sequences. Hidden states are padded on the right."""
    states = [output.aux_hidden_states for output in outputs]
    padded = [pad(state, (0, 0, 0, length - state.shape[1])) for state in states]
    return TargetOutput(torch.cat([output.logits for output in outputs]), torch.cat(padded))


def generate_next(
    target: "Target", text: Tensor, kwargs: dict[str, Any] | None = None
) -> tuple[TargetOutput, dict[str, Any]]:
    """Return the logits (1, 1, vocab) of the token after a text (1, length), by the steps of transformers' own generate, and
    the arguments that these keep for the text with that token."""
    first, model = kwargs is None, target.model
    # transformers cannot make a cache for BLT, which nests several transformers.
    kwargs = {"use_cache": getattr(target.config, "num_hidden_layers", None) is not None} if kwargs is None else kwargs
    inputs = model.prepare_inputs_for_generation(
        text,
        next_sequence_length=1 if kwargs["use_cache"] and not first else None,
        is_first_iteration=first,
        **kwargs,
    )
    out = model(**inputs, return_dict=True)
    output = TargetOutput(out.logits[:, -1:, : target.vocab_size], out.logits.new_empty(*text.shape, 0))
    return output, model._update_model_kwargs_for_generation(out, kwargs)
