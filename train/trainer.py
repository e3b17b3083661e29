"""transformers' Trainer with the loss, measurements and checkpoints of this project."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from heads.base import DraftHead, PackedBatch, draft_loss_mask
from heads.target import Target
from train.module import DistillationModel
from train.runtime import checkpoints, distributed
from train.runtime.memory import peak_memory
from train.runtime.strategy import load_full_weights, sharded_on_cpus_too, without_weights


def arguments(settings: Any, target: Target, **more: Any) -> TrainingArguments:
    """Of a config's `trainer`, what every training here needs said; then the processes of a run know of each other."""
    return instantiate(
        settings,
        use_cpu=target.device.type == "cpu",
        remove_unused_columns=False,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **more,
    )


class HeadTrainer(Trainer):
    """Trainer with the loss, measurements and checkpoints of this project.

    A loss is a sum over drafts, divided by how many there are in the whole step: so neither it nor its gradient knows how
    a step is spread over batches and processes.
    """

    optimizer: Any
    control: Any
    loss_is_scaled_for_ga = True
    hits: Tensor | float  # since the last log entry: (depth,) hits, (depth,) drafts, tokens
    counts: Tensor | float
    tokens: Tensor | int

    def __init__(
        self,
        distillation: DistillationModel,
        args: TrainingArguments,
        build_optimizer: Callable[..., torch.optim.Optimizer],
        measure: Callable[[DraftHead], float],
        **kwargs: Any,
    ):
        """build_optimizer: one of train/optimizer.py; the schedule stays with the trainer's arguments. measure: the
        acceptance length of a head."""
        self.distillation, self.build_optimizer, self.measure = distillation, build_optimizer, measure
        self.eval_head = without_weights(
            copy.deepcopy(distillation.head, {id(distillation.target): distillation.target})
        )
        self.folder = Path(args.output_dir)
        super().__init__(distillation, args, **kwargs)
        self.forget()

    def create_accelerator_and_postprocess(self) -> None:
        with sharded_on_cpus_too(self.args):
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            ids = self.distillation.head.draft_ids
            vocabularies = {self.distillation.target.vocab_size} | (set() if ids is None else {len(ids)})
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = self.build_optimizer(model or self.model, vocabularies, self.args.learning_rate, betas)
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """(depth,) drafts to learn from in all batches of a step, on all processes. It stays on the device."""
        texts = [PackedBatch(*(batch[name] for name in PackedBatch._fields)) for batch in batch_samples]
        depths = range(1, self.distillation.head.depth + 1)
        counts = torch.stack(
            [torch.stack([draft_loss_mask(text, depth).sum() for depth in depths]) for text in texts]
        ).sum(0)
        return self.accelerator.reduce(counts, "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.distillation.progress = self.state.global_step / max(1, self.state.max_steps)
        self.distillation.num_items = num_items_in_batch
        outcome = model(**inputs)
        self.hits, self.counts = self.hits + outcome.hits, self.counts + outcome.counts
        self.tokens = self.tokens + (inputs["documents"] >= 0).sum()
        loss = outcome.loss * distributed.world_size()  # every engine averages gradients over its processes
        return (loss, outcome) if return_outputs else loss

    # Logging

    def forget(self) -> None:
        self.hits, self.counts, self.tokens = 0.0, 0.0, 0
        self.since = time.perf_counter()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is no training: it counts in no rate."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and isinstance(self.hits, Tensor):
            hits, counts, tokens = (
                distributed.all_reduce(torch.as_tensor(x)) for x in (self.hits, self.counts, self.tokens)
            )
            shares = (hits / counts.clamp(min=1)).tolist()
            logs |= {f"acc_{depth}": round(share, 4) for depth, share in enumerate(shares, start=1)}
            logs["tokens_per_second"] = round(tokens.item() / (time.perf_counter() - self.since), 1)
            logs["memory_gib"] = round(peak_memory(self.args.device) / 2**30, 3)
            self.forget()
        super().log(logs, *args, **kwargs)

    # Whole weights

    @property
    def measures(self) -> bool:
        """One process measures, unless the target needs all to read."""
        return distributed.rank() == 0 or self.distillation.target.reads_collectively

    def full_head(self) -> DraftHead:
        """The head with its whole weights, in the processes that may measure it; every process must ask. Without shards, the
        tensors are those in training. In the other processes nothing is in it."""
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.distillation.target.reads_collectively:
            state = distributed.broadcast({name: tensor.cpu() for name, tensor in state.items()})
        if self.measures:
            load_full_weights(self.eval_head, state, self.distillation.target.device)
        return self.eval_head.eval()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the very weights in training; the best so far are kept."""
        with self.aside(), torch.no_grad():
            head = self.full_head()
            length = distributed.broadcast(round(self.measure(head), 4) if self.measures else 0.0)
            self.log({"acceptance_length": length})
            if distributed.rank() == 0:
                print(
                    f"step {self.state.global_step}/{self.state.max_steps}  acceptance length {length:.2f} (validation)",
                    flush=True,
                )
                if checkpoints.best_step(self.state.log_history) == self.state.global_step:
                    checkpoints.keep_best(Path(self.args.output_dir), self.state.global_step, head.state_dict())
        metrics = {"eval_acceptance_length": length}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self.aside(), checkpoints.written_whole(Path(self.args.output_dir), self.state.global_step) as self.folder:
            super()._save_checkpoint(model, trial)
        self.folder = Path(self.args.output_dir)
        if distributed.rank() == 0:
            best = checkpoints.best_step(self.state.log_history)
            checkpoints.rotate(self.folder, self.args.save_total_limit, best)
