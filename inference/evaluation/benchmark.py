"""Every decoder over every prompt, all in turn on each, repeat after repeat; what each text took is a line in a file.

A line is written when it is known and found again by the next run of the same command, so a run that was stopped continues.
A decoder that fails is left out from there, with its reason; the others continue.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.speed import (
    Decoder,
    FirstTokens,
    Stopwatch,
    foredraft_decoder,
    held_up,
    transformers_decoder,
)
from foredraft.inference.generation import generate

PLAIN = "plain"
Line = dict[str, Any]


class Text(NamedTuple):
    """A prompt as the benchmark needs it."""

    category: str
    tokens: list[int]
    ends: bool  # at an end token


class Contestant(NamedTuple):
    """What decodes: a drafter of ours (None: plain decoding), or settings of transformers' own `generate`."""

    name: str
    what: Drafter | dict[str, Any] | None
    once: bool = False  # for its acceptance alone: in the first repeat

    @property
    def is_rival(self) -> bool:
        return isinstance(self.what, dict)

    def decoder(self, target: Target, new_tokens: int, temperature: float, *how: Any) -> Decoder:
        if isinstance(self.what, dict):
            return transformers_decoder(target, self.what, new_tokens, temperature, *how)
        return foredraft_decoder(target, self.what, new_tokens, temperature, *how)


class Lines:
    """The file of results. Half a line at its end, of a run that was killed, is cut off."""

    def __init__(self, path: Path):
        self.path = path
        self.lines: list[Line] = []
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]
            self.lines = [json.loads(line) for line in whole.splitlines()]
            os.truncate(path, len(whole) + bool(whole))
        # What failed is tried again by a new run.
        self.lines = [line for line in self.lines if line["kind"] != "error"]

    def add(self, line: Line) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def failed(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        self.add({"kind": "error", "decoder": name, "reason": reason})
        tqdm.write(f"{name} failed and is left out: {reason}")

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind]

    def waited(self) -> dict[tuple[str, float, int, int], float]:
        """By decoder, temperature, text and repeat: the share of the time as `Stopwatch` has it."""
        return {
            (line["decoder"], line["temperature"], line["text"], line["repeat"]): line["waited"]
            for line in self.of("text")
            if "waited" in line  # earlier versions did not look
        }


class Benchmark:
    def __init__(self, target: Target, contestants: list[Contestant], texts: list[Text], new_tokens: int, lines: Lines):
        self.target, self.contestants, self.texts = target, contestants, texts
        self.new_tokens, self.lines = new_tokens, lines
        self.warm: set[str] = set()
        self.failed: set[str] = set()

    def run(self, temperatures: list[float], repeats: int) -> None:
        done = {(line["decoder"], line["temperature"], line["text"], line["repeat"]) for line in self.lines.of("text")}
        left = [job for job in self.jobs(temperatures, repeats) if (job[0].name, *job[1:]) not in done]
        with tqdm(total=len(left), desc="texts", unit="text") as bar:
            for one, temperature, number, repeat in left:
                bar.set_postfix_str(one.name[-30:])
                self.attempt(one.name, lambda *job: self.lines.add(self.decode(*job)), one, temperature, number, repeat)
                bar.update()
        self.time_again()
        known = {(line["decoder"], line["temperature"]) for line in self.lines.of("stages")}
        timed = [one for one in self.contestants if not (one.is_rival or one.once)]
        stages = [(one, t) for one in timed for t in temperatures if (one.name, t) not in known]
        for one, temperature in tqdm(stages, desc="stages of a step", unit="run"):
            self.attempt(one.name, self.time_stages, one, temperature)

    def time_again(self) -> None:
        """Texts during which other programs had this one's core: of two lines of a text the later counts (figures.py)."""
        contestants = {one.name: one for one in self.contestants if one.name not in self.failed}
        waited = {job: share for job, share in self.lines.waited().items() if job[0] in contestants}

        def work(one: Contestant, *job: Any) -> None:
            line = self.decode(one, *job)
            if line["waited"] < waited[one.name, *job]:
                self.lines.add(line)

        for name, *job in tqdm(held_up(waited), desc="texts that were held up", unit="text", disable=None):
            self.attempt(name, work, contestants[name], *job)

    def jobs(self, temperatures: list[float], repeats: int) -> Iterator[tuple[Contestant, float, int, int]]:
        """Contestants change fastest: what the machine does meanwhile meets all of them."""
        for repeat in range(repeats):
            for temperature in temperatures:
                for number in range(len(self.texts)):
                    for one in self.contestants:
                        if repeat == 0 or not one.once:
                            yield one, temperature, number, repeat

    def attempt(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        if name in self.failed:
            return
        try:
            work(*arguments)
        except Exception as error:  # whatever it is: hours of the others' figures are worth more
            self.failed.add(name)
            self.lines.failed(name, error)

    def decode(self, one: Contestant, temperature: float, number: int, repeat: int) -> Line:
        text, streamer = self.texts[number], FirstTokens()
        decode = one.decoder(self.target, self.new_tokens, temperature, streamer, text.ends)
        ids = torch.tensor([text.tokens], device=self.target.device)
        # What is captured, compiled or measured at a first use is no part of decoding; on a GPU it depends on lengths.
        if one.name not in self.warm or (repeat == 0 and self.target.device.type == "cuda"):
            self.warm.add(one.name)
            decode(ids, number + 1)
        watch = Stopwatch(self.target)
        count, out = decode(ids, number + 1)
        seconds, waited = watch.stop()
        line = {"kind": "text", "decoder": one.name, "temperature": temperature, "text": number, "repeat": repeat}
        line |= {"seconds": seconds, "tokens": count, "first_seconds": streamer.at - watch.started, "waited": waited}
        line |= {"first_tokens": streamer.count}
        if out is not None:
            line["accepted"] = [step.accepted[0] for step in out.steps]
            line["emitted"] = [step.emitted[0] for step in out.steps]
            line["nodes"] = [step.nodes for step in out.steps]
            line["forwards"] = [step.forwards for step in out.steps]
            if repeat == 0:
                line["ids"] = out.new_tokens[0]
        return line

    def time_stages(self, one: Contestant, temperature: float) -> None:
        """Where a step's time goes, on one text."""
        text = self.texts[len(self.texts) // 2]
        assert not isinstance(one.what, dict)
        ids = torch.tensor([text.tokens], device=self.target.device)
        settings: dict[str, Any] = {"max_new_tokens": self.new_tokens, "eos_token_id": -1, "temperature": temperature}
        out = generate(self.target, one.what, ids, timings=True, seed=0, **settings)
        seconds = {stage: part / max(1, len(out.steps)) for stage, part in out.seconds.items()}
        self.lines.add({"kind": "stages", "decoder": one.name, "temperature": temperature, "seconds": seconds})


def rivals(target: Target, assistants: dict[str, str]) -> Iterator[Contestant]:
    """Transformers' own ways to generate. assistants: label and path of smaller models that may assist.

    A static cache is compiled on a GPU alone: elsewhere transformers compiles for no device."""
    yield Contestant("transformers", {})
    yield Contestant("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3})
    if target.device.type == "cuda":
        yield Contestant("transformers, static cache, compiled", {"cache_implementation": "static"})
    for label, path in assistants.items():
        small = Target.from_pretrained(path, dtype=target.dtype, device=target.device)
        yield Contestant(f"transformers, assisted by {label}", {"assistant_model": small.model})
