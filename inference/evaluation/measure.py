"""Measurements of a drafter with the decoder that users call, on prompts that were not trained on.

Speed is measured one prompt at a time, baseline and drafter in turn (speed.py). Losslessness is verified in float32, where
forwards over one and over many tokens agree to 1e-5. In half precision their rounding differs, and a tie between two tokens
may be resolved either way (`identical_in_dtype` counts this).
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.auto import AutoTree, HeadTree
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.evaluation.speed import foredraft_decoder, time_decoders
from foredraft.inference.generation import Generation, generate, tokens_per_forward

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
    **settings: Any,
) -> list[Generation]:
    """Decode the prompts, `BATCH` at a time; prompt i has seed i. what: the activity that the progress bar names."""
    generations = []
    with Progress(what, len(prompts) * max_new_tokens, "tokens at most") as progress:
        settings |= {"max_new_tokens": max_new_tokens, "progress": progress.add}
        for start in range(0, len(prompts), BATCH):
            batch = prompts[start : start + BATCH]
            ids, mask = (part.to(target.device) for part in left_pad(batch))
            seeds = list(range(start, start + len(batch)))
            generations.append(generate(target, drafter, ids, mask, seed=seeds, **settings))
    return generations


def left_pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask (batch, longest), padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def texts(generations: list[Generation]) -> list[list[int]]:
    return [prompt for generation in generations for prompt in generation.new_tokens]


def identical(target: Target, drafter: Drafter, prompts: list[list[int]], **settings: Any) -> float:
    """Return the share of prompts whose text with drafts equals the baseline, token by token."""
    baseline = texts(run(target, None, prompts, what="checking losslessness, baseline", **settings))
    drafted = texts(run(target, drafter, prompts, what="checking losslessness, with drafts", **settings))
    return sum(a == b for a, b in zip(baseline, drafted, strict=True)) / len(prompts)


def check_identical(
    target: Target, load: Callable[[Target], Drafter], prompts: list[list[int]], max_new_tokens: int, ends: bool = False
) -> dict[str, float | None]:
    """Return the shares of identical texts in float32, greedy and sampled at temperature 1; None without memory for a
    float32 target. load: returns the drafter for it."""
    exact = float32_target(target)
    if exact is None:
        return NOT_CHECKED
    prover, limits = load(exact), length_settings(max_new_tokens, ends)
    return {
        "identical_greedy": identical(exact, prover, prompts, **limits),
        "identical_sampled": identical(exact, prover, prompts, temperature=1.0, **limits),
    }


def float32_target(target: Target) -> Target | None:
    """Return the target in float32: itself, or loaded again (a cast in place could not be undone exactly), or None if the
    device lacks memory. A quantized target stays quantized and computes in float32, which reproduces its hidden states."""
    if target.dtype == torch.float32:
        return target
    if not target.quantization and not target.sharding:
        need = 4 * sum(parameter.numel() for parameter in target.model.parameters())
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


def per_depth(generations: list[Generation], depth: int) -> list[float]:
    """Return the share of steps that accepted at least d drafts, d = 1 .. depth."""
    counts = [count for g in generations for step in g.steps for count in step.accepted]
    return [sum(count >= d for count in counts) / max(1, len(counts)) for d in range(1, depth + 1)]


def evaluate(
    target: Target, drafter: Drafter, prompts: list[list[int]], max_new_tokens: int, timed: int, ends: bool = False
) -> dict[str, Any]:
    """Measure the figures of metrics.json, greedy and sampled at temperature 1, in the target's dtype.

    drafter: a fixed tree; the same head with tree=auto is timed, too. Acceptance is measured over all prompts, speed over
    `timed` of them, one at a time. Prompts with a repetitive greedy continuation are counted separately and excluded from all
    figures but `acceptance_length_all`. ends: as in `length_settings`.
    """
    assert isinstance(drafter, HeadTree)
    settings = length_settings(max_new_tokens, ends)
    greedy = run(target, drafter, prompts, what="measuring acceptance", **settings)
    loops = [distinct(text) < REPETITIVE for text in texts(greedy)]
    chosen = [prompt for prompt, loop in zip(prompts, loops, strict=True) if not loop] or prompts
    kept = greedy if not any(loops) or all(loops) else run(target, drafter, chosen, **settings)
    sampled = run(target, drafter, chosen, temperature=1.0, what="measuring acceptance when sampling", **settings)
    some = chosen[:: max(1, len(chosen) // timed)][:timed]
    speeds, auto = [], AutoTree(copy.copy(drafter), target)
    for temperature in (0.0, 1.0):
        decoders = {
            name: foredraft_decoder(target, decoder, max_new_tokens, temperature, ends=ends)
            for name, decoder in (("baseline", None), ("drafted", drafter), ("auto", auto))
        }
        speeds.append(time_decoders(decoders, some, target))
    rates = [(speed["drafted"].rate(), speed["baseline"].rate(), speed["auto"].rate()) for speed in speeds]
    both = ("baseline", "drafted")
    pairs = [pair for speed in speeds for pair in zip(*(speed[name].generations for name in both), strict=True)]
    stages = generate(target, drafter, torch.tensor([some[0]], device=target.device), timings=True, **settings)
    steps = max(1, len(stages.steps))
    return {
        "acceptance_length": round(tokens_per_forward(kept), 4),
        "acceptance_length_sampled": round(tokens_per_forward(sampled), 4),
        "acceptance_length_all": round(tokens_per_forward(greedy), 4),
        "accepted_per_depth": [round(share, 4) for share in per_depth(kept, drafter.depth)],
        "tokens_per_second": round(rates[0][0], 2),
        "baseline_tokens_per_second": round(rates[0][1], 2),
        "speedup": round(rates[0][0] / rates[0][1], 4),
        "speedup_sampled": round(rates[1][0] / rates[1][1], 4),
        "speedup_auto": round(rates[0][2] / rates[0][1], 4),
        "speedup_auto_sampled": round(rates[1][2] / rates[1][1], 4),
        "identical_in_dtype": round(sum(a.new_tokens == b.new_tokens for a, b in pairs) / len(pairs), 4),
        "prompts": len(prompts),
        "timed_prompts": len(some),
        "preempted_share": round(
            median(share for speed in speeds for timing in speed.values() for share in timing.preempted), 4
        ),
        "new_tokens": max_new_tokens,
        "repetitive_prompts": sum(loops),
        "tree_nodes": max((step.nodes for g in greedy for step in g.steps), default=1),
        "step_seconds": {stage: round(seconds / steps, 6) for stage, seconds in stages.seconds.items()},
    }
