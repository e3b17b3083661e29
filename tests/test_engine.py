"""The engine: requests join and leave between steps, each with settings of its own, and every text is the plain one."""

import pytest
import torch
from transformers import GenerationConfig, MinPLogitsWarper

from foredraft.heads import Target
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target import cuda_graphs
from foredraft.inference import Engine, Request, SamplingParams, generate
from foredraft.inference.drafters import (
    AutoTree,
    BlockTree,
    Drafter,
    DraftModel,
    DynamicTree,
    Lookahead,
    NgramDrafter,
    StaticTree,
    SuffixDrafter,
    Union,
)
from foredraft.inference.sampling import Sampling
from tests.support.tape import Tape

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(frequency_penalty=0.6, logit_bias=((7, 2.0), (9, float("-inf")))),
]


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def target(target_anywhere: Target) -> Target:
    return target_anywhere


def requests() -> list[Request]:
    """Six of different lengths, budgets and settings."""
    sizes = zip((3, 11, 1, 7, 5, 9), (12, 30, 5, 18, 1, 24), PARAMS, strict=True)
    return [Request(prompt(length, i), params, new, seed=i) for i, (length, new, params) in enumerate(sizes)]


def drafter(name: str, target: Target) -> Drafter | None:
    eagle = Eagle3Head.for_target(target, depth=3, draft_vocab_size=200, counts=torch.arange(target.vocab_size)).eval()
    tree = DynamicTree(eagle, target, nodes=8, depth=3, width=2, min_probability=0)
    medusa = StaticTree(MedusaHead.for_target(target, depth=3).eval(), target, nodes=6)
    return {
        "plain": lambda: None,
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "lookahead": Lookahead,
        "eagle3": lambda: tree,
        "dflash": lambda: BlockTree(DFlashHead.for_target(target, block_size=4, num_layers=2).eval(), target, nodes=8),
        "medusa": lambda: medusa,
        "auto": lambda: AutoTree(tree, target),
        "draft model": lambda: DraftModel(target, target, nodes=5, depth=3, width=2, min_probability=0),
        "union": lambda: Union([tree, NgramDrafter()]),
        "union of auto": lambda: Union([AutoTree(tree, target), NgramDrafter(depth=2)]),
    }[name]()


@pytest.fixture(scope="module")
def alone(target) -> list[list[int]]:
    """Each request's text, decoded plainly and by itself."""
    texts: list[list[int]] = []
    for request in requests():
        engine = Engine(target)
        engine.add(request)
        texts.append([])
        while engine.has_work:
            texts[-1] += engine.step()[0].tokens
    return texts


@pytest.mark.parametrize(
    "name",
    ["plain", "ngram", "suffix", "lookahead", "eagle3", "medusa", "auto", "draft model", "union", "union of auto"],
)
def test_requests_join_and_leave_between_steps(target, alone, name):
    engine, asked = Engine(target, drafter(name, target), max_num_seqs=3), requests()
    texts: dict[Request, list[int]] = {request: [] for request in asked}
    coming = iter(asked)
    for request in (next(coming), next(coming)):
        engine.add(request)
    steps, sizes, reasons = 0, set(), {}
    while engine.has_work or steps < 10:
        for output in engine.step():
            texts[output.request] += output.tokens
            reasons[output.request] = output.finish_reason
        sizes.add(len(engine.batch.sequences))
        steps += 1
        late = next(coming, None) if steps % 2 == 0 else None
        if late is not None:
            engine.add(late)
    assert list(texts.values()) == alone
    assert set(reasons.values()) == {"length"} and sizes >= {2, 3}


@pytest.mark.parametrize("name", ["eagle3", "medusa", "auto", "draft model", "dflash"])
def test_a_long_prompt_joins_a_long_text(target, name):
    """Together they are longer than either may become: what is padding in one row must find room, too."""
    asked = [Request(prompt(120, 0), max_new_tokens=60), Request(prompt(200, 1), max_new_tokens=5)]
    engine, texts = Engine(target, drafter(name, target)), {request: list[int]() for request in asked}
    engine.add(asked[0])
    while engine.has_work:
        if len(texts[asked[0]]) > 30 and not texts[asked[1]]:
            engine.add(asked[1])
        for output in engine.step():
            texts[output.request] += output.tokens
    for request, text in texts.items():
        ids, size = torch.tensor([request.prompt]), request.max_new_tokens
        assert text == generate(target, None, ids, max_new_tokens=size, eos_token_id=-1).new_tokens[0]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["plain", "suffix", "lookahead", "eagle3", "medusa", "auto", "union", "dflash"])
