"""From raw text to documents, and what the target writes itself. Split by file: what measures was never trained on."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.target import Target
from inference.generation import generate
from train.data import stdlib, stored_text
from train.data.packing import Document
from train.data.packing import Packed as Packed

GENERATION_BATCH = 256  # rows that the target writes at once, half of them greedily


Held = Sequence[str | Document]  # held-out raw texts, and conversations


class Corpus(NamedTuple):
    train: Sequence[Document]
    validation: Held  # whole texts, for the measurements during training
    test: Held  # whole texts, for the measurement at the end
    card: dict[str, Any]  # what was read: rows, tokens, dropped with reasons


def standard_library(tokenizer: PreTrainedTokenizerBase, max_files: int | None = None) -> Corpus:
    """The running Python's own library (train/data/stdlib.py), without its tests."""
    texts = {part: [text for _, text in stdlib.documents(part, tests=False)] for part in stdlib.PARTS}
    train, card = texts["train"][:max_files], {"source": "standard library"}
    return corpus(tokenizer, train, texts["validation"], texts["test"], card)


def text_files(tokenizer: PreTrainedTokenizerBase, path: str, glob: str = "**/*", test_share: float = 0.1) -> Corpus:
    """Every file below `path` that matches `glob`, or the one file `path`, as raw text.

    A share of the files, picked by name, is held out; a single file is cut, its last part held out. Raises ValueError
    that names what is missing, empty, not UTF-8, or a file of rows.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"data.path={path} does not exist: give a text file or a folder of them")
    files = [root] if root.is_file() else sorted(file for file in root.glob(glob) if file.is_file())
    for file in files:
        if file.suffix in (".jsonl", ".parquet"):
            raise ValueError(f"{file} holds rows, not raw text: give data=conversations data.path={path}")
    texts = [(file, read_text(file)) for file in files]
    texts = [(file, text) for file, text in texts if text.strip()]
    if not texts:
        raise ValueError(f"data.path={path} holds no text: {len(files)} files match {glob}, none with anything in it")
    if len(texts) == 1:
        text = texts[0][1]
        cut = text.rfind("\n", 0, int(len(text) * (1 - test_share))) + 1 or int(len(text) * (1 - test_share))
        held = text[cut:]
        train, validation, test = [text[:cut]], [held], [held]
    else:
        ranked = sorted(texts, key=lambda pair: hashlib.sha256(pair[0].name.encode()).digest())
        count = max(1, round(len(ranked) * test_share))
        test = [text for _, text in ranked[:count]]
        validation = [text for _, text in ranked[count : 2 * count]] if len(ranked) >= 3 * count else test
        train = [text for _, text in ranked[count:] if text not in validation]
    return corpus(tokenizer, train, validation, test, {"source": str(path), "files": len(texts)})


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"{file} is not UTF-8 (byte {error.start})"
        raise ValueError(f"{where}: convert it, or leave it out with data.glob") from None


def corpus(
    tokenizer: PreTrainedTokenizerBase, train: list[str], validation: list[str], test: list[str], card: dict[str, Any]
) -> Corpus:
    """Tokenise raw text: every token is supervised, and each document ends as the target's texts end."""
    documents = tokenized(tokenizer, train)
    if not documents:
        raise ValueError(f"the data ({card['source']}) gives no tokens to train on")
    return Corpus(documents, validation, test, card)


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Held) -> list[Document]:
    """Raw texts as documents, all supervised, with the end token behind each; empty ones left out, others as they are."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    raw = [text for text in texts if isinstance(text, str)]
    rows = tokenizer(raw, add_special_tokens=False, verbose=False)["input_ids"] if raw else []
    documents = [Document(ids + end, [True] * (len(ids) + len(end))) for ids in rows if ids]
    return documents + [document for document in texts if isinstance(document, Document)]


def self_generate(
    target: Target, data: Corpus, tokens: int, seed: int, file: Path, begin: int = 32, new: int = 224
) -> Corpus:
    """The same corpus with training text that the target wrote itself: up to `tokens` of it, in rows of at most `new` behind
    beginnings from the documents: of `begin` tokens of raw text, or the whole of a conversation before an answer.
    Only what it wrote is supervised.

    A head drafts what its target writes, not what people wrote; on text of the latter kind it learns to draft neither. Every
    other row is greedy, the rest is sampled at temperature 1, so that both uses are covered. file: where the rows are
    kept, so that a run that goes on need not write them again; text that lies beside the target's weights
    (train/data/stored_text.py) is taken first.
    """
    if file.exists():
        kept = json.loads(file.read_text())
        documents = [Document(row, [False] * given + [True] * (len(row) - given)) for given, row in kept]
    else:
        documents = stored_text.find(target, data.card["source"], tokens) or []
    if documents:
        return data._replace(train=documents, card=data.card | {"self_generated_tokens": count_generated(documents)})
    most = (target.context or 1 << 30) - new
    found = (place for number, d in enumerate(data.train) for place in beginnings(number, d, begin))
    places = [(number, start, end) for number, start, end in found if end - start <= most]
    if not places:
        raise ValueError(
            f"no training document has {begin} tokens, or a prompt that leaves room for {new}, for the target to go on from; "
            "self_generated_tokens=0 trains on them as they are"
        )
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = max(1, -(-tokens // new))
    for first in range(0, wanted, GENERATION_BATCH):
        chosen = [places[order[i % len(order)]] for i in range(first, min(first + GENERATION_BATCH, wanted))]
        rows = [data.train[number].tokens[start:end] for number, start, end in chosen]
        for temperature, part in ((0.0, rows[::2]), (1.0, rows[1::2])):
            if part:
                documents += go_on(target, part, max_new_tokens=new, temperature=temperature, seed=seed + first)
        print(f"the target has written {len(documents)} of {wanted} rows", flush=True)
    half = file.with_suffix(".part")
    half.write_text(json.dumps([[sum(not flag for flag in d.loss_mask), d.tokens] for d in documents]))
    half.rename(file)  # whole or not at all
    return data._replace(train=documents, card=data.card | {"self_generated_tokens": count_generated(documents)})


def beginnings(number: int, document: Document, begin: int) -> list[tuple[int, int, int]]:
    """(document, start, end) of what the target can go on from: in a conversation all before an answer, in raw text any
    stretch of `begin` tokens."""
    flags = document.loss_mask
    if all(flags):
        return [(number, at, at + begin) for at in range(0, len(flags) - begin + 1, begin)]
    return [(number, 0, at) for at in range(1, len(flags)) if flags[at] and not flags[at - 1]]


def go_on(target: Target, rows: list[list[int]], **settings: Any) -> list[Document]:
    """The rows, each continued by the target; only what it wrote is supervised."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=target.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=target.device)
    new = generate(target, None, ids, mask, **settings).new_tokens
    return [Document(row + text, [False] * len(row) + [True] * len(text)) for row, text in zip(rows, new, strict=True)]


