"""Run every system on every prompt, in turn on each prompt, repeat after repeat. Each text's result is a line of a file.

A line is written at once and reused by the next run of the same command, so an interrupted run can be resumed. A system that
fails is omitted from then on, with its reason; the others continue. All systems decode a prompt one after the other, so a
change of the machine's speed affects all alike.

Batches are faster, but only acceptance can be measured in them. A system with `batched` decodes all texts in batches first.
"""

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.measure import BATCH, REPETITIVE, distinct, length_settings, run
from foredraft.inference.evaluation.progress import report, track
from foredraft.inference.generation import Generation, generate

BASELINE = "baseline"

Line = dict[str, Any]
Job = tuple[str, float, int, int]  # name of the system, temperature, number of the text, repeat


class Prompt(NamedTuple):
    category: str
    tokens: list[int]
    ends: bool  # whether its text ends at an end token; a raw text continues
    cut: int = 0  # tokens of its beginning that were cut off, for the context to hold the rest and the answer

    @classmethod
    def of(cls, category: str, tokens: list[int], ends: bool, most: int) -> "Prompt":
        """Return a prompt of the last `most` of these tokens."""
        return cls(category, tokens[-most:], ends, max(0, len(tokens) - most))


class Stopwatch:
    """Measure seconds, and the share of them in which other programs used this thread's core. The share is 0 if the thread
    waits anyway: for a GPU, or for other processes of a sharded target, which all repeat the same texts."""

    def __init__(self, target: Target):
        self.waits = target.device.type != "cpu" or target.is_collective
        self.started, self.cpu_time_start = time.perf_counter(), time.thread_time()

    def stop(self) -> tuple[float, float]:
        seconds, cpu_time = time.perf_counter() - self.started, time.thread_time() - self.cpu_time_start
        return seconds, 0.0 if self.waits else max(0.0, 1 - cpu_time / seconds)


