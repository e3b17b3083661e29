"""The measuring part of compare.py: acceptance and identity of every row, kept in a file, and speeds in turn."""

import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.heads import Target, adapter
from foredraft.heads.hub.client import weights_sha256
from foredraft.inference import load_drafter
from foredraft.inference.drafters import Drafter
from foredraft.inference.drafters.base import Accepted, Wrapper
from foredraft.inference.evaluation.measure import REPETITIVE, acceptance, distinct, per_depth, run, texts
from foredraft.inference.evaluation.speed import Decoder, foredraft_decoder, time_decoders, transformers_decoder
from foredraft.inference.tree import TokenTree
from foredraft.train.runtime.run_state import write_atomically

PLAIN = "plain"
TEMPERATURES = {"T=0": 0.0, "T=1": 1.0}


class SampleAndMatch(Wrapper):
    """Drafts that do not see the noise of the target's choice: the most probable ones at every temperature, accepted where
    the target's own sample is the same (z-lab's DFlash, DDTree, JetSpec). Lossless too, with fewer tokens per step."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return self.inner.propose(accepted, None)


class Measured:
    """Figures that were measured before, in a file, so that a stopped comparison continues."""

    def __init__(self, file: Path):
        self.file = file
        self.known: dict[str, dict] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, key: str, measure: Callable[[], dict]) -> dict:
        if key not in self.known:
            self.known[key] = measure()
            write_atomically(self.file, json.dumps(self.known, indent=1) + "\n")
        return dict(self.known[key])


class Bench:
    """All rows on the same prompts, in the target's dtype; identity of texts in float32."""

    def __init__(self, cfg: DictConfig, target: Target, rows: list[list[int]], measured: Measured):
        """rows: prompts; those that greedy decoding loops on are left out."""
        self.cfg, self.target, self.measured = cfg, target, measured
        self.limits: dict[str, Any] = {"max_new_tokens": cfg.new_tokens, "eos_token_id": -1}
        loops = [distinct(text) < REPETITIVE for text in texts(run(target, None, rows, **self.limits))]
        self.rows = [row for row, loop in zip(rows, loops, strict=True) if not loop] or rows
        print(f"{sum(loops)} of {len(loops)} prompts end in loops and are left out", flush=True)

    @cached_property
    def exact(self) -> Target:
        return self.target if self.target.dtype == torch.float32 else instantiate(self.cfg.target, dtype="float32")

    @cached_property
    def plain_texts(self) -> dict[str, list[list[int]]]:
        """In float32, of the prompts that identity is proven with."""
        proven = self.rows[: self.cfg.proven_prompts]
        return {
            label: texts(run(self.exact, None, proven, temperature=t, **self.limits))
            for label, t in TEMPERATURES.items()
        }

    def measure(self, wanted: dict[str, Any], failed: dict[str, str]) -> dict[str, dict]:
        """Per row of the table its figures, plain decoding first. A row that cannot be measured goes to `failed`."""
        found: dict[str, dict] = {PLAIN: {}}
        loaded: dict[str, tuple[Target, Drafter]] = {}
        for name, row in wanted.items():
            try:
                found[name] = self.measured.get(self.key(row), partial(self.gained, row))
                if self.cfg.timed_prompts:
                    loaded[name] = self.load(self.target, row)
            except ValueError as error:
                failed[name] = str(error)
                continue
            lengths = ", ".join(f"{found[name][f'acceptance {label}']:.2f} at {label}" for label in TEMPERATURES)
            same = found[name]["identical"]
            print(
                f"{name}: acceptance length {lengths}; {same:.1%} of its texts are the target's own in float32",
                flush=True,
            )
        if self.cfg.timed_prompts:
            self.time(wanted, loaded, found)
        return found

    def key(self, row: dict[str, Any]) -> str:
        """What a row's acceptance depends on."""
        parts = [
            weights_sha256(Path(part)) if Path(part).is_dir() else part for part in row["drafter"]["spec"].split("+")
        ]
        names = ("prompts", "proven_prompts", "prompt_tokens", "new_tokens")
        facts = row["drafter"] | {name: self.cfg[name] for name in names} | {"spec": parts}
        return json.dumps([facts, row.get("coupled", True), self.target.name, str(self.target.dtype)])

    def load(self, target: Target, row: dict[str, Any]) -> tuple[Target, Drafter]:
        """A drafter and the target that it drafts for: a copy of its own where the head comes with an adapter of it."""
        options = dict(row["drafter"])
        spec = options.pop("spec")
        if any((Path(part) / adapter.CONFIG).is_file() for part in spec.split("+")):
            target = instantiate(self.cfg.target, dtype=str(target.dtype).removeprefix("torch."))
        drafter = load_drafter(spec, target, **options)
        return target, drafter if row.get("coupled", True) else SampleAndMatch(drafter)

    def gained(self, row: dict[str, Any]) -> dict[str, Any]:
        target, drafter = self.load(self.target, row)
        found: dict[str, Any] = {}
        for label, temperature in TEMPERATURES.items():
            generations = run(target, drafter, self.rows, temperature=temperature, **self.limits)
            deepest = max(count for g in generations for step in g.steps for count in step.accepted)
            found[f"acceptance {label}"] = acceptance(generations)
            found[f"accepted per depth {label}"] = per_depth(generations, deepest)
        return found | {"identical": self.identity(row)}

    def identity(self, row: dict[str, Any]) -> float:
        """The share of texts that equal, in float32, those of the target without a drafter or adapter."""
        target, drafter = self.load(self.exact, row)
        proven = self.rows[: self.cfg.proven_prompts]
        same: list[bool] = []
        for label, temperature in TEMPERATURES.items():
            drafted = texts(run(target, drafter, proven, temperature=temperature, **self.limits))
            same += [text == plain for text, plain in zip(drafted, self.plain_texts[label], strict=True)]
        return sum(same) / len(same)

    def time(self, wanted: dict[str, Any], loaded: dict[str, tuple[Target, Drafter]], found: dict[str, dict]) -> None:
        """Add speeds, of all rows in turn on each prompt."""
        some = self.rows[:: max(1, len(self.rows) // self.cfg.timed_prompts)][: self.cfg.timed_prompts]
        baselines = {
            name: dict(row["baseline"]) for name, row in wanted.items() if "baseline" in row and name in loaded
        }
        for label, temperature in TEMPERATURES.items():
            timings = time_decoders(
                self.decoders(loaded, {PLAIN: {}, **baselines}, temperature), some, self.target.device
            )
            rates = {name: timing.rate() for name, timing in timings.items()}
            for name in [PLAIN, *loaded]:
                found[name][f"tokens/s {label}"] = rates[name]
                found[name][f"speedup {label}"] = rates[name] / rates[PLAIN]
                if f"{name}, transformers" in rates:
                    found[name][f"over transformers {label}"] = rates[name] / rates[f"{name}, transformers"]

    def decoders(
        self, loaded: dict[str, tuple[Target, Drafter]], baselines: dict[str, dict[str, Any]], temperature: float
    ) -> dict[str, Decoder]:
        """Of every row, and of transformers where a row has a baseline there."""
        target, new = self.target, self.cfg.new_tokens
        found: dict[str, Decoder] = {PLAIN: foredraft_decoder(target, None, new, temperature)}
        found |= {name: foredraft_decoder(*one, new, temperature) for name, one in loaded.items()}
        for name, settings in baselines.items():
            if "assistant_model" in settings:
                small = AutoModelForCausalLM.from_pretrained(settings["assistant_model"], dtype=target.dtype)
                settings = settings | {"assistant_model": small.to(target.device).eval()}
            found[f"{name}, transformers"] = transformers_decoder(target, settings, new, temperature)
        return found
