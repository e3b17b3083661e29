"""The results of a benchmark: figures by drafter, category and temperature, computed from its lines, and checks of each
drafter (identity with the baseline's texts, alignment, and the time of each stage of a step). `foredraft evaluate` and the
end of a training run share them; report.py writes the page.

Texts that end in a loop at a temperature are only in the category "loops": a loop is easy to draft, so it would overestimate
every drafter. Speeds include the prompt's forward. They are medians over repeats, with minimum and maximum. A speedup
compares the same texts of the same repeat.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from foredraft.inference.drafters import AutoTree
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.alignment import check_alignment
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Line, Prompt, System
from foredraft.inference.evaluation.lossless import audit, nodes_by_token
from foredraft.inference.evaluation.measure import REPETITIVE, distinct
from foredraft.inference.evaluation.progress import track
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.text import Detokenizer

ALL, LOOPS = "all", "loops"
ALIGNED = 4  # number of texts on which a drafter's alignment is checked

Lines = dict[tuple[int, int], Line]  # by repeat and text


class Spread(NamedTuple):
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread | None":
        return cls(median(values), min(values), max(values)) if values else None


class Table:
    """Compute figures from the lines of one temperature."""

    def __init__(self, lines: Iterable[Line], texts: list[Prompt], temperature: float):
        self.texts = texts
        self.by_decoder: dict[str, Lines] = defaultdict(dict)
        self.batched: dict[str, Lines] = defaultdict(dict)  # the texts that were decoded in batches
        for line in lines:
            if line["kind"] in ("text", "batched") and line["temperature"] == temperature:
                decoders = self.by_decoder if line["kind"] == "text" else self.batched
                decoders[line["decoder"]][line.get("repeat", 0), line["text"]] = line
        outputs: dict[int, list[int]] = {}  # the baseline's if it decoded the text
        for found in (self.by_decoder[BASELINE], *self.batched.values(), *self.by_decoder.values()):
            for (_, text), line in found.items():
                if "ids" in line:
                    outputs.setdefault(text, line["ids"])
        self.loops = {text for text, ids in outputs.items() if distinct(ids) < REPETITIVE}

    def chosen(self, category: str) -> set[int]:
        if category == LOOPS:
            return self.loops
        named = {number for number, text in enumerate(self.texts) if category in (ALL, text.category)}
        return named - self.loops

    def lines(self, decoder: str, category: str) -> list[Line]:
        """Return the lines that acceptance is computed from: those of the batches, if there are any."""
        chosen = self.chosen(category)
        lines = self.batched.get(decoder) or self.by_decoder[decoder]
        return [line for (_, text), line in lines.items() if text in chosen]

    def timed(self, decoder: str, category: str) -> Lines:
        chosen = self.chosen(category)
        return {key: line for key, line in self.by_decoder[decoder].items() if key[1] in chosen}

    def speedup(self, decoder: str, category: str) -> Spread | None:
        """Return the tokens per second over those of the baseline."""
        mine, theirs = self.timed(decoder, category), self.timed(BASELINE, category)
        rates = [rates_of({key: lines[key] for key in sorted(mine.keys() & theirs.keys())}) for lines in (mine, theirs)]
        return Spread.of([ours / base for ours, base in zip(*rates, strict=True)])

    def figures(self, decoder: str, category: str, chain: str | None = None) -> dict[str, Any] | None:
        """Return the figures of a decoder; None without texts of this category. chain: name of the decoder of its chain."""
        lines, timed = self.lines(decoder, category), self.timed(decoder, category)
        if not lines:
            return None
        return {
            "texts": len({line["text"] for line in lines}),
            "timed_texts": len({text for _, text in timed}),
            "acceptance_length": acceptance(lines),
            "acceptance_error": acceptance_error(lines),
            "chain_acceptance_length": acceptance(self.lines(chain, category)) if chain else None,
            "accepted_per_depth": accepted_shares(lines),
            "tokens_per_second": Spread.of(rates_of(timed)),
            "speedup": self.speedup(decoder, category),
        }


def rates_of(lines: Lines) -> list[float]:
    """Return the tokens per second of each repeat."""
    repeats: dict[int, list[Line]] = defaultdict(list)
    for (repeat, _), line in lines.items():
        repeats[repeat].append(line)
    return [sum(x["tokens"] for x in some) / sum(x["seconds"] for x in some) for _, some in sorted(repeats.items())]


def acceptance(lines: Iterable[Line]) -> float | None:
    """Return the acceptance length: tokens per target forward."""
    emitted = [count for line in lines for count in line.get("emitted", [])]
    return sum(emitted) / len(emitted) if emitted else None


def acceptance_error(lines: Iterable[Line]) -> float | None:
    """Return the standard error of the acceptance length over texts; repeats of a text are one."""
    counts: dict[int, tuple[int, int]] = {}
    for line in lines:
        steps, tokens = counts.get(line["text"], (0, 0))
        emitted = line.get("emitted", [])
        counts[line["text"]] = steps + len(emitted), tokens + sum(emitted)
    return ratio_error(list(counts.values()))


def ratio_error(counts: list[tuple[int, int]]) -> float | None:
    """Return the standard error of tokens per step, from (steps, tokens) of each text; None for less than two texts."""
    steps, tokens = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    if len(counts) < 2 or not steps:
        return None
    spread = sum((gained - tokens / steps * taken) ** 2 for taken, gained in counts)
    return math.sqrt(spread * len(counts) / (len(counts) - 1)) / steps


def accepted_shares(lines: Iterable[Line]) -> list[float]:
    """Return the share of steps that accepted at least d drafts, for d = 1, 2, ... up to the most that a step accepted."""
    accepted = [count for line in lines for count in line.get("accepted", [])]
    depths = range(1, max(accepted, default=0) + 1)
    return [sum(count >= depth for count in accepted) / len(accepted) for depth in depths]


class Sample(NamedTuple):
    prompt: str
    pieces: list[tuple[str, int]]  # text of a token, and its draft depth (0: a bonus token, chosen by the target)
    title: str = ""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[int],
        tokens: list[int],
        accepted: Iterable[int],
        emitted: Iterable[int],
        title: str = "",
    ) -> "Sample":
        """Create a sample from the tokens of a text. accepted, emitted: of each step, as `generation.Step` counts them. The
        first token comes from the prompt's forward."""
        depths = [0]
        for drafts, count in zip(accepted, emitted, strict=True):
            depths += [*range(1, drafts + 1), 0][:count]
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, prompt=prompt)
        pieces = [(detokenizer.push(token), depth) for token, depth in zip(tokens, depths, strict=False)]
        return cls(tokenizer.decode(prompt), pieces, title)

    @property
    def deepest(self) -> int:
        return max((depth for _, depth in self.pieces), default=0)


