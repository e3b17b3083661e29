"""Heads on disk: a directory with model.safetensors and config.json. Strict: every key and shape is accounted for.

A head that is read with a key missing or left over drafts garbage and says nothing (acceptance 0.000 in a published
engine), so both are errors here that name the key and the remedy.
"""

import errno
import hashlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from heads.base import DraftHead
from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head
from heads.medusa import MedusaHead
from heads.target import Target

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PUBLISHED: tuple[type[DraftHead], ...] = (Eagle3Head, EagleHead, MedusaHead)


def head_class(config: dict, where: str) -> type[DraftHead]:
    """The class that a config.json of foretoken's names, or whose published format it is in.

    Only what is installed here can be named: no code ever comes with the files.
    """
    name = config.get("foretoken", {}).get("class")
    if name is None:
        for kind in PUBLISHED:
            if kind.describes(config):
                return kind
        raise ValueError(
            f"{where} describes no head that is known here (architectures {config.get('architectures')}): "
            "an EAGLE-3 config names LlamaForCausalLMEagle3, a Medusa config has medusa_num_heads"
        )
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{where} asks for the head class {name}, which is not installed here: {error}") from None
    if not (isinstance(found, type) and issubclass(found, DraftHead)):
        raise ValueError(f"{where} asks for the head class {name}, which is no DraftHead")
    return found


def fingerprint(target: Target) -> dict:
    """What ties a head to the target it was trained on. The digest is of the final norm and of some embedding rows."""
    rows = target.model.get_input_embeddings().weight[:: max(1, target.vocab_size // 64)]
    digest = hashlib.sha256(rows.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
    facts = {"name": target.name, "model_type": target.config.model_type, "vocab_size": target.vocab_size}
    return facts | {"hidden_size": target.hidden_size, "num_layers": target.num_layers, "embedding_digest": digest}


def save_head(head: DraftHead, directory: str | Path, target: Target, **facts: Any) -> None:
    """Write model.safetensors and config.json. `facts` (JSON values) go under "foretoken", beside what loading uses."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = head.state_dict()
    weights = {name: state[ours].detach().cpu().contiguous() for name, ours in head.disk_names().items()}
    config = head.to_config()
    config["dtype"] = str(head.dtype).removeprefix("torch.")
    kind = type(head)
    own = {
        "kind": kind.kind,
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "depth": head.depth,
        "target": fingerprint(target),
    }
    config["foretoken"] = own | config.get("foretoken", {}) | facts
    try:
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except SafetensorError as error:  # safetensors reports a full disk in words only
        if "No space left" in str(error) or "os error 28" in str(error):
            raise OSError(errno.ENOSPC, "no space left on device", str(directory)) from error
        raise


def find(path_or_id: str | Path) -> Path:
    """The directory of a head: itself, or the Hub's copy of `org/name`."""
    path = Path(path_or_id)
    if path.is_dir():
        return path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(f"head {name} is neither a directory nor a Hub id like org/name")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.md"]))
    except Exception as error:
        raise ValueError(f"head {name} is no directory here, and the Hub does not give it: {error}") from error


def read_config(directory: Path) -> dict:
    try:
        return json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{directory} holds no {CONFIG}: give the directory that training wrote (<output_dir>/head)"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{directory / CONFIG} is not JSON: {error}") from error


def load_head(path: str | Path, target: Target, dtype: torch.dtype | None = None) -> DraftHead:
    """The head in a directory or on the Hub, checked against `target`, on the target's device, for inference.

    dtype: None takes the target's. Raises ValueError that names what is missing, left over or of another shape.
    """
    directory = find(path)
    config = read_config(directory)
    kind = head_class(config, str(directory / CONFIG))
    try:
        head = kind.from_config(config)
    except KeyError as error:
        raise ValueError(f"{directory / CONFIG} has no {error}, which a {kind.kind} head needs") from None
    try:
        weights = load_file(directory / WEIGHTS)
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no {WEIGHTS}") from None
    except SafetensorError as error:
        raise ValueError(f"{directory / WEIGHTS} is damaged or no safetensors file: {error}") from error
    names, state = head.disk_names(), head.state_dict()
    wanted = {name: state[ours] for name, ours in names.items()}
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - weights.keys())]
    problems += [f"{name} belongs to no layer of this head" for name in sorted(weights.keys() - wanted.keys())]
    problems += [
        f"{name} is {tuple(weights[name].shape)} where {CONFIG} asks for {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & weights.keys())
        if wanted[name].shape != weights[name].shape
    ]
    if problems:
        raise ValueError(f"{directory / WEIGHTS}: " + "; ".join(problems[:5]) + (" ..." if len(problems) > 5 else ""))
    head.load_state_dict({names[name]: tensor for name, tensor in weights.items()})
    head.bind(target)
    check_fit(config, head, target, directory)
    return head.to(target.device, dtype or target.dtype).eval().requires_grad_(False)


def check_fit(config: dict, head: DraftHead, target: Target, directory: Path) -> None:
    """Raise ValueError where the head and this target disagree, saying which side says what."""
    saved, now = config.get("foretoken", {}).get("target", {}), fingerprint(target)
    problems = [
        f"{name}: the head was trained for {saved[name]}, the target has {now[name]}"
        for name in ("vocab_size", "hidden_size", "num_layers", "embedding_digest")
        if name in saved and saved[name] != now[name]
    ]
    problems += head.misfits(target)
    if problems:
        raise ValueError(f"the head in {directory} does not fit {target.name}: " + "; ".join(dict.fromkeys(problems)))
