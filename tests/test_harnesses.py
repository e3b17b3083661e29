"""Our drafters inside the harnesses that others measure with."""

import json

import pytest
import torch

from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.evaluation.spec_bench import as_forward_func


def test_spec_bench_calls_our_loop(target, tmp_path):
    """Call it as `get_model_answers` of its evaluation/eval.py calls a forward_func, over rows of its question.jsonl."""
    file = tmp_path / "question.jsonl"
    rows = [{"question_id": 81, "category": "writing", "turns": ["def add(self", "class Pair"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, drafted = as_forward_func(target, None), as_forward_func(target, NgramDrafter())
    for question in map(json.loads, file.read_text().splitlines()):
        for turn in question["turns"]:
            inputs = target.tokenizer([turn], return_tensors="pt")
            given = (inputs, target.model, target.tokenizer, 24)
            (ids, new, steps, gained), (expected, _, slow, ones) = drafted(*given), plain(*given)
            assert torch.equal(ids, expected) and ids.shape[1] == inputs.input_ids.shape[1] + new
            assert steps == len(gained) and sum(gained) == new - 1  # the first token comes of the prompt
            assert set(ones) <= {1} and steps <= slow
    with pytest.raises(ValueError, match="not for the model"):
        drafted(inputs, None, target.tokenizer, 4)


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
