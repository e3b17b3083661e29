"""All drafters, and `load_drafter`, which loads one by name."""

from pathlib import Path
from typing import Any

import torch

from foredraft.heads.base import BlockHead, DraftHead, ParallelHead, RecurrentHead
from foredraft.heads.checkpoint import find, load_head, read_config
from foredraft.heads.draft_model import DraftModelHead
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.packing import pack
from foredraft.inference.drafters import memory
from foredraft.inference.drafters.adaptive import AdaptiveLength
from foredraft.inference.drafters.auto import AutoTree, HeadTree
from foredraft.inference.drafters.base import Drafter, NoDrafter
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.chain import Chain
from foredraft.inference.drafters.draft_model import DraftModel
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.lookahead import Lookahead
from foredraft.inference.drafters.ngram import NgramDrafter
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.drafters.suffix import SuffixDrafter
from foredraft.inference.drafters.switch import Switch
from foredraft.inference.drafters.union import Union

DRAFTER_NAMES = "none, ngram, suffix, lookahead, draft:<path or id of a smaller model>, a head's directory or Hub id"


def load_drafter(path: str, target: Target, revision: str | None = None, **options: Any) -> Drafter:
    """Load the drafter that `path` names. `options` are passed to its constructor (foredraft/loading.py).

    path: "none" (autoregressive decoding), "ngram", "suffix", "lookahead", "draft:<path or id of a smaller model>", a head's
    directory or Hub id (revision: its branch, tag or commit), or several of these joined by "+" (`load_joined`). Heads and
    draft models have the option `tree` (`with_tree_policy`), "auto" by default.
    """
    if "+" in path and not Path(path).is_dir():
        return load_joined(path.split("+"), target, **options)
    return load(path, target, revision, "auto", **options)


def load_joined(paths: list[str], target: Target, tree: str = "auto") -> Drafter:
    """Load several drafters. A head and "suffix": each step uses the one with the higher expected throughput (switch.py).
    Other drafters, or tree="fixed": the union of their trees. It sizes no head's tree, whose share of the time is unknown."""
    if tree not in ("auto", "fixed"):
        raise ValueError(f"tree={tree} is not one of auto, fixed, which drafters joined by + support")
    drafters = [load(path, target, None, tree) for path in paths]
    if tree == "auto" and len(drafters) == 2:
        suffix, auto = sorted(drafters, key=lambda one: isinstance(one, AutoTree))
        if isinstance(suffix, SuffixDrafter) and isinstance(auto, AutoTree):
            return Switch(suffix, auto)
    union = Union([drafter.inner if isinstance(drafter, AutoTree) else drafter for drafter in drafters])
    return Chain(union) if target.capabilities.prefers_chains else union


def load(path: str, target: Target, revision: str | None, default_tree: str, **options: Any) -> Drafter:
    """Load one drafter like `load_drafter`. default_tree: for heads and draft models without the option `tree`."""
    if path == "none":
        return NoDrafter(**options)
    if path == "ngram":
        return NgramDrafter(**options)
    if path == "suffix":
        return SuffixDrafter(**({"width": 1} if target.capabilities.prefers_chains else {}) | options)
    if path == "lookahead":
        return Chain(Lookahead(**options)) if target.capabilities.prefers_chains else Lookahead(**options)
    if path.startswith("draft:"):
        small = Target.from_pretrained(path.removeprefix("draft:"), dtype=target.dtype, device=target.device)
        return remembered(drafter_for_model(small, target, **{"tree": default_tree, **options}), target, path, options)
    if "/" not in path and not Path(path).is_dir():
        raise ValueError(f"drafter {path!r} is not one of: {DRAFTER_NAMES}; or several of them joined by +")
    directory = find(path, revision)
    head = load_head(directory, target)
    pack(head)
    own = read_config(directory).get("foredraft", {})
    drafter = drafter_for(head, target, accuracies=own.get("accuracies"), **{"tree": default_tree, **options})
    return remembered(drafter, target, str(directory), options)


