"""Attention over a tree of drafts that gives every node the bits that it has when its path is decoded token by token.

Sums over keys depend on their order. In the cache a node's ancestors are separated by other branches, and after it is
accepted they are neighbors. So the keys of each path are moved to where they will be then, and its nodes attend once more:

    columns        text | 0 1 2 3      0 is the bonus token, 1 and 2 its children, 3 a child of 2
    all nodes           | 0 1 2 3      right for 0 and 1, whose ancestors are in place
    path of 3           | 0 2 3 .      right for 2 and 3

Nodes in place do not attend again, so a chain costs what it did. Used on a CPU whose products have the same bits for any
number of rows (`Capabilities.keeps_bits`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.attention.masks import additive_mask
from foredraft.heads.caches.layers import newest_entries


class Path(NamedTuple):
    """Describe a path from the bonus token to a leaf."""

    nodes: Tensor  # (length,) int64, ascending
    new: Tensor  # (n,) int64: those whose ancestors are not in place, and that no earlier path has
    mask: Tensor  # (1, 1, n, width): what these see, additive


class TreePaths(NamedTuple):
    """Hold the paths of one sequence. columns: (nodes,) int64, those of its tree in the cache."""

    columns: Tensor
    paths: list[Path]


def note_paths(mask: Any, seen: Tensor, lengths: list[int], real: Tensor, window: int | None = None) -> None:
    """Give a mask (batch, 1, nodes, width), or one for each kind of layer, the attribute `paths` if nodes are not in place:
    the TreePaths of each sequence. seen: what nodes see of the text and of each other, (batch, nodes, entries) bool. The
    width is less than `entries` in a ring (layers.py). real (batch, nodes) bool: False for padding. window: tokens that
    sliding layers see."""
    nodes = seen.shape[1]
    for kind, additive in (mask if isinstance(mask, dict) else {"sliding_attention": mask}).items():
        reach = window if kind == "sliding_attention" else None
        trees = [
            paths_of(seen[row, :, first : first + nodes], real[row], first, additive, reach)
            for row, first in enumerate(lengths)
        ]
        if any(tree.paths for tree in trees):
            vars(additive)["paths"] = trees


def paths_of(ancestors: Tensor, real: Tensor, first: int, mask: Tensor, window: int | None) -> TreePaths:
    """Return the paths of a tree after `first` entries. ancestors: (nodes, nodes) bool, each node among its own."""
    lines = [[column for column, is_seen in enumerate(row) if is_seen] for row in ancestors.tolist()]
    missing = {node for node, line in enumerate(lines) if real[node] and line != list(range(node + 1))}
    nodes, width = len(lines), mask.shape[-1]
    entries = newest_entries(torch.tensor([[first + nodes]]), width, width)
    paths = []
    for node in sorted(missing, reverse=True):  # a leaf comes after its ancestors
        new = [each for each in lines[node] if each in missing]
        if node in missing:
            missing -= set(new)
            ends = first + torch.tensor([[len(lines[each])] for each in new])
            starts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
            seen = (entries >= starts) & (entries < ends)
            paths.append(
                Path(torch.tensor(lines[node]), torch.tensor(new), additive_mask(seen[None, None], mask.dtype))
            )
    return TreePaths((first + torch.arange(nodes)) % width, paths)


def attend_paths(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, trees: list[TreePaths], attend: Callable[..., Tensor]
) -> Tensor:
    """Return `out` (batch, heads, nodes, dim), the attention of all nodes, with that of nodes out of place replaced. key and
    value are changed meanwhile. attend: attention of query, key, value and mask."""
    for row, (columns, paths) in enumerate(trees):
        if not paths:
            continue
        here = slice(row, row + 1)
        text = [states[here] for states in (key, value)]
        own = [states[:, :, columns] for states in text]
        for path in paths:
            for states, new in zip(text, own, strict=True):
                states[:, :, columns[: len(path.nodes)]] = new[:, :, path.nodes]
            out[here, :, path.new] = attend(query[here, :, path.new], *text, path.mask)
        for states, new in zip(text, own, strict=True):
            states[:, :, columns] = new
    return out
