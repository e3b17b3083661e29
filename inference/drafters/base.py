"""What every drafter does: it proposes a tree of tokens for the target to check. It never decides anything."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foredraft.heads.target import TargetCache
from foredraft.heads.target.cache import to_device
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree, chain, from_parents

if TYPE_CHECKING:
    from foredraft.inference.drafters.grown import GrownTree


class Accepted(NamedTuple):
    """What was added to the text: by the last step, or of a prompt. Sequences are padded on the right, up to the longest at
    least."""

    tokens: Tensor  # (batch, new) int64: the accepted tokens, each sequence's bonus token last
    # (batch, new, width): of the position before each of them, in the layers the drafter asked for.
    aux_hidden_states: Tensor
    counts: list[int]  # how many of them are real; 0 for a sequence that has finished
    text: list[list[int]]  # each sequence's whole text on the host, bonus token included
    counts_on_device: Tensor | None = None  # (batch, 1) int64, where the device has them
    # The target's own, of the text but for the bonus tokens. What is written after it is lost with the next forward.
    cache: TargetCache | None = None

    @property
    def device_counts(self) -> Tensor:
        if self.counts_on_device is not None:
            return self.counts_on_device
        return to_device(self.counts, self.tokens.device)[:, None]


class Drafter(ABC):
    layers: Sequence[int] = ()  # which hidden states of the target it wants, numbered as in heads/target/model.py
    depth: int  # most levels of the next tree that it proposes
    nodes: int  # most nodes of any tree that it proposes, the bonus token counted
    branches: bool = True  # may its trees be more than chains?
    forwards: int = 1  # of the target, in the step of the last proposal: its verification, and what drafting it took
    remembers_others: bool = False  # may its last proposal hold text of other requests, which nobody may be shown?

    @abstractmethod
    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        """A new generation: forget the last one. capacity: most tokens a sequence will hold, drafts included."""

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:  # noqa: B027
        """The batch becomes the sequences in these slots; None is a new one, whose prompt its `cached_drafters` have taken in
        up to the newest token. Drafters that remember nothing of a sequence need not care."""

    @property
    def cached_drafters(self) -> "Sequence[GrownTree]":
        """The drafters in it that prefill a cache of their own."""
        return ()

    @abstractmethod
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        """A tree whose node 0 is each sequence's bonus token. gumbel: (batch, depth + 1, vocab) float32; [:, d - 1] is the
        noise of the tokens at depth d, None when greedy. Adding it to a draft's own logits makes it draft what the target's
        noisy choice tends to be (inference/sampling.py)."""

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:  # noqa: B027  (most have nothing to learn)
        """What became of the last proposal: per sequence the nodes that were accepted, node 0 first; [] for finished ones.
        choices: (batch, nodes) int64, what the target itself writes after each node, accepted or not."""

    def observe_seconds(self, seconds: float | None) -> None:  # noqa: B027  (only tree=auto wants to know)
        """What the whole step of the last proposal took, after `observe`; None where a part of it was captured."""


class Wrapper(Drafter):
    """A drafter that changes what another one proposes."""

    def __init__(self, inner: Drafter):
        self.inner, self.layers, self.nodes, self.branches = inner, inner.layers, inner.nodes, inner.branches

    @property
    def depth(self) -> int:  # type: ignore[override]  # some drafters change it from step to step
        return self.inner.depth

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.inner.begin(batch, capacity, sampling)

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_sequences(slots, capacity, sampling)

    @property
    def forwards(self) -> int:  # type: ignore[override]
        return self.inner.forwards

    @property
    def remembers_others(self) -> bool:  # type: ignore[override]
        return self.inner.remembers_others

    @property
    def cached_drafters(self) -> "Sequence[GrownTree]":
        return self.inner.cached_drafters

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        self.inner.observe(paths, choices)

    def observe_seconds(self, seconds: float | None) -> None:
        self.inner.observe_seconds(seconds)


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding, through the same loop."""

    depth, nodes, branches = 0, 1, False

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return bonus_only(accepted)


def bonus_tokens(accepted: Accepted) -> Tensor:
    """(batch, 1): each sequence's newest token."""
    return newest(accepted)[0]