def remembered(drafter: Drafter, target: Target, name: str, options: dict[str, Any]) -> Drafter:
    """Let tree=auto start from what earlier runs on this machine learned about this drafter (memory.py)."""
    if isinstance(drafter, AutoTree) and not target.is_collective and memory.is_on():
        drafter.memory.keep(memory.about(target, name, options))
    return drafter


def drafter_for(
    head: DraftHead,
    target: Target,
    accuracies: list[list[float]] | None = None,
    tree: str = "fixed",
    confidence: float | None = None,
    reproducible: bool = False,
    **options: Any,
) -> Drafter:
    """Return the drafter for a head. accuracies: of its guesses per depth and rank, for a static tree. tree, confidence,
    reproducible: see `with_tree_policy`."""
    policy = target, tree, confidence, reproducible
    if isinstance(head, DraftModelHead):
        return drafter_for_model(head, *policy, **options)
    if isinstance(head, RecurrentHead):
        return with_tree_policy(DynamicTree(head, target, **options), *policy)
    if isinstance(head, BlockHead):
        return with_tree_policy(BlockTree(head, target, **options), *policy)
    assert isinstance(head, ParallelHead)
    return with_tree_policy(StaticTree(head, target, accuracies=accuracies, **options), *policy)


def drafter_for_model(
    model: Target | DraftModelHead,
    target: Target,
    tree: str = "fixed",
    confidence: float | None = None,
    reproducible: bool = False,
    **options: Any,
) -> Drafter:
    """Return a drafter that uses a smaller model. tree, confidence, reproducible: see `with_tree_policy`."""
    return with_tree_policy(DraftModel(model, target, **options), target, tree, confidence, reproducible)


def tree_of(drafter: Drafter) -> HeadTree | None:
    """Return the head's tree that a drafter proposes or sizes; None for a drafter without one."""
    inner = drafter.inner if isinstance(drafter, AutoTree | AdaptiveLength) else drafter
    return inner if isinstance(inner, HeadTree) else None


def chain_of(tree: HeadTree, target: Target, length: int) -> HeadTree:
    """Return a chain of at most `length` drafts with the same head, as engines without trees draft it."""
    nodes = length + 1
    if isinstance(tree, StaticTree):  # first guesses only
        return StaticTree(tree.head, target, nodes, accuracies=[[1.0]] * length)
    settings: dict[str, Any] = {"nodes": nodes, "depth": length, "width": 1, "min_probability": 0.0}
    return type(tree)(tree.head, target, **settings)  # type: ignore[arg-type]  # each type has another type of head


def with_tree_policy(
    inner: HeadTree, target: Target, tree: str, confidence: float | None = None, reproducible: bool = False
) -> Drafter:
    """Apply a policy to a tree. "fixed" proposes the same size in every step. "auto" chooses the size by measured cost and
    acceptance, up to `inner` (auto.py). "adaptive" drafts as deep as it pays off and stops below `confidence` (adaptive.py).
    If the target prefers chains (half precision on a CPU), all are chains unless `width` asks for branches. reproducible:
    replace "auto" by "fixed" for branching trees in half precision, where the measured size may decide near-ties."""
    if tree not in ("fixed", "auto", "adaptive"):
        raise ValueError(f"tree={tree} is not one of fixed, auto, adaptive")
    if tree != "adaptive" and confidence is not None:
        raise ValueError(f"confidence={confidence} requires tree=adaptive, not tree={tree}")
    if tree == "fixed" or (tree == "auto" and reproducible and inner.branches and target.dtype != torch.float32):
        return inner
    if tree == "auto":
        return AutoTree(inner, target)
    if not isinstance(inner, DynamicTree):
        raise ValueError(
            "a head that drafts all depths at once does not support tree=adaptive: use tree=auto, which sizes its tree"
        )
    return AdaptiveLength(inner) if confidence is None else AdaptiveLength(inner, confidence)


__all__ = [
    "AdaptiveLength",
    "AutoTree",
    "BlockTree",
    "Chain",
    "DraftModel",
    "Drafter",
    "DynamicTree",
    "Lookahead",
    "NgramDrafter",
    "StaticTree",
    "SuffixDrafter",
    "Switch",
    "Union",
    "chain_of",
    "drafter_for",
    "load_drafter",
    "tree_of",
    "with_tree_policy",
]
