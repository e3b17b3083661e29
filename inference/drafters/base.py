"""What every drafter does: it proposes a tree of tokens for the target to check. It never decides anything."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target.cache import to_device
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree, chain, from_parents

if TYPE_CHECKING:
    from foredraft.inference.drafters.grown import GrownTree


class Accepted(NamedTuple):
    """What was added to the text: by the last step, or of a prompt. Rows are padded on the right, up to the longest at
    least."""

    tokens: Tensor  # (batch, new) int64: the accepted tokens, each row's root last
    aux_hidden_states: (
        Tensor  # (batch, new, width): of the position before each of them, in the layers the drafter asked for
    )
    counts: list[int]  # how many of them are real; 0 for a row that has finished
    text: list[list[int]]  # each row's whole text on the host, root included
    known_counts: Tensor | None = None  # (batch, 1) int64: the counts, where the device has them
    needs_catch_up: bool = False  # is the target's state so far behind the text that a step is to be spent on that?

    @property
    def device_counts(self) -> Tensor:
        known = self.known_counts
        return to_device(self.counts, self.tokens.device)[:, None] if known is None else known


class Drafter(ABC):
    layers: Sequence[int] = ()  # which hidden states of the target it wants, numbered as in heads/target/model.py
    depth: int  # most levels of the next tree that it proposes
    nodes: int  # most nodes of any tree that it proposes, the root counted
    branches: bool = True  # may its trees be more than chains?

    @abstractmethod
    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        """A new generation: forget the last one. capacity: most tokens a row will hold, drafts included."""

    def select_sequences(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:  # noqa: B027
        """The batch becomes these of its rows; None is a new one, whose prompt its `readers` have read up to the newest
        token. Drafters that remember nothing of a row need not care."""

    @property
    def cached_drafters(self) -> "Sequence[GrownTree]":
        """The drafters in it that read prompts into a cache of their own."""
        return ()

    @abstractmethod
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        """A tree whose root is each row's newest token. gumbel: (batch, depth + 1, vocab) float32; [:, d - 1] is the noise
        of the tokens at depth d, None when greedy. Adding it to a draft's own logits makes it draft what the target's
        noisy choice tends to be (inference/sampling.py)."""

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:  # noqa: B027  (most have nothing to learn)
        """What became of the last proposal: per row the nodes that were accepted, the root first; [] for finished rows.
        choices: (batch, nodes) int64, what the target itself writes after each node, accepted or not."""


class Wrapper(Drafter):
    """A drafter that changes what another one proposes."""

    def __init__(self, inner: Drafter):
        self.inner, self.layers, self.nodes, self.branches = inner, inner.layers, inner.nodes, inner.branches

    @property
    def depth(self) -> int:  # type: ignore[override]  # some drafters change it from step to step
        return self.inner.depth

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.inner.begin(batch, capacity, sampling)

    def select_sequences(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_sequences(rows, capacity, sampling)

    @property
    def cached_drafters(self) -> "Sequence[GrownTree]":
        return self.inner.cached_drafters

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        self.inner.observe(paths, choices)


class NoDrafter(Drafter):
    """Drafts nothing: plain decoding, through the same loop."""

    depth, nodes, branches = 0, 1, False

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return bonus_only(accepted)


def bonus_tokens(accepted: Accepted) -> Tensor:
    """(batch, 1): each row's newest token."""
    return newest(accepted)[0]


def newest(accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Each row's root (batch, 1), and the features (batch, width) of the position before it."""
    tokens, aux_hidden_states = accepted.tokens, accepted.aux_hidden_states
    if unpadded(accepted):
        return tokens[:, -1:], aux_hidden_states[:, -1]
    last = (accepted.device_counts - 1).clamp(min=0)
    return tokens.gather(1, last), aux_hidden_states.gather(
        1, last[:, :, None].expand(-1, 1, aux_hidden_states.shape[-1])
    )[:, 0]


def unpadded(accepted: Accepted) -> bool:
    """Is no row padded?"""
    return min(accepted.counts) == accepted.tokens.shape[1]


def share(accepted: Accepted, layers: Sequence[int], wanted: Sequence[int]) -> Accepted:
    """The same with the features of some of the layers that it has."""
    if list(wanted) == list(layers):
        return accepted
    by_layer = accepted.aux_hidden_states.unflatten(-1, (max(1, len(layers)), -1))
    chosen = [list(layers).index(layer) for layer in wanted]
    return accepted._replace(aux_hidden_states=by_layer[..., chosen, :].flatten(-2))


def select(accepted: Accepted, rows: list[int | None]) -> Accepted:
    """The same for a batch of these of its rows; a new one (None) has nothing in it."""
    index = [row or 0 for row in rows]
    counts = [0 if row is None else accepted.counts[row] for row in rows]
    return Accepted(
        accepted.tokens[index], accepted.aux_hidden_states[index], counts, [accepted.text[row] for row in index]
    )


def concatenate(pieces: Sequence[Accepted]) -> Accepted:
    """What several steps accepted, as one: each row's tokens of all pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    counts = [sum(piece.counts[row] for piece in pieces) if last.counts[row] else 0 for row in range(len(first.counts))]
    if all(unpadded(piece) for piece in pieces):
        tokens, aux_hidden_states = (
            torch.cat([p.tokens for p in pieces], 1),
            torch.cat([p.aux_hidden_states for p in pieces], 1),
        )
        return Accepted(tokens, aux_hidden_states, counts, last.text)
    tokens = first.tokens.new_zeros(len(counts), max(counts))
    aux_hidden_states = first.aux_hidden_states.new_zeros(len(counts), max(counts), first.aux_hidden_states.shape[-1])
    for row, total in enumerate(counts):
        at = 0
        for piece in pieces if total else ():
            count = piece.counts[row]
            tokens[row, at : at + count] = piece.tokens[row, :count]
            aux_hidden_states[row, at : at + count] = piece.aux_hidden_states[row, :count]
            at += count
    return Accepted(tokens, aux_hidden_states, counts, last.text)


def bonus_only(accepted: Accepted) -> TokenTree:
    tokens = bonus_tokens(accepted)
    zeros = tokens.new_zeros(tokens.shape)
    return TokenTree(tokens, zeros, tokens.new_ones(*tokens.shape, 1).bool(), zeros)


def chains(accepted: Accepted, drafts: list[list[int]]) -> TokenTree:
    """One branch per row, of these tokens below its root; they may differ in length."""
    longest = max(map(len, drafts))
    if longest == 0:
        return bonus_only(accepted)
    rows = [
        [text[-1], *draft, *[-1] * (longest - len(draft))] for text, draft in zip(accepted.text, drafts, strict=True)
    ]
    return chain(to_device(rows, accepted.tokens.device))


def trees(accepted: Accepted, drafts: list[list[tuple[int, int]]], depth: int) -> TokenTree:
    """One tree per row: (token, parent) of its nodes below the root, which is node 0; parents stand first."""
    longest = max(map(len, drafts))
    if longest == 0:
        return bonus_only(accepted)
    padded = [draft + [(-1, 0)] * (longest - len(draft)) for draft in drafts]
    rows = [[(text[-1], 0), *draft] for text, draft in zip(accepted.text, padded, strict=True)]
    both = to_device(rows, accepted.tokens.device)  # (batch, nodes, 2)
    return from_parents(both[..., 0], both[..., 1], depth)
