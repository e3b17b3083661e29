"""Decode many prompts in batches, where no text is timed (benchmark.py times them), and check losslessness.

Losslessness is verified in float32, where forwards over one and over many tokens agree to 1e-5. In half precision their
rounding differs, and a tie between two tokens may be resolved either way (lossless.py audits this).
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.packing import num_weights
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.generation import Generation, generate

BATCH = 16  # prompts per batch where speed is not measured
NOT_CHECKED: dict[str, float | None] = {"identical_greedy": None, "identical_sampled": None}
REPETITIVE = 0.5  # a continuation with a smaller share of distinct 4-grams is a loop, which overestimates acceptance


def distinct(tokens: list[int], n: int = 4) -> float:
    """Return the share of distinct n-grams; 1.0 for texts without an n-gram."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def run(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    max_new_tokens: int,
    what: str = "decoding",
    seeds: Sequence[int] | None = None,
    **settings: Any,
) -> list[Generation]:
    """Decode the prompts, BATCH at a time. what: the activity that the progress bar names. seeds: of each prompt; prompt i
    has seed i if there are none."""
    seeds = range(len(prompts)) if seeds is None else seeds
    generations = []
    with Progress(what, len(prompts) * max_new_tokens, "tokens at most") as progress:
        settings |= {"max_new_tokens": max_new_tokens, "progress": progress.add}
        for start in range(0, len(prompts), BATCH):
            rows = prompts[start : start + BATCH]
            ids, mask = (part.to(target.device) for part in left_pad(rows))
            some = list(seeds[start : start + BATCH])
            generations.append(generate(target, drafter, ids, mask, seed=some, **settings))
    return generations


def left_pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask (batch, longest), padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def texts(generations: list[Generation]) -> list[list[int]]:
    return [prompt for generation in generations for prompt in generation.new_tokens]


def check_identical(
    target: Target, load: Callable[[Target], Drafter], prompts: list[list[int]], max_new_tokens: int, ends: bool = False
) -> dict[str, float | None]:
    """Return the shares of identical texts in float32, greedy and sampled at temperature 1; None without memory for a
    float32 target. load: returns the drafter for it."""
    exact = float32_target(target)
    if exact is None:
        return NOT_CHECKED
    limits: dict[str, Any] = {"what": "checking losslessness", **length_settings(max_new_tokens, ends)}
    drafter, shares = load(exact), dict[str, float | None]()
    for name, temperature in (("identical_greedy", 0.0), ("identical_sampled", 1.0)):
        both = [texts(run(exact, one, prompts, temperature=temperature, **limits)) for one in (None, drafter)]
        shares[name] = sum(a == b for a, b in zip(*both, strict=True)) / len(prompts)
    return shares


def float32_target(target: Target) -> Target | None:
    """Return the target in float32: itself, or loaded again (a cast in place could not be undone exactly), or None if the
    device lacks memory. A quantized target stays quantized and computes in float32, which reproduces its hidden states."""
    if target.dtype == torch.float32:
        return target
    if not target.quantization and not target.sharding:
        need = 4 * num_weights(target.model)
        free = free_memory(target.device)
        if free is not None and need > free:
            report(
                f"warning: the target in float32 needs {need / 2**30:.1f} GiB, but {free / 2**30:.1f} are free: losslessness "
                "is not checked (run scripts/lossless.py on a larger machine, or set eval.check_float32=false)"
            )
            return None
    names = ("device", "quantization", "sharding", "revision", "trust_remote_code", "context")
    same: dict[str, Any] = {name: getattr(target, name) for name in names}
    return Target.from_pretrained(target.name, dtype="float32", **same)


def free_memory(device: torch.device) -> int | None:
    """Return the free memory in bytes, or None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    facts = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", facts.read_text()) if facts.exists() else None
    return 1024 * int(found[1]) if found and device.type == "cpu" else None


def length_settings(max_new_tokens: int, ends: bool) -> dict[str, Any]:
    """Return settings for texts of `max_new_tokens` tokens; with `ends`, texts stop at their end token."""
    return {"max_new_tokens": max_new_tokens} | ({} if ends else {"eos_token_id": -1})
