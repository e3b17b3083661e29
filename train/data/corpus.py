"""A corpus of documents, and how raw text becomes one. Split by file: what measures was never trained on."""

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.inference.text import start_tokens, with_start
from foredraft.train.data import stdlib
from foredraft.train.data.documents import Document, Documents

TEXTS = 64  # that are tokenized together
# Names of splits in paths, as `datasets` knows them.
SPLITS = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
SPLITS |= {"testing": "test", "eval": "test", "evaluation": "test"}
SPLITS |= {split: split for split in ("train", "validation", "test")}
Held = Sequence[str] | Documents  # raw texts, or what was held out of conversations


class Corpus(NamedTuple):
    train: Documents
    validation: Held  # whole texts, for the measurements during training
    test: Held  # whole texts, for the measurement at the end
    card: dict[str, Any]  # what was read: rows, tokens, dropped with reasons
    test_sets: Mapping[str, Held] = MappingProxyType({})  # `test` by the data set that it is of, where it is of several


def standard_library(tokenizer: PreTrainedTokenizerBase, max_files: int | None = None) -> Corpus:
    """Load the running Python's own library (train/data/stdlib.py), without its tests."""
    texts = {part: [text for _, text in stdlib.documents(part, tests=False)] for part in stdlib.PARTS}
    train, card = texts["train"][:max_files], {"source": "standard library"}
    return from_texts(tokenizer, train, texts["validation"], texts["test"], card)


def text_files(tokenizer: PreTrainedTokenizerBase, path: str, glob: str = "**/*", val_split: float = 0.1) -> Corpus:
    """Load every file below `path` that matches `glob` (by default all but hidden ones), or the one file `path`, as raw text.

    A share of the files, picked by name, is held out; a single file is cut, its last part held out. Raises ValueError
    that names what is missing, empty, not UTF-8, or a file of rows.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"data.path={path} does not exist: give a text file or a folder of them")
    below = walk(root) if glob == "**/*" else root.glob(glob)
    files = [root] if root.is_file() else sorted(file for file in below if file.is_file())
    for file in files:
        if file.suffix.lower() in (".jsonl", ".parquet"):
            raise ValueError(f"{file} holds rows, not raw text: give data=conversations data.path={path}")
    texts = [(file, read_text(file)) for file in files]
    texts = [(file, text) for file, text in texts if text.strip()]
    if not texts:
        raise ValueError(f"data.path={path} contains no text: {len(files)} files match {glob}, all of them empty")
    if len(texts) == 1:
        text = texts[0][1]
        cut = text.rfind("\n", 0, int(len(text) * (1 - val_split))) + 1 or int(len(text) * (1 - val_split))
        held = text[cut:]
        train, validation, test = [text[:cut]], [held], [held]
    else:
        ranked = sorted(texts, key=lambda pair: hashlib.sha256(pair[0].name.encode()).digest())
        count = max(1, round(len(ranked) * val_split))
        test = [text for _, text in ranked[:count]]
        validation = [text for _, text in ranked[count : 2 * count]] if len(ranked) >= 3 * count else test
        held_out = {*validation, *test}  # another file may have the same text
        train = [text for _, text in ranked[count:] if text not in held_out]
    return from_texts(tokenizer, train, validation, test, {"source": str(path), "files": len(texts)})


def walk(root: Path) -> Iterator[Path]:
    """Yield the files below a folder, then in linked folders, and each once, so that a link hides no name of a split.
    Copies of editors and of macOS (.ipynb_checkpoints, ._rows.jsonl) are hidden, and left out."""
    seen: set[str] = set()
    starts = [str(root)]
    for start in starts:  # which grow by links
        for folder, folders, names in os.walk(start):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            place = os.path.realpath(folder)
            if place in seen:  # a link may lead back to a folder above it
                folders.clear()
                continue
            seen.add(place)
            starts += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def of_split(found: list[Path], root: Path, split: str) -> list[Path]:
    """Return the files without those that are named for another split (data/test-00000.parquet), if some are for this one."""
    words = {file: {*re.split(r"[^a-z0-9]+", str(file.relative_to(root)).lower())} for file in found}
    ours = {*re.split(r"[^a-z0-9]+", split.lower())}
    if not any(ours <= words[file] for file in found):  # training.jsonl is for the split train
        ours = {SPLITS.get(word, word) for word in ours}
        words = {file: {SPLITS.get(word, word) for word in names} for file, names in words.items()}
    if not any(ours <= words[file] for file in found):
        return found
    return [file for file in found if ours <= words[file] or not words[file] & SPLITS.keys()]


def read_text(file: Path) -> str:
    """Read a text without the parts of a file: a byte order mark, and the end of its last line."""
    try:
        return file.read_text(encoding="utf-8-sig").removesuffix("\n")
    except UnicodeDecodeError as error:
        where = f"{file} is not UTF-8 (byte {error.start})"
        raise ValueError(f"{where}: convert it, or leave it out with data.glob") from None


def from_texts(
    tokenizer: PreTrainedTokenizerBase, train: list[str], validation: list[str], test: list[str], card: dict[str, Any]
) -> Corpus:
    """Return a corpus of raw texts; raise ValueError if `train` contains none."""
    documents = tokenize(tokenizer, train)
    if not len(documents):
        raise ValueError(f"the data ({card['source']}) gives no tokens to train on")
    return Corpus(documents, validation, test, card)


@lru_cache(8)
def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the highest id of a tokenizer, which may be above the number of its tokens: ids have holes."""
    return max(tokenizer.get_vocab().values(), default=0)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Documents:
    """Turn raw texts into documents, with the tokens that a text starts and ends with, all in the loss but the first ones.
    A text that is rendered already has some of these itself. Empty texts are left out."""
    bos, eos, start = tokenizer.bos_token_id, tokenizer.eos_token_id, len(start_tokens(tokenizer))
    parts, left = [], iter(texts)
    while some := list(islice(left, TEXTS)):
        raw = [rendered(tokenizer, text) for text in some]
        found = tokenizer(raw, add_special_tokens=False, verbose=False)["input_ids"]
        rows = [with_start(tokenizer, ids) for ids in found if ids]
        rows = [row if eos in (None, row[-1]) else [*row, eos] for row in rows]
        masks = [[False] * (n := start or int(row[0] == bos)) + [True] * (len(row) - n) for row in rows]
        parts.append(Documents.of([*map(Document, rows, masks)]))
    return Documents.joined(parts)


