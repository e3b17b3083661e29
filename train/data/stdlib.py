"""Python's own standard library as a corpus, split so that what measures was never trained on.

It ships with every Python, so the main job needs no download. Files differ between Python versions and
modules move (`datetime.py` became `_pydatetime.py`, `unittest/test/` became `test/test_unittest/`), so
the split is by module *name*: everything about one module, its tests included, falls into one part.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PARTS = ("train", "validation", "test")
# Chosen before anything was trained: the held-out modules live in Python 3.11 to 3.13 alike (json, re, html,
# doctest ...) and share under 2 % of their longer lines with the rest, where other salts gave up to 6 %.
SALT = 348
LEFT_OUT = {"site-packages", "encodings", "pydoc_data", "__pycache__", "lib-dynload"}  # tables, not code
LONGEST = 400_000  # bytes; larger files are generated tables


def group(relative: Path) -> str:
    """Return the module a file is about: `test/test_json/test_scan.py` and `json/decoder.py` both give `json`."""
    names = [part.removesuffix(".py") for part in relative.parts]
    if names[0] in ("test", "tests") and len(names) > 1:
        names = names[1:]
    return names[0].removeprefix("test_").removeprefix("_py").lstrip("_").lower()


def part(relative: Path) -> str:
    """Return `train` (86 of 100 groups), `validation` (5) or `test` (9), the same for every Python version."""
    number = int.from_bytes(hashlib.sha256(f"{SALT}:{group(relative)}".encode()).digest()[:4], "big") % 100
    return "validation" if number < 5 else "test" if number < 14 else "train"


def documents(wanted: str, tests: bool = True) -> Iterator[tuple[Path, str]]:
    """Yield path (relative to the library) and text of every file of the part `wanted`, in a fixed order. Files that are not
    UTF-8, not mostly ASCII, or not mostly words (tables of numbers) are left out. tests: with files of tests, which repeat
    themselves and each other."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT & set(relative.parts) or part(relative) != wanted:
            continue
        if relative.name.startswith("_sysconfigdata"):
            continue  # generated when Python was built; a distribution may have two that are nearly the same
        if not tests and any(name.startswith("test") or name == "idle_test" for name in relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the library holds deliberately broken files for its own tests
        letters = sum(c.isascii() and (c.isalpha() or c.isspace() or c == "_") for c in text)
        if 200 < len(text) < LONGEST and letters > 0.6 * len(text):  # code or prose, and not a table
            yield relative, text
