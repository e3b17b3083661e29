"""Packed rows for a target that takes no mask of ours: every document is read on its own, and its features put back.

packed   a a a a b b b c c .       read   a a a a
                                          b b b .      padding stands on the right, where causal layers never look
                                          c c . .
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from foredraft.heads.target.reading import Reading

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target


class Span(NamedTuple):
    """Where a document lies in a packed batch."""

    row: int
    start: int
    stop: int


def read_documents(target: "Target", tokens: Tensor, documents: Tensor, layers: Sequence[int]) -> Reading:
    """The features of a packed batch, tokens and documents (batch, length) as in heads.base.PackedBatch: what each document
    has on its own, 0 for padding. Its logits are not kept."""
    features = None
    for group in groups(spans(documents.tolist()), tokens.numel(), target.reads_collectively):
        longest = max(span.stop - span.start for span in group)
        part = tokens.new_zeros(len(group), longest)
        for number, span in enumerate(group):
            part[number, : span.stop - span.start] = tokens[span.row, span.start : span.stop]
        reading = target.read(part, layers=layers, keep_logits=1)
        if features is None:
            features = reading.features.new_zeros(*tokens.shape, reading.features.shape[-1])
        for number, span in enumerate(group):
            features[span.row, span.start : span.stop] = reading.features[number, : span.stop - span.start]
    assert features is not None, "a batch without a token"
    return reading._replace(features=features)


def spans(documents: list[list[int]]) -> list[Span]:
    """The runs of one number in every row, padding (-1) left out."""
    found = []
    for row, numbers in enumerate(documents):
        edges = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]), len(numbers)]
        found += [Span(row, a, b) for a, b in pairwise(edges) if numbers[a] >= 0]
    return found


def groups(found: list[Span], most: int, together: bool) -> list[list[Span]]:
    """Documents of like length, to be read at once: no more than `most` tokens with their padding. together: in one group,
    where every process must read as often as the others."""
    ordered = sorted(found, key=lambda span: span.start - span.stop)  # the longest first
    if together:
        return [ordered]
    parts: list[list[Span]] = []
    for span in ordered:
        longest = parts[-1][0].stop - parts[-1][0].start if parts else most
        if parts and longest * (len(parts[-1]) + 1) <= most and 2 * (span.stop - span.start) > longest:
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts
