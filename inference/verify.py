"""Which drafted tokens would the target have written itself? A pure function of a tree and the target's logits.

The target's own choice after every node is known (inference/sampling.py). A node is accepted when it equals the choice
after its parent and its parent is accepted; after the last accepted node the choice is the bonus. So the text is
y_t = choice(y_<t) whatever the tree was: lossless for every drafter, tree and pruning, at any temperature.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.inference.tree import TokenTree


class Verification(NamedTuple):
    counts: Tensor  # (batch,) int64: nodes on the accepted path, the root counted; also how many tokens are new
    path: Tensor  # (batch, depth + 1) int64: its nodes from the root down, then others up to the width
    tokens: Tensor  # (batch, depth + 1) int64: the choice after each of them: the new text, the bonus last
    choices: Tensor  # (batch, nodes) int64: what the target writes after each node


def verify(tree: TokenTree, choices: Tensor, depth: int) -> Verification:
    """Follow the target's choices (batch, nodes) down the tree. depth: at least the tree's."""
    nodes = tree.tokens.shape[1]
    matched = tree.tokens == choices.gather(1, tree.parents)
    matched[:, 0] = True
    accepted = (matched[:, None, :] | ~tree.ancestors).all(-1)
    # Siblings differ, so accepted nodes form one path; were two equal, either would do.
    last = torch.where(accepted, tree.depths, -1).argmax(1)
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, nodes))[:, 0]
    order = torch.arange(nodes, device=tree.tokens.device)
    path = torch.where(on_path, order, order + nodes).argsort(1)[:, : depth + 1]
    return Verification(on_path.sum(1), path, choices.gather(1, path), choices)


def to_host(
    verification: Verification, broken: Tensor
) -> tuple[list[bool], list[int], list[list[int]], list[list[int]]]:
    """Which rows are broken, counts, paths and tokens as Python's: the one time in a step that the host waits for the
    device."""
    width = verification.path.shape[1]
    parts = broken.long()[:, None], verification.counts[:, None], verification.path, verification.tokens
    rows = torch.cat(parts, dim=1).tolist()
    return (
        [bool(row[0]) for row in rows],
        [row[1] for row in rows],
        [row[2 : 2 + width] for row in rows],
        [row[2 + width :] for row in rows],
    )
