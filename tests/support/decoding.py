"""Requests, and an engine that decodes them to their end."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from foredraft.heads import Target
from foredraft.inference import Engine, Request, SamplingParams, generate
from foredraft.inference.drafters import Drafter
from tests.support import batches

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(frequency_penalty=0.6, logit_bias=((7, 2.0), (9, float("-inf")))),
]


def prompt(length: int, seed: int) -> list[int]:
    return batches.prompt(length, seed)[0].tolist()


def requests() -> list[Request]:
    """Return six requests of different lengths, budgets and settings."""
    sizes = zip((3, 11, 1, 7, 5, 9), (12, 30, 5, 18, 1, 24), PARAMS, strict=True)
    return [Request(prompt(length, i), params, new, seed=i) for i, (length, new, params) in enumerate(sizes)]


def run(
    engine: Engine, asked: Sequence[Request], between: Callable[[int], object] = lambda step: None, *late: Request
) -> tuple[list[list[int]], list[str | None]]:
    """Return texts and reasons; between(step) is called before each step, and adds late requests."""
    texts, reasons = {request: [] for request in (*asked, *late)}, dict.fromkeys((*asked, *late))
    for request in asked:
        engine.add(request)
    step = 0
    while engine.has_work:
        between(step)
        if engine.has_work:
            for output in engine.step():
                texts[output.request] += output.tokens
                reasons[output.request] = output.finish_reason
        step += 1
    return list(texts.values()), list(reasons.values())


def alone(target: Target, asked: Sequence[Request]) -> list[list[int]]:
    """Return each request's text, decoded separately and without drafts."""
    return [run(Engine(target), [request])[0][0] for request in asked]


def check_drafts(target: Target, drafter: Drafter | None, prompt: Tensor, *mask: Tensor, **settings: Any) -> None:
    """Check that something is drafted, and that the text is the target's own."""
    settings = {"max_new_tokens": 12, "eos_token_id": -1} | settings
    drafted = generate(target, drafter, prompt, *mask, **settings)
    assert drafted.new_tokens == generate(target, None, prompt, *mask, **settings).new_tokens
    assert any(step.nodes > 1 for step in drafted.steps)
