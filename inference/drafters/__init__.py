"""All drafters, and `load_drafter`, which loads one by name."""

import inspect
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from foredraft.heads.base import BlockHead, DraftHead, ParallelHead, RecurrentHead
from foredraft.heads.caches.device import host_by_default
from foredraft.heads.checkpoint import check_is_target, load_head
from foredraft.heads.draft_model import DraftModelHead
from foredraft.heads.eagle3 import Eagle3Head, check_window
from foredraft.heads.formats.files import read_config
from foredraft.heads.hub import find
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.packing import pack
from foredraft.inference.drafters.base import Drafter, NoDrafter
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.chain import Chain, Likeliest
from foredraft.inference.drafters.draft_model import DraftModel
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.lookahead import Lookahead
from foredraft.inference.drafters.measurements import about
from foredraft.inference.drafters.ngram import NgramDrafter
from foredraft.inference.drafters.policy import AutoTree, HeadTree
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.drafters.suffix import SuffixDrafter
from foredraft.inference.drafters.union import Union

NOT_OPTIONS = ("paths", "target", "revision", "head", "model", "accuracies")  # arguments that no user sets
T = TypeVar("T")
LOOKUPS = ("ngram", "suffix")  # look up what followed the newest tokens before
DRAFTER_NAMES = "none, ngram, suffix, lookahead, draft:<path or id of a smaller model>, a head's directory or Hub id"


@host_by_default()
def load_drafter(path: str | Path, target: Target, revision: str | None = None, **options: Any) -> Drafter:
    """Load the drafter that `path` names. `options` are passed to its constructor (foredraft/loading.py).

    path: "none" (autoregressive decoding), "ngram", "suffix", "lookahead", "draft:<path or id of a smaller model>", a head's
    directory or Hub id, or several of these joined by "+" (`load_joined`). revision: branch, tag or commit of all heads and
    draft models on the Hub. Heads and draft models have the option `tree` (`drafter_for`), "auto" by default. Of "ngram" and
    "suffix" it is "auto", which drafts only when it pays, or "fixed".
    """
    path = str(path)
    check_is_target(target)
    check_tree(options.get("tree", "auto"))
    if "+" in path and not Path(path).is_dir():
        return construct(load_joined, path.split("+"), target, revision, **options)
    return load(path, target, revision, "auto", **options)


def load_joined(
    paths: list[str], target: Target, revision: str | None = None, tree: str = "auto", window: int | None = None
) -> Drafter:
    """Load several drafters. A head and "suffix": each step uses the one that promises more tokens per second (policy.py).
    Other drafters, or tree="fixed": the union of their trees. It sizes no head's tree, whose share of the time is unknown."""
    if "" in paths:
        raise ValueError(f"drafter {'+'.join(paths)!r} lacks a drafter next to a +: add it, or remove the +")
    windows = [{} if window is None or path in ("none", *LOOKUPS) else {"window": window} for path in paths]
    chains = drafts_chains(target, tree)
    on_hub = any("/" in path and not Path(path.removeprefix("draft:")).is_dir() for path in paths)
    revisions = [None if on_hub and Path(path).is_dir() else revision for path in paths]
    drafters = [
        load_lookup(path, target, "fixed", chains) if path in LOOKUPS else load(path, target, at, tree, **some)
        for path, at, some in zip(paths, revisions, windows, strict=True)
    ]
    if tree == "auto" and len(drafters) == 2:
        suffix, auto = sorted(drafters, key=lambda drafter: isinstance(drafter, AutoTree))
        if isinstance(suffix, SuffixDrafter) and isinstance(auto, AutoTree):
            auto.add_suffix(suffix)
            return auto
    union = Union([drafter.inner if isinstance(drafter, AutoTree) else drafter for drafter in drafters])
    return Chain(union) if chains and "lookahead" not in paths else union  # see `load`


def load(path: str, target: Target, revision: str | None, default_tree: str, **options: Any) -> Drafter:
    """Load one drafter like `load_drafter`. default_tree: for drafters without the option `tree`."""
    if path == "none":
        return construct(NoDrafter, **options)
    if path == "lookahead":
        # A tree also where drafts are chains: from a single branch, lookahead learns no n-grams.
        return construct(Lookahead, **options)
    facts: dict[str, Any] = {"tree": default_tree, **options}
    if path in LOOKUPS:
        drafter = load_lookup(path, target, chains=drafts_chains(target, facts["tree"]), **facts)
    elif path.startswith("draft:"):
        name = path.removeprefix("draft:")
        model = Target.from_pretrained(name, dtype=target.dtype, device=target.device, revision=revision)
        drafter = drafter_for(model, target, **facts)
    elif "/" not in path and not Path(path).is_dir():
        raise ValueError(f"drafter {path!r} is not one of: {DRAFTER_NAMES}; or several of them joined by +")
    else:
        directory = find(path, revision)
        head = load_head(directory, target)
        if isinstance(head, Eagle3Head) and "window" in facts:
            head.window = check_window(facts.pop("window"), head.depth, "drafter.window")
        pack(head)
        facts["accuracies"] = read_config(directory).get("foredraft", {}).get("accuracies")
        path, drafter = str(directory), drafter_for(head, target, **facts)
    if isinstance(drafter, AutoTree) and not target.is_collective:  # it starts from what earlier runs measured
        drafter.memory.keep(about(target, path, options))
    return drafter


