"""Documents of tokens as flat arrays: a corpus costs no Python object per token, and what lies in a file stays there.

The arrays may be memory-mapped (an Arrow file of `datasets`): then all processes of a machine share one copy of them.
"""

import hashlib
import json
import mmap
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from foredraft.heads.target_model.images import ImageReader

BLOCK = 1 << 22  # tokens that are looked at together
# Tokens read out of mapped files before their pages are given back: all that were ever touched would count as this process's
# memory, though the machine has them once for all processes, and can drop them.
KEPT = 1 << 20
REJECTED = 2  # the flag of a token of the loss where a draft was rejected (train/data/accepted.py)


class Document(NamedTuple):
    tokens: list[int]
    loss_mask: Sequence[int]  # is this token the target's to write? All of raw text is
    images: Sequence[str] = ()  # where its images are (heads.target_model.images.open_image), in their order


class MappedFile:
    """Map an Arrow file of `datasets` into memory: its columns `tokens` (lists of int32) and `flags` (of uint8). A copy in
    another process, which a loader's worker gets, maps the file again."""

    def __init__(self, path: str):
        import pyarrow.ipc  # with its libraries, which most runs need not load

        self.path = path
        with open(path, "rb") as opened:
            self.pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        table = pyarrow.ipc.open_stream(pyarrow.py_buffer(self.pages)).read_all()
        parts = [table.column(name).chunks for name in ("tokens", "flags")]
        self.tokens, self.flags = ([part.values.to_numpy(zero_copy_only=True) for part in column] for column in parts)
        self.offsets = [part.offsets.to_numpy().astype(np.int64) for part in parts[0]]

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedFile, (self.path,)


