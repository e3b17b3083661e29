"""Train a draft head and measure what it gains:  python train/run.py head=eagle3 target=ORG/NAME data=...

    load -> prepare -> train -> finalize        the four parts of a run

One batch on its way:  train/data/row_order.py (rows) -> train/module.py (target.forward, head, loss) -> train/trainer.py
"""

import contextlib
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from transformers import PrinterCallback, TrainerState, set_seed

from foredraft.cli import entry
from foredraft.heads import lora
from foredraft.heads.base import BlockHead, DraftHead
from foredraft.heads.checkpoint import fingerprint, read_head
from foredraft.heads.hub.client import HEAD
from foredraft.heads.target_model import Target
from foredraft.inference.drafters import drafter_for, tree_of
from foredraft.inference.evaluation.measure import length_settings
from foredraft.inference.evaluation.measure import run as decode
from foredraft.inference.generation import tokens_per_forward
from foredraft.train import held_out, losses
from foredraft.train.checks import check_config, check_data, check_head, check_saving, check_target
from foredraft.train.data import data_card
from foredraft.train.data.corpus import Corpus, count_tokens, has_chats, has_prompts, prompts
from foredraft.train.data.documents import Documents
from foredraft.train.data.loading import load_corpus
from foredraft.train.data.packing import Packed
from foredraft.train.data.row_order import EpochStream
from foredraft.train.finalize import finalize
from foredraft.train.hidden_states import offline, server
from foredraft.train.hidden_states.engine import Client
from foredraft.train.module import DistillationModel
from foredraft.train.runtime import checkpoints, distributed, loggers, strategy
from foredraft.train.runtime.callbacks import Measure, Progress, StopOnSignal, time_limit_record
from foredraft.train.runtime.memory import disable_malloc_trim, explain_out_of_memory
from foredraft.train.runtime.run_state import (
    CHECKPOINTS,
    done_before,
    open_directory,
    rows_per_step,
    saved_config,
    unlock,
)
from foredraft.train.start import init_from, limit_window, new_head
from foredraft.train.trainer import HeadTrainer, HeadTrainingArguments, arguments
from foredraft.train.writing import self_generated


class Prepared(NamedTuple):
    """Hold what training needs, checked and ready for the first step."""

    target: Target
    distillation: DistillationModel  # of the head
    data: Corpus
    packed: Packed
    later: Callable[[int], Packed] | None  # the rows of a later pass, where the target writes other ones
    held_out: list[dict[str, Tensor]]  # rows as those of `packed`
    args: HeadTrainingArguments
    directory: Path
    checkpoint: str | None  # to resume from


@entry("train")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().runtime.choices["head"] == "auto":
        from foredraft.train.search import search  # which trains with the functions below

        search(cfg)
        return
    if HydraConfig.get().mode == RunMode.MULTIRUN and done_before(cfg):
        print(f"{cfg.output_dir} holds a finished run of this config; delete it to train again", flush=True)
        return
    with distributed.lost_process_named(), contextlib.ExitStack() as at_the_end:
        start_process(cfg)
        at_the_end.callback(unlock)
        target, data = load(cfg)
        run = prepare(cfg, target, data)
        trainer = train(cfg, run)
        if not target.is_collective:
            distributed.shutdown()
        if trainer.measures:  # what follows is one process's work, unless the target is run by all together
            try:
                finalize(cfg, trainer, run.data, run.held_out, run.directory)
            except KeyboardInterrupt:
                if checkpoints.newest(run.directory / CHECKPOINTS) is None:
                    raise
                raise KeyboardInterrupt("the head is trained, and the same command goes on to measure it") from None
        distributed.shutdown()


def start_process(cfg: DictConfig) -> None:
    """Check what needs neither target nor data, and set device and seed."""
    strategy.check_not_set(cfg.trainer)
    cfg.strategy = strategy.choose(cfg.strategy, cfg.trainer.optim)
    if HydraConfig.get().mode == RunMode.MULTIRUN and cfg.strategy != "single":
        raise ValueError(
            f"-m trains one run after the other in one process, and strategy={cfg.strategy} shares each with others: start "
            "each run with torchrun, without -m"
        )
    distributed.join(cfg.trainer)
    loggers.check(cfg.trainer.report_to)
    check_config(cfg)
    if distributed.rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- one process prints, to its end
    preset, trainer = HydraConfig.get().runtime.choices["preset"], cfg.trainer
    other = "cpu for an hour or two on a CPU" if preset == "gpu" else "gpu for hours or days on GPUs"
    print(
        f"preset {preset} (preset={other}): max_length={cfg.max_length} trainer.optim={trainer.optim} "
        f"trainer.learning_rate={trainer.learning_rate:g} trainer.num_train_epochs={trainer.num_train_epochs} "
        f"trainer.max_steps={trainer.max_steps}",
        flush=True,
    )
    strategy.choose_device()
    set_seed(cfg.seed)
    disable_malloc_trim()


def load(cfg: DictConfig) -> tuple[Target, Corpus]:
    target = load_target(cfg)
    check_target(cfg, target)
    data = load_corpus(cfg.data, target)
    check_data(cfg, target, data)
    return target, data


