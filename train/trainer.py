"""transformers' Trainer with the loss, measurements and checkpoints of this project.

Trainer, and not a loop of our own over accelerate, because it brings DDP, FSDP and DeepSpeed, schedules, clipping, resuming,
loggers and arguments that users know. It is used by public methods, callbacks and arguments, and by two private methods.
"""

import copy
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from hydra.utils import instantiate
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from foredraft.heads import lora
from foredraft.heads.base import DraftHead, PackedBatch
from foredraft.heads.checkpoint import published_dtype, save_head
from foredraft.heads.hub.client import HEAD
from foredraft.heads.target_model import Target
from foredraft.train import optimizer
from foredraft.train.data.packing import collate
from foredraft.train.module import DistillationModel
from foredraft.train.optimizer import OPTIMIZERS
from foredraft.train.runtime import checkpoints, distributed
from foredraft.train.runtime.callbacks import FitToTime, KeepCheckpoints, Profile
from foredraft.train.runtime.context_parallel import ContextParallel
from foredraft.train.runtime.memory import peak_memory
from foredraft.train.runtime.run_state import CHECKPOINTS
from foredraft.train.runtime.strategy import shard_on_cpus_too, without_weights

SMALLER_BATCHES = "lower trainer.per_device_train_batch_size or max_length"
NOT_HERE = {  # arguments of Trainer that change nothing here, or do harm, and the remedy
    name: f"has no effect on a head: {remedy}"
    for names, remedy in (
        ("optim_args", "set trainer.learning_rate"),
        ("optim_target_modules", "choose trainer.optim=adamw or trainer.optim=muon"),
        ("label_smoothing_factor", "the labels are the target's own distributions: choose a loss"),
        ("torch_compile torch_compile_backend torch_compile_mode", "set trainer.compile_head, which leaves the target"),
        ("eval_strategy eval_steps eval_delay eval_on_start", "set eval.steps"),
        ("load_best_model_at_end metric_for_best_model greater_is_better", "set eval.keep_best"),
        ("fp16 bf16_full_eval fp16_full_eval", "products are in bfloat16 or float32: set trainer.bf16"),
        ("activation_checkpointing activation_checkpointing_kwargs", SMALLER_BATCHES),
        ("gradient_checkpointing gradient_checkpointing_kwargs", SMALLER_BATCHES),  # the same, by their earlier names
        ("auto_find_batch_size", "set trainer.per_device_train_batch_size (foredraft plan counts what fits)"),
        ("use_liger_kernel liger_kernel_config neftune_noise_alpha", "it is for a model with embeddings: omit it"),
        ("data_seed", "set data_seed, without trainer."),
        ("push_to_hub", "foredraft push sends a finished head"),
        ("resume_from_checkpoint", "the same command resumes a run"),
    )
    for name in names.split()
} | {
    "save_only_model": "saves no optimizer to resume with: set save_total_limit=1",
    "ignore_data_skip": "lets a resumed run learn its first rows once more: leave it out",
}


@dataclass
class HeadTrainingArguments(TrainingArguments):
    """Check the arguments. Raise ValueError for one that would be ignored, and for a compiler that torch does not support."""

    bf16: bool = False  # are products in bfloat16?
    optim: str = "adamw"  # see train/optimizer.py
    compile_head: str | None = None
    max_minutes: float = 0.0  # see FitToTime
    profile: bool = False  # see Profile

    def __post_init__(self) -> None:
        if self.compile_head is not None and self.compile_head not in (known := torch.compiler.list_backends(())):
            raise ValueError(f"trainer.compile_head={self.compile_head} is not one of {', '.join(known)}")
        defaults = {field.name: field.default for field in fields(TrainingArguments)}
        for name in (name for name in NOT_HERE if name in defaults):  # versions of transformers have not all of them
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"trainer.{name}={value} {NOT_HERE[name]}")
        if self.max_minutes < 0:
            raise ValueError(f"trainer.max_minutes={self.max_minutes} must not be negative; 0 sets no limit")
        if self.optim not in OPTIMIZERS:
            raise ValueError(f"trainer.optim={self.optim} is not one of {', '.join(OPTIMIZERS)}")
        self.optimizer, self.optim = self.optim, OptimizerNames.ADAMW_TORCH  # Trainer would build its own
        # accelerate and DeepSpeed would cast weights, gradients and the loss as well: DistillationModel casts products alone.
        self.products_in_bf16, self.bf16 = self.bf16, False
        # `accelerate launch` may have said otherwise. A model that it compiles has other names of weights.
        os.environ["ACCELERATE_MIXED_PRECISION"] = os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"
        super().__post_init__()
        if self.accelerator_config.split_batches:
            raise ValueError("trainer.accelerator_config.split_batches gives processes the rows of one: leave it out")
        optimizer.schedule(self, 100)

    @property
    def n_gpu(self) -> int:
        """Return at most one device for each process: Trainer would wrap the head in nn.DataParallel on a machine with
        several, and its copies would meet a target on another device. All of them take strategy=ddp under torchrun."""
        return min(1, super().n_gpu)


