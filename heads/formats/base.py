"""A published layout of a head's files, and the strict conversion of such files to a head.

Engines that ignore an unknown key draft garbage silently (acceptance 0.000), so here every key is accounted for. A head is
built from the config, and the files must contain exactly its tensors, with the names of its layout. Settings of the head
itself (rope, context length) are read from the files, with one warning for unexpected ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor

from foredraft.heads import vocab
from foredraft.heads.base import DraftHead
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.embedding import embedding_scale
from foredraft.heads.target_model.logits import has_numbers
from foredraft.heads.target_model.sharding import weight_of

EMBEDDINGS = "embed_tokens.weight"  # in all layouts
LARGEST_CHANGE = 0.5  # of an embedding by quantization or fine-tuning, relative to its size
LARGEST_DEPTH = 512  # of drafts, and of positions in a block: a config with more is damaged


class HeadFiles(NamedTuple):
    """Hold the unmodified contents of a head's directory."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    directory: Path
    notes: list[str]  # unexpected settings of the files that are used

    @property
    def trained_here(self) -> bool:
        """Return whether foredraft trained the head, for the target that its config records."""
        record = self.config.get("foredraft", {})
        return "target" in record and not record.get("imported", False)

    def error(self, message: str) -> ValueError:
        return ValueError(f"the head in {self.directory}: {message}")

    def check_count(self, name: str, value: Any) -> int:
        """Return `value` of the setting `name`. Raises ValueError unless these weights can have that many parts."""
        return self.check_number(name, value, 0, len(self.weights))

    def speculative_tokens(self, usual: int) -> int:
        """Return the number of drafts that files of the speculators package recommend, and `usual` for other files."""
        methods = self.config.get("speculators_config", {}).get("proposal_methods") or [{}]
        return self.check_number("speculative_tokens", methods[0].get("speculative_tokens", usual))

    def check_number(self, name: str, value: Any, least: int = 1, most: int = LARGEST_DEPTH) -> int:
        """Return `value` of the setting `name`. Raises ValueError unless it is a whole number in this range."""
        if type(value) is not int or not least <= value <= most:
            raise self.error(f"config.json has {name}={value!r}, which must be a whole number from {least} to {most}")
        return value


class Format(ABC):
    """Convert heads to one layout and back. An instance also knows which variant of a layout the files use."""

    title: str  # for messages
    kind: type[DraftHead]
    is_default: ClassVar[bool] = False  # does training save heads of this kind in it?
    # Names of the weight files; .pt only if an engine requires it.
    weight_files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    embeddings = False  # are the target's written, too?
    names: Mapping[str, str] = {}  # prefixes of weight names here -> in these files, before the kind's `disk_prefixes`

    @classmethod
    @abstractmethod
    def match(cls, files: HeadFiles) -> Self | None:
        """Return this layout if the files are in it."""

    @abstractmethod
    def head_config(self, files: HeadFiles, target: Target) -> dict[str, Any]:
        """Return the config for `kind.from_config`. Raises ValueError for unsupported settings."""

    def disk_name(self, name: str) -> str:
        """Return the name in these files of the head's weight `name`."""
        prefixes = *self.names.items(), *self.kind.disk_prefixes.items()
        here, there = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        return there + name.removeprefix(here)

    def complete_weights(self, files: HeadFiles, head: DraftHead, target: Target) -> dict[str, Tensor]:
        """Return the files' tensors, plus those that follow from others or from the target, minus duplicates. Raises
        ValueError if a duplicate differs."""
        return files.weights

    def export_config(self, head: DraftHead, target: Target) -> dict[str, Any]:
        """Return the config.json to write. Raises ValueError for a head that this layout cannot express."""
        return head.to_config()

    def export_weights(self, head: DraftHead, target: Target) -> dict[str, Tensor]:
        """Return the tensors to write, on the CPU and without shared memory."""
        state = head.state_dict().items()
        weights = {self.disk_name(name): tensor.detach().cpu().clone().contiguous() for name, tensor in state}
        if self.embeddings and EMBEDDINGS not in weights:
            rows = target.embeddings.detach().cpu()
            weights[EMBEDDINGS] = rows.to(head.dtype, copy=True).contiguous()
        return weights

    def stored(self, head: DraftHead, target: Target) -> DraftHead:
        """Return the head as files in this layout store it: unchanged, unless they round its weights."""
        return head

    def write_weights(self, weights: dict[str, Tensor], path: Path, head: DraftHead, target: Target) -> None:
        """Write the result of `export_weights` to one of `weight_files`, next to config.json."""
        if path.suffix == ".safetensors":
            save_file(weights, path, metadata={"format": "pt"})
        else:
            torch.save(weights, path)