def count_generated(documents: Sequence[Document]) -> int:
    return sum(sum(document.loss_mask) for document in documents)


def count_tokens(documents: Sequence[Document], vocab: int) -> Tensor:
    """(vocab,) int64: how often each token is supervised."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for document in documents:
        ids = torch.tensor(document.tokens)[torch.tensor(document.loss_mask)]
        counts += torch.bincount(ids, minlength=vocab)
    return counts


def prompts(tokenizer: PreTrainedTokenizerBase, held: Held, count: int, length: int) -> list[list[int]]:
    """`count` prompts, spread evenly: of `length` tokens from raw texts, or of conversations all before their first answer.

    A conversation is not cut (its prompt would lose its question or its form); one of more than 8 * `length` tokens is passed
    over. Raises ValueError where there is no prompt.
    """
    whole = [d.tokens[: d.loss_mask.index(True)] for d in held if isinstance(d, Document)]
    if whole:
        asked = [prompt for prompt in whole if 0 < len(prompt) <= 8 * length]
        if not asked:
            raise ValueError(
                f"every held-out conversation has a prompt of more than {8 * length} tokens: evaluate.prompt_tokens={length} "
                "is an eighth of the longest that is measured on, raise it"
            )
        count = min(count, len(asked))
        return [asked[len(asked) * i // count] for i in range(count)]
    texts = [text for text in held if isinstance(text, str)]

    def lines() -> Iterator[str]:
        whole = sum(map(len, texts))
        at, offset = 0, 0
        for number in range(count):
            place = whole * number // count
            while place >= offset + len(texts[at]):
                offset += len(texts[at])
                at += 1
            text = texts[at]
            start = text.rfind("\n", 0, place - offset) + 1
            yield text[min(start, max(0, len(text) - 12 * length)) :][: 12 * length]

    starts = list(lines()) if any(texts) else []
    rows = tokenizer(starts, add_special_tokens=False, verbose=False)["input_ids"] if starts else []
    found = [row[:length] for row in rows if len(row) >= max(1, length // 2)]
    if not found:
        raise ValueError(
            f"the held-out text is too short for prompts of {length} tokens: hold out more of it, or ask for shorter "
            "prompts (evaluate.prompt_tokens)"
        )
    return found