class Results(NamedTuple):
    """Hold all results. Temperatures that are keys of JSON are strings."""

    metadata: dict[str, Any]  # target, device, dtype, versions, date, command, prompts
    rows: list[dict[str, Any]]  # from Table.figures, with "drafter", "category", "temperature"
    rivals: list[str]  # names of the systems that are not ours
    identity: list[dict[str, Any]]  # "drafter", "temperature", "texts", "identical", "rounding", "wrong"
    stages: list[dict[str, Any]]  # "drafter", "temperature", "seconds": {stage: seconds}
    alignment: dict[str, list[str]]  # drafter -> its faults
    errors: dict[str, str]  # drafter -> reason for its omission


def measure(benchmark: Benchmark, temperatures: list[float], repeats: int, metadata: dict[str, Any]) -> Results:
    """Run the benchmark and its checks, and return the results."""
    benchmark.run(temperatures, repeats)
    check(benchmark, temperatures)
    systems, lines = list(benchmark.systems.values()), benchmark.lines
    rows = []
    for temperature in temperatures:
        table = Table(lines.lines, benchmark.texts, temperature)
        for category in dict.fromkeys([ALL, *(text.category for text in benchmark.texts), LOOPS]):
            for system in systems:
                # A system that failed may have decoded only some texts, which others' figures are not of.
                omitted = system.once or system.name in benchmark.failed
                figures = None if omitted else table.figures(system.name, category, system.chain)
                if figures is not None:
                    rows.append({"drafter": system.name, "temperature": temperature, "category": category, **figures})
    shares = {"preempted_share": median([line["preempted_share"] for line in lines.of("text")] or [0.0])}
    return Results(
        metadata=metadata | {"new_tokens": benchmark.new_tokens} | shares,
        rows=rows,
        rivals=[system.name for system in systems if system.is_rival],
        identity=[place(line) | line["result"] for line in lines.of("identity")],
        stages=[place(line) | {"seconds": line["result"]} for line in lines.of("stages")],
        alignment={line["decoder"]: line["result"] for line in lines.of("alignment") if line["result"]},
        errors={line["decoder"]: line["reason"] for line in lines.of("error")},
    )


def place(line: Line) -> dict[str, Any]:
    return {"drafter": line["decoder"], "temperature": line["temperature"]}


