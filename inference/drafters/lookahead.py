"""Lookahead decoding: the target drafts for itself (Fu et al., arXiv:2402.02057, section 3). It needs no head.

Jacobi iteration guesses a window of future tokens and corrects all of them in every forward. The last `ngram` - 1 rounds are
retained; each column of them is an n-gram that the target generated. A pool stores n-grams by their first token, and those
that start with the newest token are drafted. Window and n-grams form one tree:

    bonus - s1 - s2 - s3     s: the oldest round of the window, a separate branch; below each of its tokens is the column
      |     |    |    |       of newer rounds, and the choice after the newest is the token of the next round
      |     a1   a2   a3
      |     |    |    |
      |     b1   b2   b3
      -- g1 - g2 - g3         an n-gram of the pool, whose first token is the bonus token
      -- h1 - h2 - h3

The window's branch may be accepted like any other. Noise depends only on positions, so with a temperature the iteration
converges to the same text as sampling token by token.
"""

from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Drafter, trees
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree


class Lookahead(Drafter):
    def __init__(self, window: int = 5, ngram: int = 3, guesses: int = 5):
        """Initialize the drafter. window: number of guessed tokens. ngram: length of the n-grams, so ngram - 1 rounds are
        retained. guesses: maximum number of n-grams that are drafted, and stored per first token. The paper's 15, 5, 15 pay
        off if a forward over 120 tokens costs little more than over one."""
        if window < 1 or ngram < 2 or guesses < 1:
            raise ValueError(f"window={window} and guesses={guesses} must be at least 1, ngram={ngram} at least 2")
        self.window, self.rounds, self.guesses = window, ngram - 1, guesses
        self.depth = window + ngram - 2
        self.nodes = 1 + (window + guesses) * self.rounds

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        # Per sequence: first token -> remaining tokens of the n-grams, the latest last (a dict keeps its order).
        self.pool: list[dict[int, dict[tuple[int, ...], None]]] = [{} for _ in range(batch)]
        self.windows: list[list[list[int]]] = [[] for _ in range(batch)]  # the tokens of each round, the oldest first

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.pool = [{} if slot is None else self.pool[slot] for slot in slots]
        self.windows = [[] if slot is None else self.windows[slot] for slot in slots]

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return trees(accepted, [self.draft(slot, text) for slot, text in enumerate(accepted.text)], self.depth)

    def draft(self, slot: int, text: list[int]) -> list[tuple[int, int]]:
        """Return (token, parent) pairs: the window round by round, then n-grams one by one."""
        size, count = self.window, self.rounds * self.window
        if not self.windows[slot]:  # any tokens would work: use the end of the text
            start = (text * (count // len(text) + 1))[-count:]
            self.windows[slot] = [start[at : at + size] for at in range(0, count, size)]
        tokens = [token for line in self.windows[slot] for token in line]
        drafts = [(token, at if at < size else at - size + 1) for at, token in enumerate(tokens)]
        for gram in self.pool[slot].get(text[-1], ()):
            drafts += [(token, len(drafts) + place if place else 0) for place, token in enumerate(gram)]
        return drafts

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        last = 1 + (self.rounds - 1) * self.window
        for slot, (path, row) in enumerate(zip(paths, choices.tolist(), strict=True)):
            lines, pool = self.windows[slot], self.pool[slot]
            written = zip(row[last : last + self.window], lines[-1], strict=True)
            # A chain leaves nodes unverified.
            lines = [*lines, [new if new >= 0 else old for new, old in written]]
            for first, *rest in zip(*lines, strict=True):
                grams = pool.setdefault(first, {})
                grams.pop(tuple(rest), None)
                grams[tuple(rest)] = None
                if len(grams) > self.guesses:
                    del grams[next(iter(grams))]
            # The bonus token and the window advance by the number of accepted tokens. Tokens that wrap around are harmless.
            steps = max(0, len(path) - 1) % self.window
            self.windows[slot] = [line[steps:] + line[:steps] for line in lines[1:]]
