"""Text next to a target's weights is used for the very data and weights that it came from, and for nothing else."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.checkpoint import fingerprint
from foredraft.inference.engine import Engine
from foredraft.train.data import corpus
from foredraft.train.data.documents import Document, Documents
from foredraft.train.writing import self_generated
from foredraft.train.writing import writers as writing
from tests.support.tiny import tiny_config


def save(documents: list[Document], file: Path, **facts: str) -> None:
    masks = [list(document.loss_mask) for document in documents]
    values = {"lengths": list(map(len, masks)), "given": [mask.index(True) for mask in masks]}
    values["tokens"] = [token for document in documents for token in document.tokens]
    file.parent.mkdir(exist_ok=True)
    save_file({name: torch.tensor(value, dtype=torch.int16) for name, value in values.items()}, file, metadata=facts)


def test_text_beside_the_weights_is_found_for_its_weights_and_data_only(tmp_path):
    for name, seed in (("one", 0), ("other", 1)):
        torch.manual_seed(seed)
        LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / name)
    target, other = (Target.from_pretrained(str(tmp_path / name), dtype="float32") for name in ("one", "other"))
    documents = [
        Document([5, 6, *range(20)], [False] * 2 + [True] * 20),
        Document([7, *range(9)], [False] + [True] * 9),
    ]
    assert self_generated.stored(target, "books", 1) is None
    facts = {"source": "books", "embedding_digest": fingerprint(target)["embedding_digest"]}
    for name in ("one", "other"):  # the second time not by the weights that lie there
        save(documents, tmp_path / name / self_generated.NAME, **facts)
    for tokens, found in ((20, documents[:1]), (21, documents), (29, documents)):
        assert list(self_generated.stored(target, "books", tokens)) == found
    assert self_generated.stored(target, "books", 30) is None
    assert self_generated.stored(target, "letters", 1) is None
    assert self_generated.stored(other, "books", 1) is None

    data = corpus.Corpus(Documents.of([]), [], [], {"source": "books"})
    own = self_generated.self_generate(target, data, 29, 0, tmp_path / "self_generated.jsonl")
    assert list(own.train) == documents


def test_long_beginnings_are_continued_a_few_at_a_time(target, tmp_path, monkeypatch):
    """Limit the batch: each slot has room for the longest text, and many would be a hundred gigabytes."""
    monkeypatch.setattr(self_generated, "POSITIONS", 800)
    monkeypatch.setattr(self_generated, "NEW", 8)
    running = []

    class Watched(Engine):
        def step(self):
            outputs = super().step()
            running.append([len(one.request.prompt) for one in self.running() if one.finish_reason is None])
            return outputs

    monkeypatch.setattr(writing, "Engine", Watched)
    lengths = [5, 190, 9, 40, 7, 160, 12, 30]
    texts = Documents.of([Document([*range(3, 3 + n), 4], [False] * n + [True]) for n in lengths])
    written = self_generated.write(target, texts, 8 * 8, 0, tmp_path / "own.jsonl")
    assert sorted(len(row.tokens) - sum(row.loss_mask) for row in written) == sorted(lengths)
    assert 1 < max(map(len, running)) <= 800 // (max(lengths) + 8)


def test_a_killed_run_writes_the_rows_that_are_missing(target, tmp_path, monkeypatch):
    monkeypatch.setattr(self_generated, "START", 8)
    monkeypatch.setattr(self_generated, "NEW", 8)
    texts = Documents.of([Document(list(range(3, 83)), [True] * 80)])
    whole = self_generated.write(target, texts, 10 * 8, 0, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "killed.about.json").write_text((tmp_path / "whole.about.json").read_text())
    (tmp_path / "killed.jsonl").write_text("".join(lines[:4]) + lines[4][:-9])
    again = self_generated.write(target, texts, 10 * 8, 0, tmp_path / "killed.jsonl")
    assert list(again) == list(whole) and len(whole) == 10
    assert (tmp_path / "killed.jsonl").read_text().startswith("".join(lines[:4]))
