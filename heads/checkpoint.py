"""Save and load heads, ours or published ones, from a directory or the Hub, and check them against their target."""

import errno
import hashlib
import json
import re
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.heads import formats, llama_config
from foredraft.heads.base import DraftHead
from foredraft.heads.caches.device import host_by_default
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.formats.files import CONFIG, FILE, PICKLED, SAFE
from foredraft.heads.hub.client import find, weights_sha256
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.files import checkpoint_file, weight_map
from foredraft.heads.target_model.loading import has_bfloat16_products
from foredraft.heads.target_model.packing import is_faster

WEIGHTS = SAFE[0]
SMALL_HEAD = 1 << 22  # parameters; 16 MB in float32
CARD = "README.md"
STATED_SHA = re.compile(r"SHA-256 of the weights\W+([0-9a-f]{64})")
ADAPTER = "adapter_model.safetensors"  # peft's, of a target
HEAD_FILES = (*SAFE, *PICKLED, FILE, CONFIG)  # would be read as part of a head
RUN_FILES = ("config.yaml", "metrics.json")  # written next to it by a training run


def check_is_target(target: object) -> None:
    """Raise ValueError for what is not a Target, such as a path or a model of transformers."""
    if not isinstance(target, Target):
        raise ValueError(
            f"target is {type(target).__name__}, not a Target: Target.from_pretrained(path) loads one, and "
            "Target(model, tokenizer, name) wraps a model"
        )


