"""Decoding speed side by side. Every decoder continues the same prompts, one at a time, all in turn on each prompt, so that
a change of the machine's speed meets all alike. Texts during which other programs held this one up are timed again."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.progress import Ticker
from foredraft.inference.generation import Generation, generate

SHARED = 0.1  # of a text's time without a core, above which the machine was not ours
AGAIN = 0.25  # of the texts that are timed again at most: where more were held up, it does not help

# prompt (1, length) int64 and seed -> how many new tokens, and the generation if foredraft made it
Decoder = Callable[[Tensor, int], tuple[int, Generation | None]]


class Timing(NamedTuple):
    """Of one decoder, an entry per prompt."""

    seconds: list[float]
    tokens: list[int]
    generations: list[Generation]  # empty for a baseline's
    waited: list[float]  # share of the time, as `Stopwatch` has it

    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)


class Stopwatch:
    """Seconds since it was made, and which share of them this thread had no core, because other programs had it. 0 where it
    waits in any case: for a GPU, or for the other processes of a target in pieces, which all time the same texts again."""

    def __init__(self, target: Target):
        self.waits = target.device.type != "cpu" or target.is_collective
        self.started, self.had_core = time.perf_counter(), time.thread_time()

    def stop(self) -> tuple[float, float]:
        seconds, had_core = time.perf_counter() - self.started, time.thread_time() - self.had_core
        return seconds, 0.0 if self.waits else max(0.0, 1 - had_core / seconds)


Job = TypeVar("Job")


def held_up(waited: dict[Job, float]) -> list[Job]:
    """Which to time again, of jobs and what they waited."""
    worst = sorted((job for job in waited if waited[job] > SHARED), key=lambda job: -waited[job])
    return worst[: math.ceil(AGAIN * len(waited))]


class FirstTokens:
    """A streamer, as transformers and `generate` know them, that notes when a text's first tokens came, and how many."""

    def __init__(self) -> None:
        self.puts, self.count, self.at = 0, 0, 0.0

    def put(self, tokens: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:  # first comes the prompt
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
    """ends: at an end token; otherwise texts are of `new_tokens` tokens whatever they say."""
    limits: dict[str, Any] = {"max_new_tokens": new_tokens} | ({} if ends else {"eos_token_id": -1})

    def decode(ids: Tensor, seed: int) -> tuple[int, Generation]:
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
    """`generate` of transformers itself. settings: of its assisted generation; {} is plain. ends: as above."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    more: dict[str, Any] = {"pad_token_id": 0, "streamer": streamer} | ({} if ends else {"eos_token_id": None})

    def decode(ids: Tensor, seed: int) -> tuple[int, None]:
        torch.manual_seed(seed)
        more["attention_mask"] = torch.ones_like(ids)
        out = target.model.generate(ids, max_new_tokens=new_tokens, **more, **sampling, **settings)
        return out.shape[1] - ids.shape[1], None

    return decode


def time_decoders(decoders: dict[str, Decoder], rows: list[list[int]], target: Target) -> dict[str, Timing]:
    """All decoders over all prompts; prompt i has seed i + 1. On a GPU each prompt is decoded once before it is timed: its
    lengths decide which CUDA graphs are captured, and capturing takes longer than decoding."""
    timings = {name: Timing([], [], [], []) for name in decoders}
    ticker = Ticker("measuring speed", len(rows), "prompts")

    def timed(name: str, number: int) -> tuple[int, Generation | None, float, float]:
        ids = torch.tensor([rows[number]], device=target.device)
        watch = Stopwatch(target)
        return *decoders[name](ids, number + 1), *watch.stop()

    for number, row in enumerate(rows):
        if number == 0 or target.device.type == "cuda":
            for decode in decoders.values():
                decode(torch.tensor([row], device=target.device), number + 1)
        for name in decoders:
            count, generation, seconds, waited = timed(name, number)
            timings[name].seconds.append(seconds)
            timings[name].waited.append(waited)
            timings[name].tokens.append(count)
            timings[name].generations.extend([] if generation is None else [generation])
        ticker.add()
    for name, number in held_up({(name, i): w for name, one in timings.items() for i, w in enumerate(one.waited)}):
        *_, seconds, waited = timed(name, number)
        if waited < timings[name].waited[number]:
            timings[name].seconds[number], timings[name].waited[number] = seconds, waited
    return timings
