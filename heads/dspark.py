"""DSpark: DFlash with a Markov head, which corrects a draft's logits by the token before it, and a head that rates each
draft (arXiv:2607.05147, sections 3.2 and 3.3; the three variants are those of the authors' code).

    vanilla   logits + W2 W1[previous token]
    gated     W1[previous token] is scaled by sigmoid(gate(hidden, W1[previous token])) first
    rnn       a memory along the path determines the input of W2

The rating is the logit of the draft's acceptance. It only prunes the tree, so it never changes the text.
"""

from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.dflash import DFlashHead

VARIANTS = ("vanilla", "gated", "rnn")


class MarkovHead(nn.Module):
    def __init__(self, variant: str, width: int, rank: int, vocab: int, draft_vocab: int):
        super().__init__()
        self.markov_w1, self.markov_w2 = nn.Embedding(vocab, rank), nn.Linear(rank, draft_vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)  # no correction at first
        self.variant = variant
        if variant == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif variant == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, hidden: Tensor, previous: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input (..., rank) of `markov_w2`, whose output corrects the logits, and the new memory (..., rank).
        previous: (..., rank), the previous token in `markov_w1`."""
        if self.variant == "vanilla":
            return previous, memory
        if self.variant == "gated":
            return self.gate_proj(torch.cat([hidden, previous], dim=-1)).sigmoid() * previous, memory
        gate, candidate, out = self.joint_proj(torch.cat([memory, previous, hidden], dim=-1)).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * memory + (1 - gate) * candidate.tanh()


class DSparkHead(DFlashHead):
    """Draft like DFlash, with a Markov correction and a rating. Weights have the names of DeepSpec and SpecForge: DFlash's,
    markov_head.*, confidence_head.proj."""

    kind, vocabulary_names = "dspark", ("markov_head.markov_w2.",)
    architecture = "DSparkDraftModel"
    own_defaults = {  # noqa: RUF012
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
    }

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self.rank, variant, self.confident = self.own.values()
        if variant not in VARIANTS:
            raise ValueError(f"head.markov_head_type={variant} must be one of {', '.join(VARIANTS)}")
        self.correction = self.rank + self.confident
        self.memory = self.rank if variant == "rnn" else 0
        self.markov_head = MarkovHead(variant, self.width, self.rank, self.config.vocab_size, self.draft_vocab)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(self.width + self.rank, 1)} if self.confident else {})

    @property
    def own_settings(self) -> dict[str, Any]:
        return self.own | {"confidence_head_with_markov": True}

    def to_config(self) -> dict:
        return super().to_config() | self.own_settings  # SGLang reads them at the top level, as in DeepSpec's files

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        previous = self.markov_head.markov_w1(tokens)
        out, memory = self.markov_head(hidden, previous, memory)
        if not self.confident:
            return out, memory
        rating = self.confidence_head["proj"](torch.cat([hidden, previous], dim=-1))
        return torch.cat([out, rating], dim=-1), memory

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        return base + self.markov_head.markov_w2(correction[..., : self.rank])
