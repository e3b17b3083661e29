"""What a run was trained on, in figures: rows, what was dropped and why, tokens, how many of them count in the loss."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from foredraft.heads import vocab
from foredraft.heads.hub.card import aligned, percent
from foredraft.train.data.documents import Document, Documents
from foredraft.train.runtime.locks import write_atomically


def describe(documents: Sequence[Document]) -> dict[str, Any]:
    """Return counts of the documents that are trained on, and their hash (tokens and masks)."""
    found = Documents.of(documents)
    lengths = found.sizes
    return {
        "documents": len(found),
        "tokens": int(lengths.sum()),
        "supervised_share": round(found.supervised / int(lengths.sum()), 4),
        "median_length": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "hash": found.digest,
    }


def coverage(counts: Tensor, draft_ids: Tensor | None) -> dict[str, Any]:
    """Count different supervised tokens, and the share that can be drafted. counts: (vocab,) of the supervised tokens."""
    drafted = 1.0 if draft_ids is None else vocab.coverage(counts, draft_ids.to(counts.device))
    return {"different_tokens": int((counts > 0).sum()), "vocabulary_coverage": round(drafted, 6)}


def lines(card: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (label, value) pairs, ready to be printed and shown."""
    shown = []
    for name, value in card.items():
        if name == "first_dropped":
            continue
        if name == "dropped":
            first = card.get("first_dropped", {})
            places = {reason: f" (first: {place})" for reason, place in first.items()}
            reasons = [f"{count} x {reason}{places.get(reason, '')}" for reason, count in value.items()]
            value = "; ".join(reasons) or "none"
        elif isinstance(value, float):
            value = percent(value)
        shown.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)))
    return shown


def summary(card: dict[str, Any]) -> str:
    """Format the card for the terminal."""
    return aligned(lines(card), indent="  ")


def check_same(directory: Path, card: dict[str, Any]) -> None:
    """Raise ValueError where the run in `directory` has learned from other text than this, or from another target in its
    place."""
    file = directory / "data_card.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    for name, what in (("hash", "data"), ("weights_digest", "weights of the target")):
        if before.get(name) and card.get(name) and before[name] != card[name]:  # not where one is not known
            raise ValueError(
                f"output_dir={directory} holds an unfinished run on other {what} ({name} {before[name]} there, {card[name]} "
                f"here, see {file.name}): give the old {what} to resume it, or another output_dir"
            )


def save(directory: Path, card: dict[str, Any]) -> None:
    write_atomically(directory / "data_card.json", json.dumps(card, indent=2) + "\n")
