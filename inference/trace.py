"""How a step's tokens came about, for requests that ask: the tree that was drafted, and the target's probabilities.

Probabilities are the target's own, before temperature, penalties and biases. Where no request asks, nothing is computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from foredraft.inference.request import Request, SequenceState
from foredraft.inference.tree import TokenTree
from foredraft.inference.verify import Verification


class Trace(NamedTuple):
    """A step's tree in one row, its padding left out, and what was chosen after each node of its accepted path."""

    tokens: list[int]  # of the nodes, the root first
    parents: list[int]
    probabilities: list[float]  # of each node after its parent; the root's is 1
    path: list[int]  # the accepted nodes, the root first
    logprobs: list[float]  # of the new token after each node of the path
    top: list[list[tuple[int, float]]]  # and the likeliest tokens there with theirs, as many as were asked for


def trace_rows(
    rows: Sequence[SequenceState], tree: TokenTree, verification: Verification, logits: Tensor
) -> dict[Request, Trace]:
    """A trace of every row whose request asks for one. logits: (batch, nodes, vocab), as the target gave them."""
    asked = [number for number, row in enumerate(rows) if row.request.trace is not None and not row.finish_reason]
    return {rows[number].request: trace(number, rows[number], tree, verification, logits) for number in asked}


def trace(number: int, row: SequenceState, tree: TokenTree, verification: Verification, logits: Tensor) -> Trace:
    logprobs = logits[number].float().log_softmax(-1)
    tokens, parents = tree.tokens[number], tree.parents[number]
    probabilities = logprobs[parents, tokens.clamp(min=0)].exp().tolist()
    real = [node for node, token in enumerate(tokens.tolist()) if node == 0 or token >= 0]
    place = {node: index for index, node in enumerate(real)}
    path = verification.path[number, : verification.counts[number]]
    chosen = verification.tokens[number, : len(path)]
    best = logprobs[path].topk(row.request.trace or 0)
    ids, values = best.indices.tolist(), best.values.tolist()
    return Trace(
        tokens[real].tolist(),
        [place[parent] for parent in parents[real].tolist()],
        [1.0, *(probabilities[node] for node in real[1:])],
        [place[node] for node in path.tolist()],
        logprobs[path, chosen].tolist(),
        [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)],
    )
