"""Read what transformers does not load from the checkpoint of a target."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import get_token, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
REASONS = {
    401: "the token is not valid (401): log in with `hf auth login`, or set HF_TOKEN",
    403: "the token lacks permission (403): use one that may read, or write, that repository. A gated one has terms to "
    "accept on its page",
    412: "somebody else changed it meanwhile (412): look at it, and run the same command again",
    429: "too many requests (429): wait some minutes and run the same command again",
}
NO_TOKEN = (
    "it does not exist, or is private or gated ({}): check the name. A gated one has terms to accept on its page. Then log "
    "in with `hf auth login`, or set HF_TOKEN"
)
UMASK = os.umask(0o077)  # it can only be read by setting it, which is not for threads
os.umask(UMASK)
MOST_CAUSES = 8  # of an error: its chain may be a ring


def hub_reason(error: BaseException) -> str:
    """Return in a sentence, without the token, why the Hub does not do what its client asked for."""
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None and len(causes) < MOST_CAUSES:
        causes.append(causes[-1].__cause__)
    status = next((cause.response.status_code for cause in causes if isinstance(cause, HfHubHTTPError)), 0)
    if status in (401, 403) and get_token() is None:
        return NO_TOKEN.format(status)
    lines = [line for line in str(error).replace(get_token() or "<token>", "<token>").splitlines() if line.strip()]
    # The first line may only be "404 Client Error. (Request ID: ...)".
    return REASONS.get(status) or next((line.strip() for line in lines if " Client Error." not in line), "".join(lines))


def check_no_pointer(file: Path) -> None:
    """Raise ValueError if Git left a pointer in the place of a large file, because the repository was cloned without LFS."""
    with file.open("rb") as opened:
        if opened.read(23) == b"version https://git-lfs":
            raise ValueError(
                f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository"
            )


def checkpoint_file(target: "Target", name: str) -> Path | None:
    """Return a file of the target's checkpoint, in its directory or the Hub's cache."""
    return stored_file(target.checkpoint, name, target.revision)


def stored_file(checkpoint: str, name: str, revision: str | None) -> Path | None:
    """Return a file of a directory, or of a Hub id in the Hub's cache."""
    if not checkpoint:  # a model that was made in memory
        return None
    if Path(checkpoint).is_dir():
        return Path(checkpoint) / name if (Path(checkpoint) / name).is_file() else None
    try:
        cached = try_to_load_from_cache(checkpoint, name, revision=revision)
    except HFValidationError:  # the name of a model that was made in memory
        return None
    return Path(cached) if isinstance(cached, str) else None


def apply_file_rules(tokenizer: PreTrainedTokenizerBase, checkpoint: str, revision: str | None) -> None:
    """Let a tokenizer split and merge words as its tokenizer.json says. transformers 5 replaces that by what the class of the
    model's family does, for example Qwen2's for each model of this kind, which changes ids silently. An `add_prefix_space`
    in tokenizer_config.json that contradicts the file is followed as the class does. A class of the checkpoint's own code
    is left unchanged."""
    file, config = (stored_file(checkpoint, name, revision) for name in ("tokenizer.json", "tokenizer_config.json"))
    if file is None or type(tokenizer) is PreTrainedTokenizerFast or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    if not type(tokenizer).__module__.startswith("transformers."):
        return
    rules, backend = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    wanted = None if config is None else json.loads(config.read_text()).get("add_prefix_space")
    if wanted is None or puts_space(rules) == wanted or puts_space(backend) != wanted:
        backend.normalizer, backend.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
        backend.decoder = rules.decoder
    backend.model = rules.model


def puts_space(rules: Tokenizer) -> bool:
    """Return whether a text gets a space before its first word."""
    return "".join(rules.encode("a", add_special_tokens=False).tokens).startswith(("Ġ", "▁"))


def commit_of(target: "Target") -> str | None:
    """Return the commit of a target from the Hub, of which the cache has a folder; None for one from a directory."""
    file = checkpoint_file(target, "config.json")
    return None if file is None or Path(target.checkpoint).is_dir() else file.parent.name


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a file in safetensors, with the permissions of any new file. The library makes files private, and a server may
    run as another user."""
    save_file(tensors, file, metadata=metadata)
    file.chmod(0o666 & ~UMASK)


def weight_map(target: "Target", weights: str = WEIGHTS) -> dict[str, Path]:
    """Return the file of every stored tensor by name; empty without a checkpoint in safetensors. weights: the name of
    its only file. transformers leaves the index of an earlier checkpoint next to it, and ignores it, too."""
    index, single = (checkpoint_file(target, name) for name in (f"{weights}.index.json", weights))
    if index is not None and single is None:
        parts: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: index.parent / part for name, part in parts.items()}
    if single is None:
        return {}
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)


def stored_tensors(target: "Target", rename: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors that get a name from `rename`."""
    tensors: dict[str, Tensor] = {}
    for name, path in sorted(weight_map(target).items()):
        if (new := rename(name)) is not None and path.is_file():
            with safe_open(path, framework="pt") as opened:
                tensors[new] = opened.get_tensor(name)
    return tensors
