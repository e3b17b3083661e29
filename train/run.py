"""Train a draft head and prove what it gained:  python train/run.py head=eagle3 target=hf target.path=... data=..."""

import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from transformers import PrinterCallback, TrainingArguments, set_seed

from heads import hub
from heads.base import DraftHead
from heads.target import Target
from inference.drafters import drafter_for
from inference.evaluation.measure import acceptance
from inference.evaluation.measure import run as decode
from train import finalize, publish
from train.cli import entry
from train.data import corpus, data_card
from train.data.row_order import Stream
from train.runtime import checkpoints, distributed, loggers, strategy
from train.runtime.memory import keep_freed
from train.runtime.run_state import (
    CHECKPOINTS,
    Measure,
    Progress,
    StopOnSignal,
    done_before,
    open_directory,
    rows_per_step,
    seconds_of,
)
from train.trainer import HeadTrainer, arguments


@entry("train")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN and done_before(cfg):
        print(f"{cfg.output_dir} holds a finished run of this config; delete it to train again", flush=True)
        return
    strategy.check(cfg.strategy.name, cfg.optimizer._target_)
    if distributed.rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- one process tells, to its end
    strategy.choose_device()
    set_seed(cfg.seed)
    keep_freed()
    if cfg.push_to_hub is not None:
        hub.check_name(cfg.push_to_hub)  # not after hours of training
    target = instantiate(cfg.target)
    if target.reads_collectively and cfg.push_to_hub is not None:
        raise ValueError(
            f"push_to_hub={cfg.push_to_hub}: one process pushes, and target.sharding={target.sharding} needs all of them to "
            "read: push the finished head with scripts/push.py"
        )
    if target.tokenizer is None:
        raise ValueError(f"target.path={cfg.target.path} has no tokenizer, and training reads text: save one beside it")
    data: corpus.Corpus = instantiate(cfg.data, tokenizer=target.tokenizer)
    finalize.check_settings(target, data, cfg.evaluate, cfg.length)
    counts = corpus.count_tokens(data.train, target.vocab_size)
    more: dict[str, Any] = {"counts": counts} if "draft_vocab_size" in cfg.head else {}
    head = instantiate(cfg.head, target=target, **more)
    args = arguments(cfg.trainer, target, **instantiate(cfg.strategy.arguments, _convert_="all"))
    parameters = sum(parameter.numel() for parameter in head.parameters())
    # Three checkpoints of weights and two moments in float32, the best weights twice, and the head itself.
    need_bytes = (3 * 3 * 4 + 2 * 4 + 2) * parameters + 2**20
    directory, checkpoint = distributed.broadcast(
        open_directory(cfg, need_bytes) if distributed.rank() == 0 else (Path(), None)
    )
    if cfg.self_generated_tokens:
        data = self_generated_text(cfg, target, data, directory)
    if head.pruned:  # by what the target writes, which is what the head will draft
        head.init_projections(target, corpus.count_tokens(data.train, target.vocab_size))
    packed = corpus.Packed(data.train, cfg.length, cfg.seed, cfg.long)
    counts = corpus.count_tokens(data.train, target.vocab_size)
    card = data_card.describe(data.train) | data_card.coverage(counts, head.draft_ids)
    data = data._replace(card=data.card | card | packed.card)
    if distributed.rank() == 0:
        data_card.save(directory, data.card)
    loggers.prepare(args.report_to, directory)
    print(f"{head.kind}: {parameters:,} parameters for {target.name}\n{data_card.summary(data.card)}", flush=True)
    if len(packed) < distributed.world_size():
        raise ValueError(
            f"the data gives {len(packed)} rows of length={cfg.length} for {distributed.world_size()} processes: take fewer"
        )
    trainer = train(cfg, args, target, head, data, packed, checkpoint)
    if not target.reads_collectively:
        distributed.shutdown()
    if trainer.measures:  # what follows is one process's work, unless the target needs all to read
        finish(cfg, trainer, data, directory)
    distributed.shutdown()


def self_generated_text(cfg: DictConfig, target: Target, data: corpus.Corpus, directory: Path) -> corpus.Corpus:
    """The corpus with text that the target wrote, which one process keeps for all."""
    file = directory / "self_generated.json"
    if target.reads_collectively and not distributed.broadcast(file.exists()):
        # All must read, in step, for the target to write: each has the whole text then, and one leaves it to later runs.
        with tempfile.TemporaryDirectory() as aside:
            kept = file if distributed.rank() == 0 else Path(aside) / file.name
            return corpus.self_generate(target, data, cfg.self_generated_tokens, cfg.seed, kept)
    with distributed.main_process_first():
        return corpus.self_generate(target, data, cfg.self_generated_tokens, cfg.seed, file)


