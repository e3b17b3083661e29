"""Every published way to draft, in one table:  python scripts/bench/compare.py

Trains every head of conf/head with train/run.py, one after the other, then decodes the same held-out prompts with every
drafter at T=0 and T=1, all in turn on each prompt. Finished trainings are reused, so a stopped comparison can be continued.
It writes compare.csv, compare.md and compare.png.
"""

import csv
import datetime
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from transformers import AutoModelForCausalLM

from heads import Target, adapter
from inference import load_drafter
from inference.drafters import Drafter
from inference.evaluation.measure import REPETITIVE, acceptance, distinct, per_depth, run, texts
from inference.evaluation.speed import Decoder, foredraft_decoder, time_decoders, transformers_decoder
from train.cli import CONF, entry
from train.data.corpus import prompts
from train.runtime.environment import device_name

ROOT = CONF.parent
PLAIN = "plain"
TEMPERATURES = {"T=0": 0.0, "T=1": 1.0}


@entry("compare")
def main(cfg: DictConfig) -> None:
    output = Path(cfg.output_dir)
    known = {path.stem: [f"head={path.stem}"] for path in sorted((CONF / "head").glob("*.yaml"))}
    known |= {str(name): list(given) for name, given in cfg.variants.items()}
    if unknown := set(cfg.heads or []) - set(known):
        raise ValueError(f"heads={sorted(unknown)} are not among conf/head and variants, which have {', '.join(known)}")
    typed = [o for o in HydraConfig.get().overrides.task if re.match(r"\+*(target|data)[.=@]", o)]
    trained: dict[str, Path] = {}
    for name in cfg.heads or known:
        trained[name] = train(output / name, [*known[name], *typed, *overrides(cfg.train)], list(trained.values()))
    target: Target = instantiate(cfg.target)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    rows = prompts(target.text_tokenizer, held_out, cfg.prompts, cfg.prompt_tokens)
    wanted: dict[str, Any] = {name: {"drafter": {"spec": f"{{{name}}}"}} for name in trained}
    wanted |= {name: OmegaConf.to_container(row) for name, row in cfg.rows.items()}
    wanted = {name: row for name, row in wanted.items() if set(named(row)) <= set(trained)}
    found = measure(cfg, target, rows, {name: fill(row, trained) for name, row in wanted.items()})
    for name, row in wanted.items():
        used = [json.loads((trained[head] / "metrics.json").read_text()) for head in named(row["drafter"])]
        found[name]["parameters"] = sum(metrics["parameters"] for metrics in used)
        found[name]["train_seconds"] = sum(metrics["train_seconds"] for metrics in used)
    note = (
        f"{len(rows)} held-out prompts of {cfg.prompt_tokens} tokens, {cfg.new_tokens} new ones; {target.name}, "
        f"{str(target.dtype).removeprefix('torch.')}; {device_name(target)}; {datetime.date.today().isoformat()}"
    )
    write(output, found, note)


def overrides(settings: DictConfig, name: str = "") -> list[str]:
    """Settings as one would type them: {"trainer": {"max_steps": 20}} gives trainer.max_steps=20."""
    typed = []
    for key, value in ((str(key), value) for key, value in settings.items()):
        if isinstance(value, DictConfig):
            typed += overrides(value, f"{name}{key}.")
        else:
            value = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
            typed.append(f"{name}{key}={value if isinstance(value, str) else json.dumps(value)}")
    return typed


def train(directory: Path, given: list[str], before: list[Path]) -> Path:
    """The directory of a training with these overrides, finished now or earlier."""
    arguments = [str(ROOT / "train" / "run.py"), f"output_dir={directory}", *given]
    metrics = directory / "metrics.json"
    if metrics.exists() and json.loads(metrics.read_text())["command"] == " ".join(["python", *arguments]):
        print(f"{directory.name}: trained before, {directory}", flush=True)
        return directory
    # The text that the target writes to train on is the same for every head: the first run's is copied to the others.
    texts = next((run / "self_generated.json" for run in before if (run / "self_generated.json").exists()), None)
    if texts is not None and not directory.exists():
        directory.mkdir(parents=True)
        shutil.copy(texts, directory)
    print("$ python " + " ".join(arguments), flush=True)
    done = subprocess.run([sys.executable, *arguments])
    if done.returncode:
        raise ValueError(
            f"training {directory.name} ended with exit code {done.returncode}; the same command continues it"
        )
    return directory


