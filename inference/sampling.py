"""Sampling of the target's next token: processed logits plus keyed noise, then argmax.

The coupled rule (Daliri et al., arXiv:2408.07978; Rowan et al., arXiv:2506.05632): every absolute position t of a text has
separate Gumbel noise G_t, and the token there is argmax(logits + G_t), whose distribution is softmax(logits). A drafter that
adds the same noise to its logits tends to draft this token. For any draft, the text equals that of autoregressive decoding
with the same seed, token by token. Temperature 0 is the same rule with G = 0.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from types import UnionType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.heads.caches.cuda_graphs import power_of_two
from foredraft.inference.grammar import Grammar

MULTIPLIERS_32 = (0x7FEB352D, 0x846CA68B)  # of a 32-bit finalizer (Wellons, Prospecting for Hash Functions, 2018)
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the finalizer of SplitMix64 (Steele et al., 2014)
GOLDEN = 0x9E3779B97F4A7C15
MIN_TEMPERATURE = 1e-30  # smaller ones would make logits infinite
SMALL_K = 64  # a smaller top-k is not cheaper, and each value of it needs its own CUDA graphs
TOP_P_CANDIDATES = 1024  # number of tokens that top-p considers if it cannot use as many as needed
SCALE = 2.0**40  # top-p adds probabilities as integers: the sum is the same in any order and on any device


def check_kind(name: str, value: object, kind: type | UnionType, what: str) -> None:
    """Raise ValueError unless `value` of the setting `name` is of this kind. what: the kind in words."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} is not {what}")


def check_counts(least: int = 1, **settings: object) -> None:
    """Raise ValueError unless each of these settings is None or a whole number of at least `least`."""
    for name, value in settings.items():
        is_count = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
        if not (value is None or is_count):
            raise ValueError(f"{name}={value!r} is not a whole number of at least {least}")


