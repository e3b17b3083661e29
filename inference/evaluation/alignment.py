"""Check the alignment of a drafter: its best guess at depth 1, along the target's own greedy text.

A guess names the token after the bonus token (heads/base.py, label alignment). If guesses fit the text better some tokens
earlier or later, the drafter is misaligned. The check counts positions where only one of the two places fits. By chance both
counts are equal, up to the square root of their sum (McNemar's test), so a drafter that is merely weak passes. That a drafter
drafts what its head learned is the question of the parity gate (train/parity_gate.py).
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.generation import generate
from foredraft.inference.tree import TokenTree

SHIFTS = {
    -2: "2 tokens earlier",
    # It repeats the token whose state it gets.
    -1: "1 token earlier, as those of a head that is hardly trained do",
    1: "1 token later",
    2: "2 tokens later",
}
ERRORS = 3.0  # a larger difference, in standard errors, is significant
MIN_SHARE = 0.02  # a difference in fewer positions may be rounding: devices compute long and short texts differently


class RecordingDrafter(Wrapper):
    """Record where each tree of another drafter starts, and its best guess at depth 1."""

    def __init__(self, inner: Drafter):
        super().__init__(inner)
        self.guesses: dict[int, int] = {}  # position in the text -> token

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.inner.propose(accepted, gumbel)
        if tree.tokens.shape[1] > 1 and int(tree.tokens[0, 1]) >= 0:
            self.guesses[len(accepted.text[0])] = int(tree.tokens[0, 1])
        return tree


class Alignment(NamedTuple):
    positions: int  # number of checked guesses
    fits: dict[int, tuple[int, int]]  # shift -> positions where only the shifted guess fits, and only the guess itself

    @property
    def faults(self) -> list[str]:
        return [
            f"its drafts are shifted: they fit the text at {shifted - own} more of {self.positions} positions if they are "
            f"taken {SHIFTS[shift]}"
            for shift, (shifted, own) in self.fits.items()
            if shifted - own > max(ERRORS * sqrt(shifted + own), MIN_SHARE * self.positions)
        ]


def check_alignment(target: Target, drafter: Drafter, prompts: Sequence[list[int]], new_tokens: int) -> Alignment:
    """Check a drafter on greedy texts after these prompts."""
    positions, fits = 0, {shift: (0, 0) for shift in SHIFTS}
    for prompt in prompts:
        recorder = RecordingDrafter(drafter)
        ids = torch.tensor([prompt], device=target.device)
        text = prompt + generate(target, recorder, ids, max_new_tokens=new_tokens, eos_token_id=-1).new_tokens[0]
        guesses = {at: guess for at, guess in recorder.guesses.items() if len(prompt) < at < len(text) - max(SHIFTS)}
        positions += len(guesses)
        for shift, (shifted, own) in fits.items():
            pairs = [(text[at + shift] == guess, text[at] == guess) for at, guess in guesses.items()]
            fits[shift] = shifted + pairs.count((True, False)), own + pairs.count((False, True))
    return Alignment(positions, fits)
