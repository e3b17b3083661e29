"""Documents of tokens as flat arrays: a corpus costs no Python object per token, and what lies in a file stays there.

The arrays may be memory-mapped (an Arrow file of `datasets`): then all processes of a machine share one copy of them.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from foredraft.heads.target_model.images import ImageReader

BLOCK = 1 << 22  # tokens that are looked at together
REJECTED = 2  # the flag of a token of the loss where a draft was rejected (train/data/accepted.py)


class Document(NamedTuple):
    tokens: list[int]
    loss_mask: Sequence[int]  # is this token the target's to write? All of raw text is
    images: Sequence[str] = ()  # where its images are (heads.target_model.images.open_image), in their order


class Chunk(NamedTuple):
    """Hold tokens (int32) and flags (uint8, 0 where a token is not in the loss) of several documents, end to end. place: the
    Arrow file and the number in it, if the arrays are mapped: another process, such as a loader's worker, maps it again."""

    tokens: np.ndarray
    flags: np.ndarray
    place: tuple[str, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Chunk, (self.tokens, self.flags)) if self.place is None else (mapped_chunk, self.place)


@cache
def mapped_arrays(path: str) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Map an Arrow file of `datasets`, with columns `tokens` (lists of int32) and `flags` (of uint8), into memory. Return the
    tokens, the flags and the offsets of each chunk."""
    import pyarrow.ipc  # with its libraries, which most runs need not load

    table = pyarrow.ipc.open_stream(pyarrow.memory_map(path)).read_all()
    chunks = zip(table.column("tokens").chunks, table.column("flags").chunks, strict=True)
    return [
        (tokens.values.to_numpy(), flags.values.to_numpy(), tokens.offsets.to_numpy().astype(np.int64))
        for tokens, flags in chunks
    ]


def mapped_chunk(path: str, number: int) -> Chunk:
    return Chunk(*mapped_arrays(path)[number][:2], place=(path, number))


@dataclass(eq=False)
class Documents(Sequence[Document]):
    """Store documents in few arrays: document n is `chunks[chunk[n]].tokens[begin[n] : begin[n] + sizes[n]]`, and the same
    stretch of its flags.

    `chunk`, `begin`, `sizes`: (documents,) int64. weights: of the loss of a token, by its flag; None weighs all alike.
    reader: of its images; None without images. images, raws: pyarrow's strings, JSON of a document's images or nothing, and
    its raw text or nothing for a conversation. Document n has number rows[n] of them, an int64.
    """

    chunks: list[Chunk]
    chunk: np.ndarray
    begin: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray | None = None
    reader: ImageReader | None = None
    images: Any = None
    raws: Any = None
    rows: np.ndarray | None = None

    @classmethod
    def flat(cls, tokens: np.ndarray, flags: np.ndarray, sizes: np.ndarray) -> "Documents":
        """Return documents that lie one after the other in two arrays."""
        sizes = sizes.astype(np.int64)
        return cls([Chunk(tokens, flags)], np.zeros_like(sizes), sizes.cumsum() - sizes, sizes)

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
        chunks: list[Chunk] = []
        columns = [np.empty((3, 0), np.int64)]
        for part in parts:
            columns.append(np.stack([part.chunk + len(chunks), part.begin, part.sizes]))
            chunks += part.chunks
        return cls(chunks, *np.concatenate(columns, axis=1))

    @classmethod
    def mapped(cls, path: str) -> "Documents":
        """Return the documents of an Arrow file of `datasets`, without a copy."""
        offsets = [part for _, _, part in mapped_arrays(path)]
        chunk = np.repeat(np.arange(len(offsets)), [len(part) - 1 for part in offsets])
        begin, sizes = np.concatenate([np.stack([part[:-1], np.diff(part)]) for part in offsets], axis=1)
        return cls([mapped_chunk(path, number) for number in range(len(offsets))], chunk, begin, sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Document:  # type: ignore[override]  # no slices: `select`
        number = range(len(self))[number]  # raises IndexError, which ends an iteration
        tokens, flags = self.token_slice(number, 0, int(self.sizes[number]))
        return Document(tokens.tolist(), flags.astype(bool).tolist(), self.images_of(number))

    def has_text(self, column: Any) -> np.ndarray:
        """Return (documents,) bool: which of them have something in `images` or `raws`."""
        if column is None or self.rows is None:
            return np.zeros(len(self), bool)
        import pyarrow.compute

        return (pyarrow.compute.binary_length(column).to_numpy() > 0)[self.rows]

    def with_images(self) -> np.ndarray:
        """Return (documents,) bool: which of them have images."""
        return self.has_text(self.images)

    def images_of(self, number: int) -> tuple[str, ...]:
        """Return where the images of document `number` are."""
        found = "" if self.images is None or self.rows is None else self.images[int(self.rows[number])].as_py()
        return tuple(json.loads(found or "[]"))

    def raw_texts(self) -> list[str]:
        """Return those documents that are raw text, as text."""
        return [] if self.rows is None else self.raws.take(self.rows[self.has_text(self.raws)]).to_pylist()

    def token_slice(self, number: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and flags of a part of document `number`, without a copy."""
        chunk, begin = self.chunks[self.chunk[number]], self.begin[number]
        return chunk.tokens[begin + start : begin + stop], chunk.flags[begin + start : begin + stop]

    def select(self, numbers: np.ndarray) -> "Documents":
        """Return these documents, in this order, of the same arrays."""
        columns = {name: getattr(self, name) for name in ("chunk", "begin", "sizes", "rows")}
        return replace(self, **{name: column[numbers] for name, column in columns.items() if column is not None})

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
