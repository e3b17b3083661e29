"""EAGLE-3's chain on a hybrid that is trained here:  python scripts/bench/hybrid.py

Trains a small target of Qwen3.5's structure and an EAGLE-3 head for it, then decodes held-out prompts plainly and with its
chains, all in turn: acceptance length, identity in float32, speed for every MAX_UNCOMMITTED, alone and in a batch, and
where the time of a step and of a read goes. Times are medians, and on a CPU with OMP_NUM_THREADS=1 of the processor, which
others on the machine do not lengthen. It writes hybrid.json.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from foredraft.heads import Target
from foredraft.heads.target import stacked_cache, state_cache
from foredraft.heads.target.device import device_name, synchronise
from foredraft.inference import generate, load_drafter
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.measure import REPETITIVE, acceptance, distinct, float32, run, texts
from foredraft.scripts.bench import compare
from foredraft.train.cli import SCRIPTS, entry
from foredraft.train.data.corpus import prompts

PLAIN, PARTS = "plain", ("GatedDeltaNet", "Attention", "MLP")
TEMPERATURES = {"T=0": 0.0, "T=1": 1.0}
READS = (1, 2, 4, 8, 16, 32, 64)  # tokens


@entry("hybrid")
def main(cfg: DictConfig) -> None:
    output = Path(cfg.output_dir)
    head = train(cfg, output)
    target = Target.from_pretrained(str(output / "target"), dtype=cfg.dtype)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    rows = prompts(target.text_tokenizer, held_out, cfg.prompts, cfg.prompt_tokens)
    loops = [distinct(text) < REPETITIVE for text in texts(run(target, None, rows, **limits(cfg)))]
    kept = [row for row, loop in zip(rows, loops, strict=True) if not loop]
    rows = kept if len(kept) >= max(cfg.batches) else rows
    where = f"{target.dtype}, {device_name(target.device)}"
    print(f"{sum(loops)} of {len(loops)} greedy texts are loops; {len(rows)} prompts are measured; {where}", flush=True)
    if len(rows) < max(cfg.batches):
        raise ValueError(
            f"batches={list(cfg.batches)} need as many prompts, and prompts={cfg.prompts} gives {len(rows)}"
        )
    found: dict[str, Any] = {"prompts": len(rows), "loops": sum(loops), "reads": reads(target)}
    found["drafters"] = gained(cfg, target, head, rows)
    found["speeds"] = speeds(cfg, target, head, rows)
    found["pending"] = of_pending(found["speeds"])
    (output / "hybrid.json").write_text(json.dumps(found, indent=1) + "\n")


def limits(cfg: DictConfig) -> dict[str, Any]:
    return {"max_new_tokens": cfg.new_tokens, "eos_token_id": -1}


def train(cfg: DictConfig, output: Path) -> str:
    """The target and its head, unless they are there; where the head is."""
    folder, part = output / "target", output / "target.part"
    if not folder.exists():
        options = {"--config": cfg.config, "--rows": 2, "--minutes": cfg.minutes, "--output": part}
        words = [str(word) for option in options.items() for word in option]
        subprocess.run([sys.executable, str(SCRIPTS / "embedded_target" / "make.py"), *words], check=True)
        part.rename(folder)
    data = [override for override in HydraConfig.get().overrides.task if override.startswith("data")]
    given = ["head=eagle3", "target=hf", f"target.path={folder}", *(data or ["data=stdlib"])]
    given += compare.overrides(cfg.train)
    if not compare.finished(output / "eagle3", given) and compare.train(output / "eagle3", given, []):
        raise ValueError("the head's training failed; the same command continues it")
    return str(output / "eagle3" / "head")


@contextmanager
def max_pending(most: int) -> Iterator[None]:
    """With another value of that constant, which both files have by name."""
    with patch.object(stacked_cache, "MAX_UNCOMMITTED", most), patch.object(state_cache, "MAX_UNCOMMITTED", most):
        yield


def reads(target: Target, repeats: int = 9) -> dict[int, dict[str, float]]:
    """Milliseconds of reading so many tokens after a text of 128, and of these in each sort of layer."""
    spent, began = dict.fromkeys(PARTS, 0.0), [0.0]

    def before(module: nn.Module, given: Any) -> None:
        began[0] = now(target)

    def after(part: str) -> Callable[..., None]:
        def note(module: nn.Module, given: Any, out: Any) -> None:
            spent[part] += now(target) - began[0]

        return note

    hooks = []
    for module in target.model.modules():
        if part := next((part for part in PARTS if type(module).__name__.endswith(part)), None):
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after(part))]
    found: dict[int, dict[str, float]] = {}
    with torch.inference_mode():
        _, state = target.forward_from(
            torch.ones(1, 128, dtype=torch.int64, device=target.device), 0, None, keep_logits=1
        )
        for count in READS:
            tokens, taken = torch.ones(1, count, dtype=torch.int64, device=target.device), []
            for _ in range(repeats):
                spent.update(dict.fromkeys(PARTS, 0.0))
                start = now(target)
                target.forward_from(tokens, 128, state_cache.fork(state))
                taken.append({"all": now(target) - start, **spent})
            found[count] = {part: 1e3 * median(one[part] for one in taken) for part in taken[0]}
            print(f"a read of {count:3}  " + "  ".join(f"{part} {ms:.2f} ms" for part, ms in found[count].items()))
    for hook in hooks:
        hook.remove()
    return found


def now(target: Target) -> float:
    if target.device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    synchronise(target.device)
    return time.perf_counter()


def gained(cfg: DictConfig, target: Target, head: str, rows: list[list[int]]) -> dict[str, dict[str, float]]:
    """Of every drafter the tokens per step, and the share of texts that are the target's own in float32, at every value of
    MAX_UNCOMMITTED."""
    exact, proven = float32(target), rows[: cfg.proven_prompts]
    assert exact is not None
    settings = {label: limits(cfg) | {"temperature": temperature} for label, temperature in TEMPERATURES.items()}
    own = {label: texts(run(exact, None, proven, **how)) for label, how in settings.items()}
    found: dict[str, dict[str, float]] = {}
    for name, given in cfg.drafters.items():
        drafter, prover = (load_drafter(head, one, **given) for one in (target, exact))
        same: list[bool] = []
        for label, how in settings.items():
            for most in cfg.pending:
                with max_pending(most):
                    drafted = texts(run(exact, prover, proven, **how))
                same += [text == plain for text, plain in zip(drafted, own[label], strict=True)]
        found[name] = {label: acceptance(run(target, drafter, rows, **how)) for label, how in settings.items()}
        found[name]["identical"] = sum(same) / len(same)
        print(f"{name:16}" + "  ".join(f"{what} {value:.3f}" for what, value in found[name].items()), flush=True)
    return found


def speeds(cfg: DictConfig, target: Target, head: str, rows: list[list[int]]) -> list[dict[str, Any]]:
    """A line per temperature, batch, drafter and value of MAX_UNCOMMITTED; plain decoding has nothing pending."""
    drafters: dict[str, Drafter | None] = {PLAIN: None}
    drafters |= {str(name): load_drafter(head, target, **given) for name, given in cfg.drafters.items()}
    contests = [(name, most) for name in drafters for most in (cfg.pending if drafters[name] else [0])]
    lines = []
    for (label, temperature), batch in product(TEMPERATURES.items(), cfg.batches):
        batches = [rows[start : start + batch] for start in range(0, len(rows) - batch + 1, batch)][: cfg.timed]
        taken: dict[tuple[str, int], list[dict[str, float]]] = {contest: [] for contest in contests}
        for number, (text, (name, most)) in enumerate(product([batches[0], *batches * cfg.repeats], contests)):
            ids = torch.tensor(text, device=target.device)
            with max_pending(most):
                facts = decode(target, drafters[name], ids, temperature=temperature, **limits(cfg))
            if number >= len(contests):  # the first of each warms up
                taken[name, most].append(facts)
        for (name, most), some in taken.items():
            line = {"temperature": label, "batch": batch, "drafter": name, "pending": most}
            line |= {what: median(one[what] for one in some) for what in some[0]}
            pairs = zip(some, taken[PLAIN, 0], strict=True)
            ratios = [one["tokens/s"] / plain["tokens/s"] for one, plain in pairs]
            line |= {"speedup": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
            lines.append(line | {"rates": [one["tokens/s"] for one in some]})
            print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{v:>3}" for k, v in line.items()), flush=True)
    return lines


def of_pending(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each value of MAX_UNCOMMITTED is worth: tokens/s as a share of the mean over all values, on the same text with the
    same drafter; median and quartiles."""
    shares: dict[tuple[str, int, int], list[float]] = {}
    drafted = [line for line in lines if line["drafter"] != PLAIN]
    for line in drafted:
        key = ("temperature", "batch", "drafter")
        alike = [other["rates"] for other in drafted if all(other[part] == line[part] for part in key)]
        means = [mean(rates) for rates in zip(*alike, strict=True)]
        place = line["temperature"], line["batch"], line["pending"]
        shares.setdefault(place, []).extend(rate / usual for rate, usual in zip(line["rates"], means, strict=True))
    found = []
    for (label, batch, most), some in shares.items():
        low, middle, high = quantiles(some) if len(some) > 1 else some * 3
        print(f"{label}, {batch} at a time, at most {most:2} pending: {middle:.3f} ({low:.3f} to {high:.3f})")
        found.append({"temperature": label, "batch": batch, "pending": most, "share": [low, middle, high]})
    return found


def decode(target: Target, drafter: Drafter | None, ids: Tensor, **settings: Any) -> dict[str, float]:
    """Tokens per second, milliseconds of a step, the target's forwards in it, and the share of each stage."""
    forwards: list[None] = []
    hook = target.model.register_forward_pre_hook(lambda module, given: forwards.append(None))
    began = now(target)
    out = generate(target, drafter, ids, timings=True, **settings)
    seconds, steps = now(target) - began, len(out.steps)
    hook.remove()
    whole = sum(out.seconds.values())
    found = {"tokens/s": sum(map(len, out.new_tokens)) / seconds, "step ms": 1e3 * seconds / steps}
    found["forwards"] = (len(forwards) - len(ids)) / steps
    return found | {stage: spent / whole for stage, spent in out.seconds.items()}


if __name__ == "__main__":
    main()
