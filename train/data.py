"""From files to packed rows of tokens. Split by file: what measures was never trained on."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from heads.target import Target
from inference.engine import generate
from train import stdlib

WRITERS = 256  # rows that the target writes at once, half of them greedily


class Document(NamedTuple):
    tokens: list[int]
    supervised: list[bool]  # is this token the target's to write? All of raw text is


class Corpus(NamedTuple):
    train: list[Document]
    validation: list[str]  # whole texts, for the measurements during training
    test: list[str]  # whole texts, for the measurement at the end
    card: dict[str, Any]  # what was read: rows, tokens, dropped with reasons


def standard_library(tokenizer: PreTrainedTokenizerBase, max_files: int | None = None) -> Corpus:
    """The running Python's own library (train/stdlib.py), without its tests."""
    texts = {part: [text for _, text in stdlib.documents(part, tests=False)] for part in stdlib.PARTS}
    train, card = texts["train"][:max_files], {"source": "standard library"}
    return corpus(tokenizer, train, texts["validation"], texts["test"], card)


def text_files(tokenizer: PreTrainedTokenizerBase, path: str, glob: str = "**/*", test_share: float = 0.1) -> Corpus:
    """Every file below `path` that matches `glob`, or the one file `path`, as raw text.

    A share of the files, picked by name, is held out; a single file is cut, its last part held out. Raises ValueError
    that names what is missing, empty or not UTF-8.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"data.path={path} does not exist: give a text file or a folder of them")
    files = [root] if root.is_file() else sorted(file for file in root.glob(glob) if file.is_file())
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
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = tokenizer(train, add_special_tokens=False, verbose=False)["input_ids"]
    documents = [Document(ids + end, [True] * (len(ids) + len(end))) for ids in rows if ids]
    tokens = sum(len(document.tokens) for document in documents)
    if tokens == 0:
        raise ValueError(f"the data ({card['source']}) gives no tokens to train on")
    digest = hashlib.sha256("\0".join(train).encode()).hexdigest()[:16]
    return Corpus(documents, validation, test, card | {"documents": len(documents), "tokens": tokens, "hash": digest})


def written_by(
    target: Target, data: Corpus, tokens: int, seed: int, file: Path, begin: int = 32, new: int = 224
) -> Corpus:
    """The same corpus with training text that the target wrote itself: at least `tokens` of it, in rows of `new` behind
    beginnings of `begin` tokens from the documents. Only what it wrote is supervised.

    A head drafts what its target writes, not what people wrote; on text of the latter kind it learns to draft neither. Every
    other row is greedy, the rest is sampled at temperature 1, so that both uses are covered. file: where the rows are
    kept, so that a run that goes on need not write them again.
    """
    if file.exists():
        documents = [
            Document(row, [False] * begin + [True] * (len(row) - begin)) for row in json.loads(file.read_text())
        ]
        return data._replace(train=documents, card=data.card | {"written_by_target": count_written(documents)})
    places = [(number, at) for number, d in enumerate(data.train) for at in range(0, len(d.tokens) - begin + 1, begin)]
    if not places:
        raise ValueError(
            f"no training document has {begin} tokens for the target to go on from; written=0 trains on them as is"
        )
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
    wanted = max(1, -(-tokens // new))
    documents = []
    for first in range(0, wanted, WRITERS):
        chosen = [places[order[i % len(order)]] for i in range(first, min(first + WRITERS, wanted))]
        rows = torch.tensor([data.train[number].tokens[at : at + begin] for number, at in chosen], device=target.device)
        for temperature, part in ((0.0, rows[::2]), (1.0, rows[1::2])):
            if len(part):
                out = generate(target, None, part, max_new_tokens=new, temperature=temperature, seed=seed + first)
                for row, text in zip(part.tolist(), out.new_tokens, strict=True):
                    documents.append(Document(row + text, [False] * begin + [True] * len(text)))
        print(f"the target has written {len(documents)} of {wanted} rows", flush=True)
    half = file.with_suffix(".part")
    half.write_text(json.dumps([document.tokens for document in documents]))
    half.rename(file)  # whole or not at all
    return data._replace(train=documents, card=data.card | {"written_by_target": count_written(documents)})


def count_written(documents: list[Document]) -> int:
    return sum(sum(document.supervised) for document in documents)


def count_tokens(documents: list[Document], vocab: int) -> Tensor:
    """(vocab,) int64: how often each token is supervised."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for document in documents:
        ids = torch.tensor(document.tokens)[torch.tensor(document.supervised)]
        counts += torch.bincount(ids, minlength=vocab)
    return counts


class Packed(Dataset):
    """Rows of exactly `length` tokens, documents one behind the other; one that does not fit goes on in the next row
    as a document of its own. Nothing is padded but the end of the last row."""

    def __init__(self, documents: list[Document], length: int, seed: int):
        if length < 8:
            raise ValueError(f"length={length} is too short to hold a prompt and its drafts")
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
        tokens = [token for i in order for token in documents[i].tokens]
        supervised = [flag for i in order for flag in documents[i].supervised]
        numbers = [number for number, i in enumerate(order) for _ in documents[i].tokens]
        missing = -len(tokens) % length
        self.tokens = torch.tensor(tokens + [0] * missing).view(-1, length)
        self.supervised = torch.tensor(supervised + [False] * missing).view(-1, length)
        self.documents = torch.tensor(numbers + [-1] * missing).view(-1, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        documents = self.documents[row]
        places = torch.arange(len(documents))
        fresh = torch.ones(len(documents), dtype=torch.bool)
        fresh[1:] = documents[1:] != documents[:-1]
        first = torch.where(fresh, places, 0).cummax(0).values
        return {
            "tokens": self.tokens[row],
            "supervised": self.supervised[row],
            "documents": documents,
            "positions": places - first,
        }


def prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, spread evenly over `texts`, each from the start of a line."""

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