def train(
    cfg: DictConfig,
    args: TrainingArguments,
    target: Target,
    head: DraftHead,
    data: corpus.Corpus,
    packed: corpus.Packed,
    checkpoint: str | None,
) -> HeadTrainer:
    """The trainer at the end of its steps. Ends the process where it was told to stop before."""
    dataset = instantiate(cfg.features)(packed, target, head.layers, cfg.trainer.per_device_train_batch_size)
    distillation = instantiate(cfg.objective, head=head, target=target, loss=instantiate(cfg.loss))
    rows = rows_per_step(cfg)
    if args.max_steps <= 0:
        args.max_steps = math.ceil(args.num_train_epochs * len(dataset) / rows)

    def validate(head: DraftHead) -> float:
        some = corpus.prompts(target.tokenizer, data.validation, cfg.evaluate.eval_prompts, cfg.evaluate.prompt_tokens)
        return acceptance(decode(target, drafter_for(head, target), some, max_new_tokens=64, eos_token_id=-1))

    stop = StopOnSignal()
    trainer = HeadTrainer(
        distillation,
        args,
        train_dataset=Stream(dataset, args.max_steps * rows, cfg.seed),
        build_optimizer=instantiate(cfg.optimizer),
        measure=validate,
        callbacks=[stop, Progress(), Measure(cfg.evaluate.eval_steps)],
    )
    trainer.remove_callback(PrinterCallback)
    strategy.check_distributed_type(cfg.strategy.name, trainer.accelerator.distributed_type)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        stop.restore()
    distillation.head = trainer.full_head()
    if stop.stopped:
        distributed.shutdown()
        print(f"stopped at step {trainer.state.global_step}; the same command goes on from there", flush=True)
        raise SystemExit(130)
    return trainer


def finish(cfg: DictConfig, trainer: HeadTrainer, data: corpus.Corpus, directory: Path) -> None:
    """Choose the best weights, save and measure them, and tell. Processes that only help to read leave nothing behind."""
    distillation, target, history = trainer.distillation, trainer.distillation.target, trainer.state.log_history
    strategy.forget_sharding(cfg.strategy.name)
    # Where more than the head learns (the target's adapter), the head of an earlier step would not fit to it.
    alone = all(name.startswith("head.") for name, _ in distillation.named_parameters())
    best = checkpoints.best_step(history) if cfg.evaluate.keep_best and alone else None
    if best is not None and best != trainer.state.global_step:
        print(f"the weights of step {best}, which drafted best on validation prompts, are kept", flush=True)
        distillation.head.load_state_dict(load_file(checkpoints.best_file(directory / CHECKPOINTS, best)))
    with tempfile.TemporaryDirectory() as aside:
        saved = (directory if distributed.rank() == 0 else Path(aside)) / "head"
        finalize.save_final(distillation, saved, data, cfg.length)
        metrics, shown = finalize.measure(target, saved, data, cfg.evaluate)
    if distributed.rank() > 0:
        return
    trained = [entry["tokens_per_second"] for entry in history if "tokens_per_second" in entry]
    metrics["train_tokens_per_second"] = round(sum(trained) / max(1, len(trained)), 1)
    metrics["train_seconds"] = round(seconds_of(trainer.state), 3)
    metrics["step"] = best or trainer.state.global_step
    metrics |= finalize.facts_of_run(distillation.head, target)
    config = OmegaConf.to_yaml(cfg, resolve=True)
    (directory / "head" / "config.yaml").write_text(config)
    (directory / "history.json").write_text(json.dumps(history, indent=1) + "\n")
    finalize.publish(directory, metrics, distillation.head, data, history, shown, config)
    if cfg.push_to_hub is not None:
        print(publish.push(directory / "head", target, cfg.push_to_hub, private=cfg.push_private), flush=True)
    loggers.finish(trainer.args.report_to, directory, config, metrics)
    if not cfg.keep_checkpoints:
        shutil.rmtree(directory / CHECKPOINTS)


if __name__ == "__main__":
    main()
