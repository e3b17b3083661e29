"""Measure foredraft, transformers, vLLM and EAGLE's own code side by side on Spec-Bench:

    bash scripts/vllm_env.sh
    python scripts/bench/spec_bench.py target=smollm2 eagle3_head=scripts/smollm2/eagle3 prompts=spec_bench vllm=.venv-vllm

All systems answer a question in turn before the next one comes, prefill included, so that a change of the machine's speed
meets all alike. Each answer is a line of answers.jsonl, and the same command continues a run that was stopped. With one
thread on a CPU, time is the CPU's (other programs hardly lengthen it), else the wall clock's. Standard errors are jackknife
estimates over questions. `table=NAME` writes the table into figures.json, from which tables.py makes README's and docs'.
"""

import datetime
import json
import math
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from tqdm.auto import tqdm

from foredraft import Target
from foredraft.cli import check_at_least, entry
from foredraft.heads.caches.device import device_name
from foredraft.inference.evaluation.benchmark import Lines, Prompt
from foredraft.scripts.bench import systems
from foredraft.scripts.bench.matched import first_turns
from foredraft.scripts.bench.tables import markdown, publish
from foredraft.train.runtime.locks import hold
from foredraft.words import ROOT

Line = dict[str, Any]  # of one system and batch: its name, the batch's number, the repeat, and an Answer's fields
Pairs = list[tuple[Line, Line]]  # of a system and its baseline
Cell = list[float] | float | str | None
COLUMNS = [
    {"title": "system"},
    {"title": "tokens/s", "digits": 1},
    {"title": "speed-up", "digits": 2, "unit": "x"},
    {"title": "acceptance length", "digits": 2},
    {"title": "texts identical to the baseline"},
]


@entry("spec_bench")
def main(cfg: DictConfig) -> None:
    check_at_least(cfg, 1, "batch_size", "max_new_tokens", "repeats", "chain")
    if cfg.eagle is not None and (cfg.eagle_head is None or cfg.batch_size > 1):
        raise ValueError(f"eagle={cfg.eagle} needs eagle_head=DIRECTORY, an EAGLE-1 head, and batch_size=1")
    if any(cfg.sampling) and (cfg.transformers or cfg.vllm or cfg.eagle):
        raise ValueError(
            f"sampling={cfg.sampling} is for foredraft only: set transformers=false, vllm=null, eagle=null"
        )
    folder = Path(cfg.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder, "output_dir"):
        measure(cfg, folder)


def measure(cfg: DictConfig, folder: Path) -> None:
    target: Target = instantiate(cfg.target)
    prompts = interleaved(first_turns(target, cfg.prompts, cfg.limit, cfg.max_new_tokens))
    tokens = [prompt.tokens for prompt in prompts]
    batches = [tokens[start : start + cfg.batch_size] for start in range(0, len(tokens), cfg.batch_size)]
    same_run(folder / "run.json", cfg)
    lines = Lines(folder / "answers.jsonl")
    rivals = systems.rivals(target, cfg, folder, max(map(len, tokens)))
    end = math.inf if cfg.minutes is None else time.monotonic() + 60 * cfg.minutes
    for repeat in range(cfg.repeats):
        contestants = rivals | systems.ours(
            target, cfg
        )  # anew: suffix matching would know its answers of an earlier repeat
        answer_all(contestants, batches, repeat, end, lines)
    found = complete(lines.of("answer"), len(contestants))
    if not found:
        raise ValueError(f"minutes={cfg.minutes}: no question was answered by all systems; the same command continues")
    rows = [row(name, one.baseline, found, clock(target)) for name, one in contestants.items()]
    numbers = sorted({line["batch"] for line in found})
    asked = [prompt.category for n in numbers for prompt in prompts[n * cfg.batch_size : (n + 1) * cfg.batch_size]]
    result = {"columns": COLUMNS, "rows": rows} | about(cfg, target, asked)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    if cfg.table is not None:
        publish(cfg.table, result)


def interleaved(prompts: list[Prompt]) -> list[Prompt]:
    """Order questions so that a run that is stopped early has answered as many of each category."""
    seen: Counter[str] = Counter()
    order = []
    for number, prompt in enumerate(prompts):
        order.append((seen[prompt.category], number))
        seen[prompt.category] += 1
    return [prompts[number] for _, number in sorted(order)]


def complete(lines: list[Line], systems: int) -> list[Line]:
    """Return the answers to questions that every system has answered."""
    counts = Counter((line["batch"], line["repeat"]) for line in lines)
    return [line for line in lines if counts[line["batch"], line["repeat"]] == systems]


def same_run(file: Path, cfg: DictConfig) -> None:
    """Refuse a directory whose answers were given under other settings."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    for name in ("repeats", "minutes", "table", "output_dir"):
        del settings[name]
    if file.exists() and json.loads(file.read_text()) != settings:
        raise ValueError(
            f"{file.parent} has answers under other settings ({file}): give another output_dir, or remove it"
        )
    file.write_text(json.dumps(settings, indent=1) + "\n")


def answer_all(
    found: dict[str, systems.Contestant], batches: list[systems.Prompts], repeat: int, end: float, lines: Lines
) -> None:
    """Let every system answer every batch that it has not answered. end: on the monotonic clock."""
    done = {(line["system"], line["batch"], line["repeat"]) for line in lines.of("answer")}
    jobs = [(number, name) for number in range(len(batches)) for name in found]
    left = [(number, name) for number, name in jobs if (name, number, repeat) not in done]
    warm: set[str] = set()
    for number, name in tqdm(left, desc="answers", unit="answer"):
        if time.monotonic() > end:
            return
        if name not in warm:  # what is loaded, compiled or measured at a first use is not part of decoding
            warm.add(name)
            # Not with a question: suffix matching remembers what it has answered.
            found[name].answer([tokens[::-1] for tokens in batches[0]], 0)
        answer = found[name].answer(batches[number], number + 1)
        job = {"kind": "answer", "system": name, "batch": number, "repeat": repeat}
        lines.add(job | answer._asdict() | {"tokens": sum(map(len, answer.texts))})


def clock(target: Target) -> str:
    return "cpu" if target.device.type == "cpu" and torch.get_num_threads() == 1 else "seconds"


def row(name: str, base: str, lines: list[Line], clock: str) -> list[Cell]:
    """Summarize one system next to its baseline."""
    ours, plain = ({(x["batch"], x["repeat"]): x for x in lines if x["system"] == one} for one in (name, base))
    questions: dict[int, Pairs] = defaultdict(list)
    for place, line in ours.items():
        questions[place[0]].append((line, plain[place]))
    found = list(questions.values())
    pairs = list(chain.from_iterable(found))
    counted = any(line["forwards"] for line in ours.values())
    same = [a == b for one, other in pairs for a, b in zip(one["texts"], other["texts"], strict=True)]
    return [
        name,
        jackknife(found, lambda some: rate([ours for ours, _ in some], clock)),
        jackknife(found, lambda some: rate([o for o, _ in some], clock) / rate([p for _, p in some], clock)),
        jackknife(found, lambda some: total(some, "emitted") / max(1, total(some, "forwards"))) if counted else None,
        f"{sum(same)} of {len(same)}",
    ]


def total(pairs: Pairs, field: str) -> float:
    return sum(ours[field] for ours, _ in pairs)


def rate(lines: list[Line], clock: str) -> float:
    return sum(line["tokens"] for line in lines) / sum(line[clock] for line in lines)


def jackknife(questions: Sequence[Pairs], statistic: Callable[[Pairs], float]) -> list[float] | float:
    """Return a statistic and its standard error, by leaving out one question at a time, with all its repeats."""
    value, n = statistic(list(chain.from_iterable(questions))), len(questions)
    if n < 2:
        return value
    parts = [[*questions[:i], *questions[i + 1 :]] for i in range(n)]
    without = [statistic(list(chain.from_iterable(some))) for some in parts]
    mean = sum(without) / n
    return [value, math.sqrt((n - 1) / n * sum((one - mean) ** 2 for one in without))]


def about(cfg: DictConfig, target: Target, asked: list[str]) -> dict[str, Any]:
    """Return what a published figure has to tell besides its value. asked: the categories of the questions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    threads = "CPU time of one thread" if clock(target) == "cpu" else "wall time"
    private = ("output_dir=", "table=", "prompts=", "minutes=", "vllm=")
    typed = [argument for argument in sys.argv[1:] if not argument.startswith(private)]
    typed += ["vllm=.venv-vllm"] if cfg.vllm else []
    typed.append("prompts=spec_bench" if "spec_bench" in cfg.prompts else f"prompts={Path(cfg.prompts).name}")
    return {
        "command": " ".join(
            ["python scripts/bench/spec_bench.py", *(f"'{one}'" if " " in one else one for one in typed)]
        ),
        "commit": commit.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "hardware": device_name(target.device),
        "n": len(asked),
        "standard_error": "jackknife over questions",
        "note": f"{target.name}, {str(target.dtype).removeprefix('torch.')}, up to {cfg.max_new_tokens} new tokens "
        f"({', '.join(f'{n} {category}' for category, n in Counter(asked).items())}), prefill included, {threads}"
        + (f"; vLLM {'without' if cfg.eager else 'with'} compilation" if cfg.vllm else ""),
    }


if __name__ == "__main__":
    main()
