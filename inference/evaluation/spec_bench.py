"""Our drafters in Spec-Bench (github.com/hemingkx/Spec-Bench, arXiv:2401.07851), as the `forward_func` of its `run_eval`.

    run_eval(model=target.model, tokenizer=target.tokenizer, forward_func=as_forward_func(target, drafter), ...)

`foredraft evaluate prompts=spec_bench` also reads its questions (data/spec_bench/question.jsonl), without fastchat and
CUDA.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.generation import generate

# output ids (1, length), number of new tokens, number of steps, new tokens per forward
Forward = Callable[..., tuple[Tensor, int, int, list[int]]]


def as_forward_func(target: Target, drafter: Drafter | None, temperature: float = 0.0, seed: int = 0) -> Forward:
    """Return a `forward_func`. drafter: None is the baseline of Spec-Bench's speed.py. It raises ValueError for calls with
    another model."""

    def forward(inputs: Any, model: Any, tokenizer: Any, max_new_tokens: int) -> tuple[Tensor, int, int, list[int]]:
        if model is not target.model:
            raise ValueError(f"the drafter was loaded for {target.name}, not for the model that Spec-Bench passes")
        out = generate(
            target,
            drafter,
            inputs.input_ids,
            inputs.attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )
        emitted = [step.emitted[0] for step in out.steps]
        return out.sequences, len(out.new_tokens[0]), len(emitted), emitted

    return forward
