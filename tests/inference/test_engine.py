"""The engine: requests join and leave between steps, each with its own settings, and every text is the baseline's."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from foredraft.heads import Target
from foredraft.heads.caches import cuda_graphs
from foredraft.inference import Engine, Request, SamplingParams, generate
from foredraft.inference.drafters import NgramDrafter
from foredraft.inference.sampling import Sampling
from tests.support import decoding, nightly_but
from tests.support.decoding import drafters, prompt, requests, run, with_trees
from tests.support.modes import Tape

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", params=DEVICES)
def target(request: pytest.FixtureRequest, tiny_path: Path) -> Target:
    """Load the target on the CPU, and on a GPU if present."""
    return with_trees(Target.from_pretrained(tiny_path, dtype="float32", device=request.param))


@pytest.fixture(scope="module")
def alone(target) -> list[list[int]]:
    return decoding.alone(target, requests())


@pytest.mark.parametrize(
    "name",
    ["plain", "ngram", "suffix", "lookahead", "eagle3", "medusa", "eagle3 auto", "itself", "union", "union of auto"],
)
def test_requests_join_and_leave_between_steps(target, alone, name):
    engine, asked, sizes = Engine(target, drafters(target).get(name), max_num_seqs=3), requests(), set()
    coming = iter(asked[2:])

    def between(step: int) -> None:
        sizes.add(len(engine.slots.sequences))
        if step and step % 2 == 0 and (late := next(coming, None)) is not None:
            engine.add(late)

    texts, reasons = run(engine, asked[:2], between, *asked[2:])
    rows = {2, 4} if target.capabilities.captures else {2, 3}  # graphs are captured for powers of two
    assert texts == alone and set(reasons) == {"length"} and sizes >= rows


REPLACED = ["plain", "suffix", "lookahead", "eagle3", "medusa", "eagle3 auto", "union", "dflash"]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", nightly_but(REPLACED, "suffix", "medusa", "eagle3"))
def test_slots_are_replaced_by_more_and_larger_ones(target, alone, name, captured, monkeypatch):
    """Let requests come one by one, so that neither the number of slots nor their size is known. They change rarely."""
    monkeypatch.setattr("foredraft.heads.caches.kv_cache.MIN_BUCKET", 8)
    if captured:
        monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
        target = Target(target.model, target.tokenizer, target.name)  # without the cache that another engine gave back
    engine, sizes, asked = Engine(target, drafters(target).get(name)), list[tuple[int, int]](), requests()
    coming = iter(asked[1:])

    def between(step: int) -> None:
        if step:
            sizes.append((engine.slots.capacity, len(engine.slots.slots)))
        if (late := next(coming, None)) is not None:
            engine.add(late)

    assert run(engine, asked[:1], between, *asked[1:])[0] == alone
    capacities, counts = zip(*sizes, strict=True)
    assert list(capacities) == sorted(capacities) and list(counts) == sorted(counts)
    assert len(set(sizes)) <= 4 and counts[-1] > counts[0]


def test_what_cannot_be_read_is_refused_before_it_joins(target):
    engine = Engine(target)
    for tokens, bias, message in (
        ([], (), "empty"),
        (prompt(256, 0), (), r"256 tokens, but the target .* supports 256"),
        ([3, target.vocab_size], (), "the prompt contains token"),
        ([3, -1], (), "the prompt contains token -1"),
        ([3], ((target.vocab_size, 1.0),), "logit_bias"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.add(Request(tokens, SamplingParams(logit_bias=bias)))
    assert not engine.has_work


def test_penalties_count_the_new_text_alone():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logits, counts = torch.zeros(1, 1, 4), torch.tensor([[[0, 1, 2, 3]]])
    processed = Sampling.of([params], 4).process(logits, counts, torch.ones(1, 1, 4, dtype=torch.bool))
    assert processed.tolist() == [[[0.0, -0.75, -1.0, -1.25]]]


@pytest.mark.parametrize("name", ["plain", "itself"])
def test_a_frequency_penalty_acts_within_an_accepted_path(target, name):
    """Use a penalty far above any logit, so that no token is written twice; the draft model drafts just what it would write
    without."""
    ids = torch.tensor([prompt(6, 1)])
    settings = {"max_new_tokens": 30, "eos_token_id": -1, "frequency_penalty": 1e4}
    text = generate(target, drafters(target).get(name), ids, **settings).new_tokens[0]
    assert len(set(text)) == 30


def test_banned_tokens_are_never_written(target):
    ids, limits = torch.tensor([prompt(6, 1)]), {"max_new_tokens": 20, "eos_token_id": -1}
    plain = generate(target, None, ids, **limits).new_tokens[0]
    for ban in ({"logit_bias": {plain[0]: float("-inf")}}, {"bad_words_ids": [[plain[0]], [plain[3]]]}):
        assert plain[0] not in generate(target, NgramDrafter(), ids, **limits, **ban).new_tokens[0]
    wanted = generate(target, None, ids, **limits, logit_bias={11: 1e4}).new_tokens[0]
    assert wanted == [11] * 20


def test_a_generation_config_is_read_as_transformers_reads_it(target):
    ids = torch.tensor([prompt(6, 2)])
    config = GenerationConfig(max_new_tokens=12, repetition_penalty=1.4, eos_token_id=[], pad_token_id=5)
    theirs = target.model.generate(ids.to(target.device), generation_config=config, do_sample=False)
    ours = generate(target, NgramDrafter(), ids, generation_config=config).sequences
    assert ours.tolist() == theirs.tolist()
    assert generate(target, None, ids, max_length=10, eos_token_id=-1).sequences.shape == (1, 10)
    warm = {"max_new_tokens": 12, "eos_token_id": -1, "seed": 4}

    def text(**settings) -> list[list[int]]:
        return generate(target, None, ids, **warm, **settings).new_tokens

    sampled, greedy = text(temperature=0.8), text()
    assert greedy != sampled == text(do_sample=True, temperature=0.8)
    assert text(generation_config=GenerationConfig(do_sample=True, temperature=0.8)) == sampled
    assert text(generation_config=GenerationConfig(max_new_tokens=12), temperature=0.8) == sampled
    assert text(do_sample=False, temperature=0.8) == greedy == text(generation_config=GenerationConfig(temperature=0.8))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size=1"),
        ({"min_new_tokens": 1}, "min_new_tokens=1"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"num_beams": True}, "num_beams=True"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"token_type_ids": torch.ones(1, 6)}, "token_type_ids"),
        ({"token_type_ids": "x"}, "token_type_ids=x"),
        ({"temprature": 1.0}, "temprature=1.0 is not a setting.*temperature"),
        ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids=\[3, 4\]"),
        ({"logit_bias": {400: 1.0}}, "token 400"),
        ({"logit_bias": {4: float("nan")}}, "logit_bias={4: nan} must be a finite number"),
        ({"logit_bias": {4: float("inf")}}, "logit_bias={4: inf} must be a finite number"),
        ({"min_p": 2.0, "temperature": 1.0}, "min_p=2.0"),
        ({"do_sample": True, "temperature": 0.0}, "temperature=0"),
        ({"max_length": 3}, "max_length=3"),
    ],
)
def test_what_is_not_done_is_refused_by_name(target, settings, message):
    with pytest.raises(ValueError, match=message):
        generate(target, None, torch.tensor([prompt(6, 2)]), **settings)


def test_settings_that_are_off_are_no_settings(target):
    off = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "use_cache": True, "output_scores": False}
    ids = torch.tensor([prompt(6, 2)])
    off |= {"token_type_ids": torch.zeros_like(ids)}
    assert len(generate(target, None, ids, max_new_tokens=3, **off).new_tokens[0]) == 3
    assert generate(target, None, ids, max_new_tokens=3, token_type_ids=None).new_tokens


def test_a_row_that_fills_the_context_writes_nothing_alone_and_in_a_batch(target):
    ids = torch.zeros(2, 256, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ids[0], mask[0] = torch.tensor(prompt(256, 1)), 1
    ids[1, -5:], mask[1, -5:] = torch.tensor(prompt(5, 2)), 1
    out = generate(target, None, ids, mask, max_new_tokens=6, eos_token_id=-1)
    short = generate(target, None, ids[1:, -5:], max_new_tokens=6, eos_token_id=-1, seed=1)
    assert out.new_tokens == [[], short.new_tokens[0]]
