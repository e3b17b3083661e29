"""Alignment checks: two tests of a drafter's best guess at depth 1, along the target's own greedy text.

*Shift*: a guess names the token after the bonus token (heads/base.py, label alignment). If guesses fit the text better some
tokens earlier or later, the drafter is misaligned.
*Head*: the head's training forward over the finished text guesses at the same positions, in one pass, without cache and tree.
If it is right more often than the drafts, something between head and text is wrong: hidden states of another position or
layer, a cache, or a mask.

Both count pairs: positions where only one of the two guesses is right. By chance both counts are equal, up to the square root
of their sum (McNemar's test). A drafter that is merely weak passes both tests.
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.heads.base import DraftHead, PackedBatch
from foredraft.heads.target import Target
from foredraft.inference.drafters import tree_of
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.generation import generate
from foredraft.inference.tree import TokenTree

SHIFTS = (-2, -1, 1, 2)
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
    right: int  # number of guesses that equal the text's token
    fits: dict[int, tuple[int, int]]  # shift -> positions where only the shifted guess fits, and only the guess itself
    head: tuple[int, int] | None  # positions where only the head's own guess is right, and only the draft

    @property
    def faults(self) -> list[str]:
        found = []
        for shift, pair in self.fits.items():
            if self.is_significant(*pair):
                where = f"{abs(shift)} token{'s' * (abs(shift) > 1)} {'later' if shift > 0 else 'earlier'}"
                more = f"at {pair[0] - pair[1]} more of {self.positions} positions"
                found.append(f"its drafts are shifted: they fit the text {more} if they are taken {where}")
        if self.head is not None and self.is_significant(*self.head):
            own = self.right + self.head[0] - self.head[1]
            found.append(
                f"it accepts less than its head can: at depth 1 the drafts are right at {self.right} of {self.positions} "
                f"positions, but the head's training forward over the same text is right at {own}"
            )
        return found

    def is_significant(self, ours: int, theirs: int) -> bool:
        return ours - theirs > max(ERRORS * sqrt(ours + theirs), MIN_SHARE * self.positions)


def check_alignment(target: Target, drafter: Drafter, prompts: Sequence[list[int]], new_tokens: int) -> Alignment:
    """Check a drafter on greedy texts after these prompts."""
    positions = right = 0
    fits = {shift: [0, 0] for shift in SHIFTS}
    by_head: list[int] = [0, 0]
    head = head_of(drafter)
    for prompt in prompts:
        recorder = RecordingDrafter(drafter)
        ids = torch.tensor([prompt], device=target.device)
        written = generate(target, recorder, ids, max_new_tokens=new_tokens, eos_token_id=-1).new_tokens[0]
        text = prompt + written
        guesses = {at: guess for at, guess in recorder.guesses.items() if len(prompt) < at < len(text) - max(SHIFTS)}
        hits = {at: text[at] == guess for at, guess in guesses.items()}
        positions, right = positions + len(hits), right + sum(hits.values())
        for shift, pair in fits.items():
            for at, guess in guesses.items():
                count(pair, text[at + shift] == guess, hits[at])
        if head is not None and guesses:
            own = guess_in_training(head, target, text, list(guesses))
            for at, guess in zip(guesses, own, strict=True):
                count(by_head, text[at] == guess, hits[at])
    pairs = {shift: (pair[0], pair[1]) for shift, pair in fits.items()}
    return Alignment(positions, right, pairs, None if head is None else (by_head[0], by_head[1]))


def count(pair: list[int], ours: bool, theirs: bool) -> None:
    """Count a pair if exactly one of the two is right."""
    if ours != theirs:
        pair[theirs] += 1


def head_of(drafter: Drafter) -> DraftHead | None:
    """Return the drafter's head, also if a wrapper changes its trees."""
    while isinstance(drafter, Wrapper):
        drafter = drafter.inner
    tree = tree_of(drafter)
    return None if tree is None else tree.head


@torch.inference_mode()
def guess_in_training(head: DraftHead, target: Target, text: list[int], positions: list[int]) -> list[int]:
    """Return the head's best guesses at these positions, from its training forward. The depth-1 draft at position t names
    token t + 2."""
    tokens = torch.tensor([text], device=target.device)
    order = torch.arange(len(text), device=target.device)[None]
    batch = PackedBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), order)
    aux_hidden_states = target.forward(tokens, layers=head.layers, keep_logits=1).aux_hidden_states
    out = head(aux_hidden_states.to(head.dtype), target.embed(tokens).to(head.dtype), batch)[0]
    logits = head.logits(out[0, [position - 2 for position in positions]], 1)
    return head.to_target_ids(logits.argmax(-1)).tolist()
