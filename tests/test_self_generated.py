"""Text next to a target's weights is used for the very data and weights that it came from, and for nothing else."""

import torch
from transformers import LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.checkpoint import fingerprint
from foredraft.train.data import corpus, self_generated
from foredraft.train.data.documents import Document, Documents
from tests.support.tiny import tiny_config


def test_text_beside_the_weights_is_found_for_its_weights_and_data_only(tmp_path):
    for name, seed in (("one", 0), ("other", 1)):
        torch.manual_seed(seed)
        LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / name)
    target, other = (Target.from_pretrained(str(tmp_path / name), dtype="float32") for name in ("one", "other"))
    documents = [
        Document([5, 6, *range(20)], [False] * 2 + [True] * 20),
        Document([7, *range(9)], [False] + [True] * 9),
    ]
    assert self_generated.load_stored(target, "books", 1) is None
    facts = {"source": "books", "embedding_digest": fingerprint(target)["embedding_digest"]}
    for name in ("one", "other"):  # the second time not by the weights that lie there
        self_generated.save(Documents.of(documents), tmp_path / name / self_generated.NAME, torch.int16, **facts)
    for tokens, found in ((20, documents[:1]), (21, documents), (29, documents)):
        assert list(self_generated.load_stored(target, "books", tokens)) == found
    assert self_generated.load_stored(target, "books", 30) is None
    assert self_generated.load_stored(target, "letters", 1) is None
    assert self_generated.load_stored(other, "books", 1) is None

    data = corpus.Corpus(Documents.of([]), [], [], {"source": "books"})
    own = self_generated.self_generate(target, data, 29, 0, tmp_path / "self_generated.safetensors")
    assert list(own.train) == documents


def test_long_beginnings_are_continued_a_few_at_a_time(target, tmp_path, monkeypatch):
    """Limit the batch: padded to the longest, its cache would be a hundred gigabytes."""
    monkeypatch.setattr(self_generated, "POSITIONS", 400)
    sizes, ask = [], self_generated.generate

    def generate(target, drafter, ids, *args, **settings):
        sizes.append(ids.shape)
        return ask(target, drafter, ids, *args, **settings)

    monkeypatch.setattr(self_generated, "generate", generate)
    lengths = [5, 190, 9, 40, 7, 160, 12, 30]
    texts = Documents.of([Document([*range(3, 3 + n), 4], [False] * n + [True]) for n in lengths])
    written = self_generated.write(target, texts, tokens=8 * 8, seed=0, begin=32, new=8)
    assert sorted(len(row.tokens) - sum(row.loss_mask) for row in written) == sorted(lengths)
    assert all(rows == 1 or rows * (length + 8) <= 400 for rows, length in sizes) and max(rows for rows, _ in sizes) > 1
