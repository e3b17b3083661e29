"""The directory of the heads of a server that learns, and which of them serves. Nothing here imports torch.

head-0001/ ..   each with its model card; the first is a copy of drafter=
current         the name of the head that serves: writing another name into it changes the head
"""

import shutil
from pathlib import Path

from foredraft.train.runtime.locks import write_atomically


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
        name = self.current_file.read_text(errors="replace").strip()
        return next((head for head in heads if head.name == name), None)

    def choose(self, name: str) -> None:
        write_atomically(self.current_file, f"{name}\n")

    def add(self, head: Path, note: str) -> Path:
        """Copy a head here, as the newest, with a note at the end of its card. A round that fails later can start again."""
        heads, part = self.all(), self.folder / "part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(head, part)
        if note:
            with (part / "README.md").open("a") as card:
                card.write(note)
        return part.rename(self.folder / f"head-{number_of(heads[-1]) + 1 if heads else 1:04}")

    def first(self, spec: str) -> str:
        """Return the head to serve first: `spec` if it is one of these or there are none, otherwise the current or newest."""
        heads = self.all()
        is_here = Path(spec).absolute().parent == self.folder.absolute()
        return spec if is_here or not heads else str(self.current() or heads[-1])

    def start(self, spec: str) -> None:
        """Serve `spec` from now on. Import it unless it is one of these."""
        is_here = Path(spec).absolute().parent == self.folder.absolute()
        self.choose(Path(spec).name if is_here else self.import_head(spec).name)

    def import_head(self, spec: str) -> Path:
        from foredraft.heads.hub import find  # imports torch

        found = find(spec, None)
        return self.add(found, "" if (found / "README.md").exists() else f"# A copy of {spec}\n")

    def prune(self, keep: int, needed: set[str]) -> None:
        """Remove the oldest heads beyond `keep`, except needed ones."""
        heads = self.all()
        spare = [head for head in heads if head.name not in needed]
        for head in spare[: max(0, len(heads) - keep)]:
            shutil.rmtree(head)


def number_of(head: Path) -> int:
    return int(head.name.removeprefix("head-"))
