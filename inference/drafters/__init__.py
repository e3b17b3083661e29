"""Everything that can propose a tree, and `load_drafter`, which finds it by a short word."""

from typing import Any

from heads.base import DraftHead
from heads.checkpoint import find, load_head, read_config
from heads.draft_model import DraftModelHead
from heads.target import Target
from inference.drafters.auto import AutoTree
from inference.drafters.base import Drafter
from inference.drafters.draft_model import DraftModel
from inference.drafters.dynamic import DynamicTree
from inference.drafters.ngram import NgramDrafter
from inference.drafters.static import StaticTree


def load_drafter(spec: str, target: Target, **options: Any) -> Drafter:
    """The drafter that `spec` names: "ngram", "draft:<path or id of a smaller model>", or a head's directory or Hub id.

    `options` go to its constructor.
    """
    if spec == "ngram":
        return NgramDrafter(**options)
    if spec.startswith("draft:"):
        small = Target.from_pretrained(spec.removeprefix("draft:"), dtype=target.dtype, device=target.device)
        return DraftModel(small, target, **options)
    head = load_head(spec, target)
    own = read_config(find(spec)).get("foretoken", {})
    return drafter_for(head, target, accuracies=own.get("accuracies"), **options)


def drafter_for(
    head: DraftHead, target: Target, accuracies: list[list[float]] | None = None, tree: str = "fixed", **options: Any
) -> Drafter:
    """The tree that suits a head. accuracies: of its guesses per depth and rank, for a static tree.

    tree: "fixed" proposes the same size in every step; "auto" chooses it by measured cost and gain, `options` then give the
    largest (inference/drafters/auto.py).
    """
    if tree not in ("fixed", "auto"):
        raise ValueError(f"tree={tree} is not one of fixed, auto")
    drafter: DynamicTree | StaticTree
    if isinstance(head, DraftModelHead):
        drafter = DraftModel(head, target, **options)
    elif head.recurrent:
        drafter = DynamicTree(head, target, **options)
    else:
        drafter = StaticTree(head, target, accuracies=accuracies, **options)
    return AutoTree(drafter, target) if tree == "auto" else drafter


__all__ = [
    "AutoTree",
    "DraftModel",
    "Drafter",
    "DynamicTree",
    "NgramDrafter",
    "StaticTree",
    "drafter_for",
    "load_drafter",
]
