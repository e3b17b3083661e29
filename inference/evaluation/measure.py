"""What a drafter gains, measured with the decoder that users call, on prompts that nothing was trained on.

Speed is measured one prompt at a time, plain and speculative in turn (speed.py). Identity is proven in float32, where
one-token and many-token forwards agree to 1e-5: in half precision their rounding differs, and a tie between two tokens may
be resolved either way (`identical_in_dtype` counts that).
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
from foredraft.inference.evaluation.progress import Ticker, report
from foredraft.inference.evaluation.speed import foredraft_decoder, time_decoders
from foredraft.inference.generation import Generation, generate, tokens_per_forward

BATCH = 16  # prompts decoded together where speed is not what is measured
NOT_PROVEN: dict[str, float | None] = {"identical_greedy": None, "identical_sampled": None}
REPETITIVE = 0.5  # a continuation with a smaller share of distinct 4-grams is a loop, which inflates acceptance


def distinct(tokens: list[int], n: int = 4) -> float:
    """Share of distinct n-grams among all of them; 1.0 for texts too short to repeat."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def run(
    target: Target,
    drafter: Drafter | None,
    rows: list[list[int]],
    max_new_tokens: int,
    what: str = "decoding",
    **settings: Any,
) -> list[Generation]:
    """Generations of the prompts, `BATCH` at a time; prompt i has seed i. what: is done, for the lines of progress."""
    generations, progress = [], Ticker(what, len(rows) * max_new_tokens, "tokens").add
    settings |= {"max_new_tokens": max_new_tokens, "progress": progress}
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        ids, mask = (part.to(target.device) for part in padded(batch))
        seeds = list(range(start, start + len(batch)))
        generations.append(generate(target, drafter, ids, mask, seed=seeds, **settings))
    return generations


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask (batch, longest), padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


def texts(generations: list[Generation]) -> list[list[int]]:
    return [row for generation in generations for row in generation.new_tokens]


def identical(target: Target, drafter: Drafter, rows: list[list[int]], **settings: Any) -> float:
    """Share of prompts whose speculative text equals the plain one, token by token."""
    plain = texts(run(target, None, rows, what="checking identity, plain decoding", **settings))
    drafted = texts(run(target, drafter, rows, what="checking identity, with drafts", **settings))
    return sum(a == b for a, b in zip(plain, drafted, strict=True)) / len(rows)


def prove(
    target: Target, load: Callable[[Target], Drafter], rows: list[list[int]], max_new_tokens: int, ends: bool = False
) -> dict[str, float | None]:
    """Identity in float32, greedy and sampled at temperature 1; None where no such target can be had. load: the drafter for
    it."""
    exact = float32(target)
    if exact is None:
        return NOT_PROVEN
    prover, limits = load(exact), limited(max_new_tokens, ends)
    return {
        "identical_greedy": identical(exact, prover, rows, **limits),
        "identical_sampled": identical(exact, prover, rows, temperature=1.0, **limits),
    }


def float32(target: Target) -> Target | None:
    """The same target in float32: itself, or loaded once more (a cast in place would not come back exactly), or None where
    the device has no room for it. A quantised one stays quantised and computes in float32: its hidden states are its own."""
    if target.dtype == torch.float32:
        return target
    if not target.quantization and not target.sharding:
        need = 4 * sum(parameter.numel() for parameter in target.model.parameters())
        free = free_memory(target.device)
        if free is not None and need > free:
            report(
                f"warning: the target in float32 takes {need / 2**30:.1f} GiB and {free / 2**30:.1f} are free: identity is "
                "not proven (scripts/lossless.py does it elsewhere; evaluate.proof=false does not try)"
            )
            return None
    names = ("device", "quantization", "sharding", "revision", "trust_remote_code", "context")
    same: dict[str, Any] = {name: getattr(target, name) for name in names}
    return Target.from_pretrained(target.name, dtype="float32", **same)


