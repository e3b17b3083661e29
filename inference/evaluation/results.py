"""The results of a benchmark: figures, and checks of each drafter (identity with the baseline's texts, alignment, and the
time of each stage of a step). `foredraft evaluate` and the end of a training run share them; report.py writes the page."""

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from foredraft.inference.drafters import tree_of
from foredraft.inference.drafters.auto import HeadTree
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.alignment import check_alignment
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Line, System
from foredraft.inference.evaluation.figures import ALL, LOOPS, Table, acceptance, decoder_figures
from foredraft.inference.evaluation.lossless import audit, nodes_by_token
from foredraft.inference.evaluation.measure import length_settings
from foredraft.inference.evaluation.progress import track
from foredraft.inference.generation import generate
from foredraft.inference.text import Detokenizer

ALIGNED = 4  # number of texts on which a drafter's alignment is checked


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
    rows: list[dict[str, Any]]  # from figures.decoder_figures, with "drafter", "category", "temperature"
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
        for category in [ALL, *dict.fromkeys(text.category for text in benchmark.texts), LOOPS]:
            for system in systems:
                figures = None if system.once else decoder_figures(table, system.name, category, system.chain)
                if figures is not None:
                    rows.append({"drafter": system.name, "temperature": temperature, "category": category, **figures})
    shares = {"preempted_share": median(lines.preempted_shares().values() or [0.0])}
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
        for number, temperature in enumerate(temperatures):
            kinds = ["identity"] if system.once else ["identity", "stages"]
            if number == 0 and is_aligned_apart(benchmark, system):
                kinds.append("alignment")
            jobs = [(kind, system.name, temperature) for kind in kinds if not system.is_rival]
            left += [job for job in jobs if job not in done]
    for job in track(left, "checking texts and alignment", "checks"):
        benchmark.attempt(job[1], save_check, benchmark, *job)


def is_aligned_apart(benchmark: Benchmark, system: System) -> bool:
    """Return whether to check a system's alignment. Where a head drafts a fixed tree and sizes it too, the fixed one is
    checked, because the other may not draft."""
    if system.once or not isinstance(system.drafter, Drafter):
        return False
    tree = tree_of(system.drafter)
    fixed = [
        other.drafter for other in benchmark.systems.values() if isinstance(other.drafter, HeadTree) and not other.once
    ]
    return tree is None or tree is system.drafter or all(tree.head is not other.head for other in fixed)


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
        divergence = audit(benchmark.target, prompt, *both, nodes, temperature, seed=number + 1)
        counts["texts"] += 1
        counts["identical" if divergence is None else "rounding" if divergence.is_arithmetic else "wrong"] += 1
        if divergence is not None:
            gaps.append({"text": number, **divergence._asdict()})
    return {**counts, "gaps": gaps}


def stages(benchmark: Benchmark, system: System, temperature: float) -> dict[str, float]:
    """Return the seconds of a step's stages, on one text."""
    assert not isinstance(system.drafter, dict)
    text = benchmark.texts[len(benchmark.texts) // 2]
    ids = torch.tensor([text.tokens], device=benchmark.target.device)
    if system.drafter is not None:
        system.drafter.forget_outputs()
    settings = length_settings(benchmark.new_tokens, ends=False) | {"temperature": temperature, "seed": 0}
    out = generate(benchmark.target, system.drafter, ids, timings=True, **settings)
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
    lines = [line for line in benchmark.lines.lines if line.get("emitted") and "ids" in line]
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
