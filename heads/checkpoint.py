"""Save a head, and load one: ours or a published one, from a directory or the Hub, checked against its target."""

import errno
import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.heads import adapter, formats
from foredraft.heads.base import DraftHead
from foredraft.heads.formats.files import ADAPTER_CONFIG, CONFIG, FILE, PICKLED, SAFE, read_config
from foredraft.heads.hub.client import find, weights_sha256
from foredraft.heads.medusa2 import Medusa2Head
from foredraft.heads.target import Target
from foredraft.heads.target.files import weight_map

WEIGHTS = SAFE[0]
SMALL_HEAD = 1 << 22  # parameters; 16 MB in float32
CARD = "README.md"
STATED = re.compile(r"SHA-256 of the weights\W+([0-9a-f]{64})")
OF_A_HEAD = (*SAFE, *PICKLED, FILE, CONFIG, ADAPTER_CONFIG)  # what would be read as one
OF_A_RUN = ("config.yaml", "metrics.json")  # what a training run writes next to it


def fingerprint(target: Target) -> dict:
    """What ties a head to the target it was trained on. The digest is of some embedding rows, as they are stored: it is the
    same whatever dtype the target was loaded in."""
    ids = range(0, target.vocab_size, max(1, target.vocab_size // 64))
    stored = stored_embeddings(target, ids)
    rows = target.embeddings[: ids.stop : ids.step].detach().cpu() if stored is None else stored
    digest = hashlib.sha256(rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()).hexdigest()[:16]
    facts = {"name": target.name, "model_type": target.config.model_type, "vocab_size": target.vocab_size}
    if target.gguf is not None:
        facts["gguf"] = target.gguf
    return facts | {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "embedding_digest": digest}


def stored_embeddings(target: Target, ids: range) -> Tensor | None:
    """These rows of the embedding in the checkpoint that the target was loaded from; None where there is none.

    Those in memory will not do alone: a float16 load of bfloat16 weights has lost its smallest numbers."""
    embedding = target.model.get_input_embeddings()
    module = next(name for name, part in target.model.named_modules() if part is embedding)
    suffix = f"{module.rpartition('.')[2]}.weight"  # what stands before it differs between versions of transformers
    for name, path in weight_map(target).items():
        if name.endswith(suffix) and path.is_file():
            with safe_open(path, framework="pt") as checkpoint:
                rows = checkpoint.get_slice(name)
                if rows.get_shape() == [embedding.num_embeddings, target.hidden_size]:
                    return torch.stack([rows[i] for i in ids])
    return None


def published_dtype(target: Target) -> torch.dtype:
    """Of a head's files: the target's own, where that is not one of packed weights."""
    return target.dtype if target.dtype.is_floating_point else torch.float32


def save_head(head: DraftHead, directory: str | Path, target: Target, **extra: Any) -> None:
    """Write model.safetensors and config.json. `extra` (JSON values) goes under "foredraft", beside what loading uses."""
    layout = formats.default_format(head)
    write_head(head, directory, target, layout, (layout.own_file,), **extra)


def write_head(
    head: DraftHead, directory: str | Path, target: Target, layout: formats.Format, files: tuple[str, ...], **extra: Any
) -> None:
    """Write a head in `layout`, its weights under each name of `files`. Raises OSError where the disk is full.

    The files are written next to the directory and take its place when they are complete, so that an interrupted run leaves
    the head that was there."""
    directory = Path(directory).expanduser().resolve()
    weights, config = layout.export_weights(head, target), layout.export_config(head, target)
    config["dtype"] = str(head.dtype).removeprefix("torch.")
    own = {"kind": head.kind, "depth": head.depth, "target": fingerprint(target)}
    if head.imported:
        own["imported"] = True
    config["foredraft"] = own | config.get("foredraft", {}) | extra
    part = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of an interrupted run
    part.mkdir(parents=True)
    try:
        for name in files:
            layout.write_weights(weights, part / name, head, target)
        (part / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        layout.complete_files(part, target)
        if isinstance(head, Medusa2Head):
            adapter.save(target, part)
        mode = (part / CONFIG).stat().st_mode
        for file in part.iterdir():
            file.chmod(mode)  # safetensors lets nobody else read its files, and a server may be another user
        put_in_place(part, directory)
    except SafetensorError as error:  # safetensors reports a full disk in words only
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, "no space left on device", str(directory)) from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def put_in_place(part: Path, directory: Path) -> None:
    """Let the files in `part` take the place of the head in `directory`, of which nothing stays. What is no head's stays."""
    if not directory.exists():
        part.rename(directory)
        return
    here = [file for file in directory.iterdir() if file.name not in OF_A_RUN]
    replaced = [file for file in here if file.name in OF_A_HEAD or states_weights(file)]
    for name in OF_A_RUN:
        if (directory / name).is_file():
            shutil.copy(directory / name, part)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if len(replaced) == len(here) and moved(directory, old):
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


def moved(directory: Path, place: Path) -> bool:
    """Rename it, where that can be: not where a disk is mounted, or where a program stands."""
    try:
        return Path.cwd() != directory and bool(directory.rename(place))
    except OSError:
        return False


def states_weights(file: Path) -> bool:
    """Is this the model card of certain weights?"""
    return file.name == CARD and STATED.search(file.read_text("utf-8")) is not None


def read_head(path: str | Path, target: Target, revision: str | None = None, strict: bool = False) -> DraftHead:
    """The head in a directory or on the Hub, on the CPU, in the dtype it was stored in. The adapter of a Medusa-2 head is
    loaded onto the target, whose text it changes. revision: a branch, tag or commit on the Hub.

    Raises ValueError that names what is missing, left over, of another shape, or at odds with `target`. Warns once of what is
    taken from the files although it is unusual or not the target's; strict: an error, where the head was trained here.
    """
    files = formats.read(find(path, revision))
    check_card(files.directory)
    layout = formats.detect(files)
    head = formats.build(layout, files, target)
    head.imported = not files.trained_here
    has_adapter = (files.directory / adapter.CONFIG).is_file()
    if has_adapter and not isinstance(head, Medusa2Head):
        raise files.error(
            f"{adapter.CONFIG} lies beside a head of kind {head.kind}, which needs no adapter, and would change the target's "
            "text: remove it"
        )
    if not has_adapter and len(adapter.lora_layers(target)):
        raise files.error(f"{target.name} has an adapter on it, which this head does not know: load the target again")
    head.attach(target)
    check_fit(files, head, target, strict)
    if has_adapter:
        adapter.load(target, files.directory)
    return head


def load_head(
    path: str | Path,
    target: Target,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    strict: bool = False,
) -> DraftHead:
    """The head of `read_head` on the target's device, for inference. dtype: None takes the one that it drafts fastest in."""
    head = read_head(path, target, revision, strict)
    return head.to(target.device, dtype or drafting_dtype(head, target)).eval().requires_grad_(False)


def drafting_dtype(head: DraftHead, target: Target) -> torch.dtype:
    """The target's, but float32 for a small head on a CPU: what it computes there is less than what a half-precision
    kernel costs to call, and its weights stay in the processor's cache at either width."""
    small = sum(parameter.numel() for parameter in head.parameters()) < SMALL_HEAD
    return torch.float32 if small and target.device.type == "cpu" else target.dtype


def check_card(directory: Path) -> None:
    """Raise ValueError where the model card beside the weights was written for other weights."""
    card = directory / CARD
    stated = STATED.search(card.read_text("utf-8")) if card.is_file() else None
    if stated and stated[1] != weights_sha256(directory):
        raise ValueError(
            f"the weights in {directory} are not those of its {CARD} (SHA-256 {stated[1][:12]}...): the download or the "
            f"repository mixes two heads; fetch it again, or remove {CARD} if you changed the weights yourself"
        )


def check_fit(files: formats.HeadFiles, head: DraftHead, target: Target, strict: bool = False) -> None:
    """Raise ValueError where the head and this target disagree, saying which side says what. What differs and may be
    meant (the rope of a target whose config.json was edited, say) is one warning, or else as `read_head` says."""
    saved, now = files.config.get("foredraft", {}).get("target", {}), fingerprint(target)
    problems = [
        f"{name}: the head was trained for {saved[name]}, the target has {now[name]}"
        for name in ("vocab_size", "hidden_size", "num_layers")
        if name in saved and saved[name] != now[name]
    ]
    problems += head.incompatibilities(target)
    notes = [*files.notes, *head.differences(target)]
    if saved.get("embedding_digest", now["embedding_digest"]) != now["embedding_digest"]:
        other = (
            f"it was trained for other weights than {target.name} has (embedding_digest {saved['embedding_digest']} and "
            f"{now['embedding_digest']}): for a quantised file or a fine-tune it may draft a little less well, for another "
            "model hardly at all"
        )
        (problems if isinstance(head, Medusa2Head) else notes).append(other)  # whose adapter would change the target
    if strict and files.trained_here:
        problems += notes
    if problems:
        raise ValueError(
            f"the head in {files.directory} does not fit {target.name}: " + "; ".join(dict.fromkeys(problems))
        )
    if notes:
        warnings.warn(f"the head in {files.directory} is used as its files say: {'; '.join(notes)}", stacklevel=3)


__all__ = ["check_fit", "find", "fingerprint", "load_head", "read_config", "read_head", "save_head", "write_head"]
