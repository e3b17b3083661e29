"""Choose how many drafts an engine should verify per step, from what was measured.

    tokens/s of N requests with chains of k drafts = N * (1 + p_1 + ... + p_k) / seconds(N, k)

p_d is the share of steps that accept at least d drafts. It belongs to the head and the texts, and is the same in every
engine. The seconds of a step are those of foredraft's engine on this machine. What counts is how much longer a step with
drafts takes.
"""

import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from foredraft.heads.target_model import Target
from foredraft.inference.drafters import HeadTree, chain_of
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.engine import Engine
from foredraft.inference.generation import Generation
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams

PREFILLED = 256  # tokens of a prompt per step, at least
WARM_UP = 3  # steps of each kind that are not timed: the first one of a shape may include what is made once for it
NEAR = 0.99  # of two lengths with nearly the same speed, the shorter one counts
TURNS = 3  # times that each length is timed, all in turn, because other programs may share the machine
MOST = 1024  # requests, the end of the last range, unless more were measured


class Tuning(NamedTuple):
    reached: list[float]  # share of steps that accept at least d drafts, for d = 1, 2, ...
    seconds: dict[int, dict[int, float]]  # of a step, by requests and drafts; 0 drafts is decoding without

    def speedup(self, requests: int, drafts: int) -> float:
        """Return the tokens per second with this number of drafts, relative to decoding without."""
        seconds = self.seconds[requests]
        return (1 + sum(self.reached[:drafts])) * seconds[0] / seconds[drafts]

    def best(self, requests: int) -> int:
        """Return the number of drafts at which this number of requests is decoded fastest; 0 if drafts do not pay off."""
        speeds = {drafts: self.speedup(requests, drafts) for drafts in sorted(self.seconds[requests])}
        return next(drafts for drafts, speed in speeds.items() if speed >= NEAR * max(speeds.values()))

    def schedule(self) -> list[list[int]]:
        """Return [first, last, drafts] for ranges of numbers of requests, as vLLM reads them. What was measured for a number
        of requests holds up to the next one, and beyond the last."""
        found: list[list[int]] = []
        for requests, after in pairwise([*sorted(self.seconds), max(MOST, *self.seconds) + 1]):
            drafts, first = self.best(requests), found[-1][1] + 1 if found else 1
            if found and found[-1][2] == drafts:
                found[-1][1] = after - 1
            else:
                found.append([first, after - 1, drafts])
        return found


def reached_depths(generations: Sequence[Generation], depth: int) -> list[float]:
    """Return the share of steps that accept at least d drafts, for d up to `depth`."""
    accepted = [count for generation in generations for step in generation.steps for count in step.accepted]
    return [sum(count >= d for count in accepted) / max(1, len(accepted)) for d in range(1, depth + 1)]


def seconds_by_drafts(
    target: Target,
    tree: HeadTree,
    lengths: Sequence[int],
    prompts: Sequence[list[int]],
    requests: int,
    steps: int,
    temperature: float,
) -> dict[int, float]:
    """Return the median seconds of a step without drafts (0) and with chains of these lengths."""
    chains = {0: None} | {length: chain_of(tree, target, length) for length in lengths}
    found: dict[int, list[float]] = {length: [] for length in chains}
    for _ in range(TURNS):
        for length, drafter in chains.items():
            found[length].append(seconds_per_step(target, drafter, prompts, requests, steps, temperature))
    return {length: median(times) for length, times in found.items()}


@torch.inference_mode()
def seconds_per_step(
    target: Target, drafter: Drafter | None, prompts: Sequence[list[int]], requests: int, steps: int, temperature: float
) -> float:
    """Return the median seconds of a step that decodes this number of requests together, with the prompts in turn."""
    chosen = [prompts[number % len(prompts)] for number in range(requests)]
    nodes = 1 if drafter is None else drafter.nodes
    joining = sum(2 + 2 * len(prompt) // PREFILLED for prompt in chosen)  # steps until the last one decodes, at most
    new_tokens = (joining + steps + WARM_UP) * nodes
    room = (target.context or sys.maxsize) - new_tokens
    if room < 1:
        raise ValueError(
            f"requests={requests} of {max(map(len, chosen))} tokens and steps={steps} need {new_tokens} new tokens, more "
            f"than the {target.context} that {target.name} reads: fewer requests, shorter prompts or fewer steps"
        )
    engine, times = Engine(target, drafter, max_num_seqs=requests), list[float]()
    for number, prompt in enumerate(chosen):
        engine.add(Request(prompt[-room:], SamplingParams(temperature), max_new_tokens=new_tokens, seed=number))
    try:
        while len(times) < steps + WARM_UP and engine.has_work:
            start = time.perf_counter()
            outputs = engine.step()  # it ends with a copy to the host, which waits for the device
            if len(outputs) == requests and outputs[0].accepted is not None:  # all decode, and none is prefilled
                times.append(time.perf_counter() - start)
    finally:
        engine.close()
    assert len(times) == steps + WARM_UP, "the budget of new tokens covers all steps until the last request decodes"
    return median(times[WARM_UP:])
