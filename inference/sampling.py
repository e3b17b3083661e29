"""How the target's next token is chosen: warped logits plus keyed noise, then the argmax.

The coupled rule (Daliri et al., arXiv:2408.07978; Rowan et al., arXiv:2506.05632): every absolute position t of a text
has Gumbel noise G_t of its own, and the token there is argmax(warped logits + G_t), which has law softmax(warped logits).
A drafter that adds the same noise to its own logits tends to draft just that token. Whatever it drafts, the text is
the one that plain decoding with this seed gives, token by token. Temperature 0 is the same rule with G = 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of SplitMix64 (Steele et al., 2014)
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Sampling:
    """Settings of a generation. temperature 0 is greedy; the warpers apply in transformers' order."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0")

    def warp(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Warped logits (..., vocab). seen: (..., vocab) bool, tokens of the text so far, for the penalty."""
        if self.repetition_penalty is not None and seen is not None:
            penalised = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = torch.where(seen, penalised, logits)
        if self.temperature == 0:
            return logits
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            min_probability = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < min_probability, float("-inf"))
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # mass of the tokens above this one
            dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            logits = logits.masked_fill(dropped, float("-inf"))
        return logits


def wrap(number: int) -> int:
    """A 64-bit pattern as the signed number that torch's int64 holds."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64 whose output bits each depend on all input bits."""
    x = (x ^ shift(x, 30)) * wrap(MULTIPLIERS[0])
    x = (x ^ shift(x, 27)) * wrap(MULTIPLIERS[1])
    return x ^ shift(x, 31)


class Noise:
    """Gumbel noise keyed by (seed, position, token id): counter-based, so any position can be asked for at any time, in
    any batch, on any device, and gives the same number. It must never be used for any other draw."""

    def __init__(self, seeds: list[int], vocab: int, device: torch.device | str):
        self.keys = mix(torch.tensor([wrap(seed * GOLDEN) for seed in seeds], device=device))[:, None]  # (batch, 1)
        self.tokens = mix(torch.arange(1, vocab + 1, device=device) * wrap(GOLDEN))  # (vocab,)

    def at(self, positions: Tensor) -> Tensor:
        """Float32 (batch, n, vocab) for absolute positions (batch, n)."""
        rows = mix((positions + 1) * wrap(GOLDEN) ^ self.keys)
        bits = shift(mix(mix(rows)[..., None] + self.tokens), 11)
        # 53 bits and float64 up to the second logarithm: float32 uniforms would cut the tail of rare tokens.
        uniform = (bits.double() + 0.5) * 2.0**-53
        return (-(-uniform.log()).log()).float()