class System(NamedTuple):
    """Describe a system: one of our drafters (None: the baseline), or settings of transformers' own `generate`."""

    name: str
    drafter: Drafter | dict[str, Any] | None
    once: bool = False  # run only in the first repeat, because only its acceptance is measured
    batched: bool = False  # decode all texts in batches too, where its acceptance is measured
    chain: str | None = None  # name of the system that drafts chains with the same head

    @property
    def is_rival(self) -> bool:
        return isinstance(self.drafter, dict)

    def decode(
        self, target: Target, text: Prompt, new_tokens: int, temperature: float, seed: int, timings: bool = False
    ) -> tuple[int, Generation | None]:
        """Return the number of new tokens, and the generation if foredraft decoded. A drafter forgets earlier outputs first,
        so that no text is drafted from itself."""
        ids = torch.tensor([text.tokens], device=target.device)
        if isinstance(self.drafter, dict):
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            limits: dict[str, Any] = {} if text.ends else {"eos_token_id": None}
            limits |= {"max_new_tokens": new_tokens, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
            torch.manual_seed(seed)
            with plain_settings(target):
                rows = target.model.generate(ids, **limits, **sampling, **self.drafter)
            return rows.shape[1] - ids.shape[1], None
        if self.drafter is not None:
            self.drafter.forget_outputs()
        settings = length_settings(new_tokens, text.ends) | {"temperature": temperature, "seed": seed}
        out = generate(target, self.drafter, ids, timings=timings, **settings)
        return len(out.new_tokens[0]), out


@contextlib.contextmanager
def plain_settings(target: Target) -> Iterator[None]:
    """Let transformers decode as foredraft does: without the penalties and filters in the checkpoint's generation config, of
    which the first changes greedy texts, too (Qwen2.5 has both)."""
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig(eos_token_id=target.eos_token_ids or None)
    try:
        yield
    finally:
        target.model.generation_config = own


class Lines:
    """Read and append the file of results. An incomplete last line, of a killed run, is removed."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[Line] = []
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            os.truncate(path, len(whole) + bool(whole))
        # Failed systems are tried again.
        self.lines = [line for line in self.lines if line["kind"] != "error"]

    def add(self, line: Line) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def failed(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.add({"kind": "error", "decoder": name, "reason": reason})
        report(f"{name} failed and is omitted: {reason}")

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind]


def counts(out: Generation, number: int = 0) -> Line:
    """Return what the steps of a sequence of the batch counted."""
    places = [(step, step.sequences.index(number)) for step in out.steps if number in step.sequences]
    return {
        "accepted": [step.accepted[place] for step, place in places],
        "emitted": [step.emitted[place] for step, place in places],
        "nodes": [step.nodes for step, _ in places],
    }


class Benchmark:
    def __init__(
        self,
        target: Target,
        systems: list[System],
        texts: list[Prompt],
        new_tokens: int,
        lines: Lines,
        num_timed: int | None = None,
    ):
        """Prepare a run. num_timed: texts that are decoded alone, which measures speed; None is all. Raises ValueError if two
        systems have one name, because a line names its system."""
        if repeated := [name for name, count in Counter(system.name for system in systems).items() if count > 1]:
            raise ValueError(f"several systems are called {repeated[0]}: give one a name, {{path: ..., name: ...}}")
        self.target, self.texts, self.num_timed = target, texts, num_timed
        self.systems = {system.name: system for system in systems}
        self.new_tokens, self.lines = new_tokens, lines
        self.warm: set[str] = set()
        self.failed: dict[str, Exception] = {}

    def run(self, temperatures: list[float], repeats: int) -> None:
        for system in [system for system in self.systems.values() if system.batched]:
            for temperature in temperatures:
                self.attempt(system.name, self.decode_batches, system, temperature)
        done = {(line["decoder"], line["temperature"], line["text"], line["repeat"]) for line in self.lines.of("text")}
        left = [job for job in self.jobs(temperatures, repeats) if job not in done]
        for job in track(left, "decoding", "texts"):
            self.attempt(job[0], self.decode, *job)

    def jobs(self, temperatures: list[float], repeats: int) -> Iterator[Job]:
        """Yield all jobs. Systems alternate fastest, so that changes of the machine's speed affect all of them."""
        nested = itertools.product(range(repeats), temperatures, self.timed_texts(), self.systems.values())
        for repeat, temperature, number, system in nested:
            if repeat == 0 or not system.once:
                yield system.name, temperature, number, repeat

    def timed_texts(self) -> list[int]:
        """Return the numbers of the texts to decode alone, spread evenly over those that are not loops in the batches."""
        everything = list(range(len(self.texts)))
        if self.num_timed is None:
            return everything
        loops = {line["text"] for line in self.lines.of("batched") if distinct(line["ids"]) < REPETITIVE}
        numbers = [number for number in everything if number not in loops] or everything
        count = min(self.num_timed, len(numbers))
        return [numbers[len(numbers) * place // count] for place in range(count)]

    def attempt(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        if name in self.failed:
            return
        try:
            work(*arguments)
        except Exception as error:  # of any kind: it must not end hours of work on the other systems
            self.failed[name] = error
            self.lines.failed(name, error)

    def decode_batches(self, system: System, temperature: float) -> None:
        """Decode all texts in batches and write their lines. Texts that end at an end token are separate batches."""
        assert not isinstance(system.drafter, dict)
        done = [(line["decoder"], line["temperature"], line["text"]) for line in self.lines.of("batched")]
        for ends in (False, True):
            numbers = [number for number, text in enumerate(self.texts) if text.ends == ends]
            numbers = [number for number in numbers if (system.name, temperature, number) not in done]
            if not numbers:
                continue
            prompts, seeds = [self.texts[number].tokens for number in numbers], [number + 1 for number in numbers]
            settings = length_settings(self.new_tokens, ends) | {"temperature": temperature, "seeds": seeds}
            generations = run(self.target, system.drafter, prompts, what="measuring acceptance", **settings)
            for place, number in enumerate(numbers):
                out, row = generations[place // BATCH], place % BATCH
                line = {"kind": "batched", "decoder": system.name, "temperature": temperature, "text": number}
                ids = out.new_tokens[row]
                self.lines.add(line | {"tokens": len(ids), "ids": ids} | counts(out, row))

    def decode(self, name: str, temperature: float, number: int, repeat: int) -> None:
        """Decode a text alone and write its line."""
        facts = (self.target, self.texts[number], self.new_tokens, temperature, number + 1)
        # Graph capture, compilation and calibration at first use are not part of decoding; on a GPU they depend on lengths.
        if name not in self.warm or (repeat == 0 and self.target.device.type == "cuda"):
            self.warm.add(name)
            self.systems[name].decode(*facts)
        watch = Stopwatch(self.target)
        count, out = self.systems[name].decode(*facts)
        seconds, preempted = watch.stop()
        line = {"kind": "text", "decoder": name, "temperature": temperature, "text": number, "repeat": repeat}
        line |= {"seconds": seconds, "tokens": count, "preempted_share": preempted}
        if out is not None:
            line |= counts(out)
            if repeat == 0:
                line["ids"] = out.new_tokens[0]
        self.lines.add(line)


def rivals(target: Target, assistants: dict[str, str]) -> Iterator[System]:
    """Yield transformers' own ways to generate. assistants: label and path of smaller models for assisted generation; those
    that cannot be loaded are omitted, as their drafters are.

    The static cache is included only on a GPU: elsewhere transformers does not compile for it."""
    yield System("transformers", {})
    yield System("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3})
    if target.device.type == "cuda":
        yield System("transformers, static cache, compiled", {"cache_implementation": "static"})
    for label, path in assistants.items():
        with contextlib.suppress(ValueError):
            small = Target.from_pretrained(path, dtype=target.dtype, device=target.device)
            yield System(f"transformers, assisted by {label}", {"assistant_model": small.model})