def arguments(cfg: Any, target: Target, **strategy: Any) -> HeadTrainingArguments:
    """Return the arguments of `trainer` and of a strategy. From here on the processes of a run can communicate. cfg: as in
    conf/train.yaml."""
    settings = cfg.trainer
    for name in sorted(strategy.keys() & settings.keys()):
        raise ValueError(
            f"{name}={strategy[name]} of strategy or strategy_args replaces trainer.{name}={settings[name]}: set "
            f"trainer.{name} and not strategy_args, or choose another strategy"
        )
    if not settings.get("dataloader_num_workers"):  # nobody reads ahead then
        strategy["dataloader_prefetch_factor"] = None
    fixed = {
        "output_dir": str(Path(cfg.output_dir) / CHECKPOINTS / checkpoints.UNFINISHED),
        "use_cpu": target.device.type == "cpu",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",  # train/data/row_order.py has the order
        "logging_nan_inf_filter": False,  # it waits for the loss of every batch, to hide one that is not a number
    }
    for name in sorted(name for name in fixed.keys() & settings.keys() if settings[name] != fixed[name]):
        raise ValueError(f"trainer.{name}={settings[name]} has no effect on a head: leave it out")
    if settings.bf16 is None:
        strategy["bf16"] = optimizer.multiplies_faster_in_bfloat16(target.device)
    return instantiate(settings, **fixed, **strategy)


