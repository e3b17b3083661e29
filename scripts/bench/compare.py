"""Every published way to draft, in one table:  python scripts/bench/compare.py

Trains every head of conf/head with train/run.py, one after the other, then decodes the same held-out prompts with every
drafter at T=0 and T=1, all in turn on each prompt. Finished trainings and measurements are reused, so a stopped comparison
can be continued, and speeds can be measured where nothing was trained: copy the folder, and give train_missing=false. A head
that fails is named in the end, and the others have their rows. It writes compare.csv, compare.md and compare.png.
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

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from foredraft.heads import Target
from foredraft.heads.base import ParallelHead
from foredraft.heads.target.device import device_name
from foredraft.scripts.bench.compare_measure import TEMPERATURES, Bench, Measured
from foredraft.train.cli import CONF, entry
from foredraft.train.data.corpus import prompts

ROOT = CONF.parent


@entry("compare")
def main(cfg: DictConfig) -> None:
    output = Path(cfg.output_dir)
    trained, failed = train_all(cfg, output)
    target: Target = instantiate(cfg.target)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    rows = prompts(target.text_tokenizer, held_out, cfg.prompts, cfg.prompt_tokens)
    wanted = rows_of_table(cfg, trained)
    bench = Bench(cfg, target, rows, Measured(output / "measured.json"))
    found = bench.measure({name: fill(row, trained) for name, row in wanted.items()}, failed)
    for name in found.keys() & wanted.keys():
        used = [json.loads((trained[head] / "metrics.json").read_text()) for head in named(wanted[name]["drafter"])]
        found[name]["parameters"] = sum(metrics["parameters"] for metrics in used)
        found[name]["train_seconds"] = sum(metrics["train_seconds"] for metrics in used)
    note = (
        f"{len(bench.rows)} held-out prompts of {cfg.prompt_tokens} tokens, {cfg.new_tokens} new ones; {target.name}, "
        f"{str(target.dtype).removeprefix('torch.')}; {device_name(target.device)}; {datetime.date.today().isoformat()}"
    )
    write(output, found, note)
    if failed:
        raise ValueError("not in the table: " + "; ".join(f"{name} ({why})" for name, why in failed.items()))


def train_all(cfg: DictConfig, output: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The directory of every head that is trained, and why the others are not."""
    kinds = sorted(path.stem for path in (CONF / "head").glob("*.yaml") if path.stem != "auto")
    known = {kind: [f"head={kind}"] for kind in kinds}
    known |= {str(name): list(given) for name, given in cfg.variants.items()}
    if unknown := set(cfg.heads) - set(known):
        raise ValueError(f"heads={sorted(unknown)} are not among conf/head and variants, which have {', '.join(known)}")
    typed = [o for o in HydraConfig.get().overrides.task if re.match(r"\+*(target|data)[.=@]", o)]
    trained: dict[str, Path] = {}
    failed: dict[str, str] = {}
    for name in cfg.heads or known:
        given = [*known[name], *typed, *overrides(cfg.train)]
        if finished(output / name, given):
            print(f"{name}: trained before, {output / name}", flush=True)
            trained[name] = output / name
        elif cfg.train_missing:
            code = train(output / name, given, list(trained.values()))
            if code:
                failed[name] = f"training ended with exit code {code}; the same command continues it"
            else:
                trained[name] = output / name
    return trained, failed


def rows_of_table(cfg: DictConfig, trained: dict[str, Path]) -> dict[str, Any]:
    """Every row's settings: of each head its tree, its chain and tree=auto, and the rows of conf/compare.yaml."""
    wanted: dict[str, Any] = {}
    for name, directory in trained.items():
        wanted[name] = {"drafter": {"spec": f"{{{name}}}", "tree": "fixed"}}
        maker = OmegaConf.load(directory / "head" / "config.yaml").head._target_
        if not issubclass(get_class(maker.rpartition(".")[0]), ParallelHead):
            wanted[f"{name}, chain"] = {"drafter": {"spec": f"{{{name}}}", **cfg.chain}}
        wanted[f"{name}, auto"] = {"drafter": {"spec": f"{{{name}}}", "tree": "auto"}}
    wanted |= {str(name): OmegaConf.to_container(row) for name, row in cfg.rows.items()}
    return {name: row for name, row in wanted.items() if set(named(row)) <= set(trained)}


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


def finished(directory: Path, given: list[str]) -> bool:
    """Is a training with these overrides finished there, wherever it was run?"""
    metrics = directory / "metrics.json"
    if not metrics.exists():
        return False
    typed = json.loads(metrics.read_text())["command"].partition("output_dir=")[2]
    return typed.partition(" ")[2] == " ".join(given)


def train(directory: Path, given: list[str], before: list[Path]) -> int:
    """Train with these overrides; the exit code."""
    arguments = [str(ROOT / "train" / "run.py"), f"output_dir={directory}", *given]
    # The text that the target writes to train on is the same for every head: the first run's is copied to the others.
    texts = next((text for run in before if (text := run / "self_generated.safetensors").exists()), None)
    if texts is not None and not directory.exists():
        directory.mkdir(parents=True)
        shutil.copy(texts, directory)
    print("$ python " + " ".join(arguments), flush=True)
    return subprocess.run([sys.executable, *arguments]).returncode


def named(row: Any) -> list[str]:
    """The trained heads that a row of conf/compare.yaml names in braces."""
    return re.findall(r"{(\w+)}", json.dumps(row, default=str))


def fill(row: Any, trained: dict[str, Path]) -> Any:
    """The row with the names of heads replaced by their directories."""
    if isinstance(row, dict):
        return {key: fill(value, trained) for key, value in row.items()}
    return re.sub(r"{(\w+)}", lambda name: str(trained[name[1]] / "head"), row) if isinstance(row, str) else row


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
    """Acceptance length of every row, and speedup where it was measured, side by side."""
    from matplotlib.figure import Figure  # half a second: only this needs it

    figure = Figure(figsize=(11, 1.5 + 0.42 * len(found)), layout="constrained")
    places = range(len(found))
    titles = {"acceptance": "acceptance length", "speedup": "speedup over plain decoding"}
    titles = {key: title for key, title in titles.items() if any(f"{key} T=0" in facts for facts in found.values())}
    for axes, (key, title) in zip(
        figure.subplots(1, len(titles), sharey=True, squeeze=False)[0], titles.items(), strict=True
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
    figure.axes[-1].legend(frameon=False, loc="lower right")
    figure.supxlabel(note, fontsize=7)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
