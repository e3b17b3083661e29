"""From a batch of text to a loss: the head's drafts against the target's own distributions, not against labels.

forward -> forward_target (aux hidden states) -> head -> depth_loss (logits, loss and hits of some rows at one depth)
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from foredraft.heads.attention.row_parts import RowParts
from foredraft.heads.base import DraftHead, PackedBatch, draft_loss_mask
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.logits import check_logits
from foredraft.train.gradients import PartialGradients
from foredraft.train.hidden_states.online import batch_of, forward_target, several_documents
from foredraft.train.hidden_states.storage import unpack
from foredraft.train.losses import Prediction

Loss = Callable[[Prediction, Prediction], Tensor]
# Number of logits that the loss holds at a time: what a CPU's caches hold, and on a GPU 512 MiB in float32, because the
# gradient of the lm_head is read and written once for each time.
# Fewer than ROWS rows would read the lm_head itself for very few.
CHUNK, GPU_CHUNK, ROWS = 1 << 20, 1 << 27, 256


def rows_at_a_time(vocab_size: int, device_type: str) -> int:
    return max(ROWS, (CHUNK if device_type == "cpu" else GPU_CHUNK) // vocab_size)


class Outcome(NamedTuple):
    loss: Tensor  # scalar
    hits: Tensor  # (depth,) drafts whose first guess is the target's
    counts: Tensor  # (depth,) drafts that were compared


class Teacher(NamedTuple):
    """Hold the target's prediction at some label positions (...)."""

    prediction: Prediction  # logits (..., draft vocab)
    best: Tensor  # (...) its best tokens
    draftable: Tensor  # (...) bool: are those in the draft vocabulary? Else no draft would be right (EAGLE-3's code)


