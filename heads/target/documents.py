"""Packed rows for a target that takes no mask of ours: documents go side by side through one forward.

packed   a a a a b b b c c .       forward   a a a a
                                             b b b .      padding stands on the right, where causal layers never look
                                             c c . .
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target.output import TargetOutput
from foredraft.heads.target.sharding import largest

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target


class Span(NamedTuple):
    """Where a document lies in a packed batch."""

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
    """The aux hidden states of a packed batch, tokens and documents (batch, length) as in heads.base.PackedBatch: what each
    document has on its own, 0 for padding. Its logits are not kept."""
    aux_hidden_states = None
    parts = groups(spans(documents.tolist()), tokens.numel())
    if target.sharding == "fsdp":  # every process takes part in as many forwards as the others
        parts += parts[-1:] * (largest(len(parts)) - len(parts))
    for group in parts:
        longest = max(span.stop - span.start for span in group)
        part = tokens.new_zeros(len(group), longest)
        for number, span in enumerate(group):
            part[number, : span.stop - span.start] = tokens[span.row, span.start : span.stop]
        own = None if images is None else images_of(images, group, longest)
        output = target.forward(part, layers=layers, keep_logits=1, images=own)
        if aux_hidden_states is None:
            aux_hidden_states = output.aux_hidden_states.new_zeros(*tokens.shape, output.aux_hidden_states.shape[-1])
        for states, span in zip(output.aux_hidden_states, group, strict=True):
            aux_hidden_states[span.row, span.start : span.stop] = states[: span.stop - span.start]
    assert aux_hidden_states is not None, "a batch without a token"
    return output._replace(aux_hidden_states=aux_hidden_states)


def images_of(images: dict[str, Tensor], group: list[Span], longest: int) -> dict[str, Tensor] | None:
    """What `images` (heads.base.PackedBatch) has for these documents, as rows of `longest` tokens; None for nothing."""
    at, grids = images["at"].tolist(), images.get("image_grid_thw")
    chosen = [number for span in group for number, place in enumerate(at) if place == [span.row, span.start]]
    if not chosen:
        return None
    sizes = [1] * len(at) if grids is None else grids.prod(-1).tolist()
    parts = images["pixel_values"].split(sizes)
    found = {"pixel_values": torch.cat([parts[number] for number in chosen])}
    found |= {} if grids is None else {"image_grid_thw": grids[chosen]}
    for name, fill in (("position_ids", 0), ("blocks", -1)):
        whole = images[name]
        found[name] = whole.new_full((*whole.shape[:-2], len(group), longest), fill)
        for number, span in enumerate(group):
            found[name][..., number, : span.stop - span.start] = whole[..., span.row, span.start : span.stop]
    return found


def spans(documents: list[list[int]]) -> list[Span]:
    """The runs of one number in every row, padding (-1) left out."""
    runs = []
    for row, numbers in enumerate(documents):
        edges = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]), len(numbers)]
        runs += [Span(row, a, b) for a, b in pairwise(edges) if numbers[a] >= 0]
    return runs


def groups(runs: list[Span], most: int) -> list[list[Span]]:
    """Documents of like length, for one forward: no more than `most` tokens with their padding."""
    ordered = sorted(runs, key=lambda span: span.start - span.stop)  # the longest first
    parts: list[list[Span]] = []
    for span in ordered:
        longest = parts[-1][0].stop - parts[-1][0].start if parts else most
        if parts and longest * (len(parts[-1]) + 1) <= most and 2 * (span.stop - span.start) > longest:
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts
