"""Prompt lookup: draft what followed the same n-gram earlier in the text. It needs no head."""

import torch
from torch import Tensor

from inference.drafters.base import Accepted, Drafter, root_only
from inference.sampling import Sampling
from inference.tree import TokenTree, chain


class NgramDrafter(Drafter):
    def __init__(self, longest: int = 3, depth: int = 10):
        """longest: n-grams of this length down to 1 are looked up, the latest match wins. depth: tokens drafted."""
        if longest < 1 or depth < 1:
            raise ValueError(f"longest={longest} and depth={depth} must be at least 1")
        self.longest, self.depth = longest, depth

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        # Where each n-gram last ended; (row, n-gram) -> index behind it. Only new text is entered in each step.
        self.ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(batch)]
        self.entered = [0] * batch

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        drafts = [self.look_up(row, text) for row, text in enumerate(accepted.text)]
        longest = max(map(len, drafts))
        if longest == 0:
            return root_only(accepted)
        rows = [
            [text[-1], *draft, *[-1] * (longest - len(draft))]
            for text, draft in zip(accepted.text, drafts, strict=True)
        ]
        return chain(torch.tensor(rows, device=accepted.tokens.device))

    def look_up(self, row: int, text: list[int]) -> list[int]:
        ends = self.ends[row]
        # The newest token is entered in the next step only: an n-gram must not find itself.
        for end in range(max(1, self.entered[row]), len(text)):
            for n in range(1, min(self.longest, end) + 1):
                ends[tuple(text[end - n : end])] = end
        self.entered[row] = len(text)
        for n in range(min(self.longest, len(text)), 0, -1):
            found = ends.get(tuple(text[-n:]))
            if found is not None:
                return text[found : found + self.depth]
        return []