def newest(accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Each sequence's bonus token (batch, 1), and the aux hidden states (batch, width) of the position before it."""
    tokens, hidden = accepted.tokens, accepted.aux_hidden_states
    if unpadded(accepted):
        return tokens[:, -1:], hidden[:, -1]
    last = (accepted.device_counts - 1).clamp(min=0)
    return tokens.gather(1, last), hidden.gather(1, last[:, :, None].expand(-1, 1, hidden.shape[-1]))[:, 0]


def unpadded(accepted: Accepted) -> bool:
    """Is no sequence padded?"""
    return min(accepted.counts) == accepted.tokens.shape[1]


def share(accepted: Accepted, layers: Sequence[int], wanted: Sequence[int]) -> Accepted:
    """The same with the aux hidden states of some of the layers that it has."""
    if list(wanted) == list(layers):
        return accepted
    by_layer = accepted.aux_hidden_states.unflatten(-1, (max(1, len(layers)), -1))
    chosen = [list(layers).index(layer) for layer in wanted]
    return accepted._replace(aux_hidden_states=by_layer[..., chosen, :].flatten(-2))


def widened(accepted: Accepted, width: int) -> Accepted:
    """Padded on the right."""
    more = max(0, width - accepted.tokens.shape[1])
    return accepted._replace(
        tokens=pad(accepted.tokens, (0, more)), aux_hidden_states=pad(accepted.aux_hidden_states, (0, 0, 0, more))
    )


def select(accepted: Accepted, slots: list[int | None]) -> Accepted:
    """The same for a batch of the sequences in these slots; a new one (None) has nothing in it."""
    index = [slot or 0 for slot in slots]
    counts = [0 if slot is None else accepted.counts[slot] for slot in slots]
    texts = [accepted.text[slot] for slot in index]
    return Accepted(accepted.tokens[index], accepted.aux_hidden_states[index], counts, texts)


class Unextended:
    """What was accepted in steps that a drafter had no part in, until it is to see it. Sequences that join and leave
    meanwhile copy nothing of it."""

    def __init__(self) -> None:
        # Steps of the same sequences, and each sequence's slot in them; None for one that has joined since.
        self.groups: list[tuple[list[Accepted], list[int | None]]] = []
        self.newest: list[Accepted] = []  # those of the sequences of today

    def append(self, accepted: Accepted) -> None:
        if not self.newest:
            self.groups.append((self.newest, list(range(len(accepted.counts)))))
        self.newest.append(accepted)

    def select(self, slots: list[int | None]) -> None:
        """The batch becomes the sequences in these slots."""
        kept = [(steps, [None if slot is None else old[slot] for slot in slots]) for steps, old in self.groups]
        self.groups = [(steps, old) for steps, old in kept if any(slot is not None for slot in old)]
        self.newest = []

    def take(self) -> Accepted:
        """All of it as one: each sequence's tokens, one after the other. Then there is nothing."""
        groups, last = self.groups, self.newest[-1]
        self.groups, self.newest = [], []
        steps = [step for group, _ in groups for step in group]
        if len(steps) == 1:
            return last
        # Of each sequence, in all steps' tokens one after the other.
        columns: list[list[int]] = [[] for _ in last.counts]
        start = 0
        for group, slots in groups:
            # A finished sequence needs nothing any more.
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
        return Accepted(tokens, hidden, counts, last.text, cache=last.cache)


def bonus_only(accepted: Accepted) -> TokenTree:
    tokens = bonus_tokens(accepted)
    zeros = tokens.new_zeros(tokens.shape)
    return TokenTree(tokens, zeros, tokens.new_ones(*tokens.shape, 1).bool(), zeros)


def chains(accepted: Accepted, drafts: list[list[int]]) -> TokenTree:
    """One branch per sequence, of these tokens after its bonus token; they may differ in length."""
    longest = max(map(len, drafts))
    if longest == 0:
        return bonus_only(accepted)
    rows = [
        [text[-1], *draft, *[-1] * (longest - len(draft))] for text, draft in zip(accepted.text, drafts, strict=True)
    ]
    return chain(to_device(rows, accepted.tokens.device))


def trees(accepted: Accepted, drafts: list[list[tuple[int, int]]], depth: int) -> TokenTree:
    """One tree per sequence: (token, parent) of its nodes below node 0, the bonus token; parents stand first."""
    longest = max(map(len, drafts))
    if longest == 0:
        return bonus_only(accepted)
    padded = [draft + [(-1, 0)] * (longest - len(draft)) for draft in drafts]
    rows = [[(text[-1], 0), *draft] for text, draft in zip(accepted.text, padded, strict=True)]
    both = to_device(rows, accepted.tokens.device)  # (batch, nodes, 2)
    return from_parents(both[..., 0], both[..., 1], depth)
