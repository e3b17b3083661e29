"""The interface of drafters. A drafter proposes a tree of tokens, which the target verifies. It never decides anything."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foredraft.heads.caches.kv_cache import to_device
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree, from_parents

if TYPE_CHECKING:
    from foredraft.inference.drafters.cached_tree import CachedTree


class Accepted(NamedTuple):
    """Hold the tokens that the last step added to the texts, or a part of the prompts. Sequences are padded on the right, at
    least to the longest one."""

    tokens: Tensor  # (batch, new) int64: accepted tokens, the bonus token of each sequence last
    # (batch, new, width): hidden states of the position before each token, in the drafter's layers.
    aux_hidden_states: Tensor
    counts: list[int]  # number of real tokens of each sequence; 0 if it has finished
    text: list[list[int]]  # whole text of each sequence on the host, including the bonus token
    counts_on_device: Tensor | None = None  # (batch, 1) int64, if the device already has them

    @property
    def device_counts(self) -> Tensor:
        if self.counts_on_device is not None:
            return self.counts_on_device
        return to_device(self.counts, self.tokens.device)[:, None]


class Drafter(ABC):
    layers: Sequence[int] = ()  # the target's hidden states that it needs, numbered as in heads/target_model/model.py
    depth: int  # maximum number of levels of its next tree
    nodes: int  # maximum number of nodes of all its trees, including the bonus token
    branches: bool = True  # whether its trees may be more than chains
    sampling: Sampling  # the settings of the batch
    parts: "Sequence[Drafter]" = ()  # the drafters that it consists of
    remembers_others: bool = False  # whether its drafts may contain text of other requests, which must not be shown

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        """Start a new generation and forget the last one. capacity: maximum tokens of a sequence, including drafts."""
        self.sampling = sampling
        for part in self.parts:
            part.begin(batch, capacity, sampling)

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        """Replace the batch by the sequences of these slots; None is a new one, whose prompt its `cached_drafters` have
        prefilled up to the newest token. Drafters without state per sequence can ignore this."""
        self.sampling = sampling
        for part in self.parts:
            part.select_sequences(slots, capacity, sampling)

    @property
    def cached_drafters(self) -> "Sequence[CachedTree]":
        """Return the drafters, within this one, that prefill a cache."""
        return [cached for part in self.parts for cached in part.cached_drafters]

    def prepare(self, accepted: Accepted) -> None:
        """Decide what the next `propose` does, before `depth` is read: noise is made for that many positions."""
        for part in self.parts:
            part.prepare(accepted)

    @abstractmethod
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        """Return a tree whose node 0 is the bonus token. gumbel: (batch, depth + 1, vocab) float32, the noise of tokens at
        depth d in [:, d - 1]; None if greedy. Adding the noise to a draft's logits makes it tend to the target's noisy
        choice (inference/sampling.py)."""

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:  # noqa: B027  (most have nothing to learn)
        """Receive the result of the last proposal. paths: accepted nodes of each sequence, node 0 first; [] for finished
        ones. choices: (batch, nodes) int64, the target's choice after each node, accepted or not."""

    def forget_outputs(self) -> None:
        """Forget the outputs of earlier generations, as a benchmark needs that decodes a prompt several times."""
        for part in self.parts:
            part.forget_outputs()

    def observe_seconds(self, seconds: float | None) -> None:
        """Receive the duration of the whole last step, after `observe`; None if a graph was captured in it."""
        for part in self.parts:
            part.observe_seconds(seconds)

    def save(self) -> None:
        """Write what the next run can use, as happens by itself unless a signal ends the process."""
        for part in self.parts:
            part.save()


class Wrapper(Drafter):
    """Change what another drafter proposes."""

    def __init__(self, inner: Drafter):
        self.inner, self.parts = inner, [inner]
        self.layers, self.nodes, self.branches = inner.layers, inner.nodes, inner.branches

    @property
    def depth(self) -> int:  # type: ignore[override]  # some drafters change it between steps
        return self.inner.depth

    @property
    def remembers_others(self) -> bool:  # type: ignore[override]
        return self.inner.remembers_others

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        self.inner.observe(paths, choices)


class NoDrafter(Drafter):
    """Draft nothing: autoregressive decoding in the same loop."""

    depth, nodes, branches = 0, 1, False

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return bonus_only(accepted)


def newest(x: Tensor, counts: Tensor) -> Tensor:
    """Return the last real entries, (batch, 1, ...), of x (batch, new, ...). counts: (batch, 1)."""
    if x.shape[1] == 1:
        return x
    last = (counts - 1).clamp(min=0)
    return x.gather(1, last) if x.dim() == 2 else x.gather(1, last[:, :, None].expand(-1, 1, x.shape[-1]))


def bonus_tokens(accepted: Accepted) -> Tensor:
    """Return the newest token of each sequence, (batch, 1)."""
    one = accepted.tokens.shape[1] == 1  # then nothing is uploaded
    return accepted.tokens if one else newest(accepted.tokens, accepted.device_counts)


