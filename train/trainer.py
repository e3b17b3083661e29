"""transformers' Trainer with one change: the loss comes from the target, not from labels."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

from heads.base import DraftHead, Text, began
from heads.target import Target
from train.features import read, sparse, unpack
from train.losses import Said

Loss = Callable[[Said, Said], Tensor]
CHUNK = 1 << 22  # numbers in a chunk's logits: the loss never holds more of one depth at a time


class Outcome(NamedTuple):
    loss: Tensor  # scalar
    hits: Tensor  # (depth,) drafts whose first guess is the target's
    counts: Tensor  # (depth,) drafts that were compared


class Lesson(nn.Module):
    """A head with everything that turns a batch of text into a loss. What is wrapped by DDP or FSDP is this, so that all
    uses of the head's weights lie inside one forward."""

    def __init__(self, head: DraftHead, target: Target, loss: Loss, depth_decay: float = 0.8, chunk: int = CHUNK):
        """depth_decay: depth d counts by depth_decay^(d - 1). chunk: most numbers in a piece of logits."""
        super().__init__()
        self.head, self.loss, self.depth_decay, self.chunk = head, loss, depth_decay, chunk
        self.target: Target = target  # frozen, and no module: not a part of this one's state
        self.few = False  # are answers the target's k best logits (features=disk, top_k)?
        self.progress = 0.0  # share of the training that is done; HeadTrainer keeps it
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
        rows = counted.any(0).nonzero()[:, 0]
        counted = counted[:, rows]
        states = [out.flatten(0, 1)[rows] for out in outs]
        last = last.roll(-1, dims=1).flatten(0, 1)[rows]  # the answer for slot p is what the target says at p + 1
        size = max(1, self.chunk // self.target.vocab_size)
        # Where all depths' logits are small there is nothing to save by computing them twice.
        small = len(rows) * len(outs) * self.target.vocab_size <= 16 * self.chunk
        sums = torch.zeros(3, len(outs), device=features.device)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            chunk = [state[part] for state in states]
            if small:
                sums = sums + self.compare(last[part], counted[:, part], *chunk)
            else:
                sums = sums + checkpoint(self.compare, last[part], counted[:, part], *chunk, use_reentrant=False)
        losses, hits, learnt = sums
        weights = self.depth_decay ** torch.arange(len(outs), device=features.device)
        loss = (weights * losses / learnt.clamp(min=1)).sum()
        return Outcome(loss, hits.detach(), counted.sum(1))

    def read(self, text: Text) -> tuple[Tensor, Tensor]:
        """The features that the head reads (batch, length, width), and the last hidden state, which gives the answers."""
        return read(self.target, text, self.head.layers)

    def compare(self, last: Tensor, counted: Tensor, *states: Tensor) -> Tensor:
        """Per depth: sum of losses, number of hits, number of drafts learnt from, (3, depth)."""
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
            sums.append(torch.stack([loss, hits.sum().to(loss.dtype), learnt.sum().to(loss.dtype)]))
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


class HeadTrainer(Trainer):
    """Logs, besides the loss, the share of drafts the target agrees with per depth, and tokens per second."""

    optimizer: Any

    def __init__(self, *args: Any, build_optimizer: Callable[..., torch.optim.Optimizer], **kwargs: Any):
        """build_optimizer: one of train/optimizer.py; the schedule stays with the trainer's arguments."""
        super().__init__(*args, **kwargs)
        self.build_optimizer = build_optimizer
        self.forget()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            lesson: Any = model or self.model
            ids = lesson.head.draft_ids
            vocabularies = {lesson.target.vocab_size} | (set() if ids is None else {len(ids)})
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = self.build_optimizer(lesson, vocabularies, self.args.learning_rate, betas)
        return self.optimizer

    def forget(self) -> None:
        self.hits: Tensor | float = 0.0
        self.counts: Tensor | float = 0.0
        self.tokens, self.since = 0, time.perf_counter()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.model.progress = self.state.global_step / max(1, self.state.max_steps)
        outcome = model(**inputs)
        self.hits, self.counts = self.hits + outcome.hits, self.counts + outcome.counts
        self.tokens += int((inputs["documents"] >= 0).sum())
        return (outcome.loss, outcome) if return_outputs else outcome.loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and isinstance(self.hits, Tensor) and isinstance(self.counts, Tensor):
            shares = (self.hits / self.counts.clamp(min=1)).tolist()
            logs |= {f"agree_{depth}": round(share, 4) for depth, share in enumerate(shares, start=1)}
            logs["tokens_per_second"] = round(self.tokens / (time.perf_counter() - self.since), 1)
            self.forget()
        super().log(logs, *args, **kwargs)
