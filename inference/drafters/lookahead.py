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

import torch
from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Drafter, bonus_tokens
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree, from_parents


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
        self.window_tokens: Tensor | None = None  # (batch, rounds, window): tokens of the rounds, the oldest first
        self.fresh = [True] * batch  # whether each sequence still needs a window

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.pool = [{} if slot is None else self.pool[slot] for slot in slots]
        self.fresh = [slot is None or self.fresh[slot] for slot in slots]
        if self.window_tokens is not None:
            self.window_tokens = self.window_tokens[[slot or 0 for slot in slots]]

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        bonus = bonus_tokens(accepted)
        if any(self.fresh):
            lines, fresh = self.init_window(accepted), torch.tensor(self.fresh, device=bonus.device)[:, None, None]
            self.window_tokens = lines if self.window_tokens is None else torch.where(fresh, lines, self.window_tokens)
            self.fresh = [False] * len(self.fresh)
        assert self.window_tokens is not None
        found = [list(pool.get(text[-1], ())) for pool, text in zip(self.pool, accepted.text, strict=True)]
        most = max(map(len, found))
        blank = (-1,) * self.rounds
        guessed = bonus.new_tensor([grams + [blank] * (most - len(grams)) for grams in found])
        tokens = torch.cat([bonus, self.window_tokens.flatten(1), guessed.view(len(bonus), -1)], dim=1)
        return from_parents(tokens, self.parents(most, tokens.device).expand(len(bonus), -1), self.depth)

    def init_window(self, accepted: Accepted) -> Tensor:
        """Return initial tokens for the window, from the end of the text: any tokens would work."""
        count = self.rounds * self.window
        rows = [(text * (count // len(text) + 1))[-count:] for text in accepted.text]
        return torch.tensor(rows, device=accepted.tokens.device).view(len(rows), self.rounds, self.window)

    def parents(self, grams: int, device: torch.device) -> Tensor:
        """Return the parents (1, nodes): the window round by round, then `grams` n-grams one by one."""
        window = torch.arange(self.rounds * self.window, device=device)
        window = torch.where(window < self.window, window, window - self.window + 1)
        first = 1 + self.rounds * self.window
        guesses = torch.arange(first - 1, first - 1 + grams * self.rounds, device=device).view(grams, self.rounds)
        guesses[:, 0] = 0
        return torch.cat([window.new_zeros(1), window, guesses.flatten()])[None]

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        assert self.window_tokens is not None
        last = 1 + (self.rounds - 1) * self.window
        written = choices[:, last : last + self.window]
        written = torch.where(written < 0, self.window_tokens[:, -1], written)  # a chain leaves nodes unverified
        columns = torch.cat([self.window_tokens, written[:, None]], dim=1)  # (batch, ngram, window)
        for pool, row in zip(self.pool, columns.transpose(1, 2).tolist(), strict=True):
            for first, *rest in row:
                grams = pool.setdefault(first, {})
                grams.pop(tuple(rest), None)
                grams[tuple(rest)] = None
                if len(grams) > self.guesses:
                    del grams[next(iter(grams))]
        # The bonus token and the window advance by the number of accepted tokens. Tokens that wrap around are harmless.
        steps = choices.new_tensor([max(0, len(path) - 1) for path in paths])[:, None, None]
        shifted = (torch.arange(self.window, device=choices.device) + steps) % self.window
        self.window_tokens = columns[:, 1:].gather(2, shifted.expand(-1, self.rounds, -1))
