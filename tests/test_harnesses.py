"""Our drafters inside the harnesses that others measure with."""

import pytest


def test_lm_eval_writes_the_answers_of_its_own_model(tiny_path):
    pytest.importorskip("lm_eval", reason="pip install lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from foredraft.inference.evaluation.lm_eval_model import Foredraft

    asked = [("def add(self, other):", {"until": ["\n\n"], "max_gen_toks": 20}), ("class Pair", {"max_gen_toks": 16})]
    asked += [("return", {"until": ["self"], "max_gen_toks": 20, "do_sample": False})]
    requests = [Instance("generate_until", {}, one, number) for number, one in enumerate(asked)]
    facts = {"pretrained": str(tiny_path), "device": "cpu", "batch_size": 2}
    ours = Foredraft(drafter="ngram", dtype="float32", **facts).generate_until(requests, disable_tqdm=True)
    assert ours == HFLM(dtype="float32", **facts).generate_until(requests, disable_tqdm=True)
    assert any(ours)