def load_target(cfg: DictConfig) -> Target:
    """Return all of the target, or only its embedding and lm_head: with hidden_states=server, and with hidden_states=offline
    once all is stored, unless `hidden_states.load_full_target` is true."""
    settings, stored = cfg.hidden_states, "path" in cfg.hidden_states
    made = str(cfg.target.path).endswith(".json")  # random weights, which lie nowhere
    all_of_it = settings.get("load_full_target", True) or made
    if all_of_it or (stored and not (Path(settings.path) / offline.MANIFEST).exists()):
        return instantiate(cfg.target)
    if cfg.target.get("sharding") is not None:
        raise ValueError(
            f"target.sharding={cfg.target.sharding} is for a target's layers, and hidden_states.load_full_target=false loads "
            "none: set target.sharding=null"
        )
    target = instantiate(cfg.target, embeddings_only=True)
    if stored:
        target.remote_hidden_states = offline.stored_probe(target, Path(settings.path))
    else:
        client = Client(settings.url, settings.run, settings.timeout, settings.patience)
        target.remote_hidden_states = server.engine_states(target, client)
    return target


def prepare(cfg: DictConfig, target: Target, data: Corpus) -> Prepared:
    """Prepare head, rows and directory. What would fail only when the head is saved fails here."""
    counts = count_tokens(data.train, target.vocab_size)
    head = new_head(cfg.head, target, counts)
    check_head(head)
    if data.train.weights is not None and isinstance(head, BlockHead):
        raise ValueError(f"data.rejection_weight is for heads that learn token by token: head={head.kind} takes 1")
    if cfg.init_from is not None:
        head = init_from(cfg.init_from, head, target)
    limit_window(head, cfg)
    head.on_train_begin(target)
    distillation = instantiate(cfg.objective, head=head, target=target, loss=losses.build(cfg.loss, cfg.loss_args))
    args = arguments(cfg, target, **strategy.arguments_of(cfg.strategy, cfg.strategy_args))
    if distributed.rank() == 0 or target.is_collective:
        check_saving(head, target, data.train)
    if cfg.lora_r is not None:
        lora.add(head, cfg.lora_r)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    # Three checkpoints of weights, two moments and the head, the best head twice, and the finished one; in float32 at most.
    need_bytes = (3 * 4 + 3) * 4 * parameters + 2**20
    opened = open_directory(cfg, need_bytes) if distributed.rank() == 0 else (Path(), None)
    directory, checkpoint = distributed.broadcast(opened)
    distributed.check_shared(directory, "output_dir")
    if checkpoint is not None and hasattr(head, "mask_token_id"):  # another version may choose another one
        head.mask_token_id = read_head(Path(checkpoint) / HEAD, target).mask_token_id
    tokens = saved_config(directory)["written_tokens"]
    later = partial(fresh_rows, cfg, target, data.train, directory, tokens) if cfg.fresh_text else None
    data, measured_on = with_self_generated_text(cfg, target, data, directory, tokens)
    counts = count_tokens(data.train, target.vocab_size)
    if head.pruned and cfg.init_from is None:  # to what the target writes, which is what the head will draft
        head.init_projections(target, counts)
    packed = pack(cfg, data)
    card = data_card.describe(data.train) | data_card.coverage(counts, head.draft_ids) | packed.card
    card["weights_digest"] = fingerprint(target).get("weights_digest")
    data = data._replace(card=data.card | card)
    if distributed.rank() == 0:
        if checkpoint is not None:
            data_card.check_same(directory, data.card)
        data_card.save(directory, data.card)
        loggers.prepare(args.report_to, directory)
    learned = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    some = "" if cfg.lora_r is None else f", of which {learned:,} learn,"
    print(f"{head.kind}: {parameters:,} parameters{some} for {target.name}\n{data_card.summary(data.card)}", flush=True)
    shared = cfg.max_length // cfg.context_parallel  # each row is measured by one process alone
    measured_rows = held_out.rows(measured_on, shared, cfg.data_seed, target.context)
    return Prepared(target, distillation, data, packed, later, measured_rows, args, directory, checkpoint)


def pack(cfg: DictConfig, data: Corpus) -> Packed:
    """Return the training rows, which are the same in all processes. Raise ValueError if there are too few."""
    packed = Packed(data.train, cfg.max_length, cfg.data_seed, cfg.packing)
    if distributed.world_size() > 1:  # each node may have read separate files, such as a cache in its home
        distributed.check_same(packed.digest, f"training rows, of {data.card['source']},")
    if len(packed) < distributed.world_size():
        raise ValueError(
            f"the data gives {len(packed)} sequences of max_length={cfg.max_length} for {distributed.world_size()} "
            "processes: use fewer"
        )
    return packed


def fresh_rows(cfg: DictConfig, target: Target, texts: Documents, directory: Path, tokens: int, part: int) -> Packed:
    """Return rows for epoch `part` (from 1 on) of text that the target writes now, with as many tokens as the first text."""
    file = directory / f"self_generated.{part}.jsonl"
    written = self_generated.write(target, texts, tokens, cfg.data_seed, file, part)
    return Packed(written, cfg.max_length, cfg.data_seed + part, cfg.packing)


