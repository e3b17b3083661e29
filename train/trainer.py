"""From a batch of text to a loss, which comes from the target and not from labels; and transformers' Trainer around it."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from heads.base import DraftHead, Text, began
from heads.target import Target
from train import checkpoints, team
from train.engine import load_plain, sharded_on_cpus_too, without_weights
from train.features import read, sparse, unpack
from train.losses import Said
from train.memory import peak_memory

Loss = Callable[[Said, Said], Tensor]
# The loss holds the logits of so many numbers, or of so many rows, at a time; less would read the lm_head once for very few.
CHUNK, ROWS = 1 << 20, 256
SMALL = 1 << 23  # up to so many logits of all depths there is nothing to save by computing them twice


class Outcome(NamedTuple):
    loss: Tensor  # scalar
    hits: Tensor  # (depth,) drafts whose first guess is the target's
    counts: Tensor  # (depth,) drafts that were compared


class Lesson(nn.Module):
    """A head with everything that turns a batch of text into a loss. What is wrapped by DDP or FSDP is this, so that all
    uses of the head's weights lie inside one forward."""

    def __init__(self, head: DraftHead, target: Target, loss: Loss, depth_decay: float = 0.8, chunk: int | None = None):
        """depth_decay: depth d counts by depth_decay^(d - 1). chunk: rows of logits at a time; None suits the vocabulary."""
        super().__init__()
        self.head, self.loss, self.depth_decay = head, loss, depth_decay
        self.chunk = chunk or max(ROWS, CHUNK // target.vocab_size)
        self.target: Target = target  # frozen, and no module: not a part of this one's state
        self.few = False  # are answers the target's k best logits (features=disk, top_k)?
        self.progress = 0.0  # share of the training that is done; HeadTrainer keeps it
        # (depth,) drafts to learn from in the whole step, all its batches and processes together, which HeadTrainer counts;
        # None where a batch is all of it.
        self.whole: Tensor | None = None
        head.bind(target)
        target.check_logits()

    def forward(
        self, tokens: Tensor, supervised: Tensor, documents: Tensor, positions: Tensor, **stored: Tensor
    ) -> Outcome:
        """stored: what the target made of the batch, where it was written to disk before (train/features.py)."""
        text = Text(tokens, supervised, documents, positions)
        features, last = unpack(stored) if stored else self.read(text)
        self.few = "top_ids" in stored
        return self.grade(text, features, last)

    def grade(self, text: Text, features: Tensor, last: Tensor) -> Outcome:
        """The head's loss on what `read` gave."""
        outs = self.head(features, self.target.embed(text.tokens), text)
        counted = torch.stack([began(text, depth).flatten() for depth in range(1, len(outs) + 1)])
        rows = self.rows(counted)
        counted = counted[:, rows]
        states = [out.flatten(0, 1)[rows] for out in outs]
        last = last.roll(-1, dims=1).flatten(0, 1)[rows]  # the answer for slot p is what the target says at p + 1
        small = len(rows) * len(outs) * self.target.vocab_size <= SMALL
        sums = torch.zeros(2, len(outs), device=features.device)
        for start in range(0, max(1, len(rows)), self.chunk):  # at least once: every weight must have a gradient
            part = slice(start, start + self.chunk)
            some = [state[part] for state in states]
            if small:
                sums = sums + self.compare(last[part], counted[:, part], *some)
            else:
                sums = sums + checkpoint(self.compare, last[part], counted[:, part], *some, use_reentrant=False)
        losses, hits = sums
        counts = counted.sum(1)
        weights = self.depth_decay ** torch.arange(len(outs), device=features.device)
        loss = (weights * losses / (counts if self.whole is None else self.whole).clamp(min=1)).sum()
        return Outcome(loss, hits.detach(), counts)

    def rows(self, counted: Tensor) -> Tensor:
        """Slots at which a draft of some depth counts, (n,), of `counted` (depth, slots): no others need logits."""
        return counted.any(0).nonzero()[:, 0]

    def read(self, text: Text) -> tuple[Tensor, Tensor]:
        """The features that the head reads (batch, length, width), and the last hidden state, which gives the answers."""
        return read(self.target, text, self.head.layers)

    def compare(self, last: Tensor, counted: Tensor, *states: Tensor) -> Tensor:
        """Per depth: sum of losses and number of hits, (2, depth)."""
        last = last.detach()  # answers are no way into the target (train/joint.py)
        with torch.no_grad():
            answer = sparse(last, self.target.vocab_size) if self.few else self.target.logits(last)
            best, ids = answer.argmax(-1), self.head.draft_ids
            if ids is not None:
                # Where the target's own token cannot be drafted there is nothing right to learn (EAGLE-3's code).
                able = torch.zeros(answer.shape[-1], dtype=torch.bool, device=ids.device).index_fill(0, ids, True)[best]
                answer = answer[:, ids]
            else:
                able = torch.ones_like(best, dtype=torch.bool)
        sums = []
        for depth, (state, counts) in enumerate(zip(states, counted, strict=True), start=1):
            draft = self.head.logits(state, depth)
            learnt = counts & able
            hits = (self.head.to_target(draft.argmax(-1)) == best) & counts
            loss = torch.where(learnt, self.loss(Said(draft, state), Said(answer, last)), 0.0).sum()
            sums.append(torch.stack([loss, hits.sum().to(loss.dtype)]))
        return torch.stack(sums, dim=1)

    @torch.no_grad()
    def guesses(
        self, tokens: Tensor, supervised: Tensor, documents: Tensor, positions: Tensor, ranks: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Per depth: its best guesses (n, ranks) and the target's tokens (n,), as target ids."""
        text = Text(tokens, supervised, documents, positions)
        features, last = self.read(text)
        best = self.target.logits(last).argmax(-1).roll(-1, dims=1)
        for depth, out in enumerate(self.head(features, self.target.embed(tokens), text), start=1):
            slots = began(text, depth)
            logits = self.head.logits(out[slots], depth)
            yield depth, self.head.to_target(logits.topk(ranks).indices), best[slots]


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
        lesson: Lesson,
        args: TrainingArguments,
        build_optimizer: Callable[..., torch.optim.Optimizer],
        measure: Callable[[DraftHead], float],
        **kwargs: Any,
    ):
        """build_optimizer: one of train/optimizer.py; the schedule stays with the trainer's arguments. measure: the
        acceptance length of a head."""
        self.lesson, self.build_optimizer, self.measure = lesson, build_optimizer, measure
        self.spare = without_weights(copy.deepcopy(lesson.head, {id(lesson.target): lesson.target}))
        self.folder = Path(args.output_dir)
        super().__init__(lesson, args, **kwargs)
        self.forget()

    def create_accelerator_and_postprocess(self) -> None:
        with sharded_on_cpus_too(self.args):
            super().create_accelerator_and_postprocess()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            ids = self.lesson.head.draft_ids
            vocabularies = {self.lesson.target.vocab_size} | (set() if ids is None else {len(ids)})
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = self.build_optimizer(model or self.model, vocabularies, self.args.learning_rate, betas)
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """(depth,) drafts to learn from in all batches of a step, on all processes. It stays on the device."""
        texts = [Text(*(batch[name] for name in Text._fields)) for batch in batch_samples]
        depths = range(1, self.lesson.head.depth + 1)
        counts = torch.stack([torch.stack([began(text, depth).sum() for depth in depths]) for text in texts]).sum(0)
        return self.accelerator.reduce(counts, "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.lesson.progress = self.state.global_step / max(1, self.state.max_steps)
        self.lesson.whole = num_items_in_batch
        outcome = model(**inputs)
        self.hits, self.counts = self.hits + outcome.hits, self.counts + outcome.counts
        self.tokens = self.tokens + (inputs["documents"] >= 0).sum()
        loss = outcome.loss * team.size()  # every engine averages gradients over its processes
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
            hits, counts, tokens = (team.total(torch.as_tensor(x)) for x in (self.hits, self.counts, self.tokens))
            shares = (hits / counts.clamp(min=1)).tolist()
            logs |= {f"agree_{depth}": round(share, 4) for depth, share in enumerate(shares, start=1)}
            logs["tokens_per_second"] = round(tokens.item() / (time.perf_counter() - self.since), 1)
            logs["memory_gib"] = round(peak_memory(self.args.device) / 2**30, 3)
            self.forget()
        super().log(logs, *args, **kwargs)

    # Whole weights

    @property
    def measures(self) -> bool:
        """One process measures, unless the target needs all to read."""
        return team.rank() == 0 or self.lesson.target.together

    def plain_head(self) -> DraftHead:
        """The head with its whole weights, in the processes that may measure it; every process must ask. Without shards, the
        tensors are those in training. In the other processes nothing is in it."""
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.lesson.target.together:
            state = team.told({name: tensor.cpu() for name, tensor in state.items()})
        if self.measures:
            load_plain(self.spare, state, self.lesson.target.device)
        return self.spare.eval()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the very weights in training; the best so far are kept."""
        with self.aside(), torch.no_grad():
            head = self.plain_head()
            length = team.told(round(self.measure(head), 4) if self.measures else 0.0)
            self.log({"acceptance_length": length})
            if team.rank() == 0:
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
        if team.rank() == 0:
            best = checkpoints.best_step(self.state.log_history)
            checkpoints.rotate(self.folder, self.args.save_total_limit, best)
