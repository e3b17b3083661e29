"""Text that a target wrote earlier, kept beside its weights so that no run has to wait for it again."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from heads.checkpoint import fingerprint
from heads.target import Target
from train.data.packing import Document

NAME = "self_generated/self_generated.safetensors"  # in a folder: engines take every such file beside the weights for weights


def keep(documents: list[Document], source: str, target: Target, directory: Path) -> None:
    """source: of the beginnings, as the data's card names it. int16 holds vocabularies up to 32,768."""
    assert target.vocab_size <= 1 << 15
    tensors = {
        "tokens": torch.tensor([token for d in documents for token in d.tokens], dtype=torch.int16),
        "lengths": torch.tensor([len(d.tokens) for d in documents], dtype=torch.int16),
        "given": torch.tensor([len(d.tokens) - sum(d.loss_mask) for d in documents], dtype=torch.int16),
    }
    facts = {"source": source, "embedding_digest": fingerprint(target)["embedding_digest"]}
    (directory / NAME).parent.mkdir(exist_ok=True)
    save_file(tensors, directory / NAME, metadata=facts)


def find(target: Target, source: str, tokens: int) -> list[Document] | None:
    """At least `tokens` tokens that these very weights wrote from this source, or None where not so many are kept."""
    file = Path(target.name) / NAME
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as held:
        facts = {"source": source, "embedding_digest": fingerprint(target)["embedding_digest"]}
        if held.metadata() != facts:
            return None
        flat, lengths, given = (held.get_tensor(name) for name in ("tokens", "lengths", "given"))
    enough = int(((lengths - given).cumsum(0) < tokens).sum()) + 1
    if enough > len(lengths):
        return None
    rows = flat.split(lengths.tolist())[:enough]
    return [
        Document(row.tolist(), [False] * begun + [True] * (len(row) - begun))
        for row, begun in zip(rows, given[:enough].tolist(), strict=True)
    ]
