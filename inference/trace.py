"""Traces, for requests that ask for them: the drafted tree of a step, and the target's probabilities.

Probabilities are the target's, before temperature, penalties and biases. Without a request for a trace, nothing is computed.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.inference.request import Request, SequenceState
from foredraft.inference.tree import TokenTree
from foredraft.inference.verify import Verification


class Trace(NamedTuple):
    """Describe one step of a sequence: its tree without padding, and the choices along the accepted path."""

    tokens: list[int]  # token of each node, the bonus token first
    parents: list[int]
    probabilities: list[float]  # probability of each node after its parent; 1 for node 0
    path: list[int]  # accepted nodes, node 0 first
    logprobs: list[float]  # log-probability of the new token after each node of the path
    top: list[list[tuple[int, float]]]  # the likeliest tokens after each node of the path, with log-probabilities
    hidden: int = 0  # number of rejected drafts that are left out of the nodes


def trace_sequences(
    sequences: Sequence[SequenceState],
    tree: TokenTree,
    verification: Verification,
    logits: Tensor,
    hide_rejected: bool = False,
) -> dict[Request, Trace]:
    """Return the traces of the requests that ask for one. logits: (batch, nodes, vocab), unprocessed. hide_rejected: omit
    rejected drafts, because they may contain text of other requests."""
    requested = [
        (slot, sequence.request, sequence.request.trace)
        for slot, sequence in enumerate(sequences)
        if not sequence.finish_reason and sequence.request.trace is not None
    ]
    if not requested:
        return {}
    parts = [part for slot, _, top in requested for part in trace_tensors(slot, top, tree, verification, logits)]
    numbers = torch.cat([part.flatten() for part in parts]).cpu()  # waits for the device once
    pieces = zip(numbers.split([part.numel() for part in parts]), parts, strict=True)
    lists = iter([piece.view(part.shape).tolist() for piece, part in pieces])
    return {request: trace(hide_rejected, *islice(lists, len(parts) // len(requested))) for _, request, _ in requested}


def trace_tensors(
    slot: int, top: int, tree: TokenTree, verification: Verification, logits: Tensor
) -> tuple[Tensor, ...]:
    """Return the inputs of `trace`, (n,) or (n, top) in float64, which represents every token exactly."""
    logprobs = logits[slot].float().log_softmax(-1)
    tokens, parents, path = tree.tokens[slot], tree.parents[slot], verification.path[slot]
    best = logprobs[path].topk(min(top, logprobs.shape[-1]))
    parts = (
        tokens,
        parents,
        logprobs[parents, tokens.clamp(min=0)].exp(),
        verification.counts[slot : slot + 1],
        path,
        logprobs[path, verification.tokens[slot]],
        best.indices,
        best.values,
    )
    return tuple(part.double() for part in parts)


def trace(
    hide_rejected: bool,
    tokens: list[float],
    parents: list[float],
    probabilities: list[float],
    counts: list[float],
    path: list[float],
    logprobs: list[float],
    ids: list[list[float]],
    values: list[list[float]],
) -> Trace:
    length = int(counts[0])
    accepted = {int(node) for node in path[:length]}
    drafted = {node for node, token in enumerate(tokens) if node == 0 or token >= 0}
    real = sorted(accepted if hide_rejected else drafted)
    position = {node: index for index, node in enumerate(real)}
    return Trace(
        [int(tokens[node]) for node in real],
        [position[int(parents[node])] for node in real],
        [1.0, *(probabilities[node] for node in real[1:])],
        [position[int(node)] for node in path[:length]],
        logprobs[:length],
        [list(zip(map(int, row), best, strict=True)) for row, best in zip(ids[:length], values[:length], strict=True)],
        len(drafted) - len(real),
    )