def test_the_cache_grows_with_the_texts(target, alone, name, captured, monkeypatch):
    """Not with what they may become. Rows that have ended do not grow with it."""
    monkeypatch.setattr("foredraft.inference.batch.ROOM", 2)
    monkeypatch.setattr("foredraft.heads.target.cache.MIN_BUCKET", 8)
    if captured:
        monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
        target = Target(target.model, target.tokenizer, target.name)  # without the cache that another engine gave back
    engine, asked, sizes = Engine(target, drafter(name, target)), requests(), list[tuple[int, int]]()
    texts: dict[Request, list[int]] = {request: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            texts[output.request] += output.tokens
        cache = engine.batch.open_cache()
        sizes.append((cache.capacity, len(engine.batch.sequences)))
    assert list(texts.values()) == alone
    capacities, rows = zip(*sizes, strict=True)
    assert capacities[0] < max(capacities)
    assert name not in ("plain", "eagle3") or rows[0] > min(rows)  # others grow once, before a row has ended


def test_a_prompt_that_cannot_be_read_is_refused_before_it_joins(target):
    engine = Engine(target)
    with pytest.raises(ValueError, match="empty"):
        engine.add(Request([]))
    with pytest.raises(ValueError, match=r"256 tokens, the target .* takes 256"):
        engine.add(Request(prompt(256, 0)))
    assert not engine.has_work


def test_an_end_token_gives_its_reason(target):
    text = generate(target, None, torch.tensor([prompt(5, 3)]), max_new_tokens=8, eos_token_id=-1).new_tokens[0]
    out = generate(target, None, torch.tensor([prompt(5, 3)] * 2), max_new_tokens=8, eos_token_id=text[4])
    assert out.finish_reasons == ["stop"] * 2 and out.new_tokens[0] == text[: text.index(text[4]) + 1]
    assert generate(target, None, torch.tensor([prompt(5, 3)]), max_new_tokens=4, eos_token_id=-1).finish_reasons == [
        "length"
    ]


def test_min_p_is_transformers_own():
    logits = torch.randn(4, 50)
    ours = Sampling.of([SamplingParams(temperature=1.0, min_p=0.1)] * 4, 50).warp(logits[:, None])[:, 0]
    assert torch.equal(ours, MinPLogitsWarper(0.1)(torch.zeros(4, 1).long(), logits))


def test_penalties_count_the_new_text_alone():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logits, counts = torch.zeros(1, 1, 4), torch.tensor([[[0, 1, 2, 3]]])
    processed = Sampling.of([params], 4).process(logits, counts, torch.ones(1, 1, 4, dtype=torch.bool))
    assert processed.tolist() == [[[0.0, -0.75, -1.0, -1.25]]]


@pytest.mark.parametrize("name", ["plain", "draft model"])
def test_a_frequency_penalty_acts_within_an_accepted_path(target, name):
    """Far above any logit, so that no token is written twice; the draft model drafts just what it would write without."""
    ids = torch.tensor([prompt(6, 1)])
    settings = {"max_new_tokens": 30, "eos_token_id": -1, "frequency_penalty": 1e4}
    text = generate(target, drafter(name, target), ids, **settings).new_tokens[0]
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
    sampled = generate(target, None, ids, temperature=0.8, **warm).new_tokens
    assert generate(target, None, ids, do_sample=True, temperature=0.8, **warm).new_tokens == sampled
    assert (
        generate(
            target, None, ids, generation_config=GenerationConfig(do_sample=True, temperature=0.8), **warm
        ).new_tokens
        == sampled
    )
    greedy = generate(target, None, ids, **warm).new_tokens
    assert generate(target, None, ids, do_sample=False, temperature=0.8, **warm).new_tokens == greedy != sampled
    assert generate(target, None, ids, generation_config=GenerationConfig(temperature=0.8), **warm).new_tokens == greedy


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size=1"),
        ({"min_new_tokens": 1}, "min_new_tokens=1"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"num_beams": True}, "num_beams=True"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"temprature": 1.0}, "temprature=1.0 is not known.*temperature"),
        ({"bad_words_ids": [[3, 4]]}, r"bad_words_ids=\[3, 4\]"),
        ({"logit_bias": {400: 1.0}}, "token 400"),
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
    assert len(generate(target, None, ids, max_new_tokens=3, **off).new_tokens[0]) == 3


def test_text_in_the_place_of_ids_is_named(target):
    with pytest.raises(ValueError, match="input_ids is str"):
        generate(target, None, "def main():")


def test_a_streamer_ends_where_there_is_nothing_to_write(target):
    ended = []

    class Streamer:
        def put(self, tokens): ...
        def end(self):
            ended.append(True)

    out = generate(target, None, torch.tensor([prompt(4, 0)]), max_new_tokens=0, streamer=Streamer())
    assert ended == [True] and out.new_tokens == [[]] and out.sequences.shape == (1, 4)


def test_a_row_that_fills_the_context_writes_nothing_alone_and_in_a_batch(target):
    ids = torch.zeros(2, 256, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ids[0], mask[0] = torch.tensor(prompt(256, 1)), 1
    ids[1, -5:], mask[1, -5:] = torch.tensor(prompt(5, 2)), 1
    out = generate(target, None, ids, mask, max_new_tokens=6, eos_token_id=-1)
    short = generate(target, None, ids[1:, -5:], max_new_tokens=6, eos_token_id=-1, seed=1)
    assert out.new_tokens == [[], short.new_tokens[0]]
