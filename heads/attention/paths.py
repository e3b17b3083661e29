"""Attention over a tree of drafts that gives every node the bits that it has when its path is decoded token by token.

Sums over keys depend on their order. In the cache a node's ancestors are separated by other branches, and after it is
accepted they are neighbors. So the keys of each path are moved to where they will be then, and its nodes attend once more:

    columns        text | 0 1 2 3      0 is the bonus token, 1 and 2 its children, 3 a child of 2
    all nodes           | 0 1 2 3      right for 0 and 1, whose ancestors are in place
    path of 3           | 0 2 3 .      right for 2 and 3

Nodes in place do not attend again, so a chain costs what it did. Used in half precision on a CPU
(`Capabilities.keeps_bits`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Path(NamedTuple):
    """Describe a path from the bonus token to a leaf."""

    nodes: Tensor  # (length,) int64, ascending
    new: Tensor  # (n,) int64: those whose ancestors are not in place, and that no earlier path has
    mask: Tensor  # (1, 1, n, width): what these see, additive


class TreePaths(NamedTuple):
    """Hold the paths of one sequence. first: the column of its bonus token."""

    first: int
    nodes: int
    paths: list[Path]


PATHS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of masks in use: a list with TreePaths of each sequence


def note_paths(mask: Tensor, seen: Tensor, lengths: list[int], real: Tensor) -> None:
    """Note the paths of the trees that a mask (batch, 1, nodes, width) describes, if nodes are not in place. seen: the same
    mask as (batch, nodes, width) bool; real (batch, nodes) bool: False for padding."""
    nodes = seen.shape[1]
    found = [
        TreePaths(first, nodes, paths_of(seen[row, :, first : first + nodes], real[row], first, mask))
        for row, first in enumerate(lengths)
    ]
    if any(tree.paths for tree in found):
        PATHS[mask] = found


def paths_of(ancestors: Tensor, real: Tensor, first: int, mask: Tensor) -> list[Path]:
    """Return the paths of one tree. ancestors: (nodes, nodes) bool, each node among its own."""
    lines = [[column for column, is_seen in enumerate(row) if is_seen] for row in ancestors.tolist()]
    missing = {node for node, line in enumerate(lines) if real[node] and line != list(range(node + 1))}
    columns, paths = torch.arange(mask.shape[-1]), []
    for node in sorted(missing, reverse=True):  # a leaf comes after its ancestors
        new = [each for each in lines[node] if each in missing]
        if node in missing:
            missing -= set(new)
            depths = torch.tensor([len(lines[each]) for each in new])
            hidden = columns >= first + depths[:, None]
            own = torch.zeros(1, 1, *hidden.shape, dtype=mask.dtype).masked_fill_(hidden, torch.finfo(mask.dtype).min)
            paths.append(Path(torch.tensor(lines[node]), torch.tensor(new), own))
    return paths


def attend_paths(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, trees: list[TreePaths], attend: Callable[..., Tensor]
) -> Tensor:
    """Return `out` (batch, heads, nodes, dim), the attention of all nodes, with that of nodes out of place replaced. key and
    value are changed meanwhile. attend: attention of query, key, value and mask."""
    for row, (first, nodes, paths) in enumerate(trees):
        here = slice(row, row + 1)
        text = [states[here] for states in (key, value)]
        own = [states[:, :, first : first + nodes].clone() for states in text]
        for path in paths:
            for states, new in zip(text, own, strict=True):
                states[:, :, first : first + len(path.nodes)] = new[:, :, path.nodes]
            out[here, :, path.new] = attend(query[here, :, path.new], *text, path.mask)
        for states, new in zip(text, own, strict=True):
            states[:, :, first : first + nodes] = new
    return out
