"""Heads on the Hugging Face Hub: pull one, push one. The client is huggingface_hub; what is ours is what may be sent,
what must not be overwritten, what a replaced head leaves behind, and errors in one sentence."""

import fnmatch
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from foredraft.heads.formats.files import PICKLED, SAFE, read_config

WEIGHTS = (*SAFE, *PICKLED)
# What a head consists of, in any layout: of these a repository holds what the newest head has, and no others.
HEAD_FILES = (*WEIGHTS, "*.safetensors", "adapter_*", "config.json", "config.yaml", "metrics.json", "report.html")
TEXTS = ["*.json", "*.md"]
REASONS = {
    401: "it does not know the token (401): log in with `hf auth login`, or set HF_TOKEN",
    403: "the token has no right to this (403): use one that may read, or write, that repository",
    412: "somebody else changed it meanwhile (412): look at it, and run the same command again",
    429: "too many requests (429): wait some minutes and run the same command again",
}


class PushRefused(ValueError):
    """An error of ours, already one full sentence."""


class Repository(NamedTuple):
    """What is on the Hub."""

    private: bool
    commit: str
    digests: dict[str, str]  # of the files of a head in it, by name: SHA-256, or git's of a small file


def find(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The directory of a head: itself, or the Hub's copy of `org/name`, which is cached and works offline afterwards.

    The config comes first, so that a drafter that cannot be used is refused before its weights are downloaded. Only the
    files that a head consists of are fetched; pickles only where there is nothing else, and code never.
    revision: a branch, tag or commit on the Hub.
    """
    path = Path(path_or_id)
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"head {path} is a directory, which has no revision={revision}: that is for ids on the Hub"
            )
        return path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(f"head {name} is neither a directory nor a Hub id like org/name")
    what = f"head {name} is no directory here, and the Hub does not give it"
    with one_sentence_errors(what):
        found = Path(snapshot_download(name, revision=revision, allow_patterns=TEXTS))
    read_config(found, name)
    with one_sentence_errors(what):
        found = Path(snapshot_download(name, revision=revision, allow_patterns=["*.safetensors", *TEXTS]))
        if not any((found / file).is_file() for file in SAFE):
            found = Path(snapshot_download(name, revision=revision, allow_patterns=[*PICKLED, *TEXTS]))
    return found


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
            check_replaceable(there, folder, repo, private, replace)
        left = sorted(there.digests.keys() - {path.name for path in files}) if there else []
        listing += "".join(f"\n  {name}  deleted, of the head that was there" for name in left)
        if dry_run:
            kind = "private" if private else "public"
            return f"would send to {'the' if there else 'a new'} {kind} repository {repo}, dry_run=false does:{listing}"
        api.create_repo(repo, private=private, exist_ok=True)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(p.name, p) for p in files),
            *(CommitOperationDelete(name) for name in left),
        ]
        message = f"Head {weights_sha256(folder)[:12]}"
        commit = there.commit if there else None
        info = api.create_commit(repo, operations, commit_message=message, parent_commit=commit)
        check_sent(look_up(api, repo, info.oid), folder, repo)
    return f"sent to {info.commit_url}:{listing}"


def look_up(api: HfApi, repo: str, revision: str | None = None) -> Repository | None:
    """What `repo` holds of a head; None where there is no repository."""
    try:
        info = api.model_info(repo, revision=revision)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401 and get_token() is not None:
            raise  # the Hub says 401 for a private repository and for a wrong token alike
        return None
    assert info.sha is not None
    names = [file.rfilename for file in info.siblings or []]
    names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in HEAD_FILES)]
    paths = api.get_paths_info(repo, names, revision=info.sha) if names else []
    files = [file for file in paths if isinstance(file, RepoFile)]
    digests = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
    return Repository(bool(info.private), info.sha, digests)


def check_replaceable(there: Repository, folder: Path, repo: str, private: bool, replace: bool) -> None:
    if there.private != private:
        actual, requested = ("private", "public") if there.private else ("public", "private")
        raise PushRefused(
            f"{repo} is {actual} and {requested} was requested: set private={str(there.private).lower()}, or change it there"
        )
    for name, digest in there.digests.items():
        is_weights = name in WEIGHTS or name.endswith(".safetensors") or name.startswith("adapter_")
        if is_weights and not replace and not same_file(folder / name, digest):
            raise PushRefused(
                f"{repo} holds a different head ({name}): replace=true overwrites it, or give another name"
            )


def check_sent(there: Repository | None, folder: Path, repo: str) -> None:
    """Raise ValueError unless the repository holds just the head in `folder`, which has passed the gate."""
    digests = there.digests if there else {}
    other = [name for name, digest in digests.items() if not same_file(folder / name, digest)]
    missing = [name for name in WEIGHTS if (folder / name).is_file() and name not in digests]
    if other or missing:
        raise PushRefused(
            f"{repo} does not hold the head that was sent ({', '.join(other + missing)} differ): look at it, and push again"
        )


def same_file(path: Path, digest: str) -> bool:
    return path.is_file() and digest == (file_sha256(path) if len(digest) == 64 else git_blob(path))


def weights_sha256(folder: Path) -> str:
    """Digest of the weights in `folder`, by which a head is known."""
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder} holds no weights: none of {', '.join(WEIGHTS)}")
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_blob(path: Path) -> str:
    """The digest that git, and so the Hub, gives a file that is too small for large-file storage."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


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
    except PushRefused:
        raise
    except Exception as error:
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
