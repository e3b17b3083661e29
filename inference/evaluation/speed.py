"""Decoding speed, compared side by side. All decoders continue the same prompts, in turn on each prompt, so that a change of
the machine's speed affects all alike. Texts during which other programs used the core are timed again."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.progress import track
from foredraft.inference.generation import Generation, generate

MAX_PREEMPTED_SHARE = 0.1  # share of a text's time without a core above which its timing is not reliable
MAX_RETIMED_SHARE = 0.25  # maximum share of texts that are timed again: with more of them, it would not help

# prompt (1, length) int64 and seed -> number of new tokens, and the Generation if foredraft made it
Decoder = Callable[[Tensor, int], tuple[int, Generation | None]]


class Timing(NamedTuple):
    """Hold the timings of one decoder, an entry per prompt."""

    seconds: list[float]
    tokens: list[int]
    generations: list[Generation]  # empty for other libraries
    preempted: list[float]  # share of the time without a core, see `Stopwatch`

    def rate(self) -> float:
        """Return the tokens per second."""
        return sum(self.tokens) / sum(self.seconds)


class Stopwatch:
    """Measure seconds, and the share of them in which other programs used this thread's core. The share is 0 if the thread
    waits anyway: for a GPU, or for other processes of a sharded target, which all repeat the same texts."""

    def __init__(self, target: Target):
        self.waits = target.device.type != "cpu" or target.is_collective
        self.started, self.cpu_time_start = time.perf_counter(), time.thread_time()

    def stop(self) -> tuple[float, float]:
        seconds, cpu_time_start = time.perf_counter() - self.started, time.thread_time() - self.cpu_time_start
        return seconds, 0.0 if self.waits else max(0.0, 1 - cpu_time_start / seconds)


Job = TypeVar("Job")


def preempted_jobs(preempted: dict[Job, float]) -> list[Job]:
    """Return the jobs that should be timed again, from their preempted shares."""
    worst = sorted((job for job in preempted if preempted[job] > MAX_PREEMPTED_SHARE), key=lambda job: -preempted[job])
    return worst[: math.ceil(MAX_RETIMED_SHARE * len(preempted))]


class FirstTokens:
    """Record when the first tokens of a text arrive and how many, as a streamer for `generate` and transformers."""

    def __init__(self) -> None:
        self.puts, self.count, self.at = 0, 0, 0.0

    def put(self, tokens: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # the prompt is the first
            self.count, self.at = tokens.numel(), time.perf_counter()

    def end(self) -> None:
        self.puts = 0


def foredraft_decoder(
    target: Target,
    drafter: Drafter | None,
    new_tokens: int,
    temperature: float = 0.0,
    streamer: FirstTokens | None = None,
    ends: bool = False,
) -> Decoder:
    """Return a decoder of foredraft, which forgets earlier outputs first, so that no text is drafted from itself. ends: stop
    at an end token; otherwise all texts have `new_tokens` tokens."""
    limits: dict[str, Any] = {"max_new_tokens": new_tokens} | ({} if ends else {"eos_token_id": -1})

    def decode(ids: Tensor, seed: int) -> tuple[int, Generation]:
        if drafter is not None:
            drafter.forget_outputs()
        out = generate(target, drafter, ids, temperature=temperature, seed=seed, streamer=streamer, **limits)
        return len(out.new_tokens[0]), out

    return decode


def transformers_decoder(
    target: Target,
    settings: dict[str, Any],
    new_tokens: int,
    temperature: float = 0.0,
    streamer: FirstTokens | None = None,
    ends: bool = False,
) -> Decoder:
    """Return a decoder of transformers' `generate`. settings: of assisted generation; {} is the baseline. ends: as above."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    more: dict[str, Any] = {"pad_token_id": 0, "streamer": streamer} | ({} if ends else {"eos_token_id": None})

    def decode(ids: Tensor, seed: int) -> tuple[int, None]:
        torch.manual_seed(seed)
        more["attention_mask"] = torch.ones_like(ids)
        out = target.model.generate(ids, max_new_tokens=new_tokens, **more, **sampling, **settings)
        return out.shape[1] - ids.shape[1], None

    return decode


def time_decoders(decoders: dict[str, Decoder], prompts: list[list[int]], target: Target) -> dict[str, Timing]:
    """Measure all decoders on all prompts; prompt i has seed i + 1. On a GPU, each prompt is decoded once before it is timed,
    because its length decides which CUDA graphs are captured, which takes longer than decoding."""
    timings = {name: Timing([], [], [], []) for name in decoders}

    def timed(name: str, number: int) -> tuple[int, Generation | None, float, float]:
        ids = torch.tensor([prompts[number]], device=target.device)
        watch = Stopwatch(target)
        return *decoders[name](ids, number + 1), *watch.stop()

    for number, prompt in enumerate(track(prompts, "measuring speed", "prompts")):
        if number == 0 or target.device.type == "cuda":
            for decode in decoders.values():
                decode(torch.tensor([prompt], device=target.device), number + 1)
        for name in decoders:
            count, generation, seconds, preempted = timed(name, number)
            timings[name].seconds.append(seconds)
            timings[name].preempted.append(preempted)
            timings[name].tokens.append(count)
            timings[name].generations.extend([] if generation is None else [generation])
    for name, number in preempted_jobs(
        {(name, i): w for name, timing in timings.items() for i, w in enumerate(timing.preempted)}
    ):
        *_, seconds, preempted = timed(name, number)
        if preempted < timings[name].preempted[number]:
            timings[name].seconds[number], timings[name].preempted[number] = seconds, preempted
    return timings