class Documents(Sequence[Document]):
    """Store documents in few arrays: document n is `tokens[chunk[n]][begin[n] : begin[n] + sizes[n]]`, and the same stretch
    of `flags`.

    tokens: int32 arrays. flags: uint8 arrays, 0 where a token is not in the loss. `chunk`, `begin`, `sizes`: (documents,)
    int64. weights: of the loss of a token, by its flag; None weighs all alike. files: where arrays lie that are mapped.
    reader: of its images; None without images. images: pyarrow's strings, JSON of a document's images or nothing, of which
    document n has number pictured[n], an int64.
    """

    weights: np.ndarray | None = None
    files: Sequence[MappedFile] = ()
    reader: ImageReader | None = None
    images: Any = None
    pictured: np.ndarray | None = None

    def __init__(
        self,
        tokens: list[np.ndarray],
        flags: list[np.ndarray],
        chunk: np.ndarray,
        begin: np.ndarray,
        sizes: np.ndarray,
    ):
        self.tokens, self.flags = tokens, flags
        self.chunk, self.begin, self.sizes = chunk, begin, sizes
        self.touched = 0  # tokens, since pages were given back

    @classmethod
    def flat(cls, tokens: np.ndarray, flags: np.ndarray, sizes: np.ndarray) -> "Documents":
        """Return documents that lie one after the other in two arrays."""
        sizes = sizes.astype(np.int64)
        return cls([tokens], [flags], np.zeros_like(sizes), sizes.cumsum() - sizes, sizes)

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "Documents":
        """Return documents unchanged, or copied from a list of them."""
        if isinstance(documents, Documents):
            return documents
        empty = [np.empty(0)]
        tokens = np.concatenate([*(np.asarray(d.tokens) for d in documents), *empty]).astype(np.int32)
        flags = np.concatenate([*(np.asarray(d.loss_mask) for d in documents), *empty]).astype(np.uint8)
        return cls.flat(tokens, flags, np.array([len(d.tokens) for d in documents], np.int64))

    @classmethod
    def joined(cls, parts: Sequence["Documents"]) -> "Documents":
        """Return the documents of all parts, in order, without a copy."""
        arrays = np.cumsum([0, *(len(part.tokens) for part in parts)])
        columns = [np.empty((3, 0), np.int64)]
        columns += [np.stack([p.chunk + first, p.begin, p.sizes]) for p, first in zip(parts, arrays, strict=False)]
        chunk, begin, sizes = np.concatenate(columns, axis=1)
        found = cls([t for p in parts for t in p.tokens], [f for p in parts for f in p.flags], chunk, begin, sizes)
        found.files = [file for part in parts for file in part.files]
        return found

    @classmethod
    def mapped(cls, path: str) -> "Documents":
        """Return the documents of an Arrow file of `datasets`, without a copy."""
        file = MappedFile(path)
        chunk = np.repeat(np.arange(len(file.offsets)), [len(part) - 1 for part in file.offsets])
        begin, sizes = np.concatenate([np.stack([part[:-1], np.diff(part)]) for part in file.offsets], axis=1)
        found = cls(file.tokens, file.flags, chunk, begin, sizes)
        found.files = [file]
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave out arrays that are mapped: (file, number) stands for each of them."""
        state = self.__dict__.copy()
        for name in ("tokens", "flags"):
            mapped = {id(a): (f, n) for f, file in enumerate(self.files) for n, a in enumerate(getattr(file, name))}
            state[name] = [mapped.get(id(array), array) for array in state[name]]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        for name in ("tokens", "flags"):
            files = [getattr(file, name) for file in self.files]
            setattr(self, name, [files[a[0]][a[1]] if isinstance(a, tuple) else a for a in state[name]])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Document:  # type: ignore[override]  # no slices: `select`
        number = range(len(self))[number]  # raises IndexError, which ends an iteration
        tokens, flags = self.token_slice(number, 0, int(self.sizes[number]))
        return Document(tokens.tolist(), flags.astype(bool).tolist(), self.images_of(number))

    def images_of(self, number: int) -> tuple[str, ...]:
        """Return where the images of document `number` are."""
        return (
            () if self.pictured is None else tuple(json.loads(self.images[int(self.pictured[number])].as_py() or "[]"))
        )

    def with_images(self) -> np.ndarray:
        """Return (documents,) bool: which of them have images."""
        if self.pictured is None:
            return np.zeros(len(self), bool)
        import pyarrow.compute

        return (pyarrow.compute.binary_length(self.images).to_numpy() > 0)[self.pictured]

    def token_slice(self, number: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and flags of a part of document `number`, without a copy. Give back mapped pages now and then."""
        self.touched += stop - start
        if self.touched > KEPT:
            self.touched = 0
            for file in self.files:
                file.pages.madvise(mmap.MADV_DONTNEED)
        chunk, begin = self.chunk[number], self.begin[number]
        part = slice(begin + start, begin + stop)
        return self.tokens[chunk][part], self.flags[chunk][part]

    def select(self, numbers: np.ndarray) -> "Documents":
        """Return these documents, in this order, of the same arrays."""
        found = Documents(self.tokens, self.flags, self.chunk[numbers], self.begin[numbers], self.sizes[numbers])
        found.weights, found.files, found.reader = self.weights, self.files, self.reader
        if self.pictured is not None:
            found.images, found.pictured = self.images, self.pictured[numbers]
        return found

    def blocks(self) -> Iterator[tuple[range, np.ndarray, np.ndarray]]:
        """Yield numbers, tokens and flags (copies, end to end) of about BLOCK tokens at a time."""
        ends = self.sizes.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        cuts = np.unique([0, *np.searchsorted(ends, np.arange(BLOCK, total, BLOCK)).tolist(), len(self)])
        for first, last in pairwise(cuts.tolist()):
            pieces = [self.token_slice(number, 0, self.sizes[number]) for number in range(first, last)]
            tokens, flags = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
            yield range(first, last), tokens, flags

    @cached_property
    def digest(self) -> str:
        """Return a hash of all tokens and masks."""
        total = hashlib.sha256()
        for number in range(len(self)):
            tokens, flags = self.token_slice(number, 0, self.sizes[number])
            total.update(tokens.tobytes() + (flags != 0).tobytes())
            for image in self.images_of(number):
                total.update(image.encode())
        return total.hexdigest()[:16]

    @cached_property
    def supervised(self) -> int:
        """Return the number of tokens in the loss."""
        return sum(int(np.count_nonzero(flags)) for _, _, flags in self.blocks())
