"""Measure a GPU, with random weights in the shapes of real targets:  python scripts/bench/gpu.py

For each target, at several numbers of requests, greedy and sampled: the baseline relative to the limit of the memory's
bandwidth; CUDA graphs relative to single kernels; the share of the acceptance length that becomes speed (eta) at a given
number of accepted drafts, by head, as trees and as chains; whether all of them write the same text; and whether a step waits
for the device more than once. Then the speed of training, utilization and memory next to the plan's. Nothing is downloaded.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

import foredraft.inference.target_sampler
from foredraft.cli import entry
from foredraft.heads import Target
from foredraft.heads.base import DraftHead, RecurrentHead
from foredraft.heads.caches import cuda_graphs
from foredraft.heads.caches.device import synchronize
from foredraft.heads.caches.kv_cache import to_device
from foredraft.heads.target_model.capabilities import is_batch_invariant
from foredraft.inference import Request, drafter_for, generate
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.generation import Generation
from foredraft.inference.tree import TokenTree
from foredraft.loading import shaped_target
from foredraft.train.start import new_head

GIB = 2**30


class Oracle(Wrapper):
    """Draft the trees of another drafter at its cost, with the texts' tokens along one path of each tree."""

    def __init__(self, inner: Drafter, prompts: Tensor, new_tokens: list[list[int]], accepted: int):
        """Wrap a drafter. prompts: (batch, length) int64, continued by new_tokens. accepted: number of correct drafts per
        step."""
        super().__init__(inner)
        self.texts = torch.cat([prompts, prompts.new_tensor(new_tokens)], 1)
        self.rows = {tuple(prompt): row for row, prompt in enumerate(prompts.tolist())}
        self.prompt, self.accepted = prompts.shape[1], accepted

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.inner.propose(accepted, gumbel)
        tokens, node = tree.tokens, torch.zeros_like(tree.tokens[:, :1])
        rows = [self.rows.get(tuple(text[: self.prompt]), 0) for text in accepted.text]  # 0 for a slot without a text
        texts = self.texts[to_device(rows, tokens.device)]
        ends = to_device([len(text) - 1 for text in accepted.text], tokens.device)[:, None]
        for depth in range(1, self.accepted + 1):
            below = (tree.parents == node) & (tree.depths == depth)
            node = below.int().argmax(1, keepdim=True)
            right = texts.gather(1, (ends + depth).clamp(0, texts.shape[1] - 1))
            tokens = torch.where(below.gather(1, node), tokens.scatter(1, node, right), tokens)
        return tree._replace(tokens=tokens)


class Facts(dict[str, Any]):
    """Hold the figures of one target. Print each when it is found, because what follows may fail."""

    def __setitem__(self, what: str, value: Any) -> None:
        super().__setitem__(what, value)
        print(f"  {what:56} {value if isinstance(value, bool | str) else f'{value:,.3f}'}", flush=True)


@entry("gpu")
def main(cfg: DictConfig) -> None:
    if cfg.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: this measures one (device=cpu tries the program on a small target)")
        return
    found: dict[str, Facts] = {}
    try:
        for path in cfg.targets:
            name = Path(path).stem
            print(name, flush=True)
            found[name] = Facts()
            decoding(cfg, shaped_target(path, cfg.dtype, cfg.device, cfg.seed), found[name])
            if cfg.device == "cuda":
                torch.cuda.empty_cache()  # the training is another process
            for head in cfg.trained:
                training(cfg, path, head, found[name])
    finally:
        if cfg.output:
            Path(cfg.output).write_text(json.dumps(found, indent=2) + "\n")


def decoding(cfg: DictConfig, target: Target, found: Facts) -> None:
    """Measure decoding without drafts and with those of untrained heads, some of which are made correct."""
    found["device"] = torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu"
    found["chains keep every bit"] = is_batch_invariant(target)
    weights = sum(p.nbytes for p in target.model.parameters()) - target.model.get_input_embeddings().weight.nbytes
    limit = bandwidth(target.device) / weights
    yamls = {name: hydra.compose("train", [f"head={name}"]).head for name in cfg.heads}
    heads = {name: new_head(yaml, target).to(target.dtype).eval() for name, yaml in yamls.items()}
    generator = torch.Generator().manual_seed(cfg.seed)
    prompts = torch.randint(1, target.vocab_size, (max(cfg.requests), cfg.prompt_tokens), generator=generator)
    prompts, decoded = prompts.to(target.device), cfg.max_new_tokens - 1  # the first token is the prefill's
    for batch, temperature in itertools.product(cfg.requests, cfg.temperatures):
        some, how = prompts[:batch], f"{batch} x T={temperature:g}"
        settings = {"max_new_tokens": cfg.max_new_tokens, "temperature": temperature}
        plain, seconds = timed(target, None, some, settings)
        rate = batch * decoded / seconds
        found[f"{how}, plain, tokens/s"] = rate
        found[f"{how}, plain, share of what bandwidth allows"] = rate / limit / batch
        alone = timed(target, None, some[:1], settings)[0].new_tokens[0] if batch > 1 else plain.new_tokens[0]
        found[f"{how}, plain, the same text alone"] = alone == plain.new_tokens[0]
        if batch == 1:
            with cuda_graphs.disabled():
                eager, slower = timed(target, None, some, settings)
            found[f"{how}, plain, kernel by kernel, tokens/s"] = decoded / slower
            found[f"{how}, plain, the same text by graphs"] = eager.new_tokens == plain.new_tokens
        for name, width in itertools.product(heads, (None, 1)):
            drafter = Oracle(drafter_of(heads[name], target, width), some, plain.new_tokens, cfg.accepted)
            kind = f"{how}, {name}{' chain' if width else ''}"
            out, seconds = timed(target, drafter, some, settings)
            found[f"{kind}, acceptance length"] = gained = out.acceptance_length
            found[f"{kind}, times plain"] = times = batch * decoded / seconds / rate
            found[f"{kind}, eta"] = times / gained
            equal = sum(ours == theirs for ours, theirs in zip(out.new_tokens, plain.new_tokens, strict=True))
            found[f"{kind}, texts equal to plain's"] = f"{equal} of {batch}"
            if batch == 1:
                found[f"{kind}, waits once a step"] = waits_once(cfg, target, drafter, some)
                with cuda_graphs.disabled():
                    eager = timed(target, drafter, some, settings)[0]
                found[f"{kind}, the same text by graphs"] = eager.new_tokens == out.new_tokens


def drafter_of(head: DraftHead, target: Target, width: int | None) -> Drafter:
    """Build the head's drafter, whose trees are full whatever the head expects. width: 1 for chains."""
    settings: dict[str, Any] = {} if width is None else {"width": width, "nodes": head.depth + 1}
    if isinstance(head, RecurrentHead):
        settings["min_probability"] = 0.0
    return drafter_for(head, target, **settings)


def timed(
    target: Target, drafter: Drafter | None, prompts: Tensor, settings: dict[str, Any]
) -> tuple[Generation, float]:
    """Return the second of two generations, and its seconds without the prefill."""
    for _ in range(2):
        limits: dict[str, Any] = {"eos_token_id": -1, "seed": 0}
        start = time.perf_counter()
        generate(target, drafter, prompts, **settings | limits | {"max_new_tokens": 1})
        synchronize(target.device)
        middle = time.perf_counter()
        out = generate(target, drafter, prompts, **settings, **limits)
        synchronize(target.device)
        seconds = time.perf_counter() - middle - (middle - start)
    return out, seconds


def waits_once(cfg: DictConfig, target: Target, drafter: Drafter, prompt: Tensor) -> bool:
    """Return whether only the engine's copy of a step's outcome waits for the device, after the first steps."""
    if target.device.type != "cuda":
        return True
    to_host = foredraft.inference.target_sampler.to_host

    def allowed(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        out = to_host(*args)
        torch.cuda.set_sync_debug_mode("error")
        return out

    engine = foredraft.inference.engine.Engine(target, drafter)
    engine.add(Request(prompt[0].tolist(), max_new_tokens=cfg.max_new_tokens))
    engine.step()
    engine.step()
    foredraft.inference.target_sampler.to_host = allowed  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_work:
            engine.step()
    except RuntimeError as error:
        print(f"a step waits: {str(error).splitlines()[0]}")
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
        foredraft.inference.target_sampler.to_host = to_host
        engine.close()
    return True


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a copy reads."""
    source = torch.empty(1 << (28 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        copy.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best  # it loads and stores; decoding only loads


def training(cfg: DictConfig, path: str, head: str, found: Facts) -> None:
    """Measure a head's training by scripts/bench/bench_train.py, next to the estimate of scripts/plan.py."""
    shape = [f"target.path={path}", f"target.dtype={cfg.dtype}", f"max_length={cfg.max_length}", f"head={head}"]
    products = f"trainer.bf16={str(cfg.dtype == 'bfloat16').lower()}"  # as `foredraft train` has it
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        size = [f"steps={cfg.steps}", f"warmup={cfg.warmup}", f"output={file}", f"output_dir={folder}"]
        program("bench/bench_train.py", *shape, products, f"target.device={cfg.device}", *size)
        measured = json.loads(file.read_text())["foredraft"]
    planned = re.search(
        r"sum +([\d.]+)", program("plan.py", *shape, "strategy=single", "trainer.per_device_train_batch_size=1")
    )
    assert planned is not None
    found[f"training {head}, tokens/s"] = measured["tokens_per_second"]
    found[f"training {head}, utilisation"] = measured["utilisation"]
    found[f"training {head}, peak GiB"] = measured["peak_gib"]
    found[f"training {head}, planned GiB"] = float(planned[1])


def program(name: str, *arguments: str) -> str:
    """Return the output of a program of scripts/. Raises ValueError with its last line if it fails."""
    command = [sys.executable, str(Path(__file__).resolve().parent.parent / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(f"{name}: {ended.stderr.strip().splitlines()[-1]}")
    return ended.stdout


if __name__ == "__main__":
    main()