def build(layout: Format, files: HeadFiles, target: Target) -> DraftHead:
    """Build the head in these files, on the CPU and in its stored dtype. Raises ValueError with every key that is missing or
    unexpected, or has another shape or another kind of number. Shapes are compared on the meta device first, so a config
    with absurd sizes costs no memory."""
    try:
        config = layout.head_config(files, target)
        try:
            with torch.device("meta"):
                head = layout.kind.from_config(config)
        except ValueError as error:  # a head does not know its files
            raise files.error(str(error)) from error
    except KeyError as error:
        raise files.error(
            f"config.json has no {error}, which a head of kind {layout.kind.kind} needs: add the value it was trained with "
            "(a trainer's own config is not a head's config.json)"
        ) from None
    except (ArithmeticError, AttributeError, IndexError, RuntimeError, StrictDataclassError, TypeError) as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise files.error(
            f"config.json has a value of another type or size than a head of kind {layout.kind.kind} needs "
            f"({type(error).__name__}: {reason})"
        ) from error
    expected = {layout.disk_name(name): tensor for name, tensor in head.state_dict().items()}
    weights = complete_vocabulary(files, layout.complete_weights(files, head, target), head, target.vocab_size)
    weights = complete_projections(files, layout, complete_biases(files, weights, expected), head, target)
    problems = weight_problems(weights, expected)
    if problems:
        raise files.error("; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""))
    dtype = reduce(torch.promote_types, (weights[name].dtype for name in expected if weights[name].is_floating_point()))
    if any(buffer.is_meta for name, buffer in head.named_buffers() if name not in head.state_dict()):
        head = layout.kind.from_config(config)  # for buffers that are not in files; its sizes are those of the weights
    state = {name: weights[layout.disk_name(name)] for name in head.state_dict()}
    state = {name: t.to(dtype if t.is_floating_point() else t.dtype, copy=True) for name, t in state.items()}
    head.load_state_dict(state, assign=True)
    return head


def complete_biases(files: HeadFiles, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` with zeros for the output of attention if only queries, keys and values have biases (Qwen2), which
    files of this project never lack."""
    if files.trained_here:
        return weights
    outputs = {name: name.replace(".o_proj.", ".q_proj.") for name in expected if name.endswith(".o_proj.bias")}
    shown = {name: weights[queries] for name, queries in outputs.items() if queries in weights and name not in weights}
    files.notes.extend(f"no {name} is stored, so it is zero" for name in shown)
    return {name: bias.new_zeros(expected[name].shape) for name, bias in shown.items()} | weights


def weight_problems(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return descriptions of how the files' tensors differ from the head's."""
    problems = [f"{name} is missing" for name in sorted(expected.keys() - weights.keys())]
    problems += [f"{name} belongs to no layer of this head" for name in sorted(weights.keys() - expected.keys())]
    for name in sorted(expected.keys() & weights.keys()):
        ours, theirs = expected[name], weights[name]
        if ours.shape != theirs.shape:
            shapes = f"{tuple(theirs.shape)} in the file, {tuple(ours.shape)} by its config and the target"
            problems.append(f"{name} is {shapes}")
        elif ours.dtype != theirs.dtype and not (ours.is_floating_point() and has_numbers(theirs)):
            problems.append(f"{name} is {theirs.dtype}, which is not the kind of number it should be ({ours.dtype})")
    return problems


def check_settings(files: HeadFiles, settings: dict[str, Any], supported: dict[str, Any]) -> None:
    """Raise ValueError if one of `settings` has a value that our layers do not support. supported: name -> the only
    value."""
    for name, value in supported.items():
        if settings.get(name, value) not in (value, None):
            raise files.error(f"config.json has {name}={settings[name]}; only {value} is supported")


def embeds_rows(target: Target) -> bool:
    """Return whether the target's first layer gets rows of its embedding unchanged. Gemma scales them."""
    return embedding_scale(target) == 1


def drop_copy(files: HeadFiles, name: str, module: Any, target: Target) -> HeadFiles:
    """Return the files without `name`, a frozen copy of this module of the target. If the target was quantized or fine-tuned
    since, its own rows are used, with a note. Raises ValueError for rows of another model."""
    rest = {other: tensor for other, tensor in files.weights.items() if other != name}
    stored, ours = files.weights.get(name), weight_of(module)
    if stored is None or not ours.is_floating_point():  # a quantized lm_head cannot be compared
        return files._replace(weights=rest)
    rows = target.vocab_size
    if stored.ndim == 2 and min(len(stored), len(ours)) >= rows:  # either may have padding, or rows for image tokens
        stored, ours = stored[:rows], ours[:rows]
    if stored.shape != ours.shape:
        raise files.error(f"{name} is {tuple(stored.shape)} in the file, {tuple(ours.shape)} in {target.name}")
    stored, ours, what = stored.float(), ours.detach().float().cpu(), name.removesuffix(".weight")
    # Either side may have been rounded to bfloat16 (8 bits) or float16 (whose smallest numbers lose more).
    if not torch.allclose(stored, ours, rtol=2**-7, atol=1e-6):
        change = ((stored - ours).norm() / ours.norm()).item()
        if not change < LARGEST_CHANGE:
            raise files.error(f"{name} differs from the {what} of {target.name}: it was trained for another target")
        files.notes.append(f"{name} differs by {change:.1%} from the {what} of {target.name}, which is used")
    return files._replace(weights=rest)


def drop_embeddings(files: HeadFiles, target: Target) -> HeadFiles:
    return drop_copy(files, EMBEDDINGS, target.model.get_input_embeddings(), target)


def draft_vocabulary(files: HeadFiles, target: Target) -> int:
    """Return the size of the draft vocabulary: absent or null means the whole one, unless the weights are smaller."""
    size = files.config.get("draft_vocab_size")
    if size is None:
        return len(files.weights["d2t"]) if "d2t" in files.weights else target.vocab_size
    return size


def complete_vocabulary(
    files: HeadFiles, weights: dict[str, Tensor], head: DraftHead, vocab_size: int
) -> dict[str, Tensor]:
    """Return `weights` with t2d, which some layouts omit. Raises ValueError if d2t and t2d are inconsistent."""
    d2t, t2d = weights.get("d2t"), weights.get("t2d")
    if d2t is None:
        return weights  # reported as missing later, if the head needs it
    if d2t.dtype != torch.int64 or d2t.dim() != 1:
        raise files.error(f"d2t is {d2t.dtype} of shape {tuple(d2t.shape)}; it should be int64 of one dimension")
    ids = vocab.from_offsets(d2t)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < vocab_size and bool((ids.diff() > 0).all())):
        raise files.error(
            f"d2t names target ids from {ids.min()} to {ids.max()}; d2t contains offsets (id = i + d2t[i]), which must "
            f"ascend within the target's {vocab_size}"
        )
    if t2d is not None and (t2d.shape != (vocab_size,) or not torch.equal(t2d, vocab.to_offsets(ids, vocab_size)[1])):
        raise files.error(f"t2d ({t2d.dtype}, {tuple(t2d.shape)}) does not mark the tokens that d2t names")
    if not head.pruned:
        if len(ids) != vocab_size:
            raise files.error(f"d2t has {len(ids)} entries, config.json a draft vocabulary of {vocab_size}")
        return {name: tensor for name, tensor in weights.items() if name not in ("d2t", "t2d")}
    return weights | {"t2d": vocab.to_offsets(ids, vocab_size)[1]}


def shared_rows(files: HeadFiles, target: Target) -> Tensor:
    """Return the rows of the target's lm_head for files that omit them. Raises ValueError if it is quantized."""
    if (rows := target.lm_head_rows) is None:
        raise files.error(f"it shares the lm_head of {target.name}, which is quantized: load it unquantized")
    return rows.detach().cpu()


def projection_names(layout: Format, head: DraftHead) -> set[str]:
    """Return the names that the head's projections to the vocabulary have in files of this layout."""
    projections = {id(projection.weight) for projection in head.projections}
    return {layout.disk_name(name) for name, weight in head.named_parameters() if id(weight) in projections}


def complete_projections(
    files: HeadFiles, layout: Format, weights: dict[str, Tensor], head: DraftHead, target: Target
) -> dict[str, Tensor]:
    """Return `weights` with the target's rows for projections that files omit because they are those rows."""
    names = projection_names(layout, head)
    if files.config.get("foredraft", {}).get("lm_head") != "target" or names <= weights.keys():
        return weights
    rows = shared_rows(files, target)
    rows = rows if "d2t" not in weights else rows[vocab.from_offsets(weights["d2t"])]
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    return {name: rows.to(dtype) for name in names} | weights
