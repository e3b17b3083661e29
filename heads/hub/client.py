"""Heads on the Hugging Face Hub: pull one, push one. The client is huggingface_hub; what is ours is what may be sent,
what must not be overwritten, and errors in one sentence."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from heads.formats.files import PICKLED, SAFE

WEIGHTS = (*SAFE, *PICKLED)
TEXTS = ["*.json", "*.md"]
REASONS = {
    401: "it does not know the token (401): log in with `hf auth login`, or set HF_TOKEN",
    403: "the token has no right to this (403): use one that may read, or write, that repository",
    429: "too many requests (429): wait some minutes and run the same command again",
}


class Refused(ValueError):
    """Ours, and said in full."""


def find(path_or_id: str | Path) -> Path:
    """The directory of a head: itself, or the Hub's copy of `org/name`, which is cached and works offline afterwards.

    Only the files that a head is made of are fetched; pickles only where there is nothing else, and code never.
    """
    path = Path(path_or_id)
    if path.is_dir():
        return path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(f"head {name} is neither a directory nor a Hub id like org/name")
    with plain_errors(f"head {name} is no directory here, and the Hub does not give it"):
        found = Path(snapshot_download(name, allow_patterns=["*.safetensors", *TEXTS]))
        if not any((found / file).is_file() for file in SAFE):
            found = Path(snapshot_download(name, allow_patterns=[*PICKLED, *TEXTS]))
    return found


def check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"repo={repo} is no name on the Hub: {error}") from None
    if repo.count("/") != 1:
        raise ValueError(f"repo={repo} names no owner: write org/name")


def push(folder: Path, repo: str, private: bool, replace: bool, dry_run: bool) -> str:
    """Send the files in `folder` to `repo` as one commit, and say so.

    Raises ValueError where the repository holds a different head and not `replace`, where it is private or public against
    what was asked, and for what the Hub refuses. Nothing is visible there before the commit, and a cut upload goes on when
    the command is run again: files that arrived are not sent twice.
    """
    check_name(repo)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    api = HfApi()
    listing = "".join(f"\n  {path.name}  {path.stat().st_size:,} bytes" for path in files)
    with plain_errors(f"the Hub ({api.endpoint}) did not take {repo}"):
        try:
            there = look(api, repo)
        except HfHubHTTPError:
            raise
        except Exception:  # of the client's transport, whichever library that is
            if not dry_run:
                raise
            return (
                f"the Hub ({api.endpoint}) cannot be reached; would send to {repo}, if no other head is there:{listing}"
            )
        if there is not None:
            refuse_other(there, folder, repo, private, replace)
        if dry_run:
            kind = "private" if private else "public"
            return f"would send to {'the' if there else 'a new'} {kind} repository {repo}, dry_run=false does:{listing}"
        api.create_repo(repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(path.name, path) for path in files]
        info = api.create_commit(repo, operations, commit_message=f"Head {sha256(folder)[:12]}")
    return f"sent to {info.commit_url}:{listing}"


def look(api: HfApi, repo: str) -> tuple[bool, dict[str, str]] | None:
    """Is the repository private, and the digests of the weights in it by name; None where there is no repository."""
    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401 and get_token() is not None:
            raise  # the Hub says 401 for a private repository and for a wrong token alike
        return None
    found = api.get_paths_info(repo, list(WEIGHTS))
    files = [file for file in found if isinstance(file, RepoFile)]
    return bool(info.private), {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}


def refuse_other(there: tuple[bool, dict[str, str]], folder: Path, repo: str, private: bool, replace: bool) -> None:
    hidden, digests = there
    if hidden != private:
        said, asked = ("private", "public") if hidden else ("public", "private")
        raise Refused(
            f"{repo} is {said} and {asked} was asked for: set private={str(hidden).lower()}, or change it there"
        )
    for name, digest in digests.items():
        path = folder / name
        same = path.is_file() and digest in (file_sha256(path), git_blob(path))
        if not same and not replace:
            raise ValueError(
                f"{repo} holds a different head ({name}): replace=true overwrites it, or give another name"
            )


def sha256(folder: Path) -> str:
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


def revision(name: str) -> str | None:
    """The commit of a model that was loaded from the Hub; None for one from a directory."""
    if Path(name).is_dir():
        return None
    cached = try_to_load_from_cache(name, "config.json")
    return Path(cached).parent.name if isinstance(cached, str) else None


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn what the client raises into a ValueError of one sentence, in which no token stands."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        reason = REASONS.get(status or 0) or without_token(str(error)).strip().split("\n")[0]
        raise ValueError(f"{what}: {reason}") from None


def without_token(text: str) -> str:
    token = get_token()
    return text.replace(token, "<token>") if token else text
