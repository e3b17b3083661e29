"""Files that are packed: what gzip packed is read, other archives are refused."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GZIP = b"\x1f\x8b"
ARCHIVES = {b"PK\x03\x04": "zip", b"(\xb5/\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}  # by their first bytes


@contextmanager
def unpacked(file: Path) -> Iterator[Any]:
    """Open a file in binary mode, as a GzipFile if gzip packed it. Raise ValueError if that is damaged, and for archives."""
    with file.open("rb") as opened:
        begins = opened.peek(8)
        if kind := next((ARCHIVES[magic] for magic in ARCHIVES if begins.startswith(magic)), None):
            raise ValueError(f"{file} is packed by {kind}: unpack it, or pack it with gzip")
        try:
            yield gzip.GzipFile(fileobj=opened) if begins.startswith(GZIP) else opened
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def ending(file: Path) -> str:
    """Return the ending of a file's name in small letters, without that of gzip."""
    return (Path(file.stem) if file.suffix.lower() == ".gz" else file).suffix.lower()
