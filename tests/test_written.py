"""Text beside a target's weights is used for the very data and weights that it came from, and for nothing else."""

import torch
from transformers import LlamaForCausalLM

from heads import Target
from tests.conftest import tiny_config
from train import data, written
from train.packing import Document


def test_text_beside_the_weights_is_found_for_its_weights_and_data_only(tmp_path):
    for name, seed in (("one", 0), ("other", 1)):
        torch.manual_seed(seed)
        LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / name)
    target, other = (Target.from_pretrained(str(tmp_path / name), dtype="float32") for name in ("one", "other"))
    documents = [
        Document([5, 6, *range(20)], [False] * 2 + [True] * 20),
        Document([7, *range(9)], [False] + [True] * 9),
    ]
    assert written.find(target, "books", 1) is None
    written.keep(documents, "books", target, tmp_path / "one")
    written.keep(documents, "books", target, tmp_path / "other")  # not by the weights that lie there
    assert written.find(target, "books", 20) == documents[:1]
    assert written.find(target, "books", 21) == written.find(target, "books", 29) == documents
    assert written.find(target, "books", 30) is None
    assert written.find(target, "letters", 1) is None
    assert written.find(other, "books", 1) is None

    corpus = data.Corpus([], [], [], {"source": "books"})
    assert data.written_by(target, corpus, 29, 0, tmp_path / "written.json").train == documents
