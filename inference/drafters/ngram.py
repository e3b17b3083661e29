"""Prompt lookup: draft what followed the same n-gram earlier in the text (Saxena, 2023). It needs no head."""

from collections.abc import Sequence

from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Drafter, chains
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree


class NgramDrafter(Drafter):
    branches = False
    expected: Sequence[float] = ()  # drafts of each sequence in this step, of which policy.py learns how many are right

    def __init__(self, longest: int = 3, depth: int = 10):
        """Initialize the drafter. longest: maximum length of the n-grams. The longest one that occurred before is used, at
        its latest occurrence. depth: number of drafted tokens."""
        if longest < 1 or depth < 1:
            raise ValueError(f"longest={longest} and depth={depth} must be at least 1")
        self.longest, self.depth, self.nodes = longest, depth, depth + 1

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        # Per sequence and n-gram: index of the token after its latest occurrence. A step adds only new text.
        self.followers: list[dict[tuple[int, ...], int]] = [{} for _ in range(batch)]
        self.entered = [0] * batch

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.followers = [{} if slot is None else self.followers[slot] for slot in slots]
        self.entered = [0 if slot is None else self.entered[slot] for slot in slots]

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        drafts = [self.look_up(slot, text) for slot, text in enumerate(accepted.text)]
        self.expected = [float(len(draft)) for draft in drafts]
        return chains(accepted, drafts)

    def look_up(self, slot: int, text: list[int]) -> list[int]:
        followers = self.followers[slot]
        # Exclude n-grams that end with the newest token: they would find themselves.
        for end in range(max(1, self.entered[slot]), len(text)):
            for n in range(1, min(self.longest, end) + 1):
                followers[tuple(text[end - n : end])] = end
        self.entered[slot] = len(text)
        for n in range(min(self.longest, len(text)), 0, -1):
            start = followers.get(tuple(text[-n:]))
            if start is not None:
                return text[start : start + self.depth]
        return []