def rendered(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text without white space around its own bos and eos token."""
    bare = text.rstrip()
    text = bare if tokenizer.eos_token and bare.endswith(tokenizer.eos_token) else text
    bare = text.lstrip()
    return bare if tokenizer.bos_token and bare.startswith(tokenizer.bos_token) else text


def count_tokens(documents: Sequence[Document], vocab: int) -> Tensor:
    """Return (vocab,) int64: how often each token is in the loss, without those that the target reads and never writes."""
    counts = np.zeros(vocab, np.int64)
    for _, tokens, flags in Documents.of(documents).blocks():
        counts += np.bincount(tokens[flags > 0], minlength=vocab)[:vocab]
    return torch.from_numpy(counts)


def has_chats(held: Held) -> bool:
    """Return whether these include conversations. Measured text ends with an answer then; raw text ends only at a limit."""
    return isinstance(held, Documents) and not held.has_text(held.raws).all()


def has_prompts(held: Held) -> bool:
    """Return whether these include a text without images. Only such texts are decoded."""
    return not held.with_images().all() if isinstance(held, Documents) else len(held) > 0


def prompt_sizes(held: Documents) -> dict[int, int]:
    """Return by number how many tokens each conversation without images has before its first answer. No list of tokens is
    made: there may be millions of conversations."""
    chats = np.flatnonzero(~(held.with_images() | held.has_text(held.raws))).tolist()
    flags = ((number, held.token_slice(number, 0, int(held.sizes[number]))[1]) for number in chats)
    return {number: int((learned != 0).argmax()) for number, learned in flags}


def prompts(tokenizer: PreTrainedTokenizerBase, held: Held, count: int, length: int) -> list[list[int]]:
    """Return `count` prompts, spread evenly: `length` tokens of raw texts, or all of a conversation before its first answer.
    There are fewer if the texts are short, because no place is given twice.

    A conversation is not cut (its prompt would lose its question or its form); one of more than 8 * `length` tokens is
    skipped. Raises ValueError if there is no prompt.
    """
    if isinstance(held, Documents) and (chats := prompt_sizes(held)):
        fitting = [number for number, size in chats.items() if 0 < size <= 8 * length]
        if not fitting:
            raise ValueError(
                f"every held-out conversation has a prompt of more than {8 * length} tokens: eval.prompt_tokens={length} "
                "is an eighth of the longest that is measured on, raise it"
            )
        count = min(count, len(fitting))
        chosen = [fitting[len(fitting) * i // count] for i in range(count)]
        return [held[number].tokens[: chats[number]] for number in chosen]
    texts = held.raw_texts() if isinstance(held, Documents) else held
    ends, starts = list(accumulate(map(len, texts))), dict[tuple[int, int], str]()
    for number in range(count if any(texts) else 0):
        place = ends[-1] * number // count
        text = texts[at := bisect_right(ends, place)]
        start = text.rfind("\n", 0, place - (ends[at] - len(text))) + 1
        start = min(start, max(0, len(text) - 12 * length))
        starts[at, start] = text[start:][: 12 * length]
    rows = tokenizer([*starts.values()], add_special_tokens=False, verbose=False)["input_ids"] if starts else []
    found = [with_start(tokenizer, row)[:length] for row in rows if len(row) >= max(1, length // 2)]
    if not found:
        raise ValueError(
            f"the held-out text is too short for prompts of {length} tokens: hold out more of it, or ask for shorter "
            "prompts (eval.prompt_tokens)"
        )
    return found