class HeadTrainer(Trainer):
    """Train a head. A loss is a sum over drafts, divided by their number in the whole step: so neither it nor its gradient
    depends on how a step is spread over batches and processes."""

    optimizer: Any
    control: Any
    loss_is_scaled_for_ga = True
    hits: Tensor | float  # since the last log entry: (depth,) hits, (depth,) drafts, tokens
    counts: Tensor | float
    tokens: Tensor | int

    def __init__(
        self,
        distillation: DistillationModel,
        args: HeadTrainingArguments,
        measure: Callable[[DraftHead], dict[str, float]],
        context_parallel: int = 1,
        **kwargs: Any,
    ):
        """Prepare training. measure: what is logged of a head, its `acceptance_length` at least. context_parallel: processes
        that share each row."""
        self.distillation, self.measure = distillation, measure
        self.context = ContextParallel(context_parallel) if context_parallel > 1 else None
        target = distillation.target
        self.eval_head = without_weights(copy.deepcopy(distillation.head, {id(target): target}))
        # The criterion as no strategy wraps it, for measurements: of one kind from the first step to the last.
        self.criterion = distillation.with_head(self.eval_head)
        self.criterion.progress = 1.0
        self.folder = Path(args.output_dir).parent
        distillation.bf16 = args.products_in_bf16
        shard_on_cpus_too(args)
        super().__init__(distillation, args, data_collator=collate, **kwargs)
        # ZeRO-3 takes a weight away as soon as its layer is done, and takes no gradient for it until the backward pass.
        distillation.recompute = self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage == 3
        if args.compile_head is not None:
            distillation.compile_head(args.compile_head)
        self.add_callback(KeepCheckpoints())
        self.schedules: list[Any] = []  # a list, because under DeepSpeed a copy of this trainer makes the schedule
        if args.max_minutes:
            self.add_callback(FitToTime(args.max_minutes, self.reschedule))
        if args.profile and distributed.rank() == 0:
            self.add_callback(Profile(self.folder.parent))
        self.saving_since: float | None = None
        self.reset_counters()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            vocabulary = self.distillation.head.vocabulary_parameters
            self.optimizer = optimizer.build(model or self.model, vocabulary, self.args)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        schedule = super().create_scheduler(num_training_steps, optimizer)
        self.schedules.append(schedule)
        return schedule

    def reschedule(self, steps: int) -> None:
        """Let the learning rate fall over this number of steps, from the next one on."""
        (rate,) = optimizer.schedule(self.args, steps).lr_lambdas
        for schedule in self.schedules:
            assert isinstance(schedule, LambdaLR)  # the others need eval_strategy
            schedule.lr_lambdas = [rate] * len(schedule.lr_lambdas)

    def get_batch_samples(self, *args: Any) -> tuple[list, Tensor]:
        """Return the batches of a step, and (depth,) the number of their drafts in the loss, over all processes."""
        if self.saving_since is not None:
            self.since += time.perf_counter() - self.saving_since
            self.saving_since = None
        batches, _ = super().get_batch_samples(*args)
        counts = torch.zeros(self.distillation.head.depth, dtype=torch.int64)
        for number, batch in enumerate(batches):
            text = PackedBatch.of(batch)
            self.tokens = self.tokens + (text.documents >= 0).sum()
            prepared = self.distillation.prepare(text, self.state.global_step)
            text = text._replace(anchors=prepared.get("anchors"))
            counts += self.distillation.loss_masks(text).sum(1)
            batches[number] = self.spread(batch | prepared)
        # From host to host: one process may write text meanwhile (`fresh_text`), for longer than NCCL waits.
        return batches, distributed.all_reduce(counts).to(self.args.device, non_blocking=True)

    def spread(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch on this process's device, or on the host its parts of the batches of all that share rows."""
        if self.context is None:
            return send_to_device(batch, self.args.device, non_blocking=True)
        parts = self.context.exchange(batch, self.distillation.head.depth)
        for part in parts if "anchors" not in batch else ():
            part["label_positions"] = self.distillation.label_positions_of(PackedBatch.of(part))
        return {"parts": parts}

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Learn the rows of all processes that share them, one after the other; the last one averages gradients."""
        *others, last = inputs.get("parts", [inputs])
        loss = torch.zeros((), device=self.args.device)
        for part in others:
            with self.accelerator.no_sync(model):
                loss += super().training_step(model, part, num_items_in_batch)
        return loss + super().training_step(model, last, num_items_in_batch)

    def get_train_dataloader(self) -> DataLoader:
        """Return a loader whose batches stay in the host's memory until `get_batch_samples` has read them."""
        loader: Any = super().get_train_dataloader()
        loader.device = None
        return loader

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        self.distillation.progress = self.state.global_step / max(1, self.state.max_steps)
        self.distillation.num_items = num_items_in_batch
        outcome = model(**inputs)
        self.hits, self.counts = self.hits + outcome.hits, self.counts + outcome.counts
        self.checked.append((self.state.global_step + 1, "loss", outcome.loss.detach()))
        loss = outcome.loss * distributed.world_size()  # every strategy averages gradients over its processes
        return (loss, outcome) if return_outputs else loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self.checked.append((self.state.global_step + 1, "grad_norm", norm))
        return norm

    # Logging

    def reset_counters(self) -> None:
        self.hits, self.counts, self.tokens = 0.0, 0.0, 0
        # The step, name and value of each batch's loss, and of the norm of each step's gradient.
        self.checked: list[tuple[int, str, Any]] = []
        self.since = time.perf_counter()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.check_finite(logs)
        if "loss" in logs and isinstance(self.hits, Tensor):
            totals = (self.hits, self.counts, self.tokens)
            hits, counts, tokens = (distributed.all_reduce(torch.as_tensor(x)) for x in totals)
            shares = (hits / counts.clamp(min=1)).tolist()
            logs |= {f"acc_{depth}": round(share, 4) for depth, share in enumerate(shares, start=1)}
            logs["tokens"] = int(tokens.item())
            logs["tokens_per_second"] = round(tokens.item() / (time.perf_counter() - self.since), 1)
            logs["memory_gib"] = round(peak_memory(self.args.device) / 2**30, 3)
            self.reset_counters()
        super().log(logs, *args, **kwargs)

    def check_finite(self, logs: dict[str, float]) -> None:
        """Raise ValueError for a loss, or a norm of its gradient, that is not finite. KeepCheckpoints has every step logged
        that is saved, so nothing is saved of it."""
        name = next((name for name in ("loss", "grad_norm") if not math.isfinite(logs.get(name, 0.0))), None)
        if name is None:
            return
        bad = [not math.isfinite(value or 0.0) for *_, value in self.checked]  # DeepSpeed may have no norm
        bad = distributed.all_reduce(torch.tensor(bad).int()).tolist()
        found = (event for event, count in zip(self.checked, bad, strict=True) if count)  # the first: weights keep it
        step, name, _ = next(found, (self.state.global_step, name, None))
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps * distributed.world_size()
        rows = sorted({self.train_dataset.locate(index) for index in range((step - 1) * size, step * size)})
        raise ValueError(
            f"{name}={logs.get(name, math.nan)} at step {step}, whose rows of the packed data are "
            f"{', '.join(map(str, rows))}: see that text, lower trainer.learning_rate={self.args.learning_rate:g} or "
            f"trainer.max_grad_norm={self.args.max_grad_norm:g}, or give target.dtype=float32; no checkpoint holds this step"
        )

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Save the first part of a checkpoint, including the head; the next step starts after the last one."""
        self.saving_since = time.perf_counter()
        super().save_model(output_dir, *args, **kwargs)
        self.save_head(self.full_head(), Path(output_dir or self.args.output_dir) / HEAD)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise ValueError, after the Trainer has read a checkpoint, if it lacks weights of this head."""
        if odd := [*load_result.missing_keys, *load_result.unexpected_keys]:
            raise ValueError(
                f"the checkpoints in {self.args.output_dir} were written by another version of foredraft, which has not "
                f"the same weights ({', '.join(odd[:3])}): train anew with another output_dir, or resume with that version"
            )

    # Full weights

    @property
    def measures(self) -> bool:
        """Return whether this process measures: one does, unless the target runs in all of them together."""
        return distributed.rank() == 0 or self.distillation.target.is_collective

    def full_head(self) -> DraftHead:
        """Return the head with its full weights in the processes that may measure it, empty in the others; every process
        must call this. Without shards the tensors are those in training."""
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.distillation.target.is_collective:
            state = distributed.broadcast({name: tensor.cpu() for name, tensor in state.items()})
        if self.measures:
            # The copy without weights shares the tensors of the state.
            weights = {name[len("head.") :]: tensor for name, tensor in state.items() if name.startswith("head.")}
            self.eval_head.load_state_dict(weights, assign=True)
            self.eval_head.to(self.distillation.target.device)
        return self.eval_head.eval()

    def save_head(self, head: DraftHead, directory: Path) -> None:
        """Write what `full_head` gave as the finished head is written. One process keeps the files."""
        if not self.measures:
            return
        target = self.distillation.target
        finished = copy.deepcopy(head, {id(target): target})
        lora.merge(finished)
        finished.on_train_end()
        with tempfile.TemporaryDirectory() as scratch:
            place = directory if distributed.rank() == 0 else Path(scratch) / HEAD
            save_head(finished.to(published_dtype(target)), place, target)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the very weights in training, and keep the best so far. The time counts in no rate."""
        start = time.perf_counter()
        with torch.no_grad():
            head = self.full_head()
            found = distributed.broadcast(self.measure(head) if self.measures else {})
            self.log(dict(found))
            step = self.state.global_step
            if checkpoints.best_step(self.state.log_history) == step:
                self.save_head(head, checkpoints.best_head(self.folder, step))
        self.since += time.perf_counter() - start
        metrics = {"eval_acceptance_length": found["acceptance_length"]}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
