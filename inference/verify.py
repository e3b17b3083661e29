"""Verification: which drafted tokens would the target have chosen? Pure functions of a tree and the target's logits.

The coupled verifier has the target's own choice after every node (inference/sampling.py). It accepts a node that equals
the choice after its parent, if its parent is accepted. The choice after the last accepted node is the next bonus token. So
the text is y_t = choice(y_<t) for any tree: lossless for every drafter, tree and pruning, at any temperature.
"""

from enum import IntEnum
from typing import NamedTuple

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
    INVALID = 2  # NaN logits or only banned tokens on the accepted path, or a failed grammar: the text cannot continue
    TOO_FEW = 3  # top-p considered too few tokens at an accepted node: verify again with more (`Sampling.warp`)


def verify(tree: TokenTree, logits: Tensor, depth: int) -> Verification:
    """Accept the deepest path of nodes that all equal the target's choice after their parent. logits: (batch, nodes, vocab),
    processed, with the noise of their positions; choices are their argmax. depth: at least that of the tree."""
    choices = argmax(logits)
    matched = tree.tokens == choices.gather(1, tree.parents)
    matched[:, 0] = True
    accepted = (matched[:, None, :] | ~tree.ancestors).all(-1)
    last = torch.where(accepted, tree.depths, -1).argmax(1)  # siblings differ, so only one path matches the choices
    nodes = tree.tokens.shape[1]
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, nodes))[:, 0]
    order = torch.arange(nodes, device=tree.tokens.device)
    path = torch.where(on_path, order, order + nodes).argsort(1)[:, : depth + 1]
    return Verification(on_path.sum(1), path, choices.gather(1, path), choices)


def argmax(logits: Tensor) -> Tensor:
    """Return the argmax of the last dimension. On a CPU, torch's is four times slower in half precision than in float32."""
    slow = logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float16)
    return (logits.float() if slow else logits).argmax(-1)


class Outcome(NamedTuple):
    """Hold a Verification on the host, as lists by sequence."""

    valid: list[int]  # Validity of each sequence
    counts: list[int]
    paths: list[list[int]]
    tokens: list[list[int]]


def validity(verification: Verification, no_choice: Tensor, too_few: Tensor | None = None) -> Tensor:
    """Return the Validity of each sequence, (batch,) int64. no_choice (NaN logits, or all tokens are banned), too_few:
    (batch, nodes) bool."""
    path, counts = verification.path, verification.counts
    accepted = torch.arange(path.shape[1], device=path.device) < counts[:, None]
    invalid = (no_choice.gather(1, path) & accepted).any(1)
    valid = no_choice.any(1).long()
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
