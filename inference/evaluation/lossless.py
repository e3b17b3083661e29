"""What "lossless" means on a given machine, in levels (a model's rounding depends on how many rows one forward has).

L1  float32, any shapes: speculative text identical to plain text, greedy and sampled, with warpers and penalties
L2  half precision, same shapes: identical to plain decoding whose forwards have as many rows
L3  half precision, other shapes: where texts part, the two candidates' scores lay closer together than what the two
    forwards differ by. A tiny gap is arithmetic; a large one is a bug.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heads.target import Target
from inference.drafters.base import Accepted, Drafter, root_only
from inference.generation import generate
from inference.sampling import Noise, Sampling, SamplingParams
from inference.tree import TokenTree, chain, padded

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1, repetition penalty 1.2": {"temperature": 1.0, "repetition_penalty": 1.2},
}


class Rows(Drafter):
    """Plain decoding whose forwards have `nodes` rows: all but the root are padding, which is never accepted."""

    def __init__(self, nodes: int, layers: Sequence[int] = ()):
        self.nodes, self.layers, self.depth = nodes, layers, nodes - 1

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tokens = root_only(accepted).tokens
        return chain(torch.cat([tokens, tokens.new_full((len(tokens), self.nodes - 1), -1)], dim=1))


class Filled(Drafter):
    """`inner`, all of whose trees have as many rows as its largest: a drafter may propose fewer."""

    def __init__(self, inner: Drafter):
        self.inner, self.layers, self.nodes = inner, inner.layers, max(2, inner.nodes)

    @property
    def depth(self) -> int:  # type: ignore[override]  # some drafters change it from step to step
        return self.inner.depth

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.inner.begin(batch, capacity, sampling)

    def select_rows(self, rows: list[int | None], capacity: int, sampling: Sampling) -> None:
        self.inner.select_rows(rows, capacity, sampling)

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return padded(self.inner.propose(accepted, gumbel), self.nodes)

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        self.inner.observe(paths, choices)


class Parting(NamedTuple):
    """Where a speculative text first parts from the plain one."""

    row: int
    token: int  # which new token, from 0
    gap: float  # between the two candidates' scores, as the one-row forward sees them
    difference: float  # largest difference of any score between one-row and many-row forwards, there

    @property
    def is_arithmetic(self) -> bool:
        return self.gap <= 2 * self.difference


def shares(
    target: Target, drafter: Drafter, against: Drafter | None, rows: list[list[int]], new_tokens: int
) -> dict[str, float]:
    """Per setting, the share of `rows` whose text with `drafter` equals that with `against` (None: plain)."""
    found = {}
    for name, settings in SETTINGS.items():
        same = 0
        for seed, row in enumerate(rows):
            ids = torch.tensor([row], device=target.device)
            texts = [
                generate(target, who, ids, max_new_tokens=new_tokens, seed=seed, eos_token_id=-1, **settings).new_tokens
                for who in (against, drafter)
            ]
            same += texts[0] == texts[1]
        found[name] = same / len(rows)
    return found


def partings(
    target: Target, drafter: Drafter, rows: list[list[int]], new_tokens: int, nodes: int, temperature: float = 0.0
) -> list[Parting]:
    """The first parting of every row where there is one, with its gap audit."""
    found = []
    for seed, row in enumerate(rows):
        ids = torch.tensor([row], device=target.device)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1, "temperature": temperature}
        plain = generate(target, None, ids, seed=seed, **settings).new_tokens[0]
        drafted = generate(target, drafter, ids, seed=seed, **settings).new_tokens[0]
        index = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=True)) if a != b), None)
        if index is None:
            continue
        text = row + plain[:index]
        one, many = (replay(target, text, len(row), size) for size in (1, nodes))
        sampling = Sampling.of([SamplingParams(temperature)], target.vocab_size, target.device)
        scores = sampling.warp(one[None, None])[0, 0]
        if temperature > 0:
            position = torch.tensor([[len(text)]], device=target.device)
            scores = scores + Noise([seed], target.vocab_size, target.device).at(position)[0, 0]
        gap = (scores[plain[index]] - scores[drafted[index]]).abs().item()
        difference = (one - many).abs().max().item() / (temperature or 1.0)
        found.append(Parting(seed, index, gap, difference))
    return found


@torch.inference_mode()
def replay(target: Target, text: list[int], prompt: int, size: int) -> Tensor:
    """The last logits (vocab,) float32 of `text` when what follows its prompt is read `size` tokens a forward."""
    ids = torch.tensor([text], device=target.device)
    cache = target.new_cache(1, len(text) + size)
    start = min(prompt, len(text) - 1)
    every = torch.arange(len(text), device=target.device)[None]
    causal = torch.ones(1, start, start, dtype=torch.bool, device=target.device).tril()
    target.read(ids[:, :start], every[:, :start], cache.mask(causal), cache, key_positions=every[:, :start])
    cache.set_lengths([start])
    logits = torch.empty(0)
    for first in range(start, len(text), size):
        piece = ids[:, first : first + size]
        real = piece.shape[1]
        padded = torch.cat([piece, piece.new_full((1, size - real), -1)], dim=1)
        tree = chain(padded)
        reading = target.read_tree(tree.tokens, cache.starts + tree.depths, cache.mask(tree.ancestors), cache)
        cache.commit([list(range(real))])
        logits = reading.logits[0, real - 1].float()
    return logits