class DistillationModel(nn.Module):
    """Turn a batch of text into a loss, with a head. DDP and FSDP wrap this module, so that all uses of the
    head's weights lie inside one forward."""

    def __init__(self, head: DraftHead, target: Target, loss: Loss, depth_decay: float = 0.8, chunk: int | None = None):
        """Set the weights of the loss. depth_decay: depth d counts by depth_decay^(d - 1). chunk: rows of logits at a time;
        None suits vocabulary and device."""
        super().__init__()
        if depth_decay < 0:
            raise ValueError(f"objective.depth_decay={depth_decay} must be at least 0")
        self.head, self.loss, self.depth_decay = head, loss, depth_decay
        self.chunk = chunk or rows_at_a_time(target.vocab_size, target.device.type)
        self.target: Target = target  # frozen, and no module: not a part of this one's state
        self.weights: Tensor | None = None  # of the batch
        self.label_positions: Tensor | None = None  # of the batch, those with a draft in the loss; None: to be computed
        self.bf16 = False  # are products in bfloat16? Weights, gradients and the loss are in float32 in any case
        self.recompute = False  # are logits computed once more in the backward pass? (train/gradients.py)
        self.progress = 0.0  # share of the training that is done; HeadTrainer sets it
        # (depth,) drafts in the loss of the whole step, over all its batches and processes, which HeadTrainer counts; None
        # where one batch is the whole step.
        self.num_items: Tensor | None = None
        check_logits(target)

    def forward(
        self,
        tokens: Tensor,
        loss_mask: Tensor,
        documents: Tensor,
        positions: Tensor,
        anchors: Tensor | None = None,
        multiple_documents: bool | None = None,
        label_positions: Tensor | None = None,
        weights: Tensor | None = None,
        images: dict[str, Tensor] | None = None,
        parts: dict[str, Any] | None = None,
        **stored: Tensor,
    ) -> Outcome:
        """Return the loss of a batch and its counts. multiple_documents, label_positions: as `prepare` returns them.
        weights: (batch, length) float32, of each token's drafts in the loss. images: as in PackedBatch. parts: arguments of
        RowParts, if processes share rows. stored: the aux hidden states of the batch, from disk
        (train/hidden_states/offline.py)."""
        self.weights, self.label_positions = weights, label_positions
        text = PackedBatch(tokens, loss_mask, documents, positions, anchors, multiple_documents, images)
        if parts is not None:
            text = text._replace(parts=RowParts(**parts))
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.bf16):
            with record_function("target"):
                states = unpack(stored) if stored else self.forward_target(text)
            return self.compute_loss(text, *states)

    def prepare(self, text: PackedBatch, step: int) -> dict[str, Any]:
        """Return arguments of `forward` that are counted or chosen while the batch is in the host's memory, without waits."""
        anchors = self.choose_anchors(text, step)
        several = {"multiple_documents": several_documents(text)}
        if anchors is not None:
            return several | {"anchors": anchors}
        return several | {"label_positions": self.label_positions_of(text)}

    def label_positions_of(self, text: PackedBatch) -> Tensor:
        """Return (n,) the label positions at which a draft of some depth is in the loss."""
        return self.active_positions(self.loss_masks(text))

    def loss_masks(self, text: PackedBatch) -> Tensor:
        """Return (depth, label positions) bool: which drafts are in the loss."""
        return torch.stack([draft_loss_mask(text, d).flatten() for d in range(1, self.head.depth + 1)])

    def choose_anchors(self, text: PackedBatch, step: int) -> Tensor | None:
        """Return (batch, n): the positions at which the drafts of this step start; None for all positions."""
        return None

    def compute_loss(self, text: PackedBatch, aux_hidden_states: Tensor, last: Tensor) -> Outcome:
        """Return the head's loss on what `forward_target` returned."""
        with record_function("head"):
            outs = self.drafts(aux_hidden_states, self.target.embed(text.tokens), text)
        counted = self.loss_masks(text)
        rows = self.active_positions(counted) if self.label_positions is None else self.label_positions
        counted = counted[:, rows]
        last = last.roll(-1, dims=1).flatten(0, 1)[rows]  # the teacher of label position p is the target at p + 1
        weights = None if self.weights is None else self.weights.roll(-2, dims=1).flatten()[rows]
        counts = counted.sum(1)
        decay = self.depth_decay ** torch.arange(len(outs), device=aux_hidden_states.device)
        items = self.items(counts)
        scale = torch.stack([torch.ones_like(decay) / items * decay, torch.zeros_like(decay)])  # a hit counts nothing
        learned, sums = PartialGradients(self.head, [out.flatten(0, 1) for out in outs], self.recompute), []
        starts = range(0, max(1, len(rows)), self.chunk)  # at least one: every weight must have a gradient
        for start in reversed(starts):
            part = slice(start, start + self.chunk)
            teacher = self.teacher(last[part])
            weight = None if weights is None else weights[part]
            parts = []
            for depth in reversed(range(len(outs))):
                compute = partial(self.depth_loss, depth + 1, teacher, counted[depth, part], weight)
                parts.append(learned.part(compute, depth, rows[part], scale[:, depth]))
            sums.append(torch.stack(parts[::-1], dim=1))
        losses, hits = reduce(torch.add, reversed(sums))
        return Outcome(learned.attach((decay * losses / items).sum()), hits, counts)

    def drafts(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Any:
        """Run the head on a batch. `compile_head` compiles this."""
        return self.head(aux_hidden_states, embeddings, text)

    def compile_head(self, backend: str) -> None:
        """Apply torch.compile to the head's part of `forward`, not to the target and this module's state."""
        self.drafts = torch.compile(self.drafts, backend=backend)  # type: ignore[method-assign]

    def items(self, counts: Tensor) -> Tensor:
        """Return (depth,): the divisor of each depth's sum of losses."""
        return (counts if self.num_items is None else self.num_items).clamp(min=1)

    def active_positions(self, counted: Tensor) -> Tensor:
        """Return (n,): the positions of `counted` (depth, positions) with a draft that counts: only these need logits."""
        return counted.any(0).nonzero()[:, 0]

    def forward_target(self, text: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the aux hidden states (batch, length, width), and the last hidden state, which gives the teacher logits."""
        return forward_target(self.target, text, self.head.layers)

    def depth_loss(self, depth: int, teacher: Teacher, counts: Tensor, weights: Tensor | None, state: Tensor) -> Tensor:
        """Return the sum of losses and number of hits, (2,), of drafts (n, width) of one depth. counts: (n,) bool."""
        draft = self.head.logits(state, depth)
        expected = teacher.prediction.logits.shape
        assert draft.shape == expected, (
            f"logits of {type(self.head).__name__} are {draft.shape}, the target's {expected}"
        )
        learned = counts & teacher.draftable
        # max, not argmax, here and for the teacher: the same token for a third of the time on a CPU.
        hits = (self.head.to_target_ids(draft.max(-1).indices) == teacher.best) & counts
        losses = self.loss(Prediction(draft, state), teacher.prediction)
        loss = torch.where(learned, losses if weights is None else weights * losses, 0.0).sum()
        return torch.stack([loss, hits.sum().to(loss.dtype)])

    @torch.no_grad()
    def teacher(self, last: Tensor) -> Teacher:
        """Compute the teacher from the target's last hidden states."""
        logits = self.target.logits(last)
        best, ids = logits.max(-1).indices, self.head.draft_ids
        if ids is None:
            return Teacher(Prediction(logits, last), best, torch.ones_like(best, dtype=torch.bool))
        draftable = torch.zeros(logits.shape[-1], dtype=torch.bool, device=ids.device).index_fill(0, ids, True)[best]
        return Teacher(Prediction(logits[..., ids], last), best, draftable)

    @torch.no_grad()
    def guesses(
        self, text: PackedBatch, aux_hidden_states: Tensor, last: Tensor, ranks: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield per depth its best guesses (n, ranks) and the target's tokens (n,), as target ids. aux_hidden_states, last:
        as `forward_target` gives them."""
        best = torch.cat([self.target.logits(part).argmax(-1) for part in last.flatten(0, 1).split(self.chunk)])
        best = best.view_as(text.tokens).roll(-1, dims=1)
        for depth, out in enumerate(self.head(aux_hidden_states, self.target.embed(text.tokens), text), start=1):
            mask = draft_loss_mask(text, depth)
            guesses = [self.head.logits(part, depth).topk(ranks).indices for part in out[mask].split(self.chunk)]
            yield depth, self.head.to_target_ids(torch.cat(guesses)), best[mask]

    def guesses_of(self, rows: Iterable[dict[str, Any]], ranks: int = 1) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield `guesses` of packed rows, one after the other."""
        for row in rows:
            text = batch_of([row], self.target)
            yield from self.guesses(text, *self.forward_target(text), ranks=ranks)

    def with_head(self, head: DraftHead) -> "DistillationModel":
        """Return the same objective for other weights, which do not train. Do not use it on a model that FSDP has wrapped."""
        other = copy.copy(self)
        other._modules = self._modules | {"head": head}
        other.num_items, other.weights, other.label_positions = None, None, None
        other.__dict__.pop("drafts", None)  # compiled for this head
        return other
