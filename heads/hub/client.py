"""Pull and push heads on the Hugging Face Hub with huggingface_hub. This module decides what may be sent, what must not be
overwritten, and what is deleted when a head is replaced, and turns errors into one sentence."""

import fnmatch
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, get_token, snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import validate_repo_id
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foredraft.heads.formats.files import CONFIG, FILE, INDEX, PICKLED, SAFE, WEIGHTS, read_config, shards, weights_file
from foredraft.heads.target_model.cache_directory import file_sha256
from foredraft.heads.target_model.files import hub_reason

HEAD = "head"  # directory in that of a run, and of each of its checkpoints
# The files of a head in any layout: a repository contains those of the newest head, and no others.
HEAD_FILES = (*WEIGHTS, "*.safetensors", "config.json", "config.yaml", "metrics.json", "report.html")
TEXTS = ["*.json", "*.md", "mask_embedding.pt"]  # the last is refused, and never opened


def find(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a head: itself, the `head` in that of a run or a checkpoint, or the Hub's copy of `org/name`,
    which is cached and works offline afterwards.

    The config comes first, so that an unusable drafter is refused before its weights are downloaded. Only the files of a
    head are downloaded; pickles only without an alternative, and code never. revision: a branch, tag or commit on the
    Hub."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"head {path} is a directory, which has no revision={revision}: give an id on the Hub")
        return path / HEAD if (path / HEAD / CONFIG).is_file() else path
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(f"head {name} is neither a directory nor a Hub id like org/name")
    what = f"head {name} is not a directory, and the Hub does not provide it"
    with one_sentence_errors(what):
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=TEXTS))
    check_no_language_model(directory, name)
    with one_sentence_errors(what):
        for known, patterns in ((SAFE, ["*.safetensors"]), ((FILE,), [FILE]), (PICKLED, list(PICKLED))):
            directory = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns, *TEXTS]))
            if any((directory / file).is_file() for file in known):
                break
    return directory


def check_no_language_model(directory: Path, name: str) -> None:
    """Raise ValueError for a whole language model without an MTP layer, from its config.json and its index. An EAGLE-1 head
    may have the name of one, with one layer."""
    config = read_config(directory, name)
    count, named = config.get("num_hidden_layers"), set(config.get("architectures") or [])
    index = directory / INDEX
    parts = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    drafts = "foredraft" in config or any(part.startswith("mtp.") for part in parts)
    if not drafts and isinstance(count, int) and count > 1 and named & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ValueError(
            f"{name} is a language model with {count} layers, not a head: use drafter=draft:{name} to draft with it, or "
            "drafter=<org>/<head> for a head of the target"
        )


def check_name(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"repo={repo} is not a valid name on the Hub: {error}") from None
    if repo.count("/") != 1:
        raise ValueError(f"repo={repo} has no owner: write org/name")


def push(folder: Path, repo: str, private: bool, replace: bool, dry_run: bool) -> str:
    """Send the files in `folder` to `repo` as one commit, delete what another head left there, and return a report.

    Raises ValueError if the repository contains a different head without `replace`, if its visibility is not the requested
    one, if it changes meanwhile, or if the Hub refuses. Nothing is visible there before the commit, and an interrupted
    upload continues when the command is run again: files that arrived are not sent twice."""
    check_name(repo)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    api = HfApi()
    listing = "".join(f"\n  {path.name}  {path.stat().st_size:,} bytes" for path in files)
    what, title = f"the Hub ({api.endpoint}) did not accept {repo}", f"Head {weights_sha256(folder)[:12]}"
    with one_sentence_errors(what):
        there = look_up(api, repo)
    if there is not None:
        check_replaceable(there, folder, repo, private, replace)
    left = sorted({file.rfilename for file in head_files(there)} - {path.name for path in files})
    listing += "".join(f"\n  {name}  deleted, part of the previous head" for name in left)
    if dry_run:
        kind = "private" if private else "public"
        return f"would send to {'the' if there else 'a new'} {kind} repository {repo}, dry_run=false does:{listing}"
    with one_sentence_errors(what):
        api.create_repo(repo, private=private, exist_ok=True)
        info = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=title,
            delete_patterns=list(HEAD_FILES),  # those that the folder has are replaced
            parent_commit=there.sha if there else None,
        )
    return f"sent to {info.commit_url}:{listing}"


def look_up(api: HfApi, repo: str) -> ModelInfo | None:
    """Return the Hub's information on `repo`; None if the repository does not exist."""
    try:
        return api.model_info(repo, files_metadata=True)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401 and get_token() is not None:
            raise  # the Hub returns 401 for a private repository and also for an invalid token
        return None


def head_files(there: ModelInfo | None) -> list[RepoSibling]:
    """Return the files in a repository that belong to a head."""
    files = (there and there.siblings) or []
    return [file for file in files if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in HEAD_FILES)]


def check_replaceable(there: ModelInfo, folder: Path, repo: str, private: bool, replace: bool) -> None:
    if there.private != private:
        actual, requested = ("private", "public") if there.private else ("public", "private")
        raise ValueError(
            f"{repo} is {actual} and {requested} was requested: set private={str(there.private).lower()}, or change it there"
        )
    for file in () if replace else head_files(there):
        name, ours = file.rfilename, folder / file.rfilename
        if name not in WEIGHTS and not name.endswith(".safetensors"):
            continue
        if not ours.is_file() or (file.lfs is not None and file.lfs.sha256 != file_sha256(ours)):
            raise ValueError(
                f"{repo} contains a different head ({name}): replace=true overwrites it, or use another name"
            )


def weights_sha256(folder: Path) -> str:
    """Return the digest of the weights in `folder`, which identifies a head. Of several files it is that of their digests."""
    file = weights_file(folder)
    if file.name != INDEX:
        return file_sha256(file)
    return hashlib.sha256("".join(map(file_sha256, shards(file))).encode()).hexdigest()


@contextmanager
def one_sentence_errors(what: str) -> Iterator[None]:
    """Turn the client's exceptions into a ValueError of one sentence without the token."""
    try:
        yield
    except Exception as error:  # from the client's transport, which may be one of two libraries
        raise ValueError(f"{what}: {hub_reason(error)}") from None