def free_memory(device: torch.device) -> int | None:
    """Bytes, or None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    facts = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", facts.read_text()) if facts.exists() else None
    return 1024 * int(found[1]) if found and device.type == "cpu" else None


def limited(max_new_tokens: int, ends: bool) -> dict[str, Any]:
    """Settings of texts of `max_new_tokens` tokens, or with `ends` up to their end token."""
    return {"max_new_tokens": max_new_tokens} | ({} if ends else {"eos_token_id": -1})


def per_depth(generations: list[Generation], depth: int) -> list[float]:
    """Share of steps that accepted at least d drafts, d = 1 .. depth."""
    counts = [count for g in generations for step in g.steps for count in step.accepted]
    return [sum(count >= d for count in counts) / max(1, len(counts)) for d in range(1, depth + 1)]


def evaluate(
    target: Target, drafter: Drafter, rows: list[list[int]], max_new_tokens: int, timed: int, ends: bool = False
) -> dict[str, Any]:
    """The measured part of metrics.json, greedy and sampled at temperature 1, in the target's dtype.

    drafter: a fixed tree; the same with tree=auto is timed beside it. Acceptance over all prompts; speed over `timed` of
    them, one at a time. Prompts whose greedy continuation repeats itself are counted apart and left out of all figures but
    `acceptance_length_all`. ends: as in `limited`.
    """
    assert isinstance(drafter, HeadTree)
    settings = limited(max_new_tokens, ends)
    greedy = run(target, drafter, rows, what="measuring acceptance", **settings)
    loops = [distinct(text) < REPETITIVE for text in texts(greedy)]
    chosen = [row for row, loop in zip(rows, loops, strict=True) if not loop] or rows
    kept = greedy if not any(loops) or all(loops) else run(target, drafter, chosen, **settings)
    sampled = run(target, drafter, chosen, temperature=1.0, what="measuring acceptance when sampling", **settings)
    some = chosen[:: max(1, len(chosen) // timed)][:timed]
    speeds, auto = [], AutoTree(copy.copy(drafter), target)
    for temperature in (0.0, 1.0):
        decoders = {
            name: foredraft_decoder(target, one, max_new_tokens, temperature, ends=ends)
            for name, one in (("plain", None), ("drafted", drafter), ("auto", auto))
        }
        speeds.append(time_decoders(decoders, some, target))
    rates = [(speed["drafted"].rate(), speed["plain"].rate(), speed["auto"].rate()) for speed in speeds]
    both = ("plain", "drafted")
    pairs = [pair for speed in speeds for pair in zip(*(speed[name].generations for name in both), strict=True)]
    stages = generate(target, drafter, torch.tensor([some[0]], device=target.device), timings=True, **settings)
    steps = max(1, len(stages.steps))
    return {
        "acceptance_length": round(tokens_per_forward(kept), 4),
        "acceptance_length_sampled": round(tokens_per_forward(sampled), 4),
        "acceptance_length_all": round(tokens_per_forward(greedy), 4),
        "accepted_per_depth": [round(share, 4) for share in per_depth(kept, drafter.depth)],
        "tokens_per_second": round(rates[0][0], 2),
        "plain_tokens_per_second": round(rates[0][1], 2),
        "speedup": round(rates[0][0] / rates[0][1], 4),
        "speedup_sampled": round(rates[1][0] / rates[1][1], 4),
        "speedup_auto": round(rates[0][2] / rates[0][1], 4),
        "speedup_auto_sampled": round(rates[1][2] / rates[1][1], 4),
        "identical_in_dtype": round(sum(a.new_tokens == b.new_tokens for a, b in pairs) / len(pairs), 4),
        "prompts": len(rows),
        "timed_prompts": len(some),
        "waited": round(median(share for speed in speeds for timing in speed.values() for share in timing.waited), 4),
        "new_tokens": max_new_tokens,
        "repetitive_prompts": sum(loops),
        "tree_nodes": max((step.nodes for g in greedy for step in g.steps), default=1),
        "step_seconds": {stage: round(seconds / steps, 6) for stage, seconds in stages.seconds.items()},
    }
