"""Measure what drafters gain:  foredraft evaluate target=ORG/NAME 'drafter=[outputs/mine/head,ngram]' prompts=spec_bench

Every drafter, plain decoding and transformers' own generate decode the same prompts, all in turn on each. The report has
acceptance, speed over plain decoding and over the best of transformers, identity with plain text, where a step's time goes,
and whether anything is wrong with a drafter. A run that was stopped is continued by the same command.
"""

import copy
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm.auto import tqdm

from foredraft.heads import Target
from foredraft.heads.target.device import device_name
from foredraft.inference import generate, load_drafter
from foredraft.inference.drafters import AutoTree, Drafter, chain_of, tree_of
from foredraft.inference.evaluation import benchmark_report, figures
from foredraft.inference.evaluation.alignment import check_alignment
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Line, Lines, System, Text, rivals
from foredraft.inference.evaluation.benchmark_report import Results
from foredraft.inference.evaluation.lossless import audit, nodes_by_token
from foredraft.inference.evaluation.report import Sample
from foredraft.train.cli import entry
from foredraft.train.data import prompt_sets
from foredraft.train.data.corpus import has_chats, prompts
from foredraft.train.data.loading import load_corpus
from foredraft.train.data.prompt_sets import Prompt
from foredraft.train.runtime.environment import versions
from foredraft.train.runtime.locks import hold

ALIGNED = 4  # texts over which a drafter's alignment is checked


