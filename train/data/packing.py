"""Documents of tokens, packed into rows of one length. Nothing attends across documents (heads.base.PackedBatch.mask)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from heads.base import PackedBatch, draft_loss_mask


class Document(NamedTuple):
    tokens: list[int]
    loss_mask: list[bool]  # is this token the target's to write? All of raw text is


class Packed(Dataset):
    """Rows of exactly `length` tokens, one document after the other.

    long="split": without a gap; a document that does not fit continues in the next row as a document of its own, and only
    the end of the last row is padded. long="truncate": each document whole in one row (best fit, the longest first), cut at
    `length`, and rows are padded. Rows without a draft to learn are left out. `card` counts all of it.
    """

    def __init__(self, documents: Sequence[Document], length: int, seed: int, long: str = "split"):
        if length < 8:
            raise ValueError(f"length={length} is too short to hold a prompt and its drafts")
        if long not in ("split", "truncate"):
            raise ValueError(f"long={long} is not known: split, or truncate")
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        sizes = [len(documents[i].tokens) for i in order]
        rows = [list(range(len(order)))] if long == "split" else best_fit(sizes, length)
        tokens, loss_mask, numbers = [], [], []
        for row in rows:
            cut = None if long == "split" else length
            for number in row:
                document = documents[order[number]]
                tokens.append(torch.tensor(document.tokens[:cut], dtype=torch.int32))
                loss_mask.append(torch.tensor(document.loss_mask[:cut], dtype=torch.bool))
                numbers.append(torch.full((len(tokens[-1]),), number, dtype=torch.int32))
            missing = -sum(min(sizes[number], cut or sizes[number]) for number in row) % length
            tokens.append(torch.zeros(missing, dtype=torch.int32))
            loss_mask.append(torch.zeros(missing, dtype=torch.bool))
            numbers.append(torch.full((missing,), -1, dtype=torch.int32))
        self.tokens = torch.cat(tokens).view(-1, length)
        self.loss_mask = torch.cat(loss_mask).view(-1, length)
        self.documents = torch.cat(numbers).view(-1, length)
        useful = draft_loss_mask(PackedBatch(self.tokens, self.loss_mask, self.documents, self.tokens), depth=1).any(1)
        if not useful.any():
            raise ValueError(
                f"rows of length={length} hold no token of the loss that could be drafted: longer rows, or other data"
            )
        longer = sum(size > length for size in sizes)
        self.card: dict[str, Any] = {
            "rows_packed": int(useful.sum()),
            "rows_left_out": int((~useful).sum()),
            "documents_longer_than_a_row": longer,
            "long": f"{long} at {length} tokens",
            "tokens_cut_off": sum(max(0, size - length) for size in sizes) if long == "truncate" else 0,
            "padding_share": round((self.documents[useful] < 0).float().mean().item(), 6),
        }
        self.tokens, self.loss_mask = self.tokens[useful], self.loss_mask[useful]
        self.documents = self.documents[useful]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        documents = self.documents[row].long()
        places = torch.arange(len(documents))
        fresh = torch.ones(len(documents), dtype=torch.bool)
        fresh[1:] = documents[1:] != documents[:-1]
        first = torch.where(fresh, places, 0).cummax(0).values
        return {
            "tokens": self.tokens[row].long(),
            "loss_mask": self.loss_mask[row],
            "documents": documents,
            "positions": places - first,
        }


def best_fit(sizes: list[int], length: int) -> list[list[int]]:
    """Numbers of the documents in each row: the longest first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = min(sizes[number], length)
        room = next((room for room in range(size, length + 1) if with_room[room]), None)
        if room is None:
            rows.append([])
            room, row = length, len(rows) - 1
        else:
            row = with_room[room].pop()
        rows[row].append(number)
        with_room[room - size].append(row)
    return rows