def check(benchmark: Benchmark, temperatures: list[float]) -> None:
    """Check our systems, and write each result as a line, like the texts."""
    done = {(line["kind"], line["decoder"], line["temperature"]) for line in benchmark.lines.lines if "result" in line}
    left: list[tuple[str, str, float]] = []
    for system in benchmark.systems.values():
        kinds = [] if system.is_rival else ["identity"] if system.once else ["identity", "stages"]
        left += [(kind, system.name, temperature) for temperature in temperatures for kind in kinds]
        # Of a head that sizes its tree, the fixed one next to it is checked, because the other may not draft.
        sizes = isinstance(system.drafter, AutoTree) and system.drafter.suffix is None
        if isinstance(system.drafter, Drafter) and not system.once and not sizes:
            left.append(("alignment", system.name, temperatures[0]))
    for job in track([job for job in left if job not in done], "checking texts and alignment", "checks"):
        benchmark.attempt(job[1], save_check, benchmark, *job)


def save_check(benchmark: Benchmark, kind: str, name: str, temperature: float) -> None:
    result = CHECKS[kind](benchmark, benchmark.systems[name], temperature)
    benchmark.lines.add({"kind": kind, "decoder": name, "temperature": temperature, "result": result})


def identity(benchmark: Benchmark, system: System, temperature: float) -> dict[str, Any]:
    """Return the number of texts that equal the baseline's, that differ because of rounding, and that are wrong."""
    texts: dict[str, dict[int, Line]] = {BASELINE: {}, system.name: {}}
    for line in benchmark.lines.of("text"):
        if line["decoder"] in texts and line["temperature"] == temperature and "ids" in line:
            texts[line["decoder"]][line["text"]] = line
    counts, gaps = {"texts": 0, "identical": 0, "rounding": 0, "wrong": 0}, []
    for number in sorted(texts[system.name].keys() & texts[BASELINE].keys()):
        line, prompt = texts[system.name][number], benchmark.texts[number].tokens
        both = texts[BASELINE][number]["ids"], line["ids"]
        nodes = nodes_by_token(line["emitted"], line["nodes"])
        divergence = audit(benchmark.target, prompt, *both, nodes, SamplingParams(temperature), seed=number + 1)
        counts["texts"] += 1
        counts["identical" if divergence is None else "rounding" if divergence.is_arithmetic else "wrong"] += 1
        if divergence is not None:
            gaps.append({"text": number, **divergence._asdict()})
    return {**counts, "gaps": gaps}


def stages(benchmark: Benchmark, system: System, temperature: float) -> dict[str, float]:
    """Return the seconds of a step's stages, on one text."""
    text = benchmark.texts[len(benchmark.texts) // 2]._replace(ends=False)
    _, out = system.decode(benchmark.target, text, benchmark.new_tokens, temperature, seed=0, timings=True)
    assert out is not None, "one of ours"
    return {stage: seconds / max(1, len(out.steps)) for stage, seconds in out.seconds.items()}


def alignment(benchmark: Benchmark, system: System, temperature: float) -> list[str]:
    """Return the faults of a drafter's alignment, on texts that are not loops."""
    assert isinstance(system.drafter, Drafter)
    table = Table(benchmark.lines.lines, benchmark.texts, temperature)
    numbers = sorted(table.chosen(ALL)) or range(len(benchmark.texts))
    prompts = [benchmark.texts[number].tokens for number in numbers[:ALIGNED]]
    return check_alignment(benchmark.target, system.drafter, prompts, benchmark.new_tokens).faults


CHECKS: dict[str, Callable[[Benchmark, System, float], Any]]
CHECKS = {"identity": identity, "stages": stages, "alignment": alignment}


def samples(benchmark: Benchmark) -> Iterator[Sample]:
    """Yield, for each category, the text with the median acceptance length of the best drafter at the first temperature."""
    whole = [line for line in benchmark.lines.lines if line["decoder"] not in benchmark.failed]
    lines = [line for line in whole if line.get("emitted") and "ids" in line]
    if not lines:
        return
    temperature = lines[0]["temperature"]
    table = Table(lines, benchmark.texts, temperature)
    drafter = max(table.by_decoder, key=lambda name: acceptance(table.lines(name, ALL)) or 0)
    for category in dict.fromkeys(text.category for text in benchmark.texts):
        texts = sorted(table.lines(drafter, category), key=lambda line: line["tokens"] / len(line["emitted"]))
        if texts:
            line = texts[len(texts) // 2]
            prompt, tokenizer = benchmark.texts[line["text"]].tokens, benchmark.target.text_tokenizer
            title = f"{category}: {drafter}, temperature {temperature:g}"
            yield Sample.of(tokenizer, prompt, line["ids"], line["accepted"], line["emitted"], title)
