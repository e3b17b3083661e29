"""A text that does not end before it has so many tokens, said as a grammar says what may stand where."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from foredraft.inference.grammar import Grammar, GrammarState


class MinTokens(Grammar):
    """In the place of a request's grammar: none of `ends` is among the first `count` tokens."""

    def __init__(self, count: int, ends: Iterable[int]):
        self.count, self.ends = count, sorted(ends)

    def state(self) -> GrammarState:
        return MinTokensState(self)


class MinTokensState(GrammarState):
    def __init__(self, rule: MinTokens):
        self.rule = rule

    @property
    def failed(self) -> bool:
        return False

    def fill(self, bits: Tensor, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        allowed = torch.ones(bits.shape[-1] * 32, dtype=torch.bool)
        allowed[[end for end in self.rule.ends if end < len(allowed)]] = False
        words = (allowed.view(-1, 32) * (1 << torch.arange(32))).sum(-1).to(torch.int32)  # the highest bit is its sign
        written = [len(text)]
        for parent in parents[1:]:  # of a node after it
            written.append(written[parent] + 1)
        bits[torch.tensor(written) < self.rule.count] = words
