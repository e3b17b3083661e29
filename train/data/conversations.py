"""Conversations as a training corpus, of one set or of several: what is trained on, and what is held out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from foredraft.heads.target_model.images import ImageReader
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.documents import Documents
from foredraft.train.data.encoding import Encoder, encode
from foredraft.train.data.sources import Source


def corpus(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    weights: list[float] | None = None,
    template: str | None = None,
    thinking: bool | None = None,
    val_split: float = 0.05,
    val_path: str | None = None,
    num_proc: int | None = None,
    cache_dir: str | None = None,
    images: ImageReader | None = None,
    **source: Any,
) -> Corpus:
    """Load conversations or raw text of a train.data.sources.Source, or of several with the same columns. template, thinking:
    as in chat_template.ChatFormat.

    weights: how often each path's conversations are read in an epoch (2 twice, 0.5 half of them). `val_split` of the
    questions is held out for the last measurement and as much for those during training, by their hash, so that a question
    is always in the same part, in whatever file it stands. val_path: a file, or a Hub dataset's split `test`, for the last
    measurement instead; its questions are trained on nowhere. images: of a target that takes them. Raises ValueError where
    nothing can be trained on.
    """
    paths = [path] if isinstance(path, str) else path
    if not 0 < val_split < 0.5:
        raise ValueError(f"data.val_split={val_split} must lie between 0 and 0.5")
    if weights is not None and (len(weights) != len(paths) or min(weights) < 0):
        raise ValueError(f"data.weights={weights} must be one number, at least 0, for each of {len(paths)} paths")
    encoders = [Encoder(tokenizer, Source(one, **source), template, thinking, images) for one in paths]
    if val_path is not None:
        given = source | {"split": "test", "data_files": None, "max_samples": None}
        encoders.append(Encoder(tokenizer, Source(val_path, **given), template, thinking, images))
    return assemble(encoders, weights, val_split, num_proc, cache_dir, val_path is not None)


def assemble(
    encoders: Sequence[Encoder],
    weights: list[float] | None,
    val_split: float,
    num_proc: int | None,
    cache_dir: str | None,
    last_is_test: bool = False,
) -> Corpus:
    """Build the corpus of several sets, of which the last may be only for the test. Raise ValueError if it is empty."""
    import datasets  # seconds to import, which most runs need not wait for

    encoded = [encode(encoder, cache_dir, num_proc) for encoder in encoders]
    whole = datasets.concatenate_datasets(encoded)
    path = ", ".join(encoder.source.path for encoder in encoders)
    firsts, keys, reasons = (whole.data.column(name).to_numpy() for name in ("first", "key", "reason"))
    good, dropped = np.flatnonzero(reasons == ""), Counter(reasons[reasons != ""])
    if not len(good):
        found = "; ".join(f"{count} x {reason}" for reason, count in dropped.most_common(3))
        advice = "Name columns of other names with data.messages, or data.prompt and data.response, or data.text"
        if dropped.keys() <= {"not JSON", "not UTF-8"}:  # one object over many lines, another compression
            advice = "Write one JSON object per line in UTF-8, or Parquet, or CSV (NAME.csv)"
        raise ValueError(f"data.path={path} gives nothing to train on: {found}. {advice}")
    parts = np.repeat(np.arange(len(encoded)), [len(part) for part in encoded])[good]
    test, validation = held_out(keys[good], val_split)
    if last_is_test:
        test = parts == len(encoded) - 1
        if not test.any():
            raise ValueError(f"data.val_path={encoders[-1].source.path} holds nothing to measure on: {dict(dropped)}")
        validation &= ~np.isin(keys[good], keys[good[test]])
        validation = validation if validation.any() else test
        weights = weights and [*weights, 0]
    held = test | validation | np.isin(keys[good], keys[good[test]])
    if held.all():
        raise ValueError(f"data.path={path} holds {len(np.unique(keys[good]))} conversation: at least two are needed")
    where = whole.data.column("where")
    first = {reason: where[int(np.argmax(reasons == reason))].as_py() for reason in dropped}
    card: dict[str, Any] = {"source": path, "rows": int(firsts.sum()), "dropped": dict(dropped)}
    card |= {"used": int(firsts[good].sum()), "first_dropped": first, "held_out": int(firsts[good][held].sum())}
    documents = Documents.joined([Documents.mapped(file["filename"]) for file in whole.cache_files])
    assert len(documents) == len(whole), "sets are files, read whole"
    documents.rows = np.arange(len(documents))
    card |= take_images(documents, whole.data.column("images"), encoders, good)
    trained = good[~held]
    if weights is not None:
        trained = weighted(trained, keys, np.repeat(weights, [len(part) for part in encoded]))
        card["weights"] = ", ".join(map(str, weights))
    if not len(trained):
        raise ValueError(f"data.weights={weights} leaves nothing to train on")
    if encoders[0].form is not None:
        card["template"] = encoders[0].form.name
    readable = replace(documents, raws=whole.data.column("raw"))
    for_validation, for_test = (readable.select(good[part]) for part in (validation, test))
    sets = {encoders[n].source.path: readable.select(good[test & (parts == n)]) for n in np.unique(parts[test])}
    return Corpus(documents.select(trained), for_validation, for_test, card, sets if len(sets) > 1 else {})


def take_images(documents: Documents, column: Any, encoders: Sequence[Encoder], good: np.ndarray) -> dict[str, Any]:
    """Give the documents their images, if the target supports them. Return what the data card says about them. column: the
    images of all rows; good: the rows that can be used."""
    if any(encoder.images is not None for encoder in encoders):
        pictured = documents.has_text(column)[good]
        if pictured.any():
            documents.images, documents.reader = column, encoders[0].images
            return {"with_images": int(pictured.sum())}
    elif left := int(np.isin(column.to_numpy(), ["[]"])[good].sum()):
        reason = "this target does not support images, or not the way they are read here"
        return {"images_left_out": f"of {left} conversations: {reason}"}
    return {}


def weighted(numbers: np.ndarray, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Repeat each of these documents as often as its weight says; a hash decides about fractions, so that all that was made
    of a conversation goes together. (The key itself has decided what is held out.)"""
    share = (keys[numbers] * 2654435761 & 0x7FFFFFFF) / 2**31
    times = weights[numbers].astype(np.int64) + (share < weights[numbers] % 1)
    return np.repeat(numbers, times)


def held_out(keys: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Choose documents for the test and for validation; of a small set the lowest keys, so that neither is empty."""
    edge = int(share * 2**31)
    lowest = np.unique(keys)[:2]
    test = keys < edge if (keys < edge).any() else keys == lowest[0]
    validation = (keys >= edge) & (keys < 2 * edge)
    if not validation.any() and len(np.unique(keys[~test])) > 1:
        validation = keys == keys[~test].min()
    return test, validation if validation.any() else test


def source_of(data: Any) -> Source:
    """Return the rows that a conf/data yaml names, without reading them. Raise ValueError if it names none."""
    names = {field.name for field in fields(Source)}
    if "path" not in data or data._target_ != "foredraft.train.data.conversations.corpus":
        raise ValueError("these data are not conversations: give data=conversations data.path=FILE, or a set by name")
    if not isinstance(data.path, str):
        raise ValueError(f"data.path={data.path}: give one set at a time here")
    return Source(**{name: value for name, value in data.items() if name in names})
