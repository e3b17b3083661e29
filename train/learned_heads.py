"""The directory of the heads of a server that learns, and which of them serves. Nothing here imports torch.

head-0001/ ..   each with its model card; the first is a copy of drafter=
current         the name of the head that serves: writing another name into it changes the head
"""

import os
import shutil
from pathlib import Path


class LearnedHeads:
    def __init__(self, folder: Path):
        """Create the directory, private because it gets texts."""
        self.folder, self.current_file = folder, folder / "current"
        folder.mkdir(0o700, parents=True, exist_ok=True)

    def all(self) -> list[Path]:
        """Return the heads from the oldest to the newest."""
        heads = [path for path in self.folder.glob("head-*") if path.name.removeprefix("head-").isdecimal()]
        return sorted(heads, key=number_of)

    def current(self) -> Path | None:
        """Return the head that serves: the newest without the file `current`; None if that names none (yet)."""
        heads = self.all()
        if not self.current_file.exists():
            return heads[-1] if heads else None
        name = self.current_file.read_text().strip()
        return next((head for head in heads if head.name == name), None)

    def choose(self, name: str) -> None:
        write_atomically(self.current_file, f"{name}\n".encode())

    def add(self, head: Path) -> Path:
        """Move a head here, as the newest."""
        heads = self.all()
        return head.rename(self.folder / f"head-{number_of(heads[-1]) + 1 if heads else 1:04}")

    def start(self, spec: str) -> Path:
        """Return the head to serve first, and choose it: `spec` if it is one of these, otherwise the current or the newest.
        Without heads, import `spec`. Raises ValueError for a head that cannot learn."""
        heads = self.all()
        if Path(spec).absolute().parent == self.folder.absolute():
            head = Path(spec)
        elif heads:
            head = self.current() or heads[-1]
        else:
            head = self.import_head(spec)
        self.choose(head.name)
        return head

    def import_head(self, spec: str) -> Path:
        from foredraft.heads import adapter  # these import torch
        from foredraft.heads.hub import find

        found, part = find(spec, None), self.folder / "part"
        if (found / adapter.CONFIG).exists():
            raise ValueError(f"learn=true: {spec} changes the target's text while it serves: use another head")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(found, part)
        if not (part / "README.md").exists():
            (part / "README.md").write_text(f"# A copy of {spec}\n")
        return self.add(part)

    def prune(self, keep: int, needed: set[str]) -> None:
        """Remove the oldest heads beyond `keep`, except needed ones."""
        heads = self.all()
        spare = [head for head in heads if head.name not in needed]
        for head in spare[: max(0, len(heads) - keep)]:
            shutil.rmtree(head)


def number_of(head: Path) -> int:
    return int(head.name.removeprefix("head-"))


def write_atomically(file: Path, content: bytes) -> None:
    """Write the file completely or not at all."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content)
    os.replace(part, file)
