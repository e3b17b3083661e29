"""What spec_bench.py measures: foredraft, transformers, vLLM and EAGLE's own code, all called alike.

A system answers prompts of token ids. vLLM and EAGLE's own code each run in a separate process and environment, with the head
as `foredraft export` writes it for them. They get a line of JSON and answer with one.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteriaList

from foredraft import Target, generate, load_drafter
from foredraft.heads.target_model.resolve_path import resolve_path
from foredraft.inference.drafters import Drafter
from foredraft.inference.evaluation.measure import left_pad
from foredraft.words import ROOT

Prompts = list[list[int]]
BASELINE = "baseline"
RIVALS = ROOT / "scripts" / "bench" / "rivals"


class Answer(NamedTuple):
    texts: list[list[int]]
    seconds: float
    cpu: float  # seconds of all threads
    forwards: int  # of the target after the prompt's, per text; 0 if they are not counted
    emitted: int  # tokens that these forwards added


System = Callable[[Prompts, int], Answer]  # prompts, and the seed of a sampled answer


class Contestant(NamedTuple):
    answer: System
    baseline: str  # the contestant whose speed and texts its own are compared with


class Timer:
    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


def foredraft(target: Target, drafter: Drafter | None, cfg: DictConfig, sampling: dict[str, Any]) -> System:
    limits = {"max_new_tokens": cfg.max_new_tokens} | ({"eos_token_id": -1} if cfg.ignore_eos else {}) | sampling

    def answer(prompts: Prompts, seed: int) -> Answer:
        ids, mask = left_pad(prompts)
        timer = Timer()
        out = generate(target, drafter, ids, mask, seed=seed, **limits)
        spent = timer.stop()
        forwards = sum(len(step.emitted) for step in out.steps)
        return Answer(out.new_tokens, *spent, forwards, sum(sum(step.emitted) for step in out.steps))

    return answer


def transformers(model: PreTrainedModel, ends: list[int], cfg: DictConfig, **assistance: Any) -> System:
    """Build transformers' own `generate`. ends: the end tokens. The forward over the prompt may accept drafts, which are not
    of the forwards after it."""
    settings: dict[str, Any] = {
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": cfg.max_new_tokens,
    } | assistance
    settings |= {"eos_token_id": None if cfg.ignore_eos else ends}

    def answer(prompts: Prompts, seed: int) -> Answer:
        ids, mask = left_pad(prompts)
        lengths: list[int] = []  # of the text after each forward

        def count(ids: Tensor, *_: Any, **__: Any) -> Tensor:
            lengths.append(ids.shape[1])
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        timer = Timer()
        out = model.generate(ids, attention_mask=mask, stopping_criteria=StoppingCriteriaList([count]), **settings)
        spent = timer.stop()
        texts = [cut(text, settings["eos_token_id"] or []) for text in out[:, ids.shape[1] :].tolist()]
        emitted = ids.shape[1] + len(texts[0]) - lengths[0]
        counts = (len(lengths) - 1, emitted) if len(texts) == 1 else (0, 0)
        return Answer(texts, *spent, *counts)

    return answer


def cut(text: list[int], ends: list[int]) -> list[int]:
    """Return a text up to its end token, without the padding behind it."""
    return text[: next((place + 1 for place, token in enumerate(text) if token in ends), len(text))]


class Worker:
    """Run a process in another environment, which is started when it is first asked."""

    def __init__(self, name: str, script: str, environment: str, folder: Path, job: dict[str, Any]):
        self.name, self.folder, self.job = name, folder, job
        self.process: subprocess.Popen[str] | None = None
        self.command = [str(Path(environment) / "bin" / "python"), str(RIVALS / script)]

    def start(self) -> subprocess.Popen[str]:
        stem = self.name.replace(", ", "_").replace(" ", "_")
        file, log = self.folder / f"{stem}.json", self.folder / f"{stem}.log"
        file.write_text(json.dumps(self.job))
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("w") as errors:
            return subprocess.Popen([*self.command, str(file)], env=env, stderr=errors, **pipes)

    def __call__(self, prompts: Prompts, seed: int) -> Answer:
        self.process = self.process or self.start()
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        for line in self.process.stdout:  # vLLM prints there, too
            if line.startswith("answer "):
                return Answer(**json.loads(line.removeprefix("answer ")))
        raise ValueError(f"{self.name} ended with exit code {self.process.wait()}; its log is in {self.folder}")


def rivals(target: Target, cfg: DictConfig, folder: Path, longest: int) -> dict[str, Contestant]:
    """Build the systems of others. longest: tokens of the longest prompt."""
    found: dict[str, System] = {}
    path, chain = str(Path(resolve_path(target.name, target.dtype))), cfg.chain
    if cfg.transformers:  # with other weights, since ours may be packed
        model = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype).eval().to(target.device)
        model.generation_config = GenerationConfig()  # its penalties would change greedy texts
        ends = list(target.eos_token_ids)
        found["transformers"] = transformers(model, ends, cfg)
        if cfg.batch_size == 1:
            lookup = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
            found["transformers, prompt lookup"] = transformers(model, ends, cfg, **lookup)
    job = {"target": path, "dtype": str(target.dtype).removeprefix("torch."), "eager": cfg.eager}
    job |= {"max_model_len": longest + cfg.max_new_tokens + 2 * chain, "batch_size": cfg.batch_size}
    job |= {"max_new_tokens": cfg.max_new_tokens, "ignore_eos": cfg.ignore_eos}
    job |= {"eos_token_ids": list(target.eos_token_ids)}
    if cfg.vllm is not None:
        head = export(cfg.eagle3_head, "vllm", target, folder / "exported")
        how = {"method": "eagle3", "model": str(head), "num_speculative_tokens": chain}
        for name, speculative in (("vLLM", None), (f"vLLM, EAGLE-3, chain of {chain}", how)):
            found[name] = Worker(name, "vllm_worker.py", cfg.vllm, folder, job | {"speculative": speculative})
    if cfg.eagle is not None:
        head = export(cfg.eagle_head, "eagle", target, folder / "exported_eagle")
        name = "EAGLE's own code, EAGLE-1"
        found[name] = Worker("eagle", "eagle_worker.py", cfg.eagle, folder, job | {"head": str(head)})
    return {name: Contestant(one, BASELINE) for name, one in found.items()}


def load(given: DictConfig, target: Target) -> Drafter:
    """Load a drafter that a list names: its path, and options next to its name."""
    options = {str(key): value for key, value in given.items() if key not in ("name", "path")}
    return load_drafter(given.path, target, **options)


def ours(target: Target, cfg: DictConfig) -> dict[str, Contestant]:
    """Build the baseline and the drafters, each with every sampling."""
    drafters: dict[str, Drafter | None] = {BASELINE: None}
    drafters |= {given.name: load(given, target) for given in cfg.drafters}
    found = {}
    for sampling in cfg.sampling:
        settings = {str(key): value for key, value in sampling.items()}
        label = "".join(f", {key}={value:g}" for key, value in settings.items())
        for name, one in drafters.items():
            found[f"{name}{label}"] = Contestant(foredraft(target, one, cfg, settings), f"{BASELINE}{label}")
    return found


def export(head: str, layout: str, target: Target, folder: Path) -> Path:
    """Return the head as `foredraft export` writes it, if that was not done before."""
    if not folder.exists():
        given = [f"checkpoint={head}", f"format={layout}", f"output_dir={folder}", f"target.path='{target.name}'"]
        subprocess.run([sys.executable, str(ROOT / "scripts" / "export.py"), *given], check=True)
    return folder
