"""Measure a GPU, with random weights in the shapes of real targets:  python scripts/bench/gpu.py

For each target: the baseline relative to the limit of the memory's bandwidth; CUDA graphs relative to single kernels, and
whether the text is the same; whether a step waits for the device more than once; the share of the acceptance length that
becomes speed (eta) at a given number of accepted drafts, by head; and EAGLE-3's training speed, utilization and memory next
to the plan's. Nothing is downloaded.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

import foredraft.inference.target_sampler
from foredraft.cli import entry
from foredraft.heads import Target
from foredraft.heads.base import RecurrentHead
from foredraft.heads.caches import cuda_graphs
from foredraft.inference import Request, drafter_for, generate
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.evaluation.random_target import shaped_target
from foredraft.inference.generation import Generation
from foredraft.inference.tree import TokenTree

GIB = 2**30


class Oracle(Wrapper):
    """Draft the trees of another drafter at its cost, with the text's tokens along one of their paths."""

    def __init__(self, inner: Drafter, text: list[int], accepted: int):
        """Wrap a drafter. text: prompt and continuation. accepted: number of correct drafts per step."""
        super().__init__(inner)
        self.text, self.accepted = text, accepted
        self.known: Tensor | None = None  # the text on the device

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.inner.propose(accepted, gumbel)
        tokens, node = tree.tokens, tree.tokens.new_zeros(1, 1)
        if self.known is None:
            self.known = tokens.new_tensor([self.text])
        length = len(accepted.text[0])
        for depth in range(1, self.accepted + 1):
            below = (tree.parents == node) & (tree.depths == depth)
            node = below.int().argmax(1, keepdim=True)
            right = self.known[:, length + depth - 1 : length + depth]
            if right.shape[1]:
                tokens = torch.where(below.gather(1, node), tokens.scatter(1, node, right), tokens)
        return tree._replace(tokens=tokens)


@entry("gpu")
def main(cfg: DictConfig) -> None:
    if cfg.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: this measures one (device=cpu tries the program on a small target)")
        return
    found = {Path(path).stem: measure(cfg, path) for path in cfg.targets}
    for name, facts in found.items():
        print(f"\n{name}")
        for what, value in facts.items():
            print(f"  {what:48} {value if isinstance(value, bool | str) else f'{value:,.3f}'}")
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(found, indent=2) + "\n")


def measure(cfg: DictConfig, path: str) -> dict[str, Any]:
    found = decoding(cfg, shaped_target(path, cfg.dtype, cfg.device, cfg.seed))
    if cfg.device == "cuda":
        torch.cuda.empty_cache()  # the training is another process
    return found | training(cfg, path)


def decoding(cfg: DictConfig, target: Target) -> dict[str, Any]:
    prompt = torch.randint(1, target.vocab_size, (1, cfg.prompt_tokens), device=target.device)
    plain, seconds = timed(cfg, target, None, prompt)
    weights = sum(p.nbytes for p in target.model.parameters()) - target.model.get_input_embeddings().weight.nbytes
    limit = bandwidth(target.device) / weights
    rate = cfg.max_new_tokens / seconds
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
        "plain, tokens/s": rate,
        "plain, share of what bandwidth allows": rate / limit,
    }
    with kernel_by_kernel():
        eager, slower = timed(cfg, target, None, prompt)
    found["plain, kernel by kernel, tokens/s"] = cfg.max_new_tokens / slower
    found["plain, the same text by graphs"] = eager.new_tokens == plain.new_tokens
    text = [*prompt[0].tolist(), *plain.new_tokens[0]]
    for name in cfg.heads:
        settings = hydra.compose("train", [f"head={name}"]).head
        counts = {"counts": torch.ones(target.vocab_size, dtype=torch.int64)} if "draft_vocab_size" in settings else {}
        head = hydra.utils.instantiate(settings, target=target, **counts)
        every_level: dict[str, Any] = {"min_probability": 0.0} if isinstance(head, RecurrentHead) else {}
        inner = drafter_for(head.to(target.dtype).eval(), target, **every_level)
        oracle = Oracle(inner, text, cfg.accepted)
        out, seconds = timed(cfg, target, oracle, prompt)
        gained = out.acceptance_length
        found[f"{name}, acceptance length"] = gained
        found[f"{name}, times plain"] = cfg.max_new_tokens / seconds / rate
        found[f"{name}, eta"] = cfg.max_new_tokens / seconds / rate / gained
        found[f"{name}, waits once a step"] = waits_once(cfg, target, oracle, prompt)
        with kernel_by_kernel():
            found[f"{name}, the same text by graphs"] = (
                timed(cfg, target, oracle, prompt)[0].new_tokens == out.new_tokens
            )
    return found


def timed(cfg: DictConfig, target: Target, drafter: Drafter | None, prompt: Tensor) -> tuple[Generation, float]:
    """Return the second of two generations, and its seconds without the prefill."""
    for _ in range(2):
        limits: dict[str, Any] = {"eos_token_id": -1, "seed": cfg.seed}
        start = time.perf_counter()
        generate(target, drafter, prompt, max_new_tokens=1, **limits)
        synchronize(target.device)
        middle = time.perf_counter()
        out = generate(target, drafter, prompt, max_new_tokens=cfg.max_new_tokens, **limits)
        synchronize(target.device)
        seconds = time.perf_counter() - middle - (middle - start)
    return out, seconds


@contextlib.contextmanager
def kernel_by_kernel() -> Iterator[None]:
    """Disable the capture of CUDA graphs."""
    captures = dict(cuda_graphs.CAPTURES)
    cuda_graphs.CAPTURES.clear()
    try:
        yield
    finally:
        cuda_graphs.CAPTURES.update(captures)


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


def bandwidth(device: torch.device, size: int = 1 << 28) -> float:
    """Return the bytes per second that a copy reads."""
    source = torch.empty(size if device.type == "cuda" else size >> 4, dtype=torch.uint8, device=device)
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(8):
        synchronize(device)
        start = time.perf_counter()
        copy.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best  # it loads and stores; decoding only loads


def training(cfg: DictConfig, path: str) -> dict[str, Any]:
    """Measure EAGLE-3's training by scripts/bench/bench_train.py, next to the estimate of scripts/plan.py."""
    shape = [f"target.path={path}", f"target.dtype={cfg.dtype}", f"max_length={cfg.max_length}"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        size = [f"steps={cfg.steps}", f"warmup={cfg.warmup}", f"output={file}", f"output_dir={folder}"]
        program("bench/bench_train.py", *shape, f"target.device={cfg.device}", *size)
        found = json.loads(file.read_text())["foredraft"]
    planned = re.search(
        r"sum +([\d.]+)", program("plan.py", *shape, "strategy=single", "trainer.per_device_train_batch_size=1")
    )
    assert planned is not None
    return {
        "training, tokens/s": found["tokens_per_second"],
        "training, utilisation": found["utilisation"],
        "training, peak GiB": found["peak_gib"],
        "training, planned GiB": float(planned[1]),
    }


def program(name: str, *arguments: str) -> str:
    """Return the output of a program of scripts/. Raises ValueError with its last line if it fails."""
    command = [sys.executable, str(Path(__file__).resolve().parent.parent / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(f"{name}: {ended.stderr.strip().splitlines()[-1]}")
    return ended.stdout


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
