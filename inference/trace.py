"""Traces, for requests that ask for them: the drafted tree of a step, and the target's probabilities.

Probabilities are the target's, before temperature, penalties and biases. Without a request for a trace, nothing is computed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from foredraft.inference.request import Request, SequenceState
from foredraft.inference.tree import TokenTree
from foredraft.inference.verify import Outcome


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
    sequences: Sequence[SequenceState], tree: TokenTree, outcome: Outcome, logits: Tensor, hide_rejected: bool = False
) -> dict[Request, Trace]:
    """Return the traces of the requests that ask for one. logits: (batch, nodes, vocab), unprocessed. hide_rejected: omit
    rejected drafts, because they may contain text of other requests."""
    traces = {}
    for slot, sequence in enumerate(sequences):
        top, count = sequence.request.trace, outcome.counts[slot]
        if not sequence.finish_reason and top is not None:
            tokens, parents = tree.tokens[slot], tree.parents[slot]
            path, new = outcome.paths[slot][:count], outcome.tokens[slot][:count]
            logprobs = logits[slot].float().log_softmax(-1)
            chances = logprobs[parents, tokens.clamp(min=0)].exp().tolist()
            best = logprobs[path].topk(top)
            drafted = [node for node, token in enumerate(tokens.tolist()) if node == 0 or token >= 0]
            shown = sorted(path) if hide_rejected else drafted
            position = {node: index for index, node in enumerate(shown)}
            traces[sequence.request] = Trace(
                tokens[shown].tolist(),
                [position[node] for node in parents[shown].tolist()],
                [1.0, *(chances[node] for node in shown[1:])],
                [position[node] for node in path],
                logprobs[path, new].tolist(),
                [
                    list(zip(*pair, strict=True))
                    for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                ],
                len(drafted) - len(shown),
            )
    return traces