@dataclass(frozen=True)
class SamplingParams:
    """Hold the sampling settings of a request, named as in transformers and OpenAI's API. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None  # minimum probability, relative to the largest one
    repetition_penalty: float | None = None  # for tokens of the prompt and the text
    presence_penalty: float = 0.0  # subtracted once for tokens of the new text
    frequency_penalty: float = 0.0  # subtracted for each occurrence in the new text
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, value added to its logit); -inf bans the token
    grammar: Grammar | None = None  # constraint of the new text (inference/grammar.py)

    def __post_init__(self) -> None:
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            check_kind(name, getattr(self, name), Real, "a number")
        for name in ("top_p", "min_p", "repetition_penalty"):
            check_kind(name, getattr(self, name), Real | None, "a number")
        check_kind("top_k", self.top_k, Integral | None, "a whole number")
        check_kind("grammar", self.grammar, Grammar | None, "a Grammar, which Grammars(target) compiles")
        for name in ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not abs(getattr(self, name) or 0) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not a finite number")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must lie in [0, 1]")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0")
        for pair in self.logit_bias if isinstance(self.logit_bias, Collection) else (None,):
            if not isinstance(pair, Collection) or [isinstance(part, Real) for part in pair] != [True, True]:
                raise ValueError(
                    f"logit_bias={self.logit_bias!r} is not pairs of a token and a number, such as ((5, -1.0),)"
                )
        for token, value in self.logit_bias:
            if not value < float("inf"):
                raise ValueError(
                    f"logit_bias={{{token}: {value}}} must be a finite number, or -inf, which bans the token"
                )


class Sampling(NamedTuple):
    """Hold the settings of a batch as tensors, (batch, 1, 1) each; None if no sequence uses a setting.

    A captured step accepts any values, because they are tensors. Its graphs depend only on `largest_k`, the last field.
    """

    temperature: Tensor | None  # float32; 0 for greedy sequences, None if all are greedy
    top_k: Tensor | None  # int64
    top_p: Tensor | None
    min_p: Tensor | None
    repetition_penalty: Tensor | None
    presence_penalty: Tensor | None
    frequency_penalty: Tensor | None
    bias: Tensor | None  # (batch, 1, vocab)
    largest_k: int  # a power of two, at least SMALL_K and the largest top_k

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device | str = "cpu") -> "Sampling":
        def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            """Return the setting as (batch, 1, 1); `off` is its neutral value."""
            values = [off if value is None else value for value in (getattr(settings, name) for settings in params)]
            if name == "temperature":
                values = [value and max(value, MIN_TEMPERATURE) for value in values]
            if all(value == off for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

        bias = None
        if any(settings.logit_bias for settings in params):
            bias = torch.zeros(len(params), 1, vocab)
            for row, settings in enumerate(params):
                if settings.logit_bias:
                    tokens, values = zip(*settings.logit_bias, strict=True)
                    bias[row, 0, list(tokens)] = torch.tensor(values, dtype=torch.float32)
            bias = bias.to(device)
        largest_k = max((min(settings.top_k, vocab) for settings in params if settings.top_k is not None), default=1)
        return cls(
            column("temperature", 0.0),
            column("top_k", vocab, torch.int64),
            column("top_p", 1.0),
            column("min_p", 0.0),
            column("repetition_penalty", 1.0),
            column("presence_penalty", 0.0),
            column("frequency_penalty", 0.0),
            bias,
            min(vocab, max(SMALL_K, power_of_two(largest_k))),
        )

    def process(self, logits: Tensor, counts: Tensor | None, seen: Tensor | None) -> Tensor:
        """Apply penalties and biases to logits (batch, n, vocab). counts: int64 of the same shape, occurrences of each token
        in the new text. seen: bool, whether prompt or new text contain it."""
        if seen is not None:
            logits = logits.float()
            if self.repetition_penalty is not None:
                penalty = self.repetition_penalty
                logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
            if counts is not None and self.frequency_penalty is not None:
                logits = logits - self.frequency_penalty * counts
            if counts is not None and self.presence_penalty is not None:
                logits = logits - self.presence_penalty * (counts > 0)
        return logits if self.bias is None else logits + self.bias

    def warp(self, logits: Tensor, candidates: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Apply temperature, top-k, top-p and min-p to logits (batch, n, vocab), in transformers' order. candidates: number
        of tokens that top-p considers; None is as many as needed (only on a CPU without graphs). Also return where (batch,
        n) this number was too small; None if top-p is off or considered all that it needs."""
        if self.temperature is None:
            return logits, None
        logits, too_few = temper(logits, self.temperature), None
        if self.top_k is not None:
            best = logits.topk(min(self.largest_k, logits.shape[-1]), dim=-1).values
            last = (self.top_k - 1).clamp(max=best.shape[-1] - 1).expand(*best.shape[:-1], 1)
            cut = (logits < best.gather(-1, last)) & (self.top_k < logits.shape[-1])
            logits = logits.masked_fill(cut, float("-inf"))
        if self.top_p is not None and candidates is None:
            logits = top_p_on_cpu(logits, self.top_p)
        elif self.top_p is not None and candidates is not None:
            logits, too_few = top_p(logits, self.top_p, candidates)
            too_few = too_few if candidates < logits.shape[-1] else None
        if self.min_p is not None:
            probabilities = logits.softmax(-1)
            least = self.min_p * probabilities.amax(-1, keepdim=True)
            logits = logits.masked_fill(probabilities < least, float("-inf"))
        return logits, too_few


def temper(logits: Tensor, temperature: Tensor, greedy: float = 1.0) -> Tensor:
    """Divide logits (batch, n, vocab) by the temperatures (batch, 1, 1), or by `greedy` where these are 0."""
    return logits.float() / torch.where(temperature > 0, temperature, greedy)


