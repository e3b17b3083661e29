"""Verification: which drafted tokens would the target have chosen? Pure functions of a tree and the target's logits.

The coupled verifier has the target's own choice after every node (inference/sampling.py). It accepts a node that equals
the choice after its parent, if its parent is accepted. The choice after the last accepted node is the next bonus token. So
the text is y_t = choice(y_<t) for any tree: lossless for every drafter, tree and pruning, at any temperature.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foredraft.inference.tree import TokenTree


class Verification(NamedTuple):
    counts: Tensor  # (batch,) int64: number of nodes on the accepted path, including node 0; equals the number of new tokens
    path: Tensor  # (batch, depth + 1) int64: nodes of this path from node 0 down, then arbitrary other nodes
    tokens: Tensor  # (batch, depth + 1) int64: choice after each node of `path`: the new text, the bonus token last
    choices: Tensor  # (batch, nodes) int64: the target's choice after each node


class Validity(IntEnum):
    """Describe the logits of a sequence in a step."""

    VALID = 0
    REJECTED_NAN = 1  # NaN logits at a padding or rejected node: erase its cache entries, because no mask hides a NaN
    INVALID = 2  # NaN logits on the accepted path, or a failed grammar: the text cannot continue
    TOO_FEW = 3  # top-p considered too few tokens at an accepted node: verify again with more (`Sampling.warp`)


class Verifier(Protocol):
    """Choose what to accept. Must be hashable and independent of the batch, because CUDA graphs capture it."""

    noisy: bool  # whether its logits include the noise of their positions

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        """Verify a tree. logits: (batch, nodes, vocab), processed, with noise if `noisy`. sampled: (batch, 1) bool, which
        sequences are not greedy; None if all are. depth: at least that of the tree. Choices are the argmax of the logits."""
        ...


@dataclass(frozen=True)
class Coupled:
    """Accept the target's own choices. This is lossless."""

    noisy = True

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        choices = argmax(logits)
        return deepest_path(tree, matches(tree, choices), choices, depth)


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accept typical tokens. LOSSY: sampled text does not follow the target's distribution. A child is accepted if p(x) >
    min(eps, delta * exp(-entropy(p))) (Medusa, Cai et al., arXiv:2401.10774, section 2.3.1). The deepest accepted path wins,
    then the likelier one; the next token is the target's argmax. Greedy text is lossless."""

    eps: float = 0.09
    delta: float = 0.3
    noisy = False

    def __call__(self, tree: TokenTree, logits: Tensor, sampled: Tensor | None, depth: int) -> Verification:
        choices = argmax(logits)
        fits = matches(tree, choices)
        if sampled is None:
            return deepest_path(tree, fits, choices, depth)
        log_p = logits.float().log_softmax(-1)
        threshold = (self.delta * torch.exp(-torch.special.entr(log_p.exp()).sum(-1))).clamp(max=self.eps)
        rows = torch.arange(len(choices), device=choices.device)[:, None]
        own = log_p[rows, tree.parents, tree.tokens.clamp(min=0)]  # log-probability of each node after its parent
        own[:, 0] = 0.0
        typical = (own > threshold.gather(1, tree.parents).log()) & (tree.tokens >= 0)
        typical[:, 0] = True
        return deepest_path(tree, torch.where(sampled, typical, fits), choices, depth, own)


def argmax(logits: Tensor) -> Tensor:
    """Return the argmax of the last dimension. On a CPU, torch's is four times slower in half precision than in float32."""
    slow = logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float16)
    return (logits.float() if slow else logits).argmax(-1)


def matches(tree: TokenTree, choices: Tensor) -> Tensor:
    """Mark the nodes that equal the target's choice after their parent, (batch, nodes) bool. choices: (batch, nodes)."""
    matched = tree.tokens == choices.gather(1, tree.parents)
    matched[:, 0] = True
    return matched


def deepest_path(
    tree: TokenTree, fits: Tensor, choices: Tensor, depth: int, log_probs: Tensor | None = None
) -> Verification:
    """Return the deepest path whose nodes all fit (batch, nodes). Of equally deep paths it is the likeliest, if log_probs
    (batch, nodes) of the nodes after their parents are given."""
    nodes = tree.tokens.shape[1]
    accepted = (fits[:, None, :] | ~tree.ancestors).all(-1)
    depths = torch.where(accepted, tree.depths, -1)
    if log_probs is not None:
        likelihood = torch.where(tree.ancestors, log_probs[:, None, :], 0.0).sum(-1)
        deepest = depths == depths.amax(1, keepdim=True)
        last = torch.where(deepest, likelihood, -torch.inf).argmax(1)
    else:  # siblings differ, so only one path matches the choices
        last = depths.argmax(1)
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, nodes))[:, 0]
    order = torch.arange(nodes, device=tree.tokens.device)
    path = torch.where(on_path, order, order + nodes).argsort(1)[:, : depth + 1]
    return Verification(on_path.sum(1), path, choices.gather(1, path), choices)


class Outcome(NamedTuple):
    """Hold a Verification on the host, as lists by sequence."""

    valid: list[int]  # Validity of each sequence
    counts: list[int]
    paths: list[list[int]]
    tokens: list[list[int]]


def validity(verification: Verification, has_nan: Tensor, too_few: Tensor | None = None) -> Tensor:
    """Return the Validity of each sequence, (batch,) int64. has_nan, too_few: (batch, nodes) bool."""
    path, counts = verification.path, verification.counts
    accepted = torch.arange(path.shape[1], device=path.device) < counts[:, None]
    invalid = (has_nan.gather(1, path) & accepted).any(1)
    valid = has_nan.any(1).long()
    if too_few is not None:
        valid = torch.where((too_few.gather(1, path) & accepted).any(1), int(Validity.TOO_FEW), valid)
    return torch.where(invalid, int(Validity.INVALID), valid)


def to_host(verification: Verification, validity: Tensor) -> Outcome:
    """Copy the results to the host. This is the only time in a step that the host waits for the device."""
    width = verification.path.shape[1]
    parts = validity[:, None], verification.counts[:, None], verification.path, verification.tokens
    rows = torch.cat(parts, dim=1).tolist()
    return Outcome(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2 : 2 + width] for row in rows],
        [row[2 + width :] for row in rows],
    )
