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
    """A step's tree of one sequence, its padding left out, and what was chosen after each node of its accepted path."""

    tokens: list[int]  # of the nodes, the bonus token first
    parents: list[int]
    probabilities: list[float]  # of each node after its parent; node 0's is 1
    path: list[int]  # the accepted nodes, node 0 first
    logprobs: list[float]  # of the new token after each node of the path
    top: list[list[tuple[int, float]]]  # and the likeliest tokens there with theirs, as many as were asked for


def trace_sequences(
    sequences: Sequence[SequenceState], tree: TokenTree, verification: Verification, logits: Tensor
) -> dict[Request, Trace]:
    """A trace of every sequence whose request asks for one. logits: (batch, nodes, vocab), as the target gave them."""
    asked = [(slot, one.request) for slot, one in enumerate(sequences) if not one.finish_reason]
    return {
        request: trace(slot, request.trace, tree, verification, logits)
        for slot, request in asked
        if request.trace is not None
    }


def trace(slot: int, top: int, tree: TokenTree, verification: Verification, logits: Tensor) -> Trace:
    logprobs = logits[slot].float().log_softmax(-1)
    tokens, parents = tree.tokens[slot], tree.parents[slot]
    probabilities = logprobs[parents, tokens.clamp(min=0)].exp().tolist()
    real = [node for node, token in enumerate(tokens.tolist()) if node == 0 or token >= 0]
    position = {node: index for index, node in enumerate(real)}
    path = verification.path[slot, : verification.counts[slot]]
    chosen = verification.tokens[slot, : len(path)]
    best = logprobs[path].topk(top)
    ids, values = best.indices.tolist(), best.values.tolist()
    return Trace(
        tokens[real].tolist(),
        [position[parent] for parent in parents[real].tolist()],
        [1.0, *(probabilities[node] for node in real[1:])],
        [position[node] for node in path.tolist()],
        logprobs[path, chosen].tolist(),
        [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)],
    )
