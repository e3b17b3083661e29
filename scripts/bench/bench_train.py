"""Measure the speed of training:  python scripts/bench/bench_train.py head=eagle3 max_length=4096 steps=8 [baseline=PYTHON]

Tokens per second of the trainer's own steps, the process's peak memory, and model-flops utilization: FLOP of the target's
forward and of the head's forward and backward per second (as scripts/plan.py computes them), as a share of what one large
matrix product reaches on this device. With `baseline`, speculators 0.9.0 trains its EAGLE-3 or DFlash in the same run: same
target, rows, length, steps, dtype and threads, from hidden states on disk; foredraft runs the target, or reads such states
too (hidden_states=offline hidden_states.load_full_target=true). The baseline's start-up is not counted: its time is the
difference of two runs. Where other programs share the machine, `processor_time=true threads=1
trainer.dataloader_num_workers=0` counts the processor's seconds of both.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from safetensors.torch import save_file
from transformers import PrinterCallback, TrainerCallback

from foredraft.cli import entry
from foredraft.heads import Target
from foredraft.train import losses
from foredraft.train.data.packing import Document, Packed
from foredraft.train.data.row_order import EpochStream
from foredraft.train.hidden_states.probe import final_norm, read_states
from foredraft.train.runtime.memory import disable_malloc_trim, peak_memory
from foredraft.train.runtime.memory_plan import study
from foredraft.train.start import new_head
from foredraft.train.trainer import HeadTrainer, arguments

EPOCHS = 4  # number of timed epochs if there is a baseline


@entry("bench_train")
def main(cfg: DictConfig) -> None:
    torch.set_num_threads(cfg.threads)
    of_kind = baseline_settings(cfg) if cfg.baseline else {}
    disable_malloc_trim()
    target: Target = instantiate(cfg.target)
    batch = cfg.trainer.per_device_train_batch_size
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(target.vocab_size, (cfg.steps * batch, cfg.max_length), generator=generator)
    results = {"foredraft": train(cfg, target, tokens)}
    if cfg.baseline:
        results["speculators"] = train_baseline(cfg, target, tokens, of_kind)
    for name, found in results.items():
        print(f"{name:12}" + "  ".join(f"{key} {value:,.4g}" for key, value in found.items()), flush=True)
    if cfg.baseline:
        ratio = {key: results["foredraft"][key] / value for key, value in results["speculators"].items()}
        print(f"{ratio['tokens_per_second']:.2f} times the tokens/s, {ratio['peak_gib']:.2f} of the memory")
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(results, indent=2) + "\n")


def train(cfg: DictConfig, target: Target, tokens: torch.Tensor) -> dict[str, float]:
    """Train a head with HeadTrainer. Returns speed and memory. tokens: (rows, length) int64."""
    documents = [Document(row, [True] * len(row)) for row in tokens.tolist()]
    head = new_head(cfg.head, target, torch.bincount(tokens.flatten(), minlength=target.vocab_size))
    distillation = instantiate(cfg.objective, head=head, target=target, loss=losses.build(cfg.loss, cfg.loss_args))
    args = arguments(cfg, target)
    args.max_steps = cfg.steps * (EPOCHS if cfg.baseline else 1)  # as long as the baseline is timed
    packed, batch = Packed(documents, cfg.max_length, cfg.seed), cfg.trainer.per_device_train_batch_size
    dataset = instantiate(cfg.hidden_states)(packed, target, head.layers, batch)
    trainer = HeadTrainer(
        distillation,
        args,
        train_dataset=EpochStream(dataset, len(packed), cfg.seed),
        measure=lambda head: {},
    )
    trainer.remove_callback(PrinterCallback)
    ends = StepEnds(time.process_time if cfg.processor_time else time.perf_counter)
    trainer.add_callback(ends)
    trainer.train()
    # From the end of the last step that warms up: no first step is timed.
    rate = batch * cfg.max_length * (args.max_steps - cfg.warmup) / (ends.times[-1] - ends.times[cfg.warmup - 1])
    peak = peak_memory(target.device)
    of_head, of_target, _ = study(cfg, target.config, target.dtype)
    work = (of_head.flops + of_target.flops) / (batch * cfg.max_length)
    facts = {"tokens_per_second": rate, "peak_gib": peak / 2**30, "gflop_per_token": work / 1e9}
    return facts | {"utilisation": rate * work / top_speed(target)}


class StepEnds(TrainerCallback):
    """Record when each step ended, by the given clock."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.times = clock, list[float]()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(self.clock())


