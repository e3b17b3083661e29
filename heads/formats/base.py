"""A published layout of a head's files, and the strict way from such files to a head.

Engines that skip a key they do not know draft garbage and say nothing (acceptance 0.000), so here every key is accounted
for: a head is built from the config, and then the file must hold exactly its tensors, under the names of its layout.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from heads import vocab
from heads.base import DraftHead
from heads.target import Target


class HeadFiles(NamedTuple):
    """What lies in a head's directory, as it is written there."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    where: Path

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"the head in {self.where}: {what}")


class Format(ABC):
    """One layout. An instance also knows which of a layout's spellings the files at hand use."""

    title: ClassVar[str]  # for people
    kind: type[DraftHead]
    own: ClassVar[bool] = False  # do we save heads of this kind in it ourselves?
    files: ClassVar[tuple[str, ...]] = (
        "model.safetensors",
    )  # of the weights; a .pt only where an engine insists on it

    @classmethod
    @abstractmethod
    def match(cls, found: HeadFiles) -> Self | None:
        """This layout, if that is what the files are in."""

    @abstractmethod
    def native_config(self, found: HeadFiles, target: Target) -> dict[str, Any]:
        """What `kind.from_config` reads. Raises ValueError for settings that it has no place for."""

    def key(self, own: str) -> str:
        """The name in these files of what the head calls `own`."""
        here, there = next((pair for pair in self.kind.renamed.items() if own.startswith(pair[0])), ("", ""))
        return there + own.removeprefix(here)

    def supply(self, found: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        """The file's tensors, with those added that follow from others or from the target, and without those that only
        repeat them. Raises ValueError where such a repetition says something else."""
        return found.weights

    def config_of(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """The config.json to write. Raises ValueError for a head that this layout cannot express."""
        return head.to_config()

    def weights_of(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        """The tensors to write, on the CPU, none sharing memory with another."""
        state = head.state_dict().items()
        return {self.key(own): tensor.detach().cpu().clone().contiguous() for own, tensor in state}


def build(form: Format, found: HeadFiles, target: Target) -> DraftHead:
    """The head in these files, on the CPU and in the dtype it was stored in. Raises ValueError that names every key that is
    missing, left over, of another shape or of another sort of number."""
    try:
        head = form.kind.from_config(form.native_config(found, target))
    except KeyError as error:
        raise found.wrong(f"config.json has no {error}, which a {form.kind.__name__} needs") from None
    wanted = {form.key(own): tensor for own, tensor in head.state_dict().items()}
    given = complete_vocabulary(found, form.supply(found, head, target), head, target.vocab_size)
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - given.keys())]
    problems += [f"{name} belongs to no layer of this head" for name in sorted(given.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & given.keys()):
        ours, theirs = wanted[name], given[name]
        if ours.shape != theirs.shape:
            said = f"{tuple(theirs.shape)} in the file, {tuple(ours.shape)} by its config and the target"
            problems.append(f"{name} is {said}")
        elif ours.is_floating_point() != theirs.is_floating_point() or ours.is_complex() != theirs.is_complex():
            problems.append(f"{name} is {theirs.dtype}, which is not the sort of number it should be ({ours.dtype})")
        elif not ours.is_floating_point() and ours.dtype != theirs.dtype:
            problems.append(f"{name} is {theirs.dtype}, not {ours.dtype}")
    if problems:
        raise found.wrong("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""))
    floats = [given[name].dtype for name in wanted if given[name].is_floating_point()]
    dtype = floats[0]
    for other in floats[1:]:
        dtype = torch.promote_types(dtype, other)
    head.to(dtype)
    head.load_state_dict({own: given[form.key(own)] for own in head.state_dict()})
    return head


def expect(found: HeadFiles, settings: dict[str, Any], allowed: dict[str, Any]) -> None:
    """Raise ValueError if one of `settings` is there and is not what our layers do. allowed: name -> the only value."""
    for name, value in allowed.items():
        if settings.get(name, value) not in (value, None):
            raise found.wrong(f"config.json says {name}={settings[name]}; only {value} can be drafted with here")


def check_rope_spellings(found: HeadFiles, settings: dict[str, Any]) -> None:
    """Raise ValueError where rope is said in the spellings of transformers 4 and 5, and differently: engines read either."""
    new = settings.get("rope_parameters") or {}
    if "rope_theta" in settings and new.get("rope_theta", settings["rope_theta"]) != settings["rope_theta"]:
        raise found.wrong(f"config.json says rope_theta={settings['rope_theta']} and rope_parameters={new}")


def check_embeddings(found: HeadFiles, name: str, target: Target) -> None:
    """Raise ValueError unless tensor `name` is the target's embedding: a frozen copy is let go, another one is not."""
    stored, ours = found.weights[name], target.embeddings
    if stored.shape != ours.shape:
        raise found.wrong(
            f"{name} is {tuple(stored.shape)} in the file, {tuple(ours.shape)} in the target {target.name}"
        )
    # Whichever side is coarser decides: the other was rounded to it.
    coarse = min((stored.dtype, ours.dtype), key=lambda dtype: dtype.itemsize)
    if not torch.equal(stored.to(coarse), ours.detach().cpu().to(coarse)):
        raise found.wrong(f"{name} differs from the embeddings of {target.name}: it was trained for another target")


def complete_vocabulary(
    found: HeadFiles, given: dict[str, Tensor], head: DraftHead, vocab_size: int
) -> dict[str, Tensor]:
    """`given` with t2d added where a layout leaves it out; ValueError where d2t and t2d make no sense."""
    d2t, t2d = given.get("d2t"), given.get("t2d")
    if d2t is None:
        return given  # strictness will name it, where it is needed
    if d2t.dtype != torch.int64 or d2t.dim() != 1:
        raise found.wrong(f"d2t is {d2t.dtype} of shape {tuple(d2t.shape)}; it should be int64 of one dimension")
    ids = vocab.from_offsets(d2t)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < vocab_size and bool((ids.diff() > 0).all())):
        raise found.wrong(
            f"d2t names target ids from {ids.min()} to {ids.max()}; d2t holds offsets (id = i + d2t[i]), which must ascend "
            f"within the target's {vocab_size}"
        )
    if t2d is not None and (t2d.shape != (vocab_size,) or not torch.equal(t2d, vocab.to_offsets(ids, vocab_size)[1])):
        raise found.wrong(f"t2d ({t2d.dtype}, {tuple(t2d.shape)}) does not mark the tokens that d2t names")
    if not head.pruned:
        if len(ids) != vocab_size:
            raise found.wrong(f"d2t has {len(ids)} entries, config.json says a draft vocabulary of {vocab_size}")
        return {name: tensor for name, tensor in given.items() if name not in ("d2t", "t2d")}
    return given | {"t2d": vocab.to_offsets(ids, vocab_size)[1]}
