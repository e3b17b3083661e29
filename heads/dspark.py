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


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.proj(hidden)


class DSparkHead(DFlashHead):
    """Draft like DFlash, with a Markov correction and a rating. Weights have the names of DeepSpec and SpecForge: DFlash's,
    markov_head.*, confidence_head.proj."""

    kind = projector = "dspark"
    architecture = "DSparkDraftModel"
    own_names = ("markov_rank", "markov_head_type", "enable_confidence_head")

    def __init__(
        self,
        *args: Any,
        markov_rank: int = 256,
        markov_head_type: str = "vanilla",
        enable_confidence_head: bool = True,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        if markov_head_type not in VARIANTS or markov_rank < 1:
            raise ValueError(
                f"head.markov_head_type={markov_head_type} must be one of {', '.join(VARIANTS)}, and "
                f"head.markov_rank={markov_rank} at least 1"
            )
        self.rank, self.confident = markov_rank, enable_confidence_head
        self.correction = markov_rank + enable_confidence_head
        self.memory = markov_rank if markov_head_type == "rnn" else 0
        sizes = self.width, markov_rank, self.config.vocab_size, self.draft_vocab
        self.markov_head = MarkovHead(markov_head_type, *sizes)
        self.confidence_head = ConfidenceHead(self.width + markov_rank) if enable_confidence_head else None

    @property
    def vocabulary_parameters(self) -> list[nn.Parameter]:
        return [*super().vocabulary_parameters, *self.markov_head.markov_w2.parameters()]

    @property
    def own_settings(self) -> dict[str, Any]:
        values = self.rank, self.markov_head.variant, self.confident
        return dict(zip(self.own_names, values, strict=True)) | {"confidence_head_with_markov": True}

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        previous = self.markov_head.markov_w1(tokens)
        out, memory = self.markov_head(hidden, previous, memory)
        if self.confidence_head is None:
            return out, memory
        rating = self.confidence_head(torch.cat([hidden, previous], dim=-1))
        return torch.cat([out, rating], dim=-1), memory

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        return base + self.markov_head.markov_w2(correction[..., : self.rank])
