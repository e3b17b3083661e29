"""Draft with a smaller language model of the same vocabulary (Leviathan et al., arXiv:2211.17192), as a tree or a chain.

It drafts the same tree as a recurrent head. The model replaces the head and has a separate cache.
"""

import torch
from torch import Tensor

from foredraft.heads.caches.kv_cache import KVCache, to_device
from foredraft.heads.draft_model import DraftModelHead, check_vocabulary
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.logits import check_logits
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.drafters.cached_tree import MIN_PROBABILITY, check_width
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.tree import TokenTree


class DraftModel(DynamicTree):
    cache_lag = 0  # its cache also has an entry for the first token

    def __init__(
        self,
        model: Target | DraftModelHead,
        target: Target,
        nodes: int = 8,
        depth: int = 5,
        width: int | None = None,
        min_probability: float = MIN_PROBABILITY,
    ):
        """Initialize the drafter. width: branches per level; None is 2, or 1 if the target supports only chains; 1 with
        nodes = depth + 1 is the chain of the papers. Raises ValueError if the vocabularies differ."""
        if isinstance(model, DraftModelHead):
            head = model
        else:
            check_vocabulary(model, target)
            check_logits(model)
            head = DraftModelHead(model, target.vocab_size)
        super().__init__(head, target, nodes, depth, check_width(width, 2, target), min_probability)

    def prefill(self, accepted: Accepted) -> None:
        super().prefill(with_first_tokens(accepted, self.open_cache()))

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return super().propose(with_first_tokens(accepted, self.open_cache()), gumbel)


def with_first_tokens(accepted: Accepted, cache: KVCache) -> Accepted:
    """Prepend the first token of each sequence that the model has not seen yet: heads start at the second token."""
    fresh = [length == 0 for length in cache.lengths]
    if not any(fresh):
        return accepted
    tokens = accepted.tokens
    first = tokens.new_tensor([[text[0]] for text in accepted.text])
    both = torch.cat([first, tokens], dim=1), torch.cat([tokens, first], dim=1)
    counts = [count + new for count, new in zip(accepted.counts, fresh, strict=True)]
    tokens = torch.where(to_device(fresh, tokens.device)[:, None].bool(), *both)
    return accepted._replace(tokens=tokens, counts=counts, counts_on_device=None)
