"""What a head is worth on text that it does not learn from: loss, agreement per depth, and the acceptance length that they
predict.

Training text overestimates a head, and more so the more often it is read. What is measured here is text of the held-out
documents, written by the target where the run's own text is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.inference.evaluation.progress import track
from foredraft.inference.generation import Generation
from foredraft.train.data.corpus import Corpus, Held, tokenize
from foredraft.train.data.documents import Documents
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states.online import batch_of
from foredraft.train.module import DistillationModel

TOKENS, WRITTEN = 1 << 14, 1 << 13  # that are read; that the target writes, fewer in a short run
DOCUMENTS = 64  # that they come from, at most


def documents(tokenizer: PreTrainedTokenizerBase, data: Corpus) -> Documents:
    """Return some documents that are held out for the measurements during training, spread evenly."""
    count = min(DOCUMENTS, len(data.validation))
    return tokenized(tokenizer, data.validation, [len(data.validation) * i // count for i in range(count)])


def tokenized(tokenizer: PreTrainedTokenizerBase, held: Held, chosen: Sequence[int]) -> Documents:
    """Tokenize the chosen held-out texts."""
    if isinstance(held, Documents):
        return held.select(np.array(chosen))
    return tokenize(tokenizer, (held[number] for number in chosen))


def rows(documents: Documents, length: int, seed: int, context: int | None = None) -> list[dict[str, Tensor]]:
    """Pack about TOKENS tokens of them into rows of `length` or up to twice that, so that documents lie whole in them.

    In the rest of a cut document the target lacks the start that it has in decoding: of conversations of 350 tokens in
    rows of 256 that lowered the agreement by 0.02. context: of the target, None for no limit."""
    longest = min(int(documents.sizes.max()), 2 * length)
    packed = Packed(documents, min(max(length, longest), context or 2 * length), seed, long="truncate")
    count = min(len(packed), max(4, TOKENS * len(packed) // packed.tokens))
    # Spread over them all, since the longest documents come first.
    return [packed[len(packed) * row // count] for row in range(count)]


def for_run(rows: list[dict[str, Tensor]], trained: int) -> list[dict[str, Tensor]]:
    """Return the rows to measure a run on that learns from `trained` tokens. A short run gets fewer, spread over them all,
    with an eighth of these tokens, so that it does not measure for longer than it trains."""
    count = min(len(rows), max(4, trained // 8 // max(1, len(rows[0]["tokens"])))) if rows else 0
    return [rows[len(rows) * row // count] for row in range(count)]


@torch.no_grad()
def agreement(distillation: DistillationModel, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Return the figures of metrics.json, measured row by row: how often the first guess of each depth is the target's, the
    loss of one step of training on all rows, and the acceptance length of chains as deep as the head was trained, along this
    text."""
    head, target = distillation.head, distillation.target
    texts = [batch_of([row], target) for row in rows]
    counted = [distillation.loss_masks(text) for text in texts]
    distillation.num_items = torch.stack([mask.sum(1) for mask in counted]).sum(0)
    loss, hits = 0.0, torch.zeros(head.depth)
    gained: list[int] = []
    for text, mask in track(list(zip(texts, counted, strict=True)), "held-out agreement"):
        states = distillation.forward_target(text)
        loss += distillation.compute_loss(text, *states).loss.item()
        grid = torch.zeros_like(mask)
        for depth, guesses, best in distillation.guesses(text, *states, ranks=1):
            grid[depth - 1, mask[depth - 1]] = guesses[:, 0] == best
        hits += grid.sum(1).cpu()
        gained += steps(grid.cpu(), mask.cpu())
    shares = (hits / distillation.num_items.cpu().clamp(min=1)).tolist()
    return {
        "held_out_agreement": [round(share, 4) for share in shares],
        "held_out_loss": round(loss, 4),
        "predicted_acceptance_length": round(sum(gained) / max(1, len(gained)), 4),
    }


def steps(hits: Tensor, counted: Tensor) -> list[int]:
    """Return the tokens gained by each step of greedy decoding along a row. A step starts where the previous one ended, so
    more often at hard places than at others: the mean over all positions would be too high.

    hits, counted: (depth, length) bool, by label position. The draft of depth d that starts at t is at t + d - 1.
    """
    depth, length = hits.shape
    starts = max(0, length - depth + 1)
    by_start = (torch.stack([grid[d, d : d + starts] for d in range(depth)]) for grid in (hits, counted))
    hits, counted = by_start  # (depth, starts)
    accepted, is_complete = hits.cumprod(0).sum(0).tolist(), counted.all(0).tolist()
    gained, at = [], 0
    while at < len(is_complete):
        if is_complete[at]:
            gained.append(accepted[at] + 1)
        at += accepted[at] + 1 if is_complete[at] else 1
    return gained


def standard_error(generations: list[Generation]) -> float:
    """Return the standard error of their acceptance length, over the steps."""
    counts = [count for generation in generations for step in generation.steps for count in step.emitted]
    gained = torch.tensor(counts, dtype=torch.float64)
    return round(gained.std().item() / len(gained) ** 0.5, 4) if len(gained) > 1 else 0.0
