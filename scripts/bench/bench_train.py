"""How fast a head trains:  python scripts/bench/bench_train.py head=eagle3 length=4096 steps=8

Tokens per second of the trainer's own steps, the process's peak memory, and model-flops utilisation: products of the
target's forward and of the head's forward and backward per second, as a share of what one large matrix product reaches on
this device. (The comparison with speculators 0.9.0 in README.md ran by this program as of its commits.)
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import PrinterCallback, TrainerCallback

from foredraft.heads import Target
from foredraft.train.cli import entry
from foredraft.train.data.corpus import Document, Packed
from foredraft.train.data.row_order import EpochStream
from foredraft.train.runtime.memory import keep_freed, peak_memory
from foredraft.train.trainer import HeadTrainer, arguments


@entry("bench_train")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    keep_freed()
    target: Target = instantiate(cfg.target)
    batch = cfg.trainer.per_device_train_batch_size
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(target.vocab_size, (cfg.steps * batch, cfg.length), generator=generator)
    found = train(cfg, target, tokens)
    print("  ".join(f"{key} {value:,.4g}" for key, value in found.items()), flush=True)
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(found, indent=2) + "\n")


def train(cfg: DictConfig, target: Target, tokens: torch.Tensor) -> dict[str, float]:
    """What HeadTrainer reaches on these rows. tokens: (rows, length) int64."""
    documents = [Document(row, [True] * len(row)) for row in tokens.tolist()]
    more = {"counts": torch.bincount(tokens.flatten(), minlength=target.vocab_size)}
    head = instantiate(cfg.head, target=target, **(more if "draft_vocab_size" in cfg.head else {}))
    distillation = instantiate(cfg.criterion, head=head, target=target, loss=instantiate(cfg.loss))
    args = arguments(cfg.trainer, target)
    args.max_steps = cfg.steps
    packed, batch = Packed(documents, cfg.length, cfg.seed), cfg.trainer.per_device_train_batch_size
    dataset = instantiate(cfg.features)(packed, target, head.layers, batch)
    trainer = HeadTrainer(
        distillation,
        args,
        train_dataset=EpochStream(dataset, len(packed), cfg.seed),
        build_optimizer=instantiate(cfg.optimizer),
        measure=lambda head: {},
    )
    trainer.remove_callback(PrinterCallback)
    ends = StepEnds()
    trainer.add_callback(ends)
    trainer.train()
    # From the end of the last step that warms up: no first step is timed.
    rate = batch * cfg.length * (args.max_steps - cfg.warmup) / (ends.times[-1] - ends.times[cfg.warmup - 1])
    peak = peak_memory(target.device)
    row = {name: value[None].to(target.device) for name, value in dataset[0].items()}
    with FlopCounterMode(display=False) as flops:
        distillation(**row).loss.backward()
    work = flops.get_total_flops() / cfg.length
    facts = {"tokens_per_second": rate, "peak_gib": peak / 2**30, "gflop_per_token": work / 1e9}
    return facts | {"utilisation": rate * work / top_speed(target)}


class StepEnds(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times = list[float]()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter())


def top_speed(target: Target, size: int = 2048, repeats: int = 5) -> float:
    """Flops per second of one large product in the target's dtype, the fastest of several."""
    a = torch.randn(size, size, device=target.device, dtype=target.dtype)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        (a @ a).sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


if __name__ == "__main__":
    main()