def with_self_generated_text(
    cfg: DictConfig, target: Target, data: Corpus, directory: Path, tokens: int
) -> tuple[Corpus, Documents]:
    """Return the corpus with about `tokens` tokens of text that the target wrote (0: with its own), and held-out documents of
    the same kind. One process writes for all."""
    held = held_out.documents(target.text_tokenizer, data)
    if not tokens:
        return data, held

    def write(corpus: Corpus, count: int, seed: int, name: str) -> Corpus:
        if not target.is_collective:
            with distributed.main_process_first():
                return self_generated.self_generate(target, corpus, count, seed, directory / name)
        # All must run the target together for it to write: the others write into copies of the first process's file.
        with tempfile.TemporaryDirectory() as scratch:
            folder = directory if distributed.rank() == 0 else Path(scratch)
            for file in directory.glob(f"{Path(name).stem}.*") if distributed.rank() else ():
                shutil.copy(file, folder)
            return self_generated.self_generate(target, corpus, count, seed, folder / name)

    source = data._replace(train=held, card={"source": f"{data.card['source']}, held out"})
    written = write(source, max(1, min(held_out.WRITTEN, tokens // 8)), cfg.data_seed + 1, "held_out.jsonl")
    return write(data, tokens, cfg.data_seed, "self_generated.jsonl"), written.train


def set_steps(args: HeadTrainingArguments, checkpoint: str | None, epoch: float) -> None:
    """Set the number of steps where none is given, or where a resumed run had found how many fit into the same minutes.
    epoch: steps of one pass over the data."""
    if args.max_steps <= 0:
        args.max_steps = math.ceil(args.num_train_epochs * epoch)
    if args.max_minutes and checkpoint is not None:
        state = TrainerState.load_from_json(str(Path(checkpoint) / checkpoints.STATE))
        before = time_limit_record(state)
        if before and (before["all_steps"], before["minutes"]) == (args.max_steps, args.max_minutes):
            args.max_steps, args.max_minutes = before["fitted_steps"], 0.0


def train(cfg: DictConfig, run: Prepared) -> HeadTrainer:
    """Return the trainer after its last step. End the process if a signal stopped it before."""
    target, distillation, args = run.target, run.distillation, run.args
    batch = cfg.trainer.per_device_train_batch_size
    dataset = instantiate(cfg.hidden_states)(run.packed, target, distillation.head.layers, batch)
    rows = rows_per_step(cfg)
    set_steps(args, run.checkpoint, len(dataset) / rows)
    if (times := args.max_steps * rows / len(dataset)) > 1:
        note = "loss and accuracy on them overestimate the head, held-out figures do not"
        fresh = "after each time the target writes others"
        print(f"the {len(dataset):,} rows are read {times:.1f} times: {fresh if run.later else note}", flush=True)

    decodes = cfg.eval.steps and not target.embeddings_only and has_prompts(run.data.validation)
    settings = cfg.eval.num_prompts, cfg.eval.prompt_tokens
    validation = prompts(target.text_tokenizer, run.data.validation, *settings) if decodes else []

    def validate(head: DraftHead) -> dict[str, float]:
        limits = length_settings(64, has_chats(run.data.validation))
        drafter = tree_of(drafter_for(head, target, tree="auto"))  # in every step, not only when it pays
        decoded = decode(target, drafter, validation, **limits)
        found = {
            "acceptance_length": round(tokens_per_forward(decoded), 4),
            "acceptance_error": held_out.standard_error(decoded),
        }
        held = held_out.for_run(run.held_out, trainer.state.max_steps * rows * cfg.max_length)
        figures = held_out.agreement(trainer.criterion.with_head(head), held)
        shares = enumerate(figures.pop("held_out_agreement"), start=1)
        return found | figures | {f"held_out_acc_{depth}": share for depth, share in shares}

    stop = StopOnSignal()
    trainer = HeadTrainer(
        distillation,
        args,
        train_dataset=EpochStream(dataset, args.max_steps * rows, cfg.seed, run.later),
        measure=validate,
        context_parallel=cfg.context_parallel,
        callbacks=[stop, Progress(), Measure(cfg.eval.steps if decodes else 0)],
    )
    trainer.remove_callback(PrinterCallback)
    strategy.check_distributed_type(cfg.strategy, trainer.accelerator.distributed_type)
    try:
        with explain_out_of_memory(cfg, target.name, distillation.head.kind):
            trainer.train(resume_from_checkpoint=run.checkpoint)
    finally:
        stop.restore()
    distillation.head = trainer.full_head()
    if stop.stopped():
        distributed.shutdown()
        print(
            f"stopped at step {trainer.state.global_step}; the same command resumes from there, and "
            f"{shlex.quote(f'drafter={checkpoints.newest(run.directory / CHECKPOINTS)}')} drafts with what it has learned",
            flush=True,
        )
        raise SystemExit(130)
    return trainer


if __name__ == "__main__":
    main()
