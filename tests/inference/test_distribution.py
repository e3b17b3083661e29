"""Generated texts follow the target's distribution, as transformers computes it."""

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from foredraft.heads import Target
from foredraft.inference import Engine, Request, SamplingParams
from foredraft.inference.drafters import DraftModel
from tests.support.tiny import random_model

VOCAB, NEW, TEXTS = 16, 3, 400
PARAMS = [
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=4, top_p=0.9),
]


def model(layers: int) -> Target:
    changes = {"vocab_size": VOCAB, "hidden_size": 16, "initializer_range": 0.6}
    return random_model(3, layers, **changes)


@pytest.fixture(scope="module")
def small() -> Target:
    return model(2)


@torch.inference_mode()
def probabilities(target: Target, prompt: list[int], params: SamplingParams, temperature: float = 1.0) -> Tensor:
    """Return (VOCAB ** NEW,): the probability of each text of NEW tokens, from forwards without a cache."""
    total, texts = torch.ones(1), torch.tensor([prompt])
    for _ in range(NEW):
        scores = TemperatureLogitsWarper(temperature)(None, target.model(texts).logits[:, -1])
        scores = TopKLogitsWarper(params.top_k)(None, scores) if params.top_k else scores
        scores = TopPLogitsWarper(params.top_p)(None, scores) if params.top_p else scores
        total = (total[:, None] * scores.softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], 1)
    return total


def chance(counts: Tensor, expected: Tensor) -> float:
    """Return the chance of counts that differ as much by chi-square; texts expected fewer than 5 times are one cell."""
    rare = expected < 5
    counts, expected = (torch.cat([each[~rare], each[rare].sum()[None] + 1e-9]) for each in (counts, expected))
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2), chi_square / 2))


def test_sampled_texts_of_a_batch_follow_the_targets_distribution(small: Target) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    asked = [Request(prompts[i % 3], PARAMS[i % 3], NEW, seed=i) for i in range(3 * TEXTS)]
    engine = Engine(small, DraftModel(model(1), small, nodes=4, depth=2), max_num_seqs=200)
    texts = {request: list[int]() for request in asked}
    accepted = 0
    for request in asked:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            texts[output.request] += output.tokens
            accepted += output.accepted or 0
    assert accepted > TEXTS / 2
    cells = torch.tensor([*texts.values()]) @ torch.tensor([VOCAB**2, VOCAB, 1])
    for kind, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True)):
        counts = torch.bincount(cells[kind::3], minlength=VOCAB**NEW).float()
        expected = TEXTS * probabilities(small, prompt, params)
        assert not counts[expected == 0].any() and chance(counts, expected) > 1e-3
        assert chance(counts, TEXTS * probabilities(small, prompt, params, 0.6)) < 1e-6
