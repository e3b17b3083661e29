"""Self-generated text: what the target itself writes, which is what a head drafts.

On text that people wrote a head learns to draft neither them nor its target. A run keeps its text as
`self_generated.jsonl`; text for a published target can also lie next to its weights, so that no run has to wait for it.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from foredraft.heads.checkpoint import fingerprint
from foredraft.heads.target_model import Target
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.text import start_tokens
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.documents import Documents
from foredraft.train.writing.writers import Ask, in_process
from foredraft.train.writing.written_rows import Row, RowFile

# In a folder: serving engines take every safetensors file next to the weights for weights.
NAME = "self_generated/self_generated.safetensors"
BATCH = 256  # rows that the target writes at once, half of them greedily
POSITIONS = 1 << 15  # of all rows that are written at once: 4 GiB of cache for a target of 8B
MARGIN = 64  # of the drafts behind a text
START, NEW = 32, 224  # tokens of raw text that a row starts with; most tokens that the target writes in it


def self_generate(target: Target, data: Corpus, tokens: int, seed: int, file: Path) -> Corpus:
    """Return the corpus with training text that the target wrote: about `tokens` tokens in rows of at most NEW.

    Each row continues the start of a document: START tokens of raw text, or all of a conversation before an answer. Only what
    the target wrote is in the loss. Every other row is greedy and the rest is sampled at temperature 1, so that both uses are
    covered; no start is continued greedily twice, which would give the same text again.

    file: where the rows are kept for a resumed run. Text next to the target's weights is used before any is written.
    """
    documents = None if file.exists() else stored(target, data.card["source"], tokens)
    if documents is None:
        documents = write(target, data.train, tokens, seed, file)
    return data._replace(train=documents, card=data.card | {"self_generated_tokens": documents.supervised})


def write(target: Target, texts: Documents, tokens: int, seed: int, file: Path, part: int = 0) -> Documents:
    """Return a part of the target's text, about `tokens` tokens, after writing what the file lacks of it. All parts have one
    size, and together form one endless list of rows. Of several processes the first one writes, and the others wait. Raise
    ValueError if no document has a start to continue."""
    size = max(1, -(-tokens // NEW))
    with RowFile(file, {"target": fingerprint(target)}, "output_dir", wait=True) as rows:
        if len(rows.done) < size:
            places = starts(target, texts)
            requests = requests_of(target, texts, places, range(part * size, (part + 1) * size), seed)
            left = (partial(row, number, request) for number, request in requests if number not in rows.done)
            longest = int((places[:, 2] - places[:, 1]).max()) + NEW + MARGIN
            batch = max(1, min(BATCH, POSITIONS // longest))  # each slot has room for the longest text
            with Progress("self-generated text", size * NEW, "tokens at most", done=rows.tokens) as progress:

                def show(texts: dict[Request, list[int]]) -> None:
                    progress.add(rows.tokens + sum(map(len, texts.values())) - progress.done)

                in_process(target, left, rows, batch, show)
            report(f"self-generated text: {size} of {size} rows, {progress.rate:,.0f} tokens/s")
        return documents(rows)


async def row(number: int, request: Request, ask: Ask) -> Row:
    tokens = request.prompt + (await ask(request)).tokens
    return {"number": number, "tokens": tokens, "written": [[len(request.prompt), len(tokens)]]}


def starts(target: Target, texts: Documents) -> np.ndarray:
    """Return (n, 3): document, start, end of each text that the target can continue by NEW tokens: all before an answer of a
    conversation, or any stretch of START tokens of raw text."""
    begin, found = start_tokens(target.text_tokenizer), [np.empty((0, 3), np.int64)]
    most = (target.context or 1 << 30) - NEW - len(begin)
    for number in range(len(texts)):
        size = int(texts.sizes[number])
        flags = texts.token_slice(number, 0, size)[1] != 0
        if flags[max(1, len(begin)) :].all():  # raw text, behind the tokens that every text starts with
            first = np.arange(0, size - START + 1, START)
            last = first + START
        else:
            last = np.flatnonzero(flags[1:] & ~flags[:-1]) + 1
            first = np.zeros_like(last)
        found.append(np.stack([np.full_like(first, number), first, last], axis=1)[last - first <= most])
    places = np.concatenate(found)
    if not len(places):
        raise ValueError(
            f"no training document has {START} tokens, or a prompt that leaves room for {NEW}, for the target to continue: "
            "self_generated_tokens=0 trains on the documents unchanged"
        )
    return places


def requests_of(
    target: Target, texts: Documents, places: np.ndarray, numbers: range, seed: int
) -> Iterator[tuple[int, Request]]:
    """Yield these rows of the endless list, each with its number."""
    start, ends = start_tokens(target.text_tokenizer), frozenset(target.eos_token_ids)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).numpy()
    for number in numbers:
        document, first, last = places[order[number % len(order)]].tolist()
        row = texts.token_slice(document, first, last)[0].tolist()
        greedy = number % 2 == 0 and number < len(order)
        params = SamplingParams(temperature=0.0 if greedy else 1.0)
        yield number, Request(row if first == 0 else [*start, *row], params, NEW, seed + number, ends)


def documents(rows: RowFile) -> Documents:
    """Return the rows of a file, in the order of their numbers."""
    read = {row["number"]: (np.array(row["tokens"], np.int32), row["written"][0][0]) for _, row in rows.read()}
    tokens, given = zip(*(read[number] for number in sorted(read)), strict=True)
    return flat(np.concatenate(tokens), list(map(len, tokens)), list(given))


def flat(tokens: np.ndarray, lengths: list[int], given: list[int]) -> Documents:
    """Return documents of these lengths. given: of each, the tokens before what the target wrote."""
    flags = np.concatenate([np.arange(n) >= before for n, before in zip(lengths, given, strict=True)])
    return Documents.flat(tokens.astype(np.int32), flags.astype(np.uint8), np.array(lengths))


def stored(target: Target, source: str, tokens: int) -> Documents | None:
    """Return at least `tokens` tokens that these very weights wrote from this source, or None if there are fewer."""
    file = Path(target.checkpoint) / NAME
    if not file.is_file():
        return None
    with safe_open(file, framework="np") as opened:
        if opened.metadata() != {"source": source, "embedding_digest": fingerprint(target)["embedding_digest"]}:
            return None
        lengths, given = opened.get_tensor("lengths"), opened.get_tensor("given")
        count = int(((lengths - given).cumsum(dtype=np.int64) < tokens).sum()) + 1
        if count > len(lengths):
            return None
        text = opened.get_slice("tokens")[: int(lengths[:count].sum(dtype=np.int64))]
    return flat(text, lengths[:count].tolist(), given[:count].tolist())
