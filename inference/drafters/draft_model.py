"""Draft with a smaller language model of the same vocabulary (Leviathan et al., arXiv:2211.17192), as a tree or a chain.

It grows the same tree as a recurrent head does; the model takes the head's place and keeps a cache of its own.
"""

from typing import Any

import torch
from torch import Tensor

from heads.cache import KVCache
from heads.target import Target
from inference.drafters.base import Accepted
from inference.drafters.dynamic import DynamicTree
from inference.sampling import Sampling
from inference.tree import TokenTree


class ModelAsHead:
    """A causal language model seen as a recurrent head: what it "embeds" are the tokens themselves."""

    kind, recurrent, draft_ids = "draft_model", True, None

    def __init__(self, model: Target, vocab: int):
        self.model, self.vocab = model, vocab
        self.layers: list[int] = []  # it needs nothing of the target's
        self.cache_layers = model.num_layers

    def read(self, features: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        new = tokens.shape[1]
        causal = torch.ones(1, new, new, dtype=torch.bool, device=tokens.device).tril()
        return self.step(features, tokens, cache.columns(new), cache.mask(causal), cache)

    def step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: KVCache) -> Tensor:
        last = [self.model.num_layers]
        return self.model.read_tree(tokens, positions, mask, cache, last, keep_logits=1).features

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.model.logits(hidden)[..., : self.vocab]  # some models pad their vocabulary


class DraftModel(DynamicTree):
    def __init__(self, model: Target, target: Target, nodes: int = 8, depth: int = 5, width: int = 2):
        """width 1 with nodes depth + 1 is the chain of the papers. Raises ValueError where the vocabularies differ."""
        check_vocabulary(model, target)
        model.check_logits()
        self.draft = model
        head: Any = ModelAsHead(model, target.vocab_size)
        super().__init__(head, target, nodes, depth, width)

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        super().begin(batch, capacity, sampling)
        self.fresh = True

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        if self.fresh:  # a head starts at the token behind the first one; a model reads that one too
            first = accepted.tokens.new_tensor([[text[0]] for text in accepted.text])
            counts = [count + 1 for count in accepted.counts]
            accepted = accepted._replace(tokens=torch.cat([first, accepted.tokens], dim=1), counts=counts)
            self.fresh = False
        return super().propose(accepted, gumbel)


def check_vocabulary(model: Target, target: Target) -> None:
    """Raise ValueError unless token ids mean the same to both."""
    if model.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        different = next((token for token in theirs if ours.get(token) != theirs[token]), None)
        if different is not None:
            raise ValueError(
                f"the draft model {model.name} has another vocabulary than {target.name}: {different!r} is "
                f"{ours.get(different)} there and {theirs[different]} here; choose one of the same tokenizer"
            )
    elif model.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model {model.name} knows {model.vocab_size} tokens, {target.name} {target.vocab_size}: "
            "choose one of the same tokenizer"
        )
