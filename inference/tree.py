"""Trees of draft tokens, one per sequence of a batch, all with the same number of nodes so that a step has fixed shapes.

Node 0 is the bonus token, and parents precede their children. Smaller trees are padded with token -1, which equals no
token and is never accepted.

    the -> cat -> sat        tokens   the cat dog sat ran     ancestors  1 . . . .
        |      -> ran        parents   0   0   0   1   1                 1 1 . . .
        -> dog               depths    0   1   1   2   2                 1 . 1 . .
                                                                        1 1 . 1 .
                                                                        1 1 . . 1
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenTree(NamedTuple):
    tokens: Tensor  # (batch, nodes) int64
    parents: Tensor  # (batch, nodes) int64, node 0's is itself
    ancestors: Tensor  # (batch, nodes, nodes) bool: whether the column's node is the row's node or an ancestor of it
    depths: Tensor  # (batch, nodes) int64


def from_parents(tokens: Tensor, parents: Tensor, depth: int) -> TokenTree:
    """Build a tree from tokens and parents, both (batch, nodes). depth: at least the depth of the tree.

    Ancestry is the transitive closure of "self or parent": each squaring doubles the number of levels that it covers.
    """
    nodes = tokens.shape[1]
    reach = torch.eye(nodes, device=tokens.device).repeat(tokens.shape[0], 1, 1)
    reach.scatter_(2, parents[:, :, None], 1.0)
    levels = 1
    while levels < depth:
        reach = (reach @ reach).clamp(max=1.0)
        levels *= 2
    return TokenTree(tokens, parents, reach.bool(), reach.sum(-1).long() - 1)


def chain(tokens: Tensor) -> TokenTree:
    """Build a tree of one branch. tokens: (batch, nodes), the bonus token first."""
    batch, nodes = tokens.shape
    order = torch.arange(nodes, device=tokens.device)
    ancestors = order[:, None] >= order
    expand = (order - 1).clamp(min=0).expand(batch, -1), ancestors.expand(batch, -1, -1), order.expand(batch, -1)
    return TokenTree(tokens, *expand)


def pad_nodes(tree: TokenTree, nodes: int) -> TokenTree:
    """Pad the tree to this number of nodes, with nodes of token -1 below node 0."""
    batch, more = len(tree.tokens), nodes - tree.tokens.shape[1]
    if more == 0:
        return tree
    whole = torch.eye(nodes, dtype=torch.bool, device=tree.tokens.device).repeat(batch, 1, 1)
    whole[:, :, 0] = True
    whole[:, :-more, :-more] = tree.ancestors
    tokens, parents, depths = (
        torch.cat([part, part.new_full((batch, more), value)], 1)
        for part, value in ((tree.tokens, -1), (tree.parents, 0), (tree.depths, 1))
    )
    return TokenTree(tokens, parents, whole, depths)