def load_lookup(path: str, target: Target, tree: str, chains: bool, **options: Any) -> Drafter:
    """Return the drafter "ngram" or "suffix". chains: does it draft one branch by default?"""
    if path == "suffix" and chains:
        options = {"width": 1} | options
    lookup = construct(NgramDrafter, **options) if path == "ngram" else construct(SuffixDrafter, **options)
    if tree == "fixed":
        return lookup
    auto = AutoTree(NoDrafter(), target)
    auto.add_suffix(lookup)
    return auto


@host_by_default()
def drafter_for(
    head: DraftHead | Target,
    target: Target,
    accuracies: list[list[float]] | None = None,
    tree: str = "fixed",
    **options: Any,
) -> Drafter:
    """Return the drafter for a head, or for a smaller model. accuracies: of a head's guesses per depth and rank, for a static
    tree. tree: "fixed" proposes the same size in every step; "auto" chooses the size by measured cost and acceptance
    (policy.py), of a chain if the target prefers chains. Where branching trees do not keep bits (half precision on a GPU),
    this size may decide near-ties."""
    check_tree(tree)
    if drafts_chains(target, tree):
        options = {"width": 1} | options
    inner: HeadTree
    if isinstance(head, Target | DraftModelHead):
        inner = construct(DraftModel, head, target, **options)
    elif isinstance(head, RecurrentHead):
        inner = construct(DynamicTree, head, target, **options)
    elif isinstance(head, BlockHead):
        inner = construct(BlockTree, head, target, **options)
    else:
        assert isinstance(head, ParallelHead)
        inner = construct(StaticTree, head, target, accuracies=accuracies, **options)
    return inner if tree == "fixed" else AutoTree(inner, target)


def construct(make: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Return what `make` constructs from these. Raises ValueError for an option that it does not have."""
    parameters = inspect.signature(make).parameters
    names = list(parameters)
    if unknown := [name for name in options if name not in names]:
        also = ["tree"] * (make not in (NoDrafter, Lookahead, load_joined))  # which `load` reads itself
        also += ["window"] * any(isinstance(argument, Eagle3Head) for argument in arguments)
        known = ", ".join([*also, *(name for name in names if name not in NOT_OPTIONS)]) or "none"
        some = "drafters joined by +" if make is load_joined else "this drafter"
        raise ValueError(
            f"{unknown[0]}={options[unknown[0]]} is not an option of {some}: leave it out (options: {known})"
        )
    for name, value in options.items():
        annotation = parameters[name].annotation
        kinds = get_args(annotation) or (annotation,)
        for kind, number, what in ((int, Integral, "a whole number"), (float, Real, "a number")):
            fits = (isinstance(value, number) and not isinstance(value, bool)) or (value is None and NoneType in kinds)
            if kind in kinds and not fits:
                raise ValueError(f"{name}={value!r} is not {what}")
    return make(*arguments, **options)


def drafts_chains(target: Target, tree: str) -> bool:
    """Return whether drafts are chains unless `width` asks for branches: with tree="auto" where chains are faster, and with
    any where only chains keep bits."""
    able = target.capabilities
    return able.prefers_chains and (tree == "auto" or not able.keeps_bits)


def check_tree(tree: str) -> None:
    if tree not in ("auto", "fixed"):
        raise ValueError(f"tree={tree} is not one of auto, fixed")


def tree_of(drafter: Drafter) -> HeadTree | None:
    """Return the head's tree that a drafter proposes or sizes; None for a drafter without one, or with others next to it."""
    if isinstance(drafter, AutoTree) and drafter.suffix:
        return None
    inner = drafter.inner if isinstance(drafter, AutoTree) else drafter
    return inner if isinstance(inner, HeadTree) else None


def fixed_form(tree: HeadTree) -> str:
    """Return the words of tables for a head's drafter that always drafts its largest tree or chain."""
    return "fixed tree" if tree.branches else "fixed chain"


def chain_of(tree: HeadTree, target: Target, length: int) -> HeadTree:
    """Return a chain of at most `length` drafts with the same head, as engines without trees draft it."""
    nodes = length + 1
    if isinstance(tree, StaticTree):  # first guesses only
        return StaticTree(tree.head, target, nodes, accuracies=[[1.0]] * length)
    settings: dict[str, Any] = {"nodes": nodes, "depth": length, "width": 1, "min_probability": 0.0}
    return type(tree)(tree.head, target, **settings)  # type: ignore[arg-type]  # each type has another type of head


__all__ = [
    "AutoTree",
    "BlockTree",
    "Chain",
    "DraftModel",
    "Drafter",
    "DynamicTree",
    "HeadTree",
    "Likeliest",
    "Lookahead",
    "NgramDrafter",
    "StaticTree",
    "SuffixDrafter",
    "Union",
    "chain_of",
    "drafter_for",
    "fixed_form",
    "load_drafter",
    "tree_of",
]
