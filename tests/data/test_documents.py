"""Documents as flat arrays, rows put together when they are read, and sets prepared once for all processes."""

import itertools
import json
import os
import pickle
import sys
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from foredraft.train.checks import check_config
from foredraft.train.data import conversations, sources
from foredraft.train.data.conversations import corpus
from foredraft.train.data.documents import Documents
from foredraft.train.data.packing import Packed, collate
from foredraft.train.data.row_order import sockets_fit
from tests.support import ROOT
from tests.support.batches import documents
from tests.support.chats import CHATML, tokenizer
from tests.support.configs import composed
from tests.support.processes import end, start

COLUMNS = {"tokens": "int32", "flags": "uint8"}


def test_joined_and_selected_documents_are_the_same_documents():
    texts = documents(4, 9, 1, 30)
    parts = [Documents.of(texts[:1]), Documents.of(texts[1:3]), Documents.of([]), Documents.of(texts[3:])]
    whole = Documents.joined(parts)
    assert list(whole) == texts and list(whole.select(np.array([2, 0]))) == [texts[2], texts[0]]
    assert whole.digest == Documents.of(texts).digest != whole.select(np.array([1, 0, 2, 3])).digest
    assert whole.supervised == sum(sum(text.loss_mask) for text in texts)


def arrow_file(folder: Path) -> str:
    """Write 100 documents, 2.5 MB."""
    texts = [{"tokens": [n] * 5_000, "flags": [n % 2] * 5_000} for n in range(100)]
    features = datasets.Features({name: datasets.List(datasets.Value(kind)) for name, kind in COLUMNS.items()})
    stored = datasets.Dataset.from_generator(lambda: iter(texts), features=features, cache_dir=str(folder))
    [file] = stored.cache_files
    return file["filename"]


def test_mapped_documents_go_to_another_process_as_their_files_name(tmp_path: Path):
    """Check that they are pickled: a loader's workers are spawned on macOS, and on Linux from Python 3.14 on."""
    own = documents(4, 9)
    parts = [Documents.of(own), Documents.mapped(arrow_file(tmp_path)), Documents.of(own)]
    given = Documents.joined(parts).select(np.array([1, 7, 40, 103]))
    given.weights = np.array([0.0, 1.0])
    sent = pickle.dumps(given)
    assert len(sent) < 20_000
    found = pickle.loads(sent)
    assert list(found) == list(given) and found.digest == given.digest and found.weights.tolist() == [0, 1]
    assert list(pickle.loads(pickle.dumps(found))) == list(given)


@pytest.mark.nightly
def test_spawned_workers_read_rows_of_mapped_documents(tmp_path: Path):
    packed = Packed(Documents.mapped(arrow_file(tmp_path)), 64, 0)
    rows = DataLoader(packed, 4, num_workers=1, multiprocessing_context="spawn", collate_fn=collate)
    alone = DataLoader(packed, 4, collate_fn=collate)
    for ours, theirs in itertools.islice(zip(rows, alone, strict=True), 9):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def write(path: Path, count: int, word: str = "it is") -> Path:
    rows = [{"prompt": f"what is {i}?", "response": f"{word} {i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_several_processes_give_the_documents_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write(tmp_path / "rows.jsonl", 300)
    alone = corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path / "one"), num_proc=1)
    monkeypatch.setattr(sources, "SHARD", 4000)
    shards = sources.shards(file)
    assert len(shards) > 3 and [row.where for shard in shards for row in shard()] == [
        f"rows.jsonl:{number}" for number in range(1, 301)
    ]
    several = corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path / "two"), num_proc=2)
    assert list(several.train) == list(alone.train) and several.card == alone.card
    assert not several.train.chunks[0].tokens.flags.owndata  # but mapped


def test_a_system_without_affinity_takes_one_process_per_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    file = write(tmp_path / "rows.jsonl", 9)
    assert len(corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path / "cache")).train)


def test_where_a_path_is_too_long_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that one process reads data, and that training with others, which would wait for ever, is refused."""
    for more, fits in ((0, True), (1, False)):
        path = "/".ljust((75 if sys.platform == "linux" else 71) + more, "x")
        monkeypatch.setattr(tempfile, "gettempdir", path.__str__)
        assert sockets_fit() == fits
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", 9)
    assert len(corpus(tokenizer(CHATML), path=str(tmp_path), cache_dir=str(tmp_path / "cache"), num_proc=2).train)
    with pytest.raises(ValueError, match=r"TMPDIR=.*long is too long for the sockets .*set it to a path of at most"):
        check_config(composed("train", "target.path=none", "hidden_states=offline"))


PREPARE = """
import sys
from tests.support.chats import CHATML, tokenizer
from foredraft.train.data import encoding
from foredraft.train.data.conversations import corpus
rows = encoding.Encoder.rows
encoding.Encoder.rows = lambda self, shards: print("prepares", flush=True) or rows(self, shards)
print(corpus(tokenizer(CHATML), path=sys.argv[1], cache_dir=sys.argv[2]).train.digest)
"""


def test_one_of_several_processes_prepares_and_the_others_wait(tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", 2000)
    command = [sys.executable, "-c", PREPARE, str(file), str(tmp_path / "cache")]
    ranks = [start(*command, cwd=ROOT) for _ in range(3)]
    printed = [end(rank).out.split() for rank in ranks]
    assert (
        sorted(words.count("prepares") for words in printed) == [0, 0, 1] and len({words[-1] for words in printed}) == 1
    )


def test_weights_say_how_often_a_set_is_read(tmp_path: Path):
    one, two = write(tmp_path / "one.jsonl", 200), write(tmp_path / "two.jsonl", 200, "maybe")

    def count(weights: list[float] | None) -> list[int]:
        data = corpus(
            tokenizer(CHATML), path=[str(one), str(two)], weights=weights, cache_dir=str(tmp_path), val_split=0.1
        )
        texts = [bytes(document.tokens) if max(document.tokens) < 256 else document.tokens for document in data.train]
        words = [tokenizer(CHATML).decode(text) for text in texts]
        return [sum(word in text for text in words) for word in ("it is", "maybe")]

    plain, mixed = count(None), count([2, 0.5])
    assert mixed[0] == 2 * plain[0] and 0.3 * plain[1] < mixed[1] < 0.7 * plain[1]
    with pytest.raises(ValueError, match=r"data.weights=\[1\] must be one number"):
        count([1])


def test_half_of_a_set_is_chosen_by_conversations():
    keys = np.repeat(np.arange(1000) * 7919 % 2**31, 2)  # two documents of each
    chosen = conversations.weighted(np.arange(2000), keys, np.full(2000, 0.5))
    assert (np.bincount(keys[chosen] // 7919 % 1000)[keys[chosen] // 7919 % 1000] == 2).all()
    assert 800 < len(chosen) < 1200
