"""Heads on the Hugging Face Hub: pull one, push one. The client is huggingface_hub; what is ours is what may be sent,
what must not be overwritten, what a replaced head leaves there, and errors in one sentence."""

import fnmatch
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, get_token, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foredraft.heads.formats.files import CONFIG, FILE, INDEX, PICKLED, SAFE, read_config

WEIGHTS = (*SAFE, FILE, *PICKLED)
HEAD = "head"  # of a run, and of each of its checkpoints
# What a head consists of, in any layout: of these a repository holds what the newest head has, and no others.
HEAD_FILES = (*WEIGHTS, "*.safetensors", "adapter_*", "config.json", "config.yaml", "metrics.json", "report.html")
TEXTS = ["*.json", "*.md"]
REASONS = {
    401: "it does not know the token (401): log in with `hf auth login`, or set HF_TOKEN",
    403: "the token has no right to this (403): use one that may read, or write, that repository",
    412: "somebody else changed it meanwhile (412): look at it, and run the same command again",
    429: "too many requests (429): wait some minutes and run the same command again",
}

BUGS = (AssertionError, AttributeError, KeyError, NameError, TypeError)  # of our own code, which keep their traceback


class PushRefused(ValueError):
    """An error of ours, already one full sentence."""


def find(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The directory of a head: itself, the `head` in that of a run or a checkpoint, or the Hub's copy of `org/name`, which is
    cached and works offline afterwards.

    The config comes first, so that a drafter that cannot be used is refused before its weights are downloaded. Only the
    files that a head consists of are fetched; pickles only where there is nothing else, and code never.
    revision: a branch, tag or commit on the Hub.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"head {path} is a directory, which has no revision={revision}: that is for ids on the Hub"
            )
        return path / HEAD if (path / HEAD / CONFIG).is_file() else path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"head {name} is neither a directory nor a Hub id like org/name")
    what = f"head {name} is no directory here, and the Hub does not give it"
    with one_sentence_errors(what):
        found = Path(snapshot_download(name, revision=revision, allow_patterns=TEXTS))
    check_no_language_model(found, name)
    with one_sentence_errors(what):
        for known, patterns in ((SAFE, ["*.safetensors"]), ((FILE,), [FILE]), (PICKLED, list(PICKLED))):
            found = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns, *TEXTS]))
            if any((found / file).is_file() for file in known):
                break
    return found


def check_no_language_model(directory: Path, name: str) -> None:
    """Raise ValueError for a whole language model without a layer that drafts, by its config.json and its index alone. An
    EAGLE-1 head may call itself one, of one layer."""
    config = read_config(directory, name)
    count, named = config.get("num_hidden_layers"), set(config.get("architectures") or [])
    index = directory / INDEX
    parts = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    drafts = "foredraft" in config or any(part.startswith("mtp.") for part in parts)
    if not drafts and isinstance(count, int) and count > 1 and named & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ValueError(
            f"{name} is a language model of {count} layers and no head: drafter=draft:{name} drafts with it, "
            "drafter=<org>/<head> with a head for the target"
        )


def check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"repo={repo} is no name on the Hub: {error}") from None
    if repo.count("/") != 1:
        raise ValueError(f"repo={repo} names no owner: write org/name")


def push(folder: Path, repo: str, private: bool, replace: bool, dry_run: bool) -> str:
    """Send the files in `folder` to `repo` as one commit, delete what another head left there, and say so.

    Raises ValueError where the repository holds a different head and not `replace`, where it is private or public against
    what was asked, where it changes meanwhile, and for what the Hub refuses. Nothing is visible there before the commit,
    and an upload that was cut continues when the command is run again: files that arrived are not sent twice.
    """
    check_name(repo)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    api = HfApi()
    listing = "".join(f"\n  {path.name}  {path.stat().st_size:,} bytes" for path in files)
    with one_sentence_errors(f"the Hub ({api.endpoint}) did not take {repo}"):
        try:
            there = look_up(api, repo)
        except HfHubHTTPError:
            raise
        except Exception:  # of the client's transport, whichever library that is
            if not dry_run:
                raise
            return (
                f"the Hub ({api.endpoint}) cannot be reached; would send to {repo}, if no other head is there:{listing}"
            )
        if there is not None:
            check_replaceable(api, there, folder, repo, private, replace)
        left = sorted(set(head_files(there)) - {path.name for path in files})
        listing += "".join(f"\n  {name}  deleted, of the head that was there" for name in left)
        if dry_run:
            kind = "private" if private else "public"
            return f"would send to {'the' if there else 'a new'} {kind} repository {repo}, dry_run=false does:{listing}"
        api.create_repo(repo, private=private, exist_ok=True)
        info = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=f"Head {weights_sha256(folder)[:12]}",
            delete_patterns=list(HEAD_FILES),  # what the folder has is replaced
            parent_commit=there.sha if there else None,
        )
    return f"sent to {info.commit_url}:{listing}"


def look_up(api: HfApi, repo: str) -> ModelInfo | None:
    """What the Hub knows of `repo`; None where there is no repository."""
    try:
        return api.model_info(repo)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401 and get_token() is not None:
            raise  # the Hub says 401 for a private repository and for a wrong token alike
        return None


def head_files(there: ModelInfo | None) -> list[str]:
    """The files in a repository that are a head's."""
    names = [file.rfilename for file in (there and there.siblings) or []]
    return [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in HEAD_FILES)]


def check_replaceable(api: HfApi, there: ModelInfo, folder: Path, repo: str, private: bool, replace: bool) -> None:
    if there.private != private:
        actual, requested = ("private", "public") if there.private else ("public", "private")
        raise PushRefused(
            f"{repo} is {actual} and {requested} was requested: set private={str(there.private).lower()}, or change it there"
        )
    weights = [name for name in head_files(there) if name in WEIGHTS or name.endswith(".safetensors")]
    weights += [name for name in head_files(there) if name.startswith("adapter_") and name not in weights]
    files = api.get_paths_info(repo, weights, revision=there.sha) if weights and not replace else []
    for file in files:
        ours = folder / file.path
        large = file.lfs if isinstance(file, RepoFile) else None
        if not ours.is_file() or (large is not None and large.sha256 != file_sha256(ours)):
            raise PushRefused(
                f"{repo} holds a different head ({file.path}): replace=true overwrites it, or give another name"
            )


def weights_sha256(folder: Path) -> str:
    """Digest of the weights in `folder`, by which a head is known."""
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder} holds no weights: none of {', '.join(WEIGHTS)}")
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_commit(name: str) -> str | None:
    """The commit of a model that was loaded from the Hub; None for one from a directory."""
    if Path(name).is_dir():
        return None
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None


@contextmanager
def one_sentence_errors(what: str) -> Iterator[None]:
    """Turn what the client raises into a ValueError of one sentence that contains no token."""
    try:
        yield
    except (PushRefused, *BUGS):
        raise
    except Exception as error:  # of the client's transport, whichever library that is
        seen: set[int] = set()  # a chain of causes may be a ring
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HfHubHTTPError) and id(cause) not in seen:
            seen.add(id(cause))
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        reason = REASONS.get(status or 0) or without_token(str(error)).strip().split("\n")[0]
        raise ValueError(f"{what}: {reason}") from None


def without_token(text: str) -> str:
    token = get_token()
    return text.replace(token, "<token>") if token else text
