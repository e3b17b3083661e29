"""Save a head, and load one: ours or a published one, from a directory or the Hub, checked against its target."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from heads import adapter, formats
from heads.base import DraftHead
from heads.formats.files import CONFIG, SAFE, read_config
from heads.hub.client import find
from heads.target import Target

WEIGHTS = SAFE[0]
SMALL = 1 << 22  # parameters; 16 MB in float32


def fingerprint(target: Target) -> dict:
    """What ties a head to the target it was trained on. The digest is of the final norm and of some embedding rows."""
    rows = target.embeddings[:: max(1, target.vocab_size // 64)]
    digest = hashlib.sha256(rows.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    facts = {"name": target.name, "model_type": target.config.model_type, "vocab_size": target.vocab_size}
    return facts | {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "embedding_digest": digest}


def save_head(head: DraftHead, directory: str | Path, target: Target, **facts: Any) -> None:
    """Write model.safetensors and config.json. `facts` (JSON values) go under "foredraft", beside what loading uses."""
    write_head(head, directory, target, formats.own(head), (WEIGHTS,), **facts)


def write_head(
    head: DraftHead, directory: str | Path, target: Target, form: formats.Format, files: tuple[str, ...], **facts: Any
) -> None:
    """Write a head in layout `form`, its weights under each name of `files`. Raises OSError where the disk is full."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights, config = form.weights_of(head, target), form.config_of(head, target)
    config["dtype"] = str(head.dtype).removeprefix("torch.")
    own = {"kind": head.kind, "depth": head.depth, "target": fingerprint(target)}
    config["foredraft"] = own | config.get("foredraft", {}) | facts
    try:
        for name in files:
            if name.endswith(".safetensors"):
                save_file(weights, directory / name, metadata={"format": "pt"})
            else:
                torch.save(weights, directory / name)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        if len(adapter.layers(target)):
            adapter.save(target, directory)
    except SafetensorError as error:  # safetensors reports a full disk in words only
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, "no space left on device", str(directory)) from error
        raise


def read_head(path: str | Path, target: Target) -> DraftHead:
    """The head in a directory or on the Hub, on the CPU, in the dtype it was stored in. An adapter beside it (Medusa-2) is
    put on the target, whose text it changes.

    Raises ValueError that names what is missing, left over, of another shape, or at odds with `target`.
    """
    found = formats.read(find(path))
    head = formats.build(formats.detect(found), found, target)
    if (found.where / adapter.CONFIG).is_file():
        adapter.load(target, found.where)
    elif len(adapter.layers(target)):
        raise found.wrong(f"{target.name} has an adapter on it, which this head does not know: load the target anew")
    head.bind(target)
    check_fit(found, head, target)
    return head


def load_head(path: str | Path, target: Target, dtype: torch.dtype | None = None) -> DraftHead:
    """The head of `read_head` on the target's device, for inference. dtype: None takes the one that it drafts fastest in."""
    head = read_head(path, target)
    return head.to(target.device, dtype or drafting_dtype(head, target)).eval().requires_grad_(False)


def drafting_dtype(head: DraftHead, target: Target) -> torch.dtype:
    """The target's, but float32 for a small head on a CPU: what it computes there is less than what a half-precision
    kernel costs to call, and its weights stay in the processor's cache at either width."""
    small = sum(parameter.numel() for parameter in head.parameters()) < SMALL
    return torch.float32 if small and target.device.type == "cpu" else target.dtype


def check_fit(found: formats.HeadFiles, head: DraftHead, target: Target) -> None:
    """Raise ValueError where the head and this target disagree, saying which side says what."""
    saved, now = found.config.get("foredraft", {}).get("target", {}), fingerprint(target)
    problems = [
        f"{name}: the head was trained for {saved[name]}, the target has {now[name]}"
        for name in ("vocab_size", "hidden_size", "num_layers", "embedding_digest")
        if name in saved and saved[name] != now[name]
    ]
    problems += head.incompatibilities(target)
    if problems:
        raise ValueError(f"the head in {found.where} does not fit {target.name}: " + "; ".join(dict.fromkeys(problems)))


__all__ = ["check_fit", "find", "fingerprint", "load_head", "read_config", "read_head", "save_head", "write_head"]
