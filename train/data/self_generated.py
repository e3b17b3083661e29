"""Self-generated text: what the target itself writes, which is what a head drafts.

On text that people wrote a head learns to draft neither them nor its target. A run keeps its text as
`self_generated.safetensors`; text for a published target can also lie next to its weights, so that no run has to wait for it.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from foredraft.heads.checkpoint import fingerprint
from foredraft.heads.target import Target
from foredraft.inference.evaluation.measure import left_pad
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.generation import generate
from foredraft.train.data.corpus import Corpus, start_tokens
from foredraft.train.data.documents import Document, Documents

# In a folder: serving engines take every safetensors file next to the weights for weights.
NAME = "self_generated/self_generated.safetensors"
BATCH = 256  # rows that the target writes at once, half of them greedily
POSITIONS = 1 << 15  # of all rows that are written at once, padded to the longest: 4 GiB of cache for a target of 8B
BEGIN, NEW = 32, 224  # tokens of raw text that a row starts with; most tokens that the target writes in it


def self_generate(
    target: Target, data: Corpus, tokens: int, seed: int, file: Path, begin: int = BEGIN, new: int = NEW
) -> Corpus:
    """Return the corpus with training text that the target wrote: about `tokens` tokens in rows of at most `new`.

    Each row continues the start of a document: `begin` tokens of raw text, or all of a conversation before an
    answer. Only what the target wrote is in the loss. Every other row is greedy and the rest is sampled at temperature 1,
    so that both uses are covered; no start is continued greedily twice, which would give the same text again.

    file: where the rows are kept for a resumed run. Text next to the target's weights is used before any is written.
    Raise ValueError if no document has a start to continue.
    """
    documents = load(file) if file.exists() else load_stored(target, data.card["source"], tokens)
    if documents is None:
        documents = write(target, data.train, tokens, seed, begin, new)
        save(documents, file, torch.int32)
    return data._replace(train=documents, card=data.card | {"self_generated_tokens": documents.supervised})


def write_more(
    target: Target, texts: Documents, tokens: int, seed: int, file: Path, part: int, begin: int = BEGIN, new: int = NEW
) -> Documents:
    """Write text for a run that has read all it had: as many tokens again, from other starts as long as there are some.
    part: 1 for the first such text; `self_generate` writes part 0.

    Every process of a run asks for the same parts, each when it has read the part before. The first one to ask writes it;
    one that asks meanwhile waits. file: where it is kept for the others and for a resumed run."""
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            save(write(target, texts, tokens, seed, begin, new, part), file, torch.int32)
    return load(file)


def write(target: Target, texts: Documents, tokens: int, seed: int, begin: int, new: int, part: int = 0) -> Documents:
    """Write about `tokens` tokens in rows of at most `new`. All parts have one size, and together form one endless list of
    rows."""
    start = start_tokens(target.text_tokenizer)
    most = (target.context or 1 << 30) - new - len(start)
    places = np.concatenate([beginnings(number, texts, begin) for number in range(len(texts))])
    places = places[places[:, 2] - places[:, 1] <= most]
    if not len(places):
        raise ValueError(
            f"no training document has {begin} tokens, or a prompt that leaves room for {new}, for the target to continue: "
            "self_generated_tokens=0 trains on the documents unchanged"
        )
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).numpy()
    size = max(1, -(-tokens // new))
    begun, end = part * size, (part + 1) * size
    batches: list[Documents] = []
    since = time.perf_counter()
    progress = Progress("self-generated text", size * new, "tokens at most")
    for base in range(begun, end, BATCH):
        prompts: dict[float, list[list[int]]] = {0.0: [], 1.0: []}  # by temperature
        for i in range(base, min(base + BATCH, end)):
            number, first, last = places[order[i % len(order)]].tolist()
            row = texts.token_slice(number, first, last)[0].tolist()
            greedy = i % 2 == 0 and i < len(order)
            prompts[0.0 if greedy else 1.0].append(row if first == 0 else [*start, *row])
        for temperature, some in prompts.items():
            first = seed + base
            for rows in batches_of(some, new):
                settings: dict[str, Any] = {"temperature": temperature, "seed": first, "progress": progress.add}
                ids, mask = (part.to(target.device) for part in left_pad(rows))
                text = generate(target, None, ids, mask, max_new_tokens=new, **settings)
                written = [masked(row + more, len(row)) for row, more in zip(rows, text.new_tokens, strict=True)]
                batches.append(Documents.of(written))
                first += len(rows)
    progress.close()
    joined = Documents.joined(batches)
    rate = joined.supervised / (time.perf_counter() - since)
    report(f"self-generated text: {size} of {size} rows, {rate:,.0f} tokens/s")
    return joined


def batches_of(prompts: list[list[int]], new: int) -> Iterator[list[list[int]]]:
    """Give the prompts in batches that have POSITIONS places at most, with `new` for each row's answer: those of about one
    length together where not all fit."""
    if len(prompts) * (max(map(len, prompts), default=0) + new) > POSITIONS:
        prompts = sorted(prompts, key=len)
    while prompts:
        count = 1
        while count < len(prompts) and (count + 1) * (len(prompts[count]) + new) <= POSITIONS:
            count += 1
        yield prompts[:count]
        prompts = prompts[count:]


def beginnings(number: int, texts: Documents, begin: int) -> np.ndarray:
    """Return (n, 3): document, start, end of what the target can continue: all before an answer of a conversation, or any
    stretch of `begin` tokens of raw text."""
    size = int(texts.sizes[number])
    flags = texts.token_slice(number, 0, size)[1] != 0
    if flags[1:].all():  # raw text, behind its bos token
        starts = np.arange(0, size - begin + 1, begin)
        return np.stack([np.full_like(starts, number), starts, starts + begin], axis=1)
    ends = np.flatnonzero(flags[1:] & ~flags[:-1]) + 1
    return np.stack([np.full_like(ends, number), np.zeros_like(ends), ends], axis=1)


def masked(tokens: list[int], given: int) -> Document:
    """Return a document whose first `given` tokens are not in the loss."""
    return Document(tokens, [False] * given + [True] * (len(tokens) - given))


def save(documents: Documents, file: Path, dtype: torch.dtype, **facts: str) -> None:
    """Write them completely or not at all. dtype: of the tokens."""
    tokens, flags = (np.concatenate([block[n] for block in documents.blocks()]) for n in (1, 2))
    given = documents.sizes - np.add.reduceat(flags.astype(np.int64), documents.sizes.cumsum() - documents.sizes)
    tensors = {
        "tokens": torch.from_numpy(tokens).to(dtype),
        "lengths": torch.from_numpy(documents.sizes).to(dtype),
        "given": torch.from_numpy(given).to(dtype),
    }
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata=facts)
    part.rename(file)


def load(file: Path) -> Documents:
    tensors = load_file(file)
    tokens, lengths, given = (tensors[name].numpy() for name in ("tokens", "lengths", "given"))
    flags = np.ones(len(tokens), np.uint8)
    starts = lengths.cumsum(dtype=np.int64) - lengths
    for start, count in zip(starts.tolist(), given.tolist(), strict=True):
        flags[start : start + count] = 0
    return Documents.flat(tokens.astype(np.int32), flags, lengths)


def load_stored(target: Target, source: str, tokens: int) -> Documents | None:
    """Load at least `tokens` tokens that these very weights wrote from this source, by the file's metadata, or None if there
    are fewer."""
    file = Path(target.checkpoint) / NAME
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as opened:
        facts = {"source": source, "embedding_digest": fingerprint(target)["embedding_digest"]}
        if opened.metadata() != facts:
            return None
        written = (opened.get_tensor("lengths") - opened.get_tensor("given")).cumsum(0)
    rows = int((written < tokens).sum()) + 1
    return None if rows > len(written) else load(file).select(np.arange(rows))
