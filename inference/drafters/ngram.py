"""Prompt lookup: draft what followed the same n-gram earlier in the text (Saxena, 2023). It needs no head."""

from torch import Tensor

from foredraft.inference.drafters.base import Accepted, Drafter, chains
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import TokenTree

MATCHES = ("latest", "frequent")


class NgramDrafter(Drafter):
    branches = False

    def __init__(self, longest: int = 3, depth: int = 10, match: str = "latest"):
        """longest: n-grams of this length down to 1 are looked up, the first that occurred before wins. depth: tokens
        drafted. match: among its occurrences, the "latest", or the latest with the most "frequent" next token."""
        if longest < 1 or depth < 1:
            raise ValueError(f"longest={longest} and depth={depth} must be at least 1")
        if match not in MATCHES:
            raise ValueError(f"match={match} is not one of {', '.join(MATCHES)}")
        self.longest, self.depth, self.nodes, self.match = longest, depth, depth + 1, match

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        # Per sequence and n-gram: next token -> (how often, index where it last stood). A step enters new text only.
        self.followers: list[dict[tuple[int, ...], dict[int, tuple[int, int]]]] = [{} for _ in range(batch)]
        self.entered = [0] * batch

    def select_sequences(self, slots: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.followers = [{} if slot is None else self.followers[slot] for slot in slots]
        self.entered = [0 if slot is None else self.entered[slot] for slot in slots]

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return chains(accepted, [self.look_up(slot, text) for slot, text in enumerate(accepted.text)])

    def look_up(self, slot: int, text: list[int]) -> list[int]:
        followers = self.followers[slot]
        # Up to the newest token as a next token: as the end of an n-gram it must not find itself.
        for end in range(max(1, self.entered[slot]), len(text)):
            for n in range(1, min(self.longest, end) + 1):
                following = followers.setdefault(tuple(text[end - n : end]), {})
                following[text[end]] = (following.get(text[end], (0, 0))[0] + 1, end)
        self.entered[slot] = len(text)
        for n in range(min(self.longest, len(text)), 0, -1):
            following = followers.get(tuple(text[-n:]), {})
            if following:
                counts_first = self.match == "frequent"
                _, end = max(following.values(), key=lambda seen: seen if counts_first else seen[1:])
                return text[end : end + self.depth]
        return []
