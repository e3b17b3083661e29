"""Suffix counting: draft what followed the longest suffixes of the text, in this text and in past outputs, as a tree of the
likeliest continuations (SuffixDecoding, Oliaro et al., arXiv:2411.04975, section 4). It needs no head.

A trie counts every sequence of up to `longest` tokens. The suffixes of the text are a set of nodes in it, one per length,
which every new token advances by one. The children of such a node are the tokens that followed the suffix, with counts.
"""

import heapq
from collections.abc import Sequence

from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Drafter, trees
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree


class Trie:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.children: dict[int, Trie] = {}
        self.count = 0

    def enter(self, token: int) -> "Trie":
        child = self.children.setdefault(token, Trie())
        child.count += 1
        return child


def likeliest(start: Trie, nodes: int, depth: int, width: int | None = None) -> tuple[list[tuple[int, int]], float]:
    """Return the likeliest nodes below `start`, (token, parent), with at most `width` children each, and the number of them
    that will be accepted according to the counts."""
    drafts, expected, number = list[tuple[int, int]](), 0.0, 0  # number: a tie-breaker, because tries have no order
    heap: list[tuple[float, int, int, int, int, Trie]] = []
    opened: tuple[Trie, float, int, int] | None = (start, 1.0, 0, 1)
    while len(drafts) < nodes:
        if opened is not None:
            above, chance, parent, level = opened
            whole = sum(child.count for child in above.children.values())
            children = list(above.children.items())
            if width is not None and len(children) > width:
                children = heapq.nlargest(width, children, key=lambda pair: pair[1].count)
            for token, child in children:
                number += 1
                heapq.heappush(heap, (-chance * child.count / whole, number, token, parent, level, child))
        if not heap:
            break
        negative, _, token, parent, level, child = heapq.heappop(heap)
        drafts.append((token, parent))
        expected -= negative
        opened = (child, -negative, len(drafts), level + 1) if level < depth else None
    return drafts, expected


class Followed:
    """Follow a sequence in its own trie and in that of past outputs."""

    def __init__(self, past: Trie):
        self.text: list[int] = []
        self.prompt: int | None = None  # length of its prompt; None until the first step
        self.own, self.num_entered = Trie(), 0
        # [n]: node of the suffix of n tokens in its own trie, and in the one of past outputs if it exists.
        self.suffixes, self.matches = [self.own], [past]


class SuffixDrafter(Drafter):
    def __init__(
        self, longest: int = 8, nodes: int = 16, per_match: float = 2.0, past: int = 20_000, width: int | None = None
    ):
        """Initialize the drafter. longest: tokens of a suffix and its continuation together. nodes: of a tree, including the
        bonus token. per_match: drafted nodes per token of the matched suffix, because longer matches are more reliable. past:
        maximum number of stored tokens of past outputs, after which all are deleted. width: continuations per token; 1 drafts
        chains; None is unlimited."""
        if longest < 2 or nodes < 2:
            raise ValueError(f"longest={longest} and nodes={nodes} must be at least 2")
        if not per_match > 0 or past < 0:
            raise ValueError(f"per_match={per_match} must be above 0 and past={past} not negative")
        if width is not None and width < 1:
            raise ValueError(f"width={width} must be at least 1")
        self.longest, self.nodes, self.per_match, self.max_past = longest, nodes, per_match, past
        self.width, self.branches = width, width != 1
        self.depth = min(nodes, longest) - 1
        self.remembers_others = past > 0
        self.past, self.remembered = Trie(), 0
        self.sequences: list[Followed] = []
        self.expected: Sequence[float] = ()  # expected number of accepted drafts of each sequence in this step

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.select_sequences([None] * batch, capacity, sampling)

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        for slot, sequence in enumerate(self.sequences):
            if slot not in slots:  # it has ended
                self.remember(sequence.text[sequence.prompt :])
        self.sequences = [Followed(self.past) if slot is None else self.sequences[slot] for slot in slots]

    def forget_outputs(self) -> None:
        self.sequences, self.past, self.remembered = [], Trie(), 0

    def remember(self, output: list[int]) -> None:
        if self.remembered + len(output) > self.max_past:
            self.past, self.remembered = Trie(), 0
        if len(output) > self.max_past:
            return
        suffixes = [self.past]
        for token in output:
            suffixes = [self.past, *(suffix.enter(token) for suffix in suffixes[: self.longest])]
        self.remembered += len(output)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        pairs = zip(self.sequences, accepted.text, strict=True)
        drafts, self.expected = zip(*(self.draft(sequence, text) for sequence, text in pairs))
        return trees(accepted, list(drafts), self.depth)

    def draft(self, sequence: Followed, text: list[int]) -> tuple[list[tuple[int, int]], float]:
        """Return the (token, parent) pairs below the bonus token, and the expected number of accepted ones."""
        sequence.prompt = len(text) - 1 if sequence.prompt is None else sequence.prompt
        for token in text[sequence.num_entered :]:
            suffixes = sequence.suffixes[: self.longest]
            sequence.suffixes = [sequence.own, *(suffix.enter(token) for suffix in suffixes)]
            longer = (match.children.get(token) for match in sequence.matches[: self.longest])
            sequence.matches = [self.past, *(match for match in longer if match is not None)]
        sequence.text, sequence.num_entered = text, len(text)
        best, score = list[tuple[int, int]](), 0.0
        for suffixes in (sequence.suffixes, sequence.matches):
            for length in range(len(suffixes) - 1, 0, -1):
                nodes = min(self.nodes - 1, int(self.per_match * length))
                if nodes <= score:
                    break  # a node is at most one accepted token, and shorter suffixes have fewer nodes
                drafts, expected = likeliest(suffixes[length], nodes, self.depth, self.width)
                if expected > score:
                    best, score = drafts, expected
        return best, score
