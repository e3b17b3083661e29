"""Which drafted tokens would the target have written itself? Pure functions of a tree and the target's logits.

The coupled verifier knows the target's own choice after every node (inference/sampling.py). A node is accepted when it equals
the choice after its parent and its parent is accepted; after the last accepted node the choice is the next bonus token. So
the text is y_t = choice(y_<t) whatever the tree was: lossless for every drafter, tree and pruning, at any temperature.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foredraft.inference.tree import TokenTree


class Verification(NamedTuple):
    counts: Tensor  # (batch,) int64: nodes on the accepted path, node 0 counted; also how many tokens are new
    path: Tensor  # (batch, depth + 1) int64: its nodes from node 0 down, then others up to the width
    tokens: Tensor  # (batch, depth + 1) int64: the choice after each of them: the new text, the bonus token last
    choices: Tensor  # (batch, nodes) int64: what the target writes after each node


class Validity(IntEnum):
    """Of a sequence's logits in a step."""

    VALID = 0
    REJECTED_NAN = 1  # a logit was NaN at a padding or rejected node: its cache entries must go, no mask hides a NaN
    INVALID = 2  # a logit on the accepted path was NaN, or the grammar failed: the text cannot go on
    TOO_FEW = 3  # a node on the accepted path considered too few tokens: verify again with more (`Sampling.warp`)


class Verifier(Protocol):
    """Hashable, and the same code for every batch: it is captured with the step (heads/target/cuda_graphs.py)."""

    noisy: bool  # does it see logits with the noise of their positions?

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        """logits: (batch, nodes, vocab), processed, with the noise where it asks for it. sampled: (batch, 1) bool, which
        sequences are not greedy; None where all are. depth: at least the tree's. Its choices are the logits' argmax."""
        ...


@dataclass(frozen=True)
class Coupled:
    """The target's own choices, lossless."""

    noisy = True

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        choices = argmax(logits)
        return follow(tree, matches(tree, choices), choices, depth)


@dataclass(frozen=True)
class TypicalAcceptance:
    """LOSSY: a sampled text is not that of the target. Every child with p(x) > min(eps, delta * exp(-entropy(p))) is accepted
    (Medusa, Cai et al., arXiv:2401.10774, section 2.3.1), the deepest accepted path wins, among equals the likelier one, and
    the next token is the target's argmax. Greedy texts are the target's."""

    eps: float = 0.09
    delta: float = 0.3
    noisy = False

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        choices = argmax(logits)
        fits = matches(tree, choices)
        if sampled is None:
            return follow(tree, fits, choices, depth)
        log_p = logits.float().log_softmax(-1)
        threshold = (self.delta * torch.exp(-torch.special.entr(log_p.exp()).sum(-1))).clamp(max=self.eps)
        rows = torch.arange(len(choices), device=choices.device)[:, None]
        own = log_p[rows, tree.parents, tree.tokens.clamp(min=0)]  # of each node after its parent
        own[:, 0] = 0.0
        typical = (own > threshold.gather(1, tree.parents).log()) & (tree.tokens >= 0)
        typical[:, 0] = True
        return follow(tree, torch.where(sampled, typical, fits), choices, depth, own)


def argmax(logits: Tensor) -> Tensor:
    """Of their last dimension. On a CPU torch's takes four times as long over half precision as over float32."""
    slow = logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float16)
    return (logits.float() if slow else logits).argmax(-1)


def matches(tree: TokenTree, choices: Tensor) -> Tensor:
    """(batch, nodes) bool: which nodes are what the target chose (batch, nodes) after their parents."""
    matched = tree.tokens == choices.gather(1, tree.parents)
    matched[:, 0] = True
    return matched


def follow(tree: TokenTree, fits: Tensor, choices: Tensor, depth: int, log_probs: Tensor | None = None) -> Verification:
    """The deepest path whose nodes all fit (batch, nodes); of several as deep the likeliest, if log_probs (batch, nodes) of
    nodes after their parents are given."""
    nodes = tree.tokens.shape[1]
    accepted = (fits[:, None, :] | ~tree.ancestors).all(-1)
    depths = torch.where(accepted, tree.depths, -1)
    if log_probs is not None:
        likelihood = torch.where(tree.ancestors, log_probs[:, None, :], 0.0).sum(-1)
        deepest = depths == depths.amax(1, keepdim=True)
        last = torch.where(deepest, likelihood, -torch.inf).argmax(1)
    else:  # siblings differ, so the choices match one path alone; were two equal, either would do
        last = depths.argmax(1)
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, nodes))[:, 0]
    order = torch.arange(nodes, device=tree.tokens.device)
    path = torch.where(on_path, order, order + nodes).argsort(1)[:, : depth + 1]
    return Verification(on_path.sum(1), path, choices.gather(1, path), choices)


class Outcome(NamedTuple):
    """A Verification as the host knows it, by sequence."""

    valid: list[int]  # a Validity each
    counts: list[int]
    paths: list[list[int]]
    tokens: list[list[int]]


def validity(verification: Verification, has_nan: Tensor, too_few: Tensor | None = None) -> Tensor:
    """A Validity (batch,) int64 per sequence. has_nan, too_few: (batch, nodes) bool."""
    path, counts = verification.path, verification.counts
    accepted = torch.arange(path.shape[1], device=path.device) < counts[:, None]
    invalid = (has_nan.gather(1, path) & accepted).any(1)
    valid = has_nan.any(1).long()
    if too_few is not None:
        valid = torch.where((too_few.gather(1, path) & accepted).any(1), int(Validity.TOO_FEW), valid)
    return torch.where(invalid, int(Validity.INVALID), valid)


def to_host(verification: Verification, validity: Tensor) -> Outcome:
    """The one time in a step that the host waits for the device."""
    width = verification.path.shape[1]
    parts = validity[:, None], verification.counts[:, None], verification.path, verification.tokens
    rows = torch.cat(parts, dim=1).tolist()
    return Outcome(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2 : 2 + width] for row in rows],
        [row[2 + width :] for row in rows],
    )