def top_speed(target: Target) -> float:
    """Return the flops per second of one large product in the target's dtype, the fastest of several. On a GPU a product of
    2,048 rows ends before its start and its wait no longer count: it reached a third of an H200's speed."""
    size = 2048 if target.device.type == "cpu" else 8192
    a = torch.randn(size, size, device=target.device, dtype=target.dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def train_baseline(cfg: DictConfig, target: Target, tokens: torch.Tensor, of_kind: dict[str, Any]) -> dict[str, float]:
    """Train with speculators on the same rows, for one epoch and for EPOCHS more: the difference is only training. Several
    epochs, because the start takes as long as an epoch and varies. of_kind: see `baseline_settings`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        layers = list(cfg.head.target_layer_ids or new_head(cfg.head, target).layers)
        write_rows(target, layers, tokens, folder)
        command = [cfg.baseline, *([cfg.baseline_driver] if cfg.baseline_driver else ["-m", "speculators"]), "train"]
        settings = {
            "verifier-name-or-path": target.name,
            "data-path": folder,
            "hidden-states-path": folder / "hidden_states",
            "on-missing": "raise",
            "total-seq-len": cfg.max_length,
            "num-workers": 0,
            "hidden-states-dtype": str(target.dtype).removeprefix("torch."),
            "loss-implementation": "eager",
            "draft-attn-impl": "sdpa",
            "lr": cfg.trainer.learning_rate,
            "target-layer-ids": layers,
            **of_kind,
        }
        if "ttt-steps" in settings:  # the vocabulary of EAGLE-3 may be pruned
            vocab = target.vocab_size
            settings["draft-vocab-size"] = min(cfg.head.draft_vocab_size or vocab, vocab)
            settings["token-freq-path"] = folder / "token_freq.pt"
        for key, value in settings.items():
            command += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        runs = [
            timed(
                [*command, "--epochs", str(n), "--save-path", str(folder / f"out{n}")], cfg.threads, cfg.processor_time
            )
            for n in (1, 1 + EPOCHS)
        ]
    trained = EPOCHS * tokens.numel()
    seconds = runs[1][0] - runs[0][0]
    return {"tokens_per_second": trained / seconds, "peak_gib": runs[0][1] / 2**30}


def baseline_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings of speculators for this head. Raises ValueError for a kind that is not compared."""
    kind = HydraConfig.get().runtime.choices["head"]
    if kind == "eagle3":
        return {"speculator-type": kind, "ttt-steps": cfg.head.ttt_steps}
    if kind == "dflash":
        return {
            "speculator-type": kind,
            "block-size": cfg.head.block_size,
            "num-layers": cfg.head.num_hidden_layers,
            "mask-token-id": cfg.head.mask_token_id or 0,
            "full-attention-indices": list(range(cfg.head.num_hidden_layers)),
            "max-anchors": round(cfg.objective.anchors * cfg.max_length),
            "per-position-loss-weight": "fixed-exp-decay",
        }
    raise ValueError(f"head={kind} is not compared with speculators here: head=eagle3, head=dflash, or baseline=null")


def timed(command: list[str], threads: int, processor_time: bool) -> tuple[float, int]:
    """Run a process. Returns its seconds, or the processor's, and its peak bytes. Raises ValueError if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"{' '.join(command[:4])} failed:\n{output[-2000:]}")
    seconds = usage.ru_utime + usage.ru_stime if processor_time else time.perf_counter() - start
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_rows(target: Target, layers: list[int], tokens: torch.Tensor, folder: Path) -> None:
    """Write the rows for speculators: an Arrow dataset, and per row three layers and the state before the norm."""
    from datasets import Dataset

    (folder / "hidden_states").mkdir()
    norm = final_norm(target)
    for number, row in enumerate(tokens):
        states = read_states(target, norm, row.tolist(), [*layers, target.num_layers])
        save_file(
            {"token_ids": row, "hidden_states": states.to(target.dtype).cpu().contiguous()},
            folder / "hidden_states" / f"hs_{number}.safetensors",
        )
    rows = tokens.tolist()
    columns = {"input_ids": rows, "loss_mask": [[1] * len(r) for r in rows], "seq_len": [len(r) for r in rows]}
    Dataset.from_dict(columns).with_format("torch").save_to_disk(str(folder))
    counts = torch.bincount(tokens.flatten(), minlength=target.vocab_size)
    torch.save({token: int(count) for token, count in enumerate(counts)}, folder / "token_freq.pt")


if __name__ == "__main__":
    main()