def fingerprint(target: Target) -> dict:
    """Return what ties a head to the target it was trained on. The digests cover some embedding rows, and a row of every
    matrix, as stored on disk, so they do not depend on the dtype in which the target was loaded."""
    ids = range(0, target.vocab_size, max(1, target.vocab_size // 64))
    stored = stored_embeddings(target, ids)
    rows = target.embeddings[: ids.stop : ids.step].detach().cpu() if stored is None else stored
    digest = hashlib.sha256(rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()).hexdigest()[:16]
    facts = {"name": target.name, "model_type": target.config.model_type, "vocab_size": target.vocab_size}
    if target.gguf is not None:
        facts["gguf"] = target.gguf
    facts |= {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "embedding_digest": digest}
    if (weights := stored_digest(target)) is not None:
        facts["weights_digest"] = weights
    return facts


def same_weights(one: dict, other: dict) -> bool:
    """Return whether two fingerprints are of the same weights. A digest that one of them lacks is not compared."""
    return all(
        one[name] == other[name] for name in ("embedding_digest", "weights_digest") if name in one and name in other
    )


def stored_digest(target: Target) -> str | None:
    """Return a digest of the first row of every matrix in the checkpoint and its adapter, or None if not all of it is here in
    safetensors (`embeddings_only` fetches a part). A fine-tune may leave the embedding unchanged. The matrices have no order,
    since versions of transformers differ in names and in what they tie. Experts are left out: there may be tens of
    thousands."""
    files: dict[Path, list[str]] = {}
    for name, path in (weight_map(target) | weight_map(target, ADAPTER)).items():
        if not path.is_file():
            return None
        if ".experts." not in name:
            files.setdefault(path, []).append(name)
    rows = set[bytes]()
    for path, names in files.items():
        with safe_open(path, framework="pt") as checkpoint:
            for name in names:
                matrix = checkpoint.get_slice(name)
                if len(matrix.get_shape()) == 2 and matrix.get_shape()[0]:
                    row = matrix[0]
                    row = row.to(torch.bfloat16) if row.dtype in (torch.float32, torch.float16) else row
                    rows.add(row.view(torch.uint8).numpy().tobytes())
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()[:16] if rows else None


def stored_embeddings(target: Target, ids: range) -> Tensor | None:
    """Return these rows of the embedding in the checkpoint that the target was loaded from, or None without one. The weights
    in memory are not enough: loading bfloat16 weights in float16 loses the smallest numbers."""
    embedding = target.model.get_input_embeddings()
    module = next(name for name, part in target.model.named_modules() if part is embedding)
    suffix = f"{module.rpartition('.')[2]}.weight"  # its prefix differs between versions of transformers
    for name, path in weight_map(target).items():
        if name.endswith(suffix) and path.is_file():
            with safe_open(path, framework="pt") as checkpoint:
                rows = checkpoint.get_slice(name)
                if rows.get_shape() == [embedding.num_embeddings, target.hidden_size]:
                    return torch.stack([rows[i] for i in ids])
    pickled = checkpoint_file(target, PICKLED[0])
    if pickled is not None and zipfile.is_zipfile(pickled):  # a mapped file, not one of the first versions of torch
        for name, weight in torch.load(pickled, map_location="cpu", mmap=True, weights_only=True).items():
            if name.endswith(suffix) and list(weight.shape) == [embedding.num_embeddings, target.hidden_size]:
                return weight[ids.start : ids.stop : ids.step]
    return None


def published_dtype(target: Target) -> torch.dtype:
    """Return the dtype of a head's files: the target's, unless the target's weights are packed."""
    return target.dtype if target.dtype.is_floating_point else torch.float32


def save_head(head: DraftHead, directory: str | Path, target: Target, **extra: Any) -> None:
    """Write model.safetensors and config.json. `extra` (JSON values) is added under "foredraft", next to what loading
    uses."""
    write_head(head, directory, target, formats.default_format(head), (WEIGHTS,), **extra)


def write_head(
    head: DraftHead, directory: str | Path, target: Target, layout: formats.Format, files: tuple[str, ...], **extra: Any
) -> None:
    """Write a head in `layout`, with its weights under each name of `files`. Raises OSError if the disk is full. The files
    are written next to the directory and replace it when they are complete, so an interrupted run keeps the previous
    head."""
    directory = Path(directory).expanduser().resolve()
    weights, config = layout.export_weights(head, target), layout.export_config(head, target)
    config["dtype"] = str(head.dtype).removeprefix("torch.")
    record = {"kind": head.kind, "depth": head.depth, "target": fingerprint(target)}
    noted = {"imported": head.imported, "rope": head.own_rope and "own"}
    noted["lm_head"] = head.lm_head_is_targets and "target"
    record |= {name: value for name, value in noted.items() if value}
    config["foredraft"] = record | config.get("foredraft", {}) | extra
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted run
    part.mkdir(parents=True)
    try:
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for name in files:
            layout.write_weights(weights, part / name, head, target)
        mode = (part / CONFIG).stat().st_mode
        for file in part.iterdir():
            file.chmod(mode)  # safetensors makes files private, and a server may run as another user
        replace_head(part, directory)
    except SafetensorError as error:  # safetensors reports a full disk in words only
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, "no space left on device", str(directory)) from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def replace_head(part: Path, directory: Path) -> None:
    """Replace all files of the head in `directory` by those in `part`. Files of other kinds stay."""
    if not directory.exists():
        part.rename(directory)
        return
    here = [file for file in directory.iterdir() if file.name not in RUN_FILES]
    replaced = [file for file in here if file.name in HEAD_FILES or is_own_card(file)]
    for name in RUN_FILES:
        if (directory / name).is_file():
            shutil.copy(directory / name, part)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if len(replaced) == len(here) and try_rename(directory, old):
        try:
            part.chmod(old.stat().st_mode)
            part.rename(directory)
        except BaseException:
            old.rename(directory)
            raise
        shutil.rmtree(old)
        return
    new = [file.replace(directory / file.name) for file in part.iterdir()]
    for file in replaced:
        if file not in new:
            file.unlink()


def try_rename(directory: Path, place: Path) -> bool:
    """Rename a directory if possible; a mount point or a working directory of this process cannot be renamed."""
    try:
        return Path.cwd() != directory and bool(directory.rename(place))
    except OSError:
        return False


def is_own_card(file: Path) -> bool:
    """Return whether this file is a model card that states the digest of weights."""
    return file.name == CARD and STATED_SHA.search(file.read_text("utf-8", "replace")) is not None


def read_head(path: str | Path, target: Target, revision: str | None = None, strict: bool = False) -> DraftHead:
    """Read a head from a directory or the Hub, on the CPU and in its stored dtype. revision: a branch, tag or commit on the
    Hub.

    Raises ValueError with the missing, unexpected or mismatched tensors and settings. Warns once about settings of the files
    that are unusual or differ from the target's; with strict this is an error for heads trained by foredraft."""
    check_is_target(target)
    files = formats.read(find(path, revision))
    check_card(files.directory)
    layout = formats.detect(files)
    head = formats.build(layout, files, target)
    head.imported = not files.trained_here
    record = files.config.get("foredraft", {})
    head.own_rope, head.lm_head_is_targets = record.get("rope") == "own", record.get("lm_head") == "target"
    head.attach(target)
    check_fit(files, head, target, strict)
    return head


@host_by_default()
def load_head(
    path: str | Path,
    target: Target,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    strict: bool = False,
) -> DraftHead:
    """Load the head of `read_head` onto the target's device for inference. dtype: None uses that of the fastest drafting."""
    head = read_head(path, target, revision, strict)
    return head.to(target.device, dtype or drafting_dtype(head, target)).eval().requires_grad_(False)


def drafting_dtype(head: DraftHead, target: Target) -> torch.dtype:
    """Return the target's dtype. On a CPU: float32 for a small head, whose products cost less than calling a half-precision
    kernel, and bfloat16 for a larger one, where the CPU multiplies in it: its weights are read for every draft, and the
    text does not depend on their rounding."""
    if target.device.type != "cpu":
        return target.dtype
    if sum(parameter.numel() for parameter in head.parameters()) < SMALL_HEAD:
        return torch.float32
    return torch.bfloat16 if has_bfloat16_products("cpu") and is_faster(torch.bfloat16) else target.dtype


def check_card(directory: Path) -> None:
    """Raise ValueError if the model card next to the weights was written for other weights."""
    card = directory / CARD
    stated = STATED_SHA.search(card.read_text("utf-8", "replace")) if card.is_file() else None
    if stated and stated[1] != weights_sha256(directory):
        raise ValueError(
            f"the weights in {directory} are not those of its {CARD} (SHA-256 {stated[1][:12]}...): the download or the "
            f"repository mixes two heads; fetch it again, or remove {CARD} if you changed the weights yourself"
        )


def check_fit(files: formats.HeadFiles, head: DraftHead, target: Target, strict: bool = False) -> None:
    """Raise ValueError if the head and this target disagree, with the values of both. Differences that may be intended (the
    rope of a target with an edited config.json) give one warning, or an error as `read_head` describes."""
    saved, now = files.config.get("foredraft", {}).get("target", {}), fingerprint(target)
    stated = {} if head.config is None else head.config.to_dict()  # in files of others
    if isinstance(head, Eagle3Head):
        stated["hidden_size"] = head.target_hidden_size
    sizes = {name: saved.get(name, stated.get(name, now[name])) for name in ("vocab_size", "hidden_size", "num_layers")}
    problems = [
        f"{name}: the head has {size}, the target {now[name]}" for name, size in sizes.items() if size != now[name]
    ]
    notes = list(files.notes)
    if head.config is not None:
        notes += llama_config.differences(head.config, target, head.own_rope)
    if not same_weights(saved, now):
        notes.append(
            f"it was trained for other weights than those of {target.name}: its acceptance is a little lower for a quantized "
            "file or a fine-tune, and very low for another model"
        )
    if strict and files.trained_here:
        problems += notes
    if problems:
        raise ValueError(
            f"the head in {files.directory} does not fit {target.name}: " + "; ".join(dict.fromkeys(problems))
        )
    if notes:
        warnings.warn(f"the head in {files.directory} is used with its own settings: {'; '.join(notes)}", stacklevel=3)
