"""Self-generated text: what the target itself writes, which is what a head drafts.

On text that people wrote a head learns to draft neither them nor its target. A run keeps its text as
`self_generated.json`; text for a published target can also lie beside its weights, so that no run has to wait for it.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from heads.checkpoint import fingerprint
from heads.target import Target
from inference.generation import Generation, generate
from train.data.corpus import Corpus, start_tokens
from train.data.packing import Document

# In a folder: serving engines take every safetensors file beside the weights for weights.
NAME = "self_generated/self_generated.safetensors"
BATCH = 256  # rows that the target writes at once, half of them greedily


def self_generate(
    target: Target, data: Corpus, tokens: int, seed: int, file: Path, begin: int = 32, new: int = 224
) -> Corpus:
    """The corpus with training text that the target wrote: some `tokens` tokens in rows of at most `new`.

    Each row continues a beginning from the documents: `begin` tokens of raw text, or all of a conversation before an
    answer. Only what the target wrote is in the loss. Every other row is greedy and the rest is sampled at temperature 1,
    so that both uses are covered; no beginning is continued greedily twice, which would give the same text again.

    file: where the rows are kept for a resumed run. Text beside the target's weights is taken before any is written.
    Raises ValueError where no document has a beginning.
    """
    if file.exists():
        documents = [masked(row, given) for given, row in json.loads(file.read_text())]
    else:
        documents = load_stored(target, data.card["source"], tokens) or []
    if not documents:
        documents = write(target, data.train, tokens, seed, begin, new)
        part = file.with_suffix(".part")
        part.write_text(json.dumps([[sum(not flag for flag in d.loss_mask), d.tokens] for d in documents]))
        part.rename(file)  # complete or absent
    return data._replace(train=documents, card=data.card | {"self_generated_tokens": count(documents)})


def write(target: Target, texts: Sequence[Document], tokens: int, seed: int, begin: int, new: int) -> list[Document]:
    start = start_tokens(target.text_tokenizer)
    most = (target.context or 1 << 30) - new - len(start)
    found = (place for number, document in enumerate(texts) for place in beginnings(number, document, begin))
    places = [(number, first, last) for number, first, last in found if last - first <= most]
    if not places:
        raise ValueError(
            f"no training document has {begin} tokens, or a prompt that leaves room for {new}, for the target to continue: "
            "self_generated_tokens=0 trains on the documents as they are"
        )
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = max(1, -(-tokens // new))
    documents: list[Document] = []
    since = time.perf_counter()
    for base in range(0, wanted, BATCH):
        rows: dict[float, list[list[int]]] = {0.0: [], 1.0: []}
        for i in range(base, min(base + BATCH, wanted)):
            number, first, last = places[order[i % len(order)]]
            row = texts[number].tokens[first:last]
            greedy = i % 2 == 0 and i < len(order)
            rows[0.0 if greedy else 1.0].append(row if first == 0 else [*start, *row])
        for temperature, part in rows.items():
            if part:
                text = continue_rows(
                    target, part, max_new_tokens=new, temperature=temperature, seed=seed + base
                ).new_tokens
                documents += [masked(row + more, len(row)) for row, more in zip(part, text, strict=True)]
        rate = count(documents) / (time.perf_counter() - since)
        print(f"self-generated text: {len(documents)} of {wanted} rows, {rate:,.0f} tokens/s", flush=True)
    return documents


def beginnings(number: int, document: Document, begin: int) -> list[tuple[int, int, int]]:
    """(document, start, end) of what the target can continue: all before an answer of a conversation, or any stretch of
    `begin` tokens of raw text."""
    flags = document.loss_mask
    if all(flags):
        return [(number, at, at + begin) for at in range(0, len(flags) - begin + 1, begin)]
    return [(number, 0, at) for at in range(1, len(flags)) if flags[at] and not flags[at - 1]]


def continue_rows(target: Target, rows: list[list[int]], **settings: Any) -> Generation:
    """Plain decoding of rows of any lengths."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=target.device)
    return generate(target, None, ids, mask, **settings)


def masked(tokens: list[int], given: int) -> Document:
    """The first `given` tokens are not in the loss."""
    return Document(tokens, [False] * given + [True] * (len(tokens) - given))


def count(documents: Sequence[Document]) -> int:
    return sum(sum(document.loss_mask) for document in documents)


def store(documents: list[Document], source: str, target: Target, directory: Path) -> None:
    """Keep text beside a target's weights. source: of the beginnings, as the data's card names it. int16 holds
    vocabularies up to 32,768."""
    assert target.vocab_size <= 1 << 15
    tensors = {
        "tokens": torch.tensor([token for d in documents for token in d.tokens], dtype=torch.int16),
        "lengths": torch.tensor([len(d.tokens) for d in documents], dtype=torch.int16),
        "given": torch.tensor([len(d.tokens) - sum(d.loss_mask) for d in documents], dtype=torch.int16),
    }
    facts = {"source": source, "embedding_digest": fingerprint(target)["embedding_digest"]}
    (directory / NAME).parent.mkdir(exist_ok=True)
    save_file(tensors, directory / NAME, metadata=facts)


def load_stored(target: Target, source: str, tokens: int) -> list[Document] | None:
    """At least `tokens` tokens that these very weights wrote from this source, or None where there are not so many."""
    file = Path(target.name) / NAME
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as opened:
        facts = {"source": source, "embedding_digest": fingerprint(target)["embedding_digest"]}
        if opened.metadata() != facts:
            return None
        flat, lengths, given = (opened.get_tensor(name) for name in ("tokens", "lengths", "given"))
    rows = int(((lengths - given).cumsum(0) < tokens).sum()) + 1
    if rows > len(lengths):
        return None
    parts = flat.split(lengths.tolist())[:rows]
    return [masked(part.tolist(), begun) for part, begun in zip(parts, given[:rows].tolist(), strict=True)]
