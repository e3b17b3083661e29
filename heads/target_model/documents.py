"""Packed sequences for a target that does not support our masks: documents become a padded batch of one forward.

packed   a a a a b b b c c .       forward   a a a a
                                             b b b .      padding is on the right, where causal layers never look
                                             c c . .
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target_model.logits import TargetOutput
from foredraft.heads.target_model.sharding import largest

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target


class Span(NamedTuple):
    """Locate a document in a packed batch."""

    row: int
    start: int
    stop: int


def forward_documents(
    target: "Target",
    tokens: Tensor,
    documents: Tensor,
    layers: Sequence[int],
    images: dict[str, Tensor] | None = None,
) -> TargetOutput:
    """Return the aux hidden states of a packed batch with tokens and documents (batch, length) as in
    heads.base.PackedBatch: those of each document processed separately, 0 for padding. Logits are discarded."""
    aux_hidden_states = None
    parts = groups(spans(documents.tolist()), tokens.numel())
    if target.sharding == "fsdp":  # every process must take part in the same number of forwards
        parts += parts[-1:] * (largest(len(parts)) - len(parts))
    for group in parts:
        longest = max(span.stop - span.start for span in group)
        part = tokens.new_zeros(len(group), longest)
        for number, span in enumerate(group):
            part[number, : span.stop - span.start] = tokens[span.row, span.start : span.stop]
        inputs = None if images is None else images_of(images, group, longest)
        output = target.forward(part, layers=layers, keep_logits=1, images=inputs)
        if aux_hidden_states is None:
            aux_hidden_states = output.aux_hidden_states.new_zeros(*tokens.shape, output.aux_hidden_states.shape[-1])
        for states, span in zip(output.aux_hidden_states, group, strict=True):
            aux_hidden_states[span.row, span.start : span.stop] = states[: span.stop - span.start]
    assert aux_hidden_states is not None, "a batch without a token"
    return output._replace(aux_hidden_states=aux_hidden_states)


def images_of(images: dict[str, Tensor], group: list[Span], longest: int) -> dict[str, Tensor] | None:
    """Select these documents from `images` (heads.base.PackedBatch), padded to `longest` tokens; None if they have no
    images."""
    at, grids = images["at"].tolist(), images.get("image_grid_thw")
    chosen = [number for span in group for number, place in enumerate(at) if place == [span.row, span.start]]
    if not chosen:
        return None
    sizes = [1] * len(at) if grids is None else grids.prod(-1).tolist()
    parts = images["pixel_values"].split(sizes)
    selected = {"pixel_values": torch.cat([parts[number] for number in chosen])}
    selected |= {} if grids is None else {"image_grid_thw": grids[chosen]}
    positions = images["position_ids"].new_zeros(3, len(group), longest)
    for number, span in enumerate(group):
        positions[:, number, : span.stop - span.start] = images["position_ids"][:, span.row, span.start : span.stop]
    return selected | {"position_ids": positions}


def spans(documents: list[list[int]]) -> list[Span]:
    """Return the runs of equal numbers in every row, without padding (-1)."""
    runs = []
    for row, numbers in enumerate(documents):
        edges = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]), len(numbers)]
        runs += [Span(row, a, b) for a, b in pairwise(edges) if numbers[a] >= 0]
    return runs


def groups(runs: list[Span], max_tokens: int) -> list[list[Span]]:
    """Group documents of similar length for one forward of at most `most` tokens, padding included."""
    ordered = sorted(runs, key=lambda span: span.start - span.stop)  # longest first
    parts: list[list[Span]] = []
    for span in ordered:
        longest = parts[-1][0].stop - parts[-1][0].start if parts else max_tokens
        if parts and longest * (len(parts[-1]) + 1) <= max_tokens and 2 * (span.stop - span.start) > longest:
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts
