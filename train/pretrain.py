"""experiment=train_target: a target of its own, trained from scratch on public text at hand, for heads to be measured on.

Plain language modelling by transformers' Trainer, which brings devices, bfloat16, several processes (DDP) and resuming. The
folder is a model as transformers saves one; while it is trained it holds tokenizer, tokens, checkpoints and settings.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from foredraft.heads.hub.card import size
from foredraft.heads.target import Target
from foredraft.heads.target.loading import has_bfloat16_products
from foredraft.train.data.pretraining import Windows, texts, tokens_of, train_tokenizer
from foredraft.train.data.row_order import EpochStream
from foredraft.train.runtime import checkpoints, distributed
from foredraft.train.runtime.callbacks import KeepCheckpoints, Progress, StopOnSignal
from foredraft.train.runtime.run_state import CHECKPOINTS, differences, write_atomically

SETTINGS, TOKENS, HISTORY = "training.json", "tokens.npy", "history.json"
HELD_OUT = 64  # rows of held-out text that the loss is measured on


def trained_target(
    path: str,
    config: str,
    more_text: str | None = None,
    steps: int = 1500,
    rows: int = 32,
    rows_at_once: int = 8,
    length: int = 512,
    learning_rate: float = 1e-3,
    save_steps: int = 100,
    device: str | None = None,
    **loading: Any,
) -> Target:
    """The target at `path`, which is trained first if it is not there; a training that was stopped there is resumed.

    config: a config.json; its vocab_size is that of the tokenizer, which is trained on the same text. more_text: see `texts`;
    the others: conf/experiment/train_target.yaml; loading: of Target.from_pretrained. Raises ValueError for a training with
    other settings. Ends the process where a signal stopped it."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        settings = {
            "config": json.loads(Path(config).read_text()),
            "more_text": more_text,
            "steps": steps,
            "rows": rows,
        }
        settings |= {"length": length, "learning_rate": learning_rate}
        args = arguments(folder, settings, rows_at_once, save_steps, device)
        with distributed.main_process_first():
            prepare(folder, settings)
        train(folder, settings, args)
    return Target.from_pretrained(path, device=device, **loading)


def arguments(
    folder: Path, settings: dict[str, Any], rows_at_once: int, save_steps: int, device: str | None
) -> TrainingArguments:
    """From here on the processes of a run can communicate."""
    rows, processes = settings["rows"], distributed.world_size()
    at_once = min(rows, rows_at_once)
    if min(settings["steps"], at_once, save_steps) < 1 or rows % (processes * at_once):
        raise ValueError(
            f"target.rows={rows} must be a multiple of target.rows_at_once={rows_at_once} times {processes} processes, and "
            "target.steps, rows, rows_at_once and save_steps at least 1 each"
        )
    return TrainingArguments(
        str(folder / CHECKPOINTS / checkpoints.UNFINISHED),
        max_steps=settings["steps"],
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // (processes * at_once),
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.1,
        adam_beta2=0.95,
        bf16=has_bfloat16_products("cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"),
        use_cpu=device == "cpu",
        logging_first_step=True,
        logging_steps=math.gcd(10, save_steps),  # a checkpoint comes after a log entry: none is of steps that were lost
        save_steps=save_steps,
        save_total_limit=2,
        train_sampling_strategy="sequential",  # EpochStream has the order
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to=["none"],
    )


def prepare(folder: Path, settings: dict[str, Any]) -> None:
    """Settings, tokenizer and tokens in `folder`; what is there is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / SETTINGS
    if file.exists() and (different := differences(json.loads(file.read_text()), settings)):
        raise ValueError(
            f"target.path={folder} holds a target whose training began with other settings ({'; '.join(different[:3])}): "
            "give another target.path, the old settings to resume, or delete it"
        )
    if (folder / TOKENS).exists():
        return
    found = list(texts("train", settings["more_text"]))
    tokenizer = train_tokenizer(found, settings["config"]["vocab_size"])
    tokenizer.save_pretrained(folder)
    write_atomically(file, json.dumps(settings, indent=1) + "\n")
    part = folder / f"part.{TOKENS}"
    np.save(part, tokens_of(tokenizer, found).to(torch.int32).numpy())
    part.rename(folder / TOKENS)


def train(folder: Path, settings: dict[str, Any], args: TrainingArguments) -> None:
    """From the newest checkpoint to the last step, and the model into `folder`."""
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings["config"]), dtype=torch.float32)
    model.config.use_cache = False
    windows = Windows(np.load(folder / TOKENS, mmap_mode="r"), settings["length"])
    announce(model, windows, settings)
    stop = StopOnSignal()
    trainer = Trainer(
        model,
        args,
        train_dataset=EpochStream(windows, settings["steps"] * settings["rows"], args.seed),
        callbacks=[stop, Progress(), KeepCheckpoints()],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = checkpoints.newest(folder / CHECKPOINTS)
    if distributed.rank() == 0:
        checkpoints.clear_unfinished(folder / CHECKPOINTS)
    if checkpoint is not None:
        print(f"resuming from {checkpoint}", flush=True)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        stop.restore()
    if stop.stopped:
        distributed.shutdown()
        print(f"stopped at step {trainer.state.global_step}; the same command resumes from there", flush=True)
        raise SystemExit(130)
    if distributed.rank() == 0:
        finish(folder, model, trainer.state.log_history, settings)
    distributed.barrier()


def announce(model: PreTrainedModel, windows: Windows, settings: dict[str, Any]) -> None:
    """What is about to be done, in numbers. Raises ValueError for a text shorter than a row."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = settings["steps"] * settings["rows"] * settings["length"]
    there = len(windows) * settings["length"]
    if not there:
        raise ValueError(f"the text gives no row of target.length={settings['length']} tokens")
    print(
        f"a target of {parameters:,} parameters: {settings['steps']:,} steps read {tokens:,} tokens, the {there:,} there are "
        f"{tokens / there:.1f} times; some {6 * parameters * tokens:.1e} operations, and {size(3 * 12 * parameters)} "
        "of checkpoints",
        flush=True,
    )


def finish(folder: Path, model: PreTrainedModel, history: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """The weights in bfloat16, as models are published; config.json, which marks it as finished, comes last."""
    loss = held_out_loss(folder, model, settings["length"])
    history = [*history, {"held_out_loss": round(loss, 4)}]
    print(f"held-out loss {loss:.3f} nats per token", flush=True)
    (folder / HISTORY).write_text(json.dumps(history, indent=1) + "\n")
    model.config.use_cache = True
    part = folder / CHECKPOINTS / checkpoints.UNFINISHED / "model"
    model.to(torch.bfloat16).save_pretrained(part)
    for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
        file.replace(folder / file.name)
    shutil.rmtree(folder / CHECKPOINTS)
    (folder / TOKENS).unlink()


@torch.no_grad()
def held_out_loss(folder: Path, model: PreTrainedModel, length: int) -> float:
    """Mean negative log-likelihood of some text of the part `validation`, in nats per token."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    windows = Windows(tokens_of(tokenizer, list(texts("validation", None))).numpy(), length)
    every = max(1, math.ceil(len(windows) / HELD_OUT))
    rows = [windows[row]["input_ids"][None].to(model.device) for row in range(0, len(windows), every)]
    model.eval()
    return sum(model(input_ids=row, labels=row).loss.item() for row in rows) / len(rows)
