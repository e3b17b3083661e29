"""Conversations as a training corpus: rows -> chat template -> tokens and masks, in a cache of `datasets`.

The cache is memory-mapped, so a large set costs disk and not memory. Its key is a hash of the files, the tokenizer, the
template and this very code, so nothing stale is ever read.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from train.data.chat_template import ChatFormat, template_file
from train.data.corpus import Corpus, Document, Held, tokenize
from train.data.sources import SkippedRow, Source

CODE = ("sources", "chat_template", "corpus", "conversations")  # what makes documents of rows
CHECKED = 256  # conversations whose masks are checked together


class Documents(Sequence[Document]):
    """Some rows of an encoded dataset, read from disk when they are needed."""

    def __init__(self, encoded: Any, chosen: np.ndarray):
        self.encoded, self.chosen = encoded, chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> Document:  # type: ignore[override]  # no slices: nothing cuts a corpus
        row = self.encoded[int(self.chosen[number])]
        return Document(row["tokens"], row["loss_mask"])


def corpus(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    thinking: bool | None = None,
    test_share: float = 0.05,
    cache_dir: str | None = None,
    **source: Any,
) -> Corpus:
    """Conversations or raw text of a train.data.sources.Source; template and thinking as in chat_template.ChatFormat.

    `test_share` of the conversations is held out for the last measurement and as much for those during training, by a hash
    of the conversation, so that it is always in the same part. Raises ValueError where nothing can be trained on.
    """
    where = Source(**source)
    if not 0 < test_share < 0.5:
        raise ValueError(f"data.test_share={test_share} must lie between 0 and 0.5")
    encoded = encode(tokenizer, where, template, thinking, cache_dir)
    numbers, keys, reasons, raws = (encoded.data.column(name).to_numpy() for name in ("number", "key", "reason", "raw"))
    good, dropped = np.flatnonzero(reasons == ""), Counter(reasons[reasons != ""])
    if not len(good):
        found = "; ".join(f"{count} x {reason}" for reason, count in dropped.most_common(3))
        raise ValueError(
            f"data.path={where.path} gives nothing to train on: {found}. Name columns of other names "
            "with data.messages, or data.prompt and data.response, or data.text"
        )
    test, validation = held_out(keys[good], test_share)
    if (test | validation).all():
        raise ValueError(
            f"data.path={where.path} holds {len(np.unique(keys[good]))} conversation: at least two are needed"
        )
    first = {reason: encoded[int(np.argmax(reasons == reason))]["where"] for reason in dropped}
    card: dict[str, Any] = {"source": where.path, "rows": int(numbers.max()), "dropped": dict(dropped)}
    card |= {"used": len(np.unique(numbers[good])), "first_dropped": first, "held_out": int((test | validation).sum())}
    if (raws[good] == "").any():
        card["template"] = ChatFormat(tokenizer, template, thinking).name

    def held(chosen: np.ndarray) -> Held:
        found = [encoded[int(i)] for i in good[chosen]]
        return [row["raw"] or Document(row["tokens"], row["loss_mask"]) for row in found]

    return Corpus(Documents(encoded, good[~(test | validation)]), held(validation), held(test), card)


def held_out(keys: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Which documents are for the test and which for validation; of a small set the lowest keys, so that neither is empty."""
    edge = int(share * 2**31)
    lowest = np.unique(keys)[:2]
    test = keys < edge if (keys < edge).any() else keys == lowest[0]
    validation = (keys >= edge) & (keys < 2 * edge)
    if not validation.any() and len(np.unique(keys[~test])) > 1:
        validation = keys == keys[~test].min()
    return test, validation if validation.any() else test


def encode(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    template: str | None,
    thinking: bool | None,
    cache_dir: str | None,
) -> Any:
    """A dataset of documents and of dropped rows, from the cache where it is there."""
    import datasets  # seconds to import, which most runs need not wait for

    datasets.disable_progress_bars()
    code = b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in CODE)
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.name_or_path
    file = template_file(template) if template else None
    written = file.read_text() if file is not None and file.is_file() else tokenizer.chat_template
    settings = repr((source.digest(), written, thinking, tokenizer.special_tokens_map, words))
    features = {
        "number": datasets.Value("int64"),
        "key": datasets.Value("int64"),
        "tokens": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "raw": datasets.Value("string"),
        "reason": datasets.Value("string"),
        "where": datasets.Value("string"),
    }
    try:
        return datasets.Dataset.from_generator(
            encoded_rows,
            features=datasets.Features(features),
            cache_dir=cache_dir,
            gen_kwargs={"tokenizer": tokenizer, "source": source, "template": template, "thinking": thinking},
            fingerprint=hashlib.sha256(code + settings.encode()).hexdigest()[:16],
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None


def encoded_rows(
    tokenizer: PreTrainedTokenizerBase, source: Source, template: str | None, thinking: bool | None
) -> Iterator[dict[str, Any]]:
    """Per row its documents (a thinking model's conversation can give several), or one entry that says why it has none."""
    form: ChatFormat | None = None
    shares: list[float] = []
    number = 0
    for number, row in enumerate(source.rows(), start=1):
        blank: dict[str, Any] = {"number": number, "tokens": [], "loss_mask": [], "raw": "", "reason": ""}
        blank |= {"where": row.where, "key": 0}
        try:
            messages = source.conversation(row)
            if isinstance(messages, str):
                found, raw = tokenize(tokenizer, [messages]), messages
            else:
                form, raw = form or ChatFormat(tokenizer, template, thinking), ""
                found = form.documents(messages)
                shares += [sum(document.loss_mask) / max(1, len(document.tokens)) for document in found]
                found = [document for document in found if any(document.loss_mask)]
            if not found:
                raise SkippedRow("nothing in it is in the loss")
        except SkippedRow as reason:
            yield blank | {"reason": str(reason)}
            continue
        for document in found:
            yield blank | document._asdict() | {"key": key(messages), "raw": raw}
        if form is not None and len(shares) >= CHECKED:
            check(shares, form)
            shares = []
    if form is not None and shares:
        check(shares, form)
    if number == 0:
        raise ValueError(f"data.path={source.path} gives nothing to train on: it has no rows")


def check(shares: list[float], form: ChatFormat) -> None:
    """Raise ValueError for conversations of which nothing is in the loss, or all. Packed rows are no evidence: one
    may lie inside a single answer."""
    if all(share == 1 for share in shares):
        raise ValueError(
            f"{form.name} gives {len(shares)} conversations of which 100 % of the tokens are in the loss, the prompts too: "
            "mark the answers alone with {% generation %} in a template of your own (data.template=FILE)"
        )
    if not any(shares):
        raise ValueError(
            f"{form.name} gives {len(shares)} conversations of which 0 % of the tokens are in the loss: mark the answers "
            "with {% generation %} in a template of your own (data.template=FILE)"
        )


def key(messages: Any) -> int:
    """31 bits of a hash of a conversation, whatever file it stands in."""
    return int.from_bytes(hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).digest()[:4], "big") >> 1


def source_of(data: Any) -> Source:
    """The rows that a conf/data yaml names, without reading them. Raises ValueError where it names none."""
    names = {field.name for field in fields(Source)}
    if "path" not in data or data._target_ != "train.data.conversations.corpus":
        raise ValueError("these data are no conversations: give data=conversations data.path=FILE, or a set by name")
    return Source(**{name: value for name, value in data.items() if name in names})