def named(row: Any) -> list[str]:
    """The trained heads that a row of conf/compare.yaml names in braces."""
    return re.findall(r"{(\w+)}", json.dumps(row, default=str))


def fill(row: Any, trained: dict[str, Path]) -> Any:
    """The row with the names of heads replaced by their directories."""
    if isinstance(row, dict):
        return {key: fill(value, trained) for key, value in row.items()}
    return re.sub(r"{(\w+)}", lambda name: str(trained[name[1]] / "head"), row) if isinstance(row, str) else row


def load(cfg: DictConfig, target: Target, drafter: dict[str, Any]) -> tuple[Target, Drafter]:
    """A drafter and the target that it drafts for: a copy of its own where the head comes with an adapter of the target."""
    options = dict(drafter)
    spec = options.pop("spec")
    if any((Path(part) / adapter.CONFIG).is_file() for part in spec.split("+")):
        target = instantiate(cfg.target, dtype=str(target.dtype).removeprefix("torch."))
    return target, load_drafter(spec, target, **options)


def measure(cfg: DictConfig, target: Target, rows: list[list[int]], wanted: dict[str, Any]) -> dict[str, dict]:
    """Per row of the table its figures, plain decoding first. Prompts that greedy decoding loops on are left out."""
    limits: dict[str, Any] = {"max_new_tokens": cfg.new_tokens, "eos_token_id": -1}
    loops = [distinct(text) < REPETITIVE for text in texts(run(target, None, rows, **limits))]
    rows = [row for row, loop in zip(rows, loops, strict=True) if not loop] or rows
    print(f"{sum(loops)} of {len(loops)} prompts end in loops and are left out", flush=True)
    loaded = {name: load(cfg, target, row["drafter"]) for name, row in wanted.items()}
    found: dict[str, dict] = {name: {} for name in [PLAIN, *wanted]}
    timed = rows[:: max(1, len(rows) // cfg.timed_prompts)][: cfg.timed_prompts]
    for label, temperature in TEMPERATURES.items():
        for name, (own, drafter) in loaded.items():
            generations = run(own, drafter, rows, temperature=temperature, **limits)
            found[name][f"acceptance {label}"] = acceptance(generations)
            deepest = max(count for g in generations for step in g.steps for count in step.accepted)
            found[name][f"accepted per depth {label}"] = per_depth(generations, deepest)
            print(f"{label} {name}: acceptance length {acceptance(generations):.2f}", flush=True)
        timings = time_decoders(decoders(cfg, target, loaded, wanted, temperature), timed, target.device)
        rates = {name: timing.rate() for name, timing in timings.items()}
        for name in found:
            found[name][f"tokens/s {label}"] = rates[name]
            found[name][f"speedup {label}"] = rates[name] / rates[PLAIN]
            if f"{name}, transformers" in rates:
                found[name][f"over transformers {label}"] = rates[name] / rates[f"{name}, transformers"]
    check_identity(cfg, target, rows[: cfg.proven_prompts], wanted, found)
    return found


def decoders(
    cfg: DictConfig,
    target: Target,
    loaded: dict[str, tuple[Target, Drafter]],
    wanted: dict[str, Any],
    temperature: float,
) -> dict[str, Decoder]:
    """Of every row, and of transformers where a row has a baseline there."""
    found: dict[str, Decoder] = {PLAIN: foredraft_decoder(target, None, cfg.new_tokens, temperature)}
    found |= {name: foredraft_decoder(*one, cfg.new_tokens, temperature) for name, one in loaded.items()}
    baselines = {PLAIN: {}, **{name: dict(row["baseline"]) for name, row in wanted.items() if "baseline" in row}}
    for name, settings in baselines.items():
        if "assistant_model" in settings:
            small = AutoModelForCausalLM.from_pretrained(settings["assistant_model"], dtype=target.dtype)
            settings["assistant_model"] = small.to(target.device).eval()
        found[f"{name}, transformers"] = transformers_decoder(target, settings, cfg.new_tokens, temperature)
    return found


def check_identity(cfg: DictConfig, target: Target, rows: list[list[int]], wanted: dict[str, Any], found: dict) -> None:
    """Add to every row the share of its texts that equal, in float32, those of the target without a drafter or adapter."""
    exact: Target = target if target.dtype == torch.float32 else instantiate(cfg.target, dtype="float32")
    limits: dict[str, Any] = {"max_new_tokens": cfg.new_tokens, "eos_token_id": -1}
    plain = {label: texts(run(exact, None, rows, temperature=t, **limits)) for label, t in TEMPERATURES.items()}
    for name, row in wanted.items():
        own, drafter = load(cfg, exact, row["drafter"])
        same = [
            text == expected
            for label, t in TEMPERATURES.items()
            for text, expected in zip(
                texts(run(own, drafter, rows, temperature=t, **limits)), plain[label], strict=True
            )
        ]
        found[name]["identical"] = sum(same) / len(same)
        print(f"{name}: {found[name]['identical']:.1%} of its texts are the target's own in float32", flush=True)


def write(output: Path, found: dict[str, dict], note: str) -> None:
    """Every figure to compare.csv, the main ones to compare.md and compare.png."""
    names = list(dict.fromkeys(key for facts in found.values() for key in facts))
    with (output / "compare.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["drafter", *names])
        writer.writerows([[name, *(cell(facts.get(key)) for key in names)] for name, facts in found.items()])
    columns = ["acceptance", "accepted per depth", "tokens/s", "speedup", "over transformers"]
    heads = [f"{column} {label}" for column in columns for label in TEMPERATURES if column != "accepted per depth"]
    heads.insert(2, "accepted per depth T=0")
    lines = ["| drafter | " + " | ".join([*heads, "parameters", "training s", "text"]) + " |"]
    lines.append("|---" * (len(heads) + 4) + "|")
    for name, facts in found.items():
        share = facts.get("identical", 1.0)
        cells = [cell(facts.get(key)) for key in [*heads, "parameters", "train_seconds"]]
        verdict = "lossless" if share == 1 else f"lossy ({share:.0%} identical)"
        lines.append("| " + " | ".join([name, *cells, verdict]) + " |")
    (output / "compare.md").write_text("\n".join([*lines, "", note, ""]))
    draw(output / "compare.png", found, note)
    print("\n".join([*lines, "", note, f"wrote {output}/compare.csv, .md, .png"]), flush=True)


def cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{share:.2f}" for share in value)
    if isinstance(value, float):
        return f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return "" if value is None else f"{value}"


def draw(file: Path, found: dict[str, dict], note: str) -> None:
    """Acceptance length and speedup of every row, side by side."""
    from matplotlib.figure import Figure  # half a second: only this needs it

    figure = Figure(figsize=(11, 1.5 + 0.42 * len(found)), layout="constrained")
    places = range(len(found))
    for axes, key, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("acceptance", "speedup"),
        ("acceptance length", "speedup over plain decoding"),
        strict=True,
    ):
        for number, (label, color) in enumerate(zip(TEMPERATURES, ("#2563b0", "#bd640a"), strict=True)):
            values = [facts.get(f"{key} {label}", 1.0) for facts in found.values()]
            bars = axes.barh([place + 0.38 * number - 0.19 for place in places], values, 0.36, color=color, label=label)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        axes.axvline(1.0, color="#868d99", linewidth=1)
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_yticks(list(places), list(found))
        axes.margins(x=0.12)
    figure.axes[0].invert_yaxis()
    figure.axes[1].legend(frameon=False, loc="lower right")
    figure.supxlabel(note, fontsize=7)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
