"""What every drafter does: it proposes a tree of tokens for the target to check. It never decides anything."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from inference.sampling import Sampling
from inference.tree import TokenTree


class Accepted(NamedTuple):
    """What the last step (or the prompt) added to the text. Rows are padded on the right up to the longest."""

    tokens: Tensor  # (batch, new) int64: the accepted tokens, each row's root last
    features: Tensor  # (batch, new, width): of the position before each of them, in the layers the drafter asked for
    counts: list[int]  # how many of them are real; 0 for a row that has finished
    text: list[list[int]]  # each row's whole text on the host, root included


class Drafter(ABC):
    layers: Sequence[int] = ()  # which hidden states of the target it wants, numbered as in heads/target.py
    depth: int  # most levels of the trees it proposes

    @abstractmethod
    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        """A new generation: forget the last one. capacity: most tokens a row will hold, drafts included."""

    @abstractmethod
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        """A tree whose root is each row's newest token. gumbel: (batch, depth + 1, vocab) float32; [:, d - 1] is the noise
        of the tokens at depth d, None when greedy. Adding it to a draft's own logits makes it draft what the target's
        noisy choice tends to be (inference/sampling.py)."""

    def learn(self, paths: list[list[int]]) -> None:  # noqa: B027  (most drafters have nothing to learn)
        """What became of the last proposal: per row the nodes that were accepted, the root first; [] for finished rows."""


class Nothing(Drafter):
    """Drafts nothing: plain decoding, through the same loop."""

    depth = 0

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return root_only(accepted)


def roots(accepted: Accepted) -> Tensor:
    """(batch, 1): each row's newest token."""
    if len(set(accepted.counts)) == 1:
        return accepted.tokens[:, -1:]
    last = accepted.tokens.new_tensor([[max(count, 1) - 1] for count in accepted.counts])
    return accepted.tokens.gather(1, last)


def root_only(accepted: Accepted) -> TokenTree:
    tokens = roots(accepted)
    zeros = tokens.new_zeros(tokens.shape)
    return TokenTree(tokens, zeros, tokens.new_ones(*tokens.shape, 1).bool(), zeros)
