"""Measure drafters:  foredraft evaluate target=ORG/NAME 'drafter=[outputs/mine/head,ngram]' prompts=spec_bench

Every drafter, autoregressive decoding (the baseline) and transformers' own generate decode the same prompts, all in turn on
each prompt. The report has acceptance length, speed relative to the baseline and to the best of transformers, identity with
the baseline's texts, the time of each stage of a step, and faults of drafters. The same command resumes an interrupted run.
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
from omegaconf import DictConfig, ListConfig, OmegaConf

from foredraft.cli import entry
from foredraft.heads import Target
from foredraft.heads.target.device import device_name
from foredraft.inference import generate, load_drafter
from foredraft.inference.drafters import AutoTree, Drafter, chain_of, tree_of
from foredraft.inference.evaluation import benchmark_report, figures
from foredraft.inference.evaluation.alignment import check_alignment
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Line, Lines, System, Text, rivals
from foredraft.inference.evaluation.benchmark_report import Results
from foredraft.inference.evaluation.lossless import audit, nodes_by_token
from foredraft.inference.evaluation.progress import track
from foredraft.inference.evaluation.report import Sample
from foredraft.train.data import prompt_sets
from foredraft.train.data.corpus import has_chats, prompts
from foredraft.train.data.loading import load_corpus
from foredraft.train.data.prompt_sets import Prompt
from foredraft.train.runtime.environment import versions
from foredraft.train.runtime.locks import hold

ALIGNED = 4  # number of texts on which a drafter's alignment is checked


@entry("evaluate")
def main(cfg: DictConfig) -> None:
    for name in ("prompt_tokens", "max_new_tokens", "repeats", "chain"):
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
    if not isinstance(cfg.drafter, ListConfig):
        cfg.drafter = [cfg.drafter]
    same_run(output / "run.json", cfg)
    target: Target = instantiate(cfg.target)
    chosen = read_prompts(cfg, target, output / "prompts.json")
    print(prompt_sets.summary(chosen), flush=True)
    lines = Lines(output / "lines.jsonl")
    ours = load(cfg, target, lines)
    systems = [*ours, *(rivals(target, assistants(cfg)) if cfg.rivals else ())]
    texts = [Text(prompt.category, prompt.tokens, prompt.ends) for prompt in chosen]
    benchmark = Benchmark(target, systems, texts, cfg.max_new_tokens, lines)
    temperatures = [float(t) for t in cfg.temperature]
    benchmark.run(temperatures, cfg.repeats)
    examine(cfg, benchmark, temperatures)
    results = collect(cfg, benchmark, temperatures, prompt_sets.summary(chosen))
    benchmark_report.write(output, results, list(samples(benchmark)))
    print(f"\n{benchmark_report.terminal(results)}\n\nreport: {output / 'report.html'}")


def same_run(file: Path, cfg: DictConfig) -> None:
    """Save the settings. Raises ValueError if the directory contains a run with other settings; repeats may differ."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    for name in ("repeats", "temperature", "rivals", "output_dir"):
        del settings[name]
    if file.exists() and json.loads(file.read_text()) != settings:
        raise ValueError(
            f"output_dir={file.parent} contains a run with other settings ({file}). Use another output_dir, or remove it."
        )
    file.write_text(json.dumps(settings, indent=1) + "\n")


def read_prompts(cfg: DictConfig, target: Target, file: Path) -> list[Prompt]:
    """Return the prompts that an earlier part of the run saved, or read and save new ones. Questions of several turns need
    the target's answers to the turns before."""
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
        most = (target.context or 10**9) - cfg.max_new_tokens
        if most < 1:
            raise ValueError(
                f"max_new_tokens={cfg.max_new_tokens} leaves no room for a prompt in the target's context of "
                f"{target.context} tokens"
            )

        def answer(ids: list[int]) -> list[int]:
            return generate(
                target, None, torch.tensor([ids], device=target.device), max_new_tokens=cfg.max_new_tokens
            ).new_tokens[0]

        found = list(
            prompt_sets.tokenize(prompt_sets.questions(cfg.prompts, cfg.limit or None), tokenizer, most, answer)
        )
    file.write_text(json.dumps(found) + "\n")
    return found


def load(cfg: DictConfig, target: Target, lines: Lines) -> list[System]:
    """Return the baseline and the drafters, each with its variants. Drafters that cannot be loaded are logged."""
    systems = [System(BASELINE, None)]
    for one in cfg.drafter:
        options: dict[str, Any] = {"path": one} if isinstance(one, str) else {str(key): one[key] for key in one}
        name = str(options.pop("name", options.get("path", options.get("_target_"))))
        try:
            drafter = (
                instantiate(options, target=target) if "_target_" in options else load_drafter(target=target, **options)
            )
            systems += with_variants(name, drafter, target, cfg.chain)
        except Exception as error:
            lines.failed(name, error)
    if len(systems) == 1:
        raise ValueError(
            f"no drafter of drafter={list(cfg.drafter)} could be loaded: {lines.of('error')[-1]['reason']}"
        )
    return systems


def with_variants(name: str, drafter: Drafter, target: Target, chain: int) -> Iterator[System]:
    """Yield the drafter, its fixed tree if it sizes its tree, and the chain of a head."""
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
    """Return the smaller models among the drafters, with which transformers can draft too."""
    paths = [given if isinstance(given, str) else str(given.get("path", "")) for given in cfg.drafter]
    return {path: path.removeprefix("draft:") for path in paths if path.startswith("draft:")}


def examine(cfg: DictConfig, benchmark: Benchmark, temperatures: list[float]) -> None:
    """Check identity and alignment, and write each result as a line, like the texts."""
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
            lambda one=one, rows=rows: check_alignment(target, one.drafter, rows[:ALIGNED], cfg.max_new_tokens).faults,
        )
    for name, work in track(left, "checking texts and alignment", "checks"):
        benchmark.attempt(name, work)


def identity(benchmark: Benchmark, one: System, temperature: float) -> dict[str, Any]:
    """Return the number of texts that equal the baseline's, that differ because of rounding, and that are wrong."""
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
    """Yield, for each category, the text with the median acceptance length of the best drafter at the first temperature."""
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
            "new_tokens": cfg.max_new_tokens,
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