@entry("evaluate")
def main(cfg: DictConfig) -> None:
    for name in ("prompt_tokens", "new_tokens", "repeats", "chain"):
        if cfg[name] < 1:
            raise ValueError(f"{name}={cfg[name]} must be at least 1")
    if not cfg.temperature or min(cfg.temperature) < 0:
        raise ValueError(f"temperature={list(cfg.temperature)}: at least one, of 0 (greedy) or more")
    if cfg.limit < 0:
        raise ValueError(f"limit={cfg.limit} must be at least 1, or 0 for all prompts")
    output = Path(cfg.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with hold(output, "output_dir"):
        measure(cfg, output)


def measure(cfg: DictConfig, output: Path) -> None:
    same_run(output / "run.json", cfg)
    target: Target = instantiate(cfg.target)
    chosen = read_prompts(cfg, target, output / "prompts.json")
    print(prompt_sets.summary(chosen), flush=True)
    lines = Lines(output / "lines.jsonl")
    ours = load(cfg, target, lines)
    systems = [*ours, *(rivals(target, assistants(cfg)) if cfg.rivals else ())]
    texts = [Text(prompt.category, prompt.tokens, prompt.ends) for prompt in chosen]
    benchmark = Benchmark(target, systems, texts, cfg.new_tokens, lines)
    temperatures = [float(t) for t in cfg.temperature]
    benchmark.run(temperatures, cfg.repeats)
    examine(cfg, benchmark, temperatures)
    results = collect(cfg, benchmark, temperatures, prompt_sets.summary(chosen))
    benchmark_report.write(output, results, list(samples(benchmark)))
    print(f"\n{benchmark_report.terminal(results)}\n\nreport: {output / 'report.html'}")


def same_run(file: Path, cfg: DictConfig) -> None:
    """Raises ValueError where the directory holds lines of other settings. More repeats, say, are the same run."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    for name in ("repeats", "temperature", "rivals", "output_dir"):
        del settings[name]
    if file.exists() and json.loads(file.read_text()) != settings:
        raise ValueError(
            f"{file.parent} holds a run with other settings ({file}): give another output_dir, or remove it"
        )
    file.write_text(json.dumps(settings, indent=1) + "\n")


def read_prompts(cfg: DictConfig, target: Target, file: Path) -> list[Prompt]:
    """Those of an earlier part of the run, which may have had the target answer first turns, or new ones."""
    if file.exists():
        return [Prompt(*prompt) for prompt in json.loads(file.read_text())]
    tokenizer = target.text_tokenizer
    if cfg.prompts == "held_out":
        data = load_corpus(cfg.data, target)
        sets = data.test_sets or {"held_out": data.test}
        most = -(-cfg.limit // len(sets)) if cfg.limit else 10**6
        found = [
            Prompt(name, row, has_chats(held))
            for name, held in sets.items()
            for row in prompts(tokenizer, held, most, cfg.prompt_tokens)
        ]
    else:
        most = (target.context or 10**9) - cfg.new_tokens
        if most < 1:
            raise ValueError(
                f"new_tokens={cfg.new_tokens} leaves no room for a prompt: the target's context is {target.context}"
            )

        def answer(ids: list[int]) -> list[int]:
            return generate(
                target, None, torch.tensor([ids], device=target.device), max_new_tokens=cfg.new_tokens
            ).new_tokens[0]

        found = list(
            prompt_sets.tokenize(prompt_sets.questions(cfg.prompts, cfg.limit or None), tokenizer, most, answer)
        )
    file.write_text(json.dumps(found) + "\n")
    return found


def load(cfg: DictConfig, target: Target, lines: Lines) -> list[System]:
    """Plain decoding and the drafters; where one sizes its tree, the fixed tree beside it; and the chain of a head."""
    found = [System(BASELINE, None)]
    for one in cfg.drafters:
        options: dict[str, Any] = {"spec": one} if isinstance(one, str) else {str(key): one[key] for key in one}
        name = str(options.pop("name", options.get("spec", options.get("_target_"))))
        try:
            drafter = (
                instantiate(options, target=target) if "_target_" in options else load_drafter(target=target, **options)
            )
            found += around(name, drafter, target, cfg.chain)
        except Exception as error:
            lines.failed(name, error)
    if len(found) == 1:
        raise ValueError(
            f"no drafter of drafter={list(cfg.drafters)} could be loaded: {lines.of('error')[-1]['reason']}"
        )
    return found


def around(name: str, drafter: Drafter, target: Target, chain: int) -> Iterator[System]:
    yield System(name, drafter)
    tree = tree_of(drafter)
    if isinstance(drafter, AutoTree) and tree is not None:
        fixed = copy.copy(tree)
        yield System(f"{name}, fixed tree", fixed)
    if tree is not None:
        yield System(chain_name(name, chain), chain_of(tree, target, chain), once=True)


def chain_name(name: str, chain: int) -> str:
    return f"{name.removesuffix(', fixed tree')}, chain of {chain}"


def assistants(cfg: DictConfig) -> dict[str, str]:
    """Smaller models among the drafters, which transformers can draft with too."""
    specs = [given if isinstance(given, str) else str(given.get("spec", "")) for given in cfg.drafters]
    return {spec: spec.removeprefix("draft:") for spec in specs if spec.startswith("draft:")}


def examine(cfg: DictConfig, benchmark: Benchmark, temperatures: list[float]) -> None:
    """What is not speed: identity and alignment. Each is a line, like the texts."""
    lines, target = benchmark.lines, benchmark.target
    done = {(line["kind"], line["decoder"], *line["job"]) for line in lines.lines if "job" in line}
    left: list[tuple[str, Callable[[], None]]] = []

    def once(kind: str, name: str, job: list[Any], work: Any) -> None:
        if (kind, name, *job) not in done:
            left.append((name, lambda: lines.add({"kind": kind, "decoder": name, "job": job, "found": work()})))

    for one in benchmark.systems:
        if not isinstance(one.drafter, Drafter):
            continue
        for temperature in temperatures:
            once("identity", one.name, [temperature], lambda one=one, t=temperature: identity(benchmark, one, t))
        if one.once or one.name.endswith(", fixed tree"):
            continue
        table = figures.Table(lines.lines, benchmark.texts, temperatures[0])
        rows = [benchmark.texts[n].tokens for n in sorted(table.chosen(figures.ALL)) or range(len(benchmark.texts))]
        once(
            "alignment",
            one.name,
            [],
            lambda one=one, rows=rows: check_alignment(target, one.drafter, rows[:ALIGNED], cfg.new_tokens).faults,
        )
    for name, work in tqdm(left, desc="checks", unit="check"):
        benchmark.attempt(name, work)


def identity(benchmark: Benchmark, one: System, temperature: float) -> dict[str, Any]:
    """How many texts are plain decoding's, how many differ where rounding decides, and how many are wrong."""
    assert isinstance(one.drafter, Drafter)
    found: dict[str, dict[int, Line]] = {BASELINE: {}, one.name: {}}
    for line in benchmark.lines.of("text"):
        if line["decoder"] in found and line["temperature"] == temperature and "ids" in line:
            found[line["decoder"]][line["text"]] = line
    counts, gaps = {"identical": 0, "rounding": 0, "wrong": 0}, []
    for number, line in found[one.name].items():
        prompt, seed, plain = benchmark.texts[number].tokens, number + 1, found[BASELINE][number]["ids"]
        nodes = nodes_by_token(line["emitted"], line["nodes"])
        place = audit(benchmark.target, prompt, plain, line["ids"], nodes, temperature, seed)
        counts["identical" if place is None else "rounding" if place.is_arithmetic else "wrong"] += 1
        if place is not None:
            gaps.append({"text": number, **place._asdict()})
    return {"texts": len(found[one.name]), **counts, "gaps": gaps}


def samples(benchmark: Benchmark) -> Iterator[Sample]:
    """Of each category the text with the median tokens per forward of the drafter that accepts most, first temperature."""
    lines = [line for line in benchmark.lines.of("text") if line.get("emitted") and "ids" in line]
    if not lines:
        return
    table = figures.Table(lines, benchmark.texts, lines[0]["temperature"])
    drafter = max(table.by_decoder, key=lambda name: figures.acceptance(table.lines(name, figures.ALL)) or 0)
    for category in dict.fromkeys(text.category for text in benchmark.texts):
        found = sorted(table.lines(drafter, category), key=lambda line: line["tokens"] / len(line["emitted"]))
        if found:
            line = found[len(found) // 2]
            prompt, tokenizer = benchmark.texts[line["text"]].tokens, benchmark.target.text_tokenizer
            title = f"{category}: {drafter}, temperature {line['temperature']:g}"
            yield Sample.of(tokenizer, prompt, line["ids"], line["accepted"], line["emitted"], title)


def collect(cfg: DictConfig, benchmark: Benchmark, temperatures: list[float], about: str) -> Results:
    lines, target = benchmark.lines, benchmark.target
    names = [one.name for one in benchmark.systems if not one.once]
    others = [one.name for one in benchmark.systems if one.is_rival]
    rows = []
    for temperature in temperatures:
        table = figures.Table(lines.lines, benchmark.texts, temperature)
        for category in [figures.ALL, *dict.fromkeys(text.category for text in benchmark.texts), figures.LOOPS]:
            for name in names:
                found = figures.decoder_figures(table, name, category, others, chain_name(name, cfg.chain))
                if found is not None:
                    rows.append({"drafter": name, "temperature": temperature, "category": category, **found})
    return Results(
        metadata={
            "target": target.name,
            "device": device_name(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "date": datetime.date.today().isoformat(),
            "prompts": about,
            "new_tokens": cfg.new_tokens,
            "preempted_share": median(lines.preempted_shares().values() or [0.0]),
            "command": " ".join(["python", *sys.argv]),
            "versions": versions(),
        },
        rows=rows,
        rivals=others,
        identity=[
            {"drafter": line["decoder"], "temperature": line["job"][0], **line["found"]}
            for line in lines.of("identity")
        ],
        stages=[
            {"drafter": line["decoder"], "temperature": line["temperature"], "seconds": line["seconds"]}
            for line in lines.of("stages")
        ],
        alignment={line["decoder"]: line["found"] for line in lines.of("alignment") if line["found"]},
        errors={line["decoder"]: line["reason"] for line in lines.of("error")},
    )


if __name__ == "__main__":
    main()
