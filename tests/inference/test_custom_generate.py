"""`model.generate` with our loop inside gives what it gives without."""

import pytest
import torch
from transformers import LogitsProcessorList, MinLengthLogitsProcessor, pipeline, set_seed

from foredraft.inference import generate
from foredraft.inference.custom_generate import as_custom_generate
from foredraft.inference.drafters import NgramDrafter


def inputs(target):
    batch = target.tokenizer(
        ["def add(self", "class Pair:\n    pass"], padding=True, padding_side="left", return_tensors="pt"
    )
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "max_new_tokens": 20}


@pytest.fixture(autouse=True)
def padded(target):
    target.tokenizer.pad_token = target.tokenizer.eos_token


def test_generate_writes_the_same(target):
    ours = as_custom_generate(target, NgramDrafter())
    ends = target.model.generate(**inputs(target), do_sample=False)[0, -15:-14].tolist()  # of one row before the other
    padded_by_an_end = {"eos_token_id": [319, *ends], "pad_token_id": None}
    for settings in ({}, {"repetition_penalty": 1.3}, {"eos_token_id": [*ends, 319]}, padded_by_an_end):
        common = inputs(target) | {"do_sample": False, "pad_token_id": 17} | settings
        plain = target.model.generate(**common)
        assert torch.equal(target.model.generate(**common, custom_generate=ours), plain)
        assert torch.equal(generate(target, NgramDrafter(), **common).sequences, plain)


def test_sampling_obeys_set_seed_and_the_warpers(target):
    ours = as_custom_generate(target, None)
    common = inputs(target) | {"do_sample": True, "top_k": 1, "pad_token_id": 0}
    greedy = target.model.generate(**(common | {"do_sample": False, "top_k": None}))
    assert torch.equal(target.model.generate(**common, custom_generate=ours), greedy)
    texts = []
    for seed in (1, 2, 1):
        set_seed(seed)
        texts.append(target.model.generate(**(common | {"top_k": 0}), custom_generate=ours))
    assert torch.equal(texts[0], texts[2]) and not torch.equal(texts[0], texts[1])


def test_a_pipeline_drafts(target):
    writer = pipeline("text-generation", model=target.model, tokenizer=target.tokenizer)
    ours = as_custom_generate(target, NgramDrafter())
    settings = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    plain = writer("def add(self, other)", **settings)[0]["generated_text"]
    assert writer("def add(self, other)", **settings, custom_generate=ours)[0]["generated_text"] == plain != ""


def test_what_it_does_not_know_is_refused(target):
    ours = as_custom_generate(target, None)
    with pytest.raises(ValueError, match="MinLengthLogitsProcessor"):
        processors = LogitsProcessorList([MinLengthLogitsProcessor(5, 0)])
        target.model.generate(**inputs(target), do_sample=False, logits_processor=processors, custom_generate=ours)
    with pytest.raises(ValueError, match="num_beams=2"):
        target.model.generate(**inputs(target), do_sample=False, num_beams=2, custom_generate=ours)
