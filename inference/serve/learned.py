"""The directory of the heads of a server that learns, and which of them is in use.

head-0001/ ..   each with its model card; the first is a copy of drafter=
current         the name of the head in use: writing another name into it changes the head
"""

import os
import shutil
from pathlib import Path

from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.hub import find
from foredraft.inference.drafters import Drafter, tree_of


def write_atomically(file: Path, text: str) -> None:
    """Write the file completely or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(f"{text}\n")
    os.replace(part, file)


def heads_in(directory: Path) -> list[Path]:
    """Return the heads from the oldest to the newest."""
    heads = [path for path in directory.glob("head-*") if path.name.removeprefix("head-").isdecimal()]
    return sorted(heads, key=lambda path: int(path.name.removeprefix("head-")))


def new_name(directory: Path) -> str:
    heads = heads_in(directory)
    return f"head-{int(heads[-1].name.removeprefix('head-')) + 1 if heads else 1:04}"


def newest_head(directory: Path, spec: str) -> str:
    """Return the head to serve: `spec` if it is one of the heads in `directory` or there are none, otherwise the one in
    `current`, or the newest."""
    heads, current = heads_in(directory), directory / "current"
    if is_in(directory, spec) or not heads:
        return spec
    name = current.read_text().strip() if current.exists() else ""
    return str(directory / name if (directory / name) in heads else heads[-1])


def is_in(directory: Path, head: str) -> bool:
    return Path(head).absolute().parent == directory.absolute()


def import_initial_head(directory: Path, spec: str) -> None:
    """Copy the first head into `directory`, unless it is there."""
    found = find(spec, None)
    directory.mkdir(0o700, parents=True, exist_ok=True)  # texts are private
    if not is_in(directory, spec):
        part = directory / "part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(found, part)
        if not (part / "README.md").exists():
            (part / "README.md").write_text(f"# A copy of {spec}\n")
        found = part.rename(directory / new_name(directory))
    write_atomically(directory / "current", found.name)


def prune(directory: Path, keep: int, needed: set[str]) -> None:
    """Remove the oldest heads beyond `keep`, except needed ones."""
    spare = [head for head in heads_in(directory) if head.name not in needed]
    for head in spare[: max(0, len(heads_in(directory)) - keep)]:
        shutil.rmtree(head)


def head_of(drafter: Drafter) -> DraftHead:
    """Return the drafter's head. Raises ValueError for a drafter without one."""
    tree = tree_of(drafter)
    if tree is None:
        raise ValueError("learn=true trains the head that drafts: set drafter=DIRECTORY")
    return tree.head


def train_overrides(head: DraftHead) -> list[str]:
    """Return arguments of `foredraft train` to continue the training of a head."""
    more = ["data.rejection_weight=1"] if isinstance(head, BlockHead) else []
    few = ["eval.steps=0", "eval.final_num_prompts=16", "eval.max_new_tokens=64", "eval.timed_prompts=1"]
    depth = [f"head.{head.depth_key}={head.depth}"] if head.depth_key else []
    if isinstance(head, DFlashHead):
        depth = [
            f"head.block_size={head.block_size}",
            f"head.sample_from_anchor={str(head.sample_from_anchor).lower()}",
        ]
    return [f"head={head.kind}", *depth, *more, *few, "eval.check_float32=false"]