def select_layers(accepted: Accepted, layers: Sequence[int], wanted: Sequence[int]) -> Accepted:
    """Return `accepted` with the aux hidden states of the `wanted` layers only. layers: those that it contains."""
    if list(wanted) == list(layers):
        return accepted
    by_layer = accepted.aux_hidden_states.unflatten(-1, (max(1, len(layers)), -1))
    chosen = [list(layers).index(layer) for layer in wanted]
    return accepted._replace(aux_hidden_states=by_layer[..., chosen, :].flatten(-2))


def pad_accepted(accepted: Accepted, width: int) -> Accepted:
    """Pad `accepted` on the right to this width."""
    more = max(0, width - accepted.tokens.shape[1])
    return accepted._replace(
        tokens=pad(accepted.tokens, (0, more)), aux_hidden_states=pad(accepted.aux_hidden_states, (0, 0, 0, more))
    )


def select(accepted: Accepted, slots: list[int | None]) -> Accepted:
    """Return the tokens of a batch with the sequences of these slots; a new sequence (None) has none."""
    index = [slot or 0 for slot in slots]
    counts = [0 if slot is None else accepted.counts[slot] for slot in slots]
    texts = [accepted.text[slot] for slot in index]
    return Accepted(accepted.tokens[index], accepted.aux_hidden_states[index], counts, texts)


def scatter(accepted: Accepted, rows: Sequence[int], fresh: Accepted) -> Accepted:
    """Return `accepted` with the sequences of `fresh` in these rows."""
    accepted, fresh = pad_accepted(accepted, fresh.tokens.shape[1]), pad_accepted(fresh, accepted.tokens.shape[1])
    accepted.tokens[rows], accepted.aux_hidden_states[rows] = fresh.tokens, fresh.aux_hidden_states
    for row, count, text in zip(rows, fresh.counts, fresh.text, strict=True):
        accepted.counts[row], accepted.text[row] = count, text
    return accepted


class PendingAccepted:
    """Collect tokens of steps without this drafter, until it drafts again. Joining and leaving sequences copy no data."""

    def __init__(self) -> None:
        # Steps of the same batch, and the slot of each current sequence in them; None if it joined later.
        self.groups: list[tuple[list[Accepted], list[int | None]]] = []
        self.newest: list[Accepted] = []  # steps of the current batch

    def __len__(self) -> int:
        """Return the number of steps."""
        return sum(len(steps) for steps, _ in self.groups)

    def append(self, accepted: Accepted) -> None:
        if not self.newest:
            self.groups.append((self.newest, list(range(len(accepted.counts)))))
        self.newest.append(accepted)

    def select(self, slots: list[int | None]) -> None:
        """Replace the batch by the sequences of these slots."""
        kept = [(steps, [None if slot is None else old[slot] for slot in slots]) for steps, old in self.groups]
        self.groups = [(steps, old) for steps, old in kept if any(slot is not None for slot in old)]
        self.newest = []

    def take(self) -> Accepted:
        """Return all tokens of each sequence as one `Accepted`, and forget them."""
        groups, last = self.groups, self.newest[-1]
        self.groups, self.newest = [], []
        steps = [step for group, _ in groups for step in group]
        if len(steps) == 1:
            return last
        # Per sequence: indices into the concatenated tokens of all steps.
        columns: list[list[int]] = [[] for _ in last.counts]
        start = 0
        for group, slots in groups:
            # Finished sequences need nothing.
            every = zip(columns, slots, last.counts)
            wanted = [(column, slot) for column, slot, now in every if now and slot is not None]
            for step in group:
                for column, slot in wanted:
                    first = start + slot * step.tokens.shape[1]
                    column += range(first, first + step.counts[slot])
                start += step.tokens.numel()
        counts = list(map(len, columns))
        index = to_device([column + [0] * (max(counts) - len(column)) for column in columns], last.tokens.device)
        tokens = torch.cat([step.tokens.flatten() for step in steps])[index]
        hidden = torch.cat([step.aux_hidden_states.flatten(0, 1) for step in steps])[index]
        return Accepted(tokens, hidden, counts, last.text)


def bonus_only(accepted: Accepted) -> TokenTree:
    tokens = bonus_tokens(accepted)
    zeros = tokens.new_zeros(tokens.shape)
    return TokenTree(tokens, zeros, tokens.new_ones(*tokens.shape, 1).bool(), zeros)


def chains(accepted: Accepted, drafts: list[list[int]]) -> TokenTree:
    """Return one branch per sequence: `drafts` after its bonus token, which may differ in length."""
    branches = [[(token, above) for above, token in enumerate(draft)] for draft in drafts]
    return trees(accepted, branches, max(map(len, drafts)))


def trees(accepted: Accepted, drafts: list[list[tuple[int, int]]], depth: int) -> TokenTree:
    """Return one tree per sequence from its (token, parent) pairs below node 0, the bonus token; parents come first."""
    longest = max(map(len, drafts))
    if longest == 0:
        return bonus_only(accepted)
    padded = [draft + [(-1, 0)] * (longest - len(draft)) for draft in drafts]
    rows = [[(text[-1], 0), *draft] for text, draft in zip(accepted.text, padded, strict=True)]
    both = to_device(rows, accepted.tokens.device)  # (batch, nodes, 2)
    return from_parents(both[..., 0], both[..., 1], depth)
