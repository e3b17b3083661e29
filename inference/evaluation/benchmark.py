"""Run every system on every prompt, in turn on each prompt, repeat after repeat. Each text's result is a line of a file.

A line is written at once and reused by the next run of the same command, so an interrupted run can be resumed. A system that
fails is omitted from then on, with its reason; the others continue.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.progress import report, track
from foredraft.inference.evaluation.speed import (
    Decoder,
    FirstTokens,
    Stopwatch,
    foredraft_decoder,
    preempted_jobs,
    transformers_decoder,
)
from foredraft.inference.generation import generate

BASELINE = "baseline"
Line = dict[str, Any]


class Text(NamedTuple):
    """Describe a prompt of the benchmark."""

    category: str
    tokens: list[int]
    ends: bool  # whether the text ends at an end token


class System(NamedTuple):
    """Describe a system: one of our drafters (None: the baseline), or settings of transformers' own `generate`."""

    name: str
    drafter: Drafter | dict[str, Any] | None
    once: bool = False  # run only in the first repeat, because only its acceptance is measured

    @property
    def is_rival(self) -> bool:
        return isinstance(self.drafter, dict)

    def decoder(self, target: Target, new_tokens: int, temperature: float, *how: Any) -> Decoder:
        if isinstance(self.drafter, dict):
            return transformers_decoder(target, self.drafter, new_tokens, temperature, *how)
        return foredraft_decoder(target, self.drafter, new_tokens, temperature, *how)


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

    def preempted_shares(self) -> dict[tuple[str, float, int, int], float]:
        """Return the preempted share of each text (see `Stopwatch`), by system, temperature, text and repeat."""
        return {
            (line["decoder"], line["temperature"], line["text"], line["repeat"]): line["preempted_share"]
            for line in self.of("text")
            if "preempted_share" in line  # earlier versions did not measure it
        }


class Benchmark:
    def __init__(self, target: Target, systems: list[System], texts: list[Text], new_tokens: int, lines: Lines):
        self.target, self.systems, self.texts = target, systems, texts
        self.new_tokens, self.lines = new_tokens, lines
        self.warm: set[str] = set()
        self.failed: set[str] = set()

    def run(self, temperatures: list[float], repeats: int) -> None:
        done = {(line["decoder"], line["temperature"], line["text"], line["repeat"]) for line in self.lines.of("text")}
        left = [job for job in self.jobs(temperatures, repeats) if (job[0].name, *job[1:]) not in done]
        for system, *job in track(left, "decoding", "texts"):
            self.attempt(system.name, lambda *job: self.lines.add(self.decode(*job)), system, *job)
        self.retime_preempted()
        known = {(line["decoder"], line["temperature"]) for line in self.lines.of("stages")}
        timed = [system for system in self.systems if not (system.is_rival or system.once)]
        stages = [(system, t) for system in timed for t in temperatures if (system.name, t) not in known]
        for system, temperature in track(stages, "timing the stages of a step", "runs"):
            self.attempt(system.name, self.time_stages, system, temperature)

    def retime_preempted(self) -> None:
        """Measure texts again during which other programs used the core. Of two lines of a text the later one counts."""
        systems = {system.name: system for system in self.systems if system.name not in self.failed}
        preempted = {job: share for job, share in self.lines.preempted_shares().items() if job[0] in systems}

        def work(system: System, *job: Any) -> None:
            line = self.decode(system, *job)
            if line["preempted_share"] < preempted[system.name, *job]:
                self.lines.add(line)

        for name, *job in track(preempted_jobs(preempted), "timing preempted texts again", "texts"):
            self.attempt(name, work, systems[name], *job)

    def jobs(self, temperatures: list[float], repeats: int) -> Iterator[tuple[System, float, int, int]]:
        """Yield all jobs. Systems alternate fastest, so that changes of the machine's speed affect all of them."""
        for repeat in range(repeats):
            for temperature in temperatures:
                for number in range(len(self.texts)):
                    for system in self.systems:
                        if repeat == 0 or not system.once:
                            yield system, temperature, number, repeat

    def attempt(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        if name in self.failed:
            return
        try:
            work(*arguments)
        except Exception as error:  # of any kind: it must not end hours of work on the other systems
            self.failed.add(name)
            self.lines.failed(name, error)

    def decode(self, system: System, temperature: float, number: int, repeat: int) -> Line:
        text, streamer = self.texts[number], FirstTokens()
        decode = system.decoder(self.target, self.new_tokens, temperature, streamer, text.ends)
        ids = torch.tensor([text.tokens], device=self.target.device)
        # Graph capture, compilation and calibration at first use are not part of decoding; on a GPU they depend on lengths.
        if system.name not in self.warm or (repeat == 0 and self.target.device.type == "cuda"):
            self.warm.add(system.name)
            decode(ids, number + 1)
        watch = Stopwatch(self.target)
        count, out = decode(ids, number + 1)
        seconds, preempted = watch.stop()
        line = {"kind": "text", "decoder": system.name, "temperature": temperature, "text": number, "repeat": repeat}
        line |= {
            "seconds": seconds,
            "tokens": count,
            "first_seconds": streamer.at - watch.started,
            "preempted_share": preempted,
        }
        line |= {"first_tokens": streamer.count}
        if out is not None:
            line["accepted"] = [step.accepted[0] for step in out.steps]
            line["emitted"] = [step.emitted[0] for step in out.steps]
            line["nodes"] = [step.nodes for step in out.steps]
            if repeat == 0:
                line["ids"] = out.new_tokens[0]
        return line

    def time_stages(self, system: System, temperature: float) -> None:
        """Measure the seconds of a step's stages, on one text."""
        text = self.texts[len(self.texts) // 2]
        assert not isinstance(system.drafter, dict)
        ids = torch.tensor([text.tokens], device=self.target.device)
        if system.drafter is not None:
            system.drafter.forget_outputs()
        settings: dict[str, Any] = {"max_new_tokens": self.new_tokens, "eos_token_id": -1, "temperature": temperature}
        out = generate(self.target, system.drafter, ids, timings=True, seed=0, **settings)
        seconds = {stage: part / max(1, len(out.steps)) for stage, part in out.seconds.items()}
        self.lines.add({"kind": "stages", "decoder": system.name, "temperature": temperature, "seconds": seconds})


def rivals(target: Target, assistants: dict[str, str]) -> Iterator[System]:
    """Yield transformers' own ways to generate. assistants: label and path of smaller models for assisted generation.

    The static cache is included only on a GPU: elsewhere transformers does not compile for it."""
    yield System("transformers", {})
    yield System("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3})
    if target.device.type == "cuda":
        yield System("transformers, static cache, compiled", {"cache_implementation": "static"})
    for label, path in assistants.items():
        small = Target.from_pretrained(path, dtype=target.dtype, device=target.device)
        yield System(f"transformers, assisted by {label}", {"assistant_model": small.model})
