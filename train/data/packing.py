"""Documents of tokens, packed into rows of one length. Nothing attends across documents (heads.base.PackedBatch.mask)."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from foredraft.train.data.documents import Document as Document
from foredraft.train.data.documents import Documents


class Packed(Dataset):
    """Rows of exactly `length` tokens, one document after the other.

    long="split": without a gap; a document that does not fit continues in the next row as a document of its own, and only
    the end of the last row is padded. long="truncate": each document whole in one row (best fit, the longest first), cut at
    `length`, and rows are padded. Rows without a draft to learn are left out. `card` counts all of it.

    It is a plan, a few numbers per document: a row is put together when it is read, from where its documents lie. Think of
    all rows as one stream; piece n of it is document numbers[n], its first sizes[n] tokens, from place starts[n] on.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int, long: str = "split"):
        if length < 8:
            raise ValueError(f"length={length} is too short to hold a prompt and its drafts")
        if long not in ("split", "truncate"):
            raise ValueError(f"long={long} is not known: split, or truncate")
        found, self.length = Documents.of(documents), length
        self.made_of = found, f"{length} {seed} {long}"
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).numpy()
        self.store = found.select(order)
        whole = self.store.sizes
        if long == "split":
            self.numbers, self.sizes = np.arange(len(whole)), whole
            self.starts = whole.cumsum() - whole
        else:
            rows = best_fit(whole.tolist(), length)
            self.numbers = np.array([number for row in rows for number in row], np.int64)
            self.sizes = whole[self.numbers].clip(max=length)
            before = self.sizes.cumsum() - self.sizes
            firsts = np.cumsum([0, *map(len, rows)])[:-1]
            self.starts = before + np.repeat(np.arange(len(rows)) * length - before[firsts], list(map(len, rows)))
        some = np.flatnonzero(self.sizes)
        self.numbers, self.sizes, self.starts = self.numbers[some], self.sizes[some], self.starts[some]
        useful, filled = self.useful_rows()
        self.rows, self.tokens = np.flatnonzero(useful), int(filled[useful].sum())  # tokens without padding
        if not len(self.rows):
            raise ValueError(
                f"rows of length={length} hold no token of the loss that could be drafted: longer rows, or other data"
            )
        self.card: dict[str, Any] = {
            "rows_packed": len(self.rows),
            "rows_left_out": int((~useful).sum()),
            "documents_longer_than_a_row": int((whole > length).sum()),
            "long": f"{long} at {length} tokens",
            "tokens_cut_off": int((whole - length).clip(min=0).sum()) if long == "truncate" else 0,
            "padding_share": round(1 - self.tokens / (len(self.rows) * length), 6),
        }

    def useful_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Per row of the stream: is there a draft to learn, that is a token in the loss with two before it in the same row
        and document? And how many of its places are filled."""
        count = int(-(-(self.starts[-1] + self.sizes[-1]) // self.length)) if len(self.sizes) else 0
        useful, filled = np.zeros(count, bool), np.zeros(count, np.int64)
        pieces = self.store.select(self.numbers)
        pieces.sizes = self.sizes
        for numbers, _, flags in pieces.blocks():
            here = slice(numbers.start, numbers.stop)
            starts, sizes = self.starts[here], self.sizes[here]
            # Cut at the ends of rows: `row` of each part, and where it begins in the stream and in `flags`.
            first = starts // self.length
            parts = (starts + sizes - 1) // self.length - first + 1
            piece = np.repeat(np.arange(len(starts)), parts)
            row = first[piece] + np.arange(len(piece)) - (parts.cumsum() - parts)[piece]
            begin = np.maximum(starts[piece], row * self.length)
            at = begin - starts[piece] + (sizes.cumsum() - sizes)[piece]
            flags[at] = flags[np.minimum(at + 1, len(flags) - 1)] = 0
            np.logical_or.at(useful, row, np.maximum.reduceat(flags, at) > 0)
            np.add.at(filled, row, np.diff(at, append=len(flags)))
        return useful, filled

    @property
    def digest(self) -> str:
        """A hash of what all rows hold."""
        documents, settings = self.made_of
        return hashlib.sha256(f"{documents.digest} {settings}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        first = int(self.rows[row]) * self.length
        last = first + self.length
        tokens, documents = np.zeros(self.length, np.int64), np.full(self.length, -1, np.int64)
        flags, positions = np.zeros(self.length, np.uint8), np.zeros(self.length, np.int64)
        pieces = range(
            max(0, int(np.searchsorted(self.starts, first, "right")) - 1), int(np.searchsorted(self.starts, last))
        )
        filled = 0
        for piece in pieces:
            start, number = int(self.starts[piece]), int(self.numbers[piece])
            begin, end = max(first, start), min(last, start + int(self.sizes[piece]))
            if begin < end:
                place, filled = slice(begin - first, end - first), end - first
                tokens[place], flags[place] = self.store.stretch(number, begin - start, end - start)
                documents[place], positions[place] = number, np.arange(end - begin)
        positions[filled:] = np.arange(self.length - filled)
        found = {"tokens": tokens, "loss_mask": flags > 0, "documents": documents, "positions": positions}
        if self.store.weights is not None:
            found["weights"] = self.store.weights[flags].astype(np.float32)
        return {name: torch.from_numpy(value) for name, value in found.items()}


def best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Numbers of the documents in each row: the longest first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit n: is there a row with room for n?
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = min(sizes[number], length)
        fitting = rooms >> size
        if not fitting:
            rows.append([])
            room, row = length, len(rows) - 1
        else:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        rows[row].append(number)
        with_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows
