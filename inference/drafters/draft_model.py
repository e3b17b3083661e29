"""Draft with a smaller language model of the same vocabulary (Leviathan et al., arXiv:2211.17192), as a tree or a chain.

It grows the same tree as a recurrent head does; the model takes the head's place and keeps a cache of its own.
"""

import torch
from torch import Tensor

from heads.draft_model import DraftModelHead, check_vocabulary
from heads.target import Target
from inference.drafters.base import Accepted
from inference.drafters.dynamic import DynamicTree
from inference.drafters.grown import MIN_PROBABILITY, check_width
from inference.sampling import Sampling
from inference.tree import TokenTree


class DraftModel(DynamicTree):
    def __init__(
        self,
        model: Target | DraftModelHead,
        target: Target,
        nodes: int = 8,
        depth: int = 5,
        width: int | None = None,
        min_probability: float = MIN_PROBABILITY,
    ):
        """width: 2 or, for a target that reads chains only, 1; 1 with nodes depth + 1 is the chain of the papers. Raises
        ValueError where the vocabularies differ."""
        if isinstance(model, DraftModelHead):
            head = model
        else:
            check_vocabulary(model, target)
            model.check_logits()
            head = DraftModelHead(model, target.vocab_size)
        super().__init__(head, target, nodes, depth, check_width(width, 2, target), min_probability)

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        super().begin(batch, capacity, sampling)
        self.fresh = [True] * batch  # rows of which the model has read nothing yet

    def select_rows(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:
        super().select_rows(rows, capacity, sampling)
        self.fresh = [row is None or self.fresh[row] for row in rows]

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        if any(self.fresh):  # a head starts at the token after the first one; a model reads that one too
            tokens, fresh = accepted.tokens, torch.tensor(self.fresh, device=accepted.tokens.device)[:, None]
            first = tokens.new_tensor([[text[0]] for text in accepted.text])
            both = torch.cat([first, tokens], dim=1), torch.cat([tokens, first], dim=1)
            counts = [count + new for count, new in zip(accepted.counts, self.fresh, strict=True)]
            accepted = accepted._replace(tokens=torch.where(fresh, *both), counts=counts, known_counts=None)
            self.fresh = [False] * len(self.fresh)
        return super().propose(accepted, gumbel)
