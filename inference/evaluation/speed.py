"""Who decodes faster? Every contender continues the same prompts, one at a time, all in turn on each prompt, so that a
change of the machine's speed meets all alike."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.target import Target
from inference.drafters.base import Drafter
from inference.generation import Generation, generate

Contender = Callable[
    [Tensor, int], tuple[int, Generation | None]
]  # prompt (1, length) and seed -> new tokens, and more


class Result(NamedTuple):
    """Of one contender, an entry per prompt."""

    seconds: list[float]
    tokens: list[int]
    generations: list[Generation]  # none of a rival's

    def rate(self, chosen: list[int]) -> float:
        """Tokens per second over these prompts."""
        return sum(self.tokens[i] for i in chosen) / sum(self.seconds[i] for i in chosen)


def ours(target: Target, drafter: Drafter | None, new_tokens: int, temperature: float = 0.0) -> Contender:
    def decode(ids: Tensor, seed: int) -> tuple[int, Generation]:
        limits: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1}
        out = generate(target, drafter, ids, temperature=temperature, seed=seed, **limits)
        return len(out.new_tokens[0]), out

    return decode


def transformers(target: Target, settings: dict[str, Any], new_tokens: int, temperature: float = 0.0) -> Contender:
    """`generate` of transformers itself. settings: of its assisted generation; {} is plain."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def decode(ids: Tensor, seed: int) -> tuple[int, None]:
        torch.manual_seed(seed)
        facts = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        out = target.model.generate(ids, max_new_tokens=new_tokens, **facts, **sampling, **settings)
        return out.shape[1] - ids.shape[1], None

    return decode


def race(contenders: dict[str, Contender], rows: list[list[int]], device: torch.device) -> dict[str, Result]:
    """All of them over all prompts, after a warm-up on the first."""
    results = {name: Result([], [], []) for name in contenders}
    for number, row in enumerate([rows[0], *rows]):
        ids = torch.tensor([row], device=device)
        for name, decode in contenders.items():
            start = time.perf_counter()
            count, generation = decode(ids, number)
            if number:
                results[name].seconds.append(time.perf_counter() - start)
                results[name].tokens.append(count)
                results[name].generations.extend([generation] if generation is not None else [])
    return results
