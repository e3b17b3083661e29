"""Documents of tokens, packed into rows of one length. Nothing attends across documents (heads.base.PackedBatch.mask)."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from foredraft.heads.target_model.images import ImageReader
from foredraft.train.data.documents import Document, Documents


class Packed(Dataset):
    """Pack documents into rows of exactly `length` tokens, each document whole in one row (best fit, the longest first).

    A document that is longer than a row starts with the first `length` tokens. packing="split": the rest is in other rows,
    as separate documents, after the tokens before its first one in the loss (a conversation's prompt, a text's bos token):
    without, the target would read its middle as a start, as it never does in decoding. If that prompt takes half a row or
    more, and with packing="truncate", the rest is left out. Rows without a draft to learn are left out too. `card` counts all
    of it; `headless_share` is the share of the loss in rests of texts that have no bos token to come first.

    It is a plan, a few numbers per document: a row is put together when it is read, from where its documents lie. Row n holds
    `pieces[edges[n] : edges[n + 1]]`; piece p is the first `heads[p]` tokens of document `numbers[p]`, and those from
    `begins[p]` to `ends[p]`.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int, long: str = "split"):
        if length < 8:
            raise ValueError(f"max_length={length} is too short to hold a prompt and its drafts")
        if long not in ("split", "truncate"):
            raise ValueError(f"packing={long} is not known: split, or truncate")
        found, self.length = Documents.of(documents), length
        self.made_of = found, f"{length} {seed} {long} whole"
        # A part of an image is none.
        fits = ~(found.with_images() & (found.sizes > length))
        num_skipped_images = int(len(found) - fits.sum())
        found = found.select(np.flatnonzero(fits)) if num_skipped_images else found
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).numpy()
        self.store = found.select(order)
        whole = self.store.sizes
        prompts, later = np.zeros_like(whole), np.zeros_like(whole)
        for number in np.flatnonzero(whole > length).tolist() if long == "split" else ():
            prompts[number] = int((self.store.token_slice(number, 0, int(whole[number]))[1] != 0).argmax())
            if prompts[number] < length // 2:
                later[number] = -(-(whole[number] - length) // (length - prompts[number]))
        self.numbers = np.repeat(np.arange(len(whole)), later + 1)
        firsts = (later + 1).cumsum() - later - 1  # the piece that starts each document
        after = np.arange(len(self.numbers)) - np.repeat(firsts, later + 1)
        room = length - prompts[self.numbers]
        self.begins = np.where(after > 0, length + (after - 1) * room, 0)
        self.ends = np.minimum(whole[self.numbers], length + after * room)
        self.heads = np.where(after > 0, prompts[self.numbers], 0)
        rows = best_fit((self.heads + self.ends - self.begins).tolist(), length)
        learned = self.learned()
        rows = [row for row in rows if learned[row].any()]
        self.pieces = np.array([piece for row in rows for piece in row], np.int64)
        self.edges = np.cumsum([0, *map(len, rows)])
        if not rows:
            raise ValueError(f"rows of max_length={length} have no token of the loss to draft: set more, or other data")
        kept = np.zeros(len(self.numbers), bool)
        kept[self.pieces] = True
        self.tokens = int((self.heads + self.ends - self.begins)[kept].sum())  # without padding
        headless = learned[kept & (after > 0) & (self.heads == 0)].sum()
        self.card: dict[str, Any] = {
            "rows_packed": len(rows),
            **({"image_documents_longer_than_a_row": num_skipped_images} if num_skipped_images else {}),
            "documents_left_out": len(whole) - len(np.unique(self.numbers[kept])),
            "documents_longer_than_a_row": int((whole > length).sum()),
            "long": f"{long} at {length} tokens",
            "tokens_cut_off": int(whole.sum() - (self.ends - self.begins).sum()),
            "headless_share": round(float(headless / learned[kept].sum()), 6),
            "padding_share": round(1 - self.tokens / (len(rows) * length), 6),
        }

    def learned(self) -> np.ndarray:
        """Return the number of drafts to learn in each piece: tokens in the loss with two before them."""
        firsts = self.begins + np.where(self.heads > 0, 1, 2)
        places = zip(self.numbers.tolist(), firsts.tolist(), self.ends.tolist(), strict=True)
        return np.array([np.count_nonzero(self.store.token_slice(*place)[1]) for place in places], np.int64)

    @property
    def digest(self) -> str:
        """Return a hash of the content of all rows."""
        documents, settings = self.made_of
        return hashlib.sha256(f"{documents.digest} {settings}".encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.edges) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens, documents = np.zeros(self.length, np.int64), np.full(self.length, -1, np.int64)
        flags, positions = np.zeros(self.length, np.uint8), np.zeros(self.length, np.int64)
        filled, images = 0, []
        for piece in self.pieces[self.edges[row] : self.edges[row + 1]].tolist():
            number, head, first = int(self.numbers[piece]), int(self.heads[piece]), filled
            for start, end in ((0, head), (int(self.begins[piece]), int(self.ends[piece]))):
                place = slice(filled, filled + end - start)
                tokens[place], flags[place] = self.store.token_slice(number, start, end)
                filled = place.stop
            if head:
                flags[first + head] = 0  # it does not follow what stands before it
            documents[first:filled], positions[first:filled] = piece, np.arange(filled - first)
            if places := self.store.images_of(number):
                images.append((first, filled, places))
        positions[filled:] = np.arange(self.length - filled)
        found = {"tokens": tokens, "loss_mask": flags > 0, "documents": documents, "positions": positions}
        if self.store.weights is not None:
            found["weights"] = self.store.weights[flags].astype(np.float32)
        read = {name: torch.from_numpy(value) for name, value in found.items()}
        if images and self.store.reader is not None:
            return read | {"images": read_images(self.store.reader, read, images)}
        return read


def read_images(
    reader: ImageReader, row: dict[str, Tensor], images: Sequence[tuple[int, int, Sequence[str]]]
) -> dict[str, Tensor]:
    """Return `images` of heads.base.PackedBatch for a batch of one row. images: of each document that has some its first
    column, its end, and their places."""
    inputs: list[dict[str, Tensor]] = []
    every = row["positions"].expand(3, -1).clone()
    at = []
    for first, end, places in images:
        inputs.append(reader.read(places))
        here = slice(first, end)
        every[:, here] = reader.positions(row["tokens"][here], inputs[-1])
        at += [[0, first]] * len(places)
    found = {name: torch.cat([some[name] for some in inputs]) for name in inputs[0]}
    return found | {"position_ids": every[:, None], "at": torch.tensor(at)}


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate rows into a batch."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "images"}
    pictured = [(number, row["images"]) for number, row in enumerate(rows) if "images" in row]
    if not pictured:
        return batch
    images = {name: [some[name] for _, some in pictured] for name in pictured[0][1]}
    at = torch.cat([at + torch.tensor([number, 0]) for (number, _), at in zip(pictured, images.pop("at"), strict=True)])
    every = batch["positions"].expand(3, -1, -1).clone()
    for (number, _), positions in zip(pictured, images.pop("position_ids"), strict=True):
        every[:, number] = positions[:, 0]
    joined = {name: torch.cat(parts) for name, parts in images.items()}
    return batch | {"images": joined | {"position_ids": every, "at": at}}


def best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Return numbers of the documents in each row: the longest first, each into the fullest row that has room for it."""
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