def top_p(logits: Tensor, p: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Retain the fewest tokens of logits (batch, n, vocab) with a total probability of at least `p` (batch, 1, 1), likelier
    ones first, smaller ids first among equals. Consider only the `candidates` likeliest; also return where their total is
    below p, (batch, n).

    This does not wait for the device, and no shape depends on the logits, so CUDA graphs can capture it."""
    best, ids = logits.topk(min(candidates, logits.shape[-1]))
    mass = (logits.softmax(-1).gather(-1, ids) * SCALE).long()
    total, wanted = mass.cumsum(-1), (p * SCALE).long().clamp(min=1)
    count = (total - mass < wanted).sum(-1, keepdim=True).clamp(min=1)  # NaN logits have an undefined mass
    last = best.gather(-1, count - 1)
    equal, kept = logits == last, count - (best > last).sum(-1, keepdim=True)
    dropped = (logits < last) | (equal & (equal.cumsum(-1, dtype=torch.int32) > kept))
    return logits.masked_fill(dropped & (p < 1), float("-inf")), ((total[..., -1:] < wanted) & (p < 1))[..., 0]


def top_p_on_cpu(logits: Tensor, p: Tensor) -> Tensor:
    """Do the same as `top_p` with all tokens, but sort only those that can matter."""
    probabilities, kept = logits.softmax(-1).numpy(), torch.full_like(logits, float("-inf"))
    for row, share in enumerate(p.flatten().tolist()):
        for place, one in enumerate(logits[row].numpy()):
            if share < 1 and not np.isnan(probabilities[row, place, 0]):  # one NaN makes all of them NaN
                ids = nucleus(one, probabilities[row, place], share)
                kept[row, place].numpy()[ids] = one[ids]
            else:
                kept[row, place] = logits[row, place]
    return kept


def nucleus(logits: np.ndarray, probabilities: np.ndarray, p: float) -> np.ndarray:
    """Return the ids that top-p retains. Tokens with a probability below (1 - p) / vocab each have less than 1 - p in total,
    so the others suffice up to rounding, and usually far fewer do."""
    wanted = max(1, int(p * SCALE))
    for least in ((1 - p) / TOP_P_CANDIDATES, (1 - p) / len(logits), 0.0):
        ids = np.flatnonzero(probabilities >= least)
        mass = (probabilities[ids] * np.float32(SCALE)).astype(np.int64)
        if mass.sum() >= wanted:
            break
    order = np.argsort(-logits[ids], kind="stable")
    before = mass[order].cumsum() - mass[order]
    return ids[order[before < wanted]]


def wrap(number: int, bits: int = 64) -> int:
    """Return a pattern of this number of bits as a signed integer, as torch stores it."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def shift(x: Tensor, bits: int) -> Tensor:
    """Shift an int32 or int64 tensor right, filling with zeros."""
    return (x >> bits).bitwise_and_((1 << (8 * x.element_size() - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64: a bijection of int64, each of whose output bits depends on all input bits."""
    x = (x ^ shift(x, 30)) * wrap(MULTIPLIERS[0])
    x = (x ^ shift(x, 27)) * wrap(MULTIPLIERS[1])
    return x ^ shift(x, 31)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32 (..., n), of keys int64 (..., 1) and hashed tokens int32 (n,).

    One round of a 32-bit finalizer and a multiplication of another mix them. A uniform number consists of 31 bits of this and
    a fraction from the key below them, because 31 bits alone would never draw a token of probability below 2^-31."""
    x = tokens + keys.to(torch.int32)
    x ^= shift(x, 16)
    x *= wrap(MULTIPLIERS_32[0], 32)
    x ^= (keys >> 32).to(torch.int32)
    x ^= shift(x, 15)
    x *= wrap(MULTIPLIERS_32[1], 32)
    return gumbel_of(x, (shift(mix(keys), 40).float() + 0.5) * 2.0**-24)


def gumbel_of(bits: Tensor, fraction: Tensor) -> Tensor:
    """Convert to Gumbel noise: bits int32, whose sign is ignored, and a fraction float32 in (0, 1) below them. The factor
    prevents rounding up to 1, whose noise would be infinite."""
    uniform = bits.float().abs_().add_(fraction).mul_(2.0**-31 * (1 - 2.0**-24))
    return uniform.neg_().log1p_().neg_().log_().neg_()  # precise near uniform = 0, where noise is large


@lru_cache(maxsize=4)
def token_hashes(vocab: int, device: torch.device | str) -> Tensor:
    """Return a hash of each token id, (vocab,) int32."""
    return mix(torch.arange(1, vocab + 1, device=device) * wrap(GOLDEN)).to(torch.int32)


class Noise:
    """Generate Gumbel noise keyed by (seed, position, token id). It is counter-based: any position gives the same numbers at
    any time, in any batch, on any device. It must never be used for another draw."""

    def __init__(self, seeds: Sequence[int | None], vocab: int, device: torch.device | str):
        """Initialize the keys. seeds: of each sequence; None is greedy, without noise."""
        self.rows = [row for row, seed in enumerate(seeds) if seed is not None]
        self.keys = mix(torch.tensor([wrap(seed * GOLDEN) for seed in seeds if seed is not None], device=device))[
            :, None
        ]
        self.tokens = token_hashes(vocab, device)
        self.by_position = self.keys.device.type == "cpu"  # the data of one position stays in the processor's cache

    def at(self, positions: Tensor) -> Tensor:
        """Return the noise, float32 (batch, n, vocab), of absolute positions (batch, n)."""
        noise = torch.zeros(*positions.shape, len(self.tokens), device=positions.device)
        keys = mix(mix((positions[self.rows] + 1) * wrap(GOLDEN) ^ self.keys))
        if not self.by_position:
            noise[self.rows] = gumbel(keys[..., None], self.tokens)
            return noise
        for number, row in enumerate(self.rows):
            for place in range(keys.shape[1]):
                noise[row, place] = gumbel(keys[number, place], self.tokens)
        return noise
