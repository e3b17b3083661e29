"""What "lossless" means on a given machine, in levels (a model's rounding depends on how many tokens one forward has).

L1  float32, any shapes: speculative text identical to plain text, greedy and sampled, with warpers and penalties
L2  half precision: identical to plain decoding where drafts are chains and the target's logits keep every bit
    (`Target.prefers_chains`), and else to plain decoding whose forwards have as many tokens
L3  half precision, other shapes: where two texts first differ, the gap between the two tokens' scores is no larger than what
    the two forwards' shapes change of them. A tiny gap is arithmetic; a large one is a bug.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.generation import generate
from foredraft.inference.sampling import Noise
from foredraft.inference.tree import TokenTree, chain, padded

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1, repetition penalty 1.2": {"temperature": 1.0, "repetition_penalty": 1.2},
}


class PaddedDrafter(Wrapper):
    """`inner` with every tree padded to one size, since a drafter may propose smaller ones."""

    def __init__(self, inner: Drafter, nodes: int | None = None):
        """nodes: None is the size of its largest tree, or 2."""
        super().__init__(inner)
        self.nodes = nodes or max(2, inner.nodes)

    @property
    def depth(self) -> int:  # type: ignore[override]
        return max(1, self.inner.depth)  # padding stands below the bonus token

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return padded(self.inner.propose(accepted, gumbel), self.nodes)


class Divergence(NamedTuple):
    """The first token at which a speculative text differs from the plain one."""

    prompt: int
    token: int  # which new token, from 0
    gap: float  # between the scores of the two tokens, in the forward of one token
    # Of these two scores together, between the forward of one and of many tokens; at least a unit in their last place, since
    # neither forward is quite the one that drafted (rejected drafts lay beside it), and up to twice as much is rounding.
    difference: float

    @property
    def is_arithmetic(self) -> bool:
        return self.gap <= 2 * self.difference


def identical_shares(
    target: Target, drafter: Drafter, baseline: Drafter | None, rows: list[list[int]], new_tokens: int
) -> dict[str, float]:
    """Per setting, the share of `rows` whose text with `drafter` equals that with `baseline` (None: plain)."""
    found = {}
    for name, settings in SETTINGS.items():
        same = 0
        for seed, row in enumerate(rows):
            ids = torch.tensor([row], device=target.device)
            texts = [
                generate(target, one, ids, max_new_tokens=new_tokens, seed=seed, eos_token_id=-1, **settings).new_tokens
                for one in (baseline, drafter)
            ]
            same += texts[0] == texts[1]
        found[name] = same / len(rows)
    return found


def divergences(
    target: Target, drafter: Drafter, rows: list[list[int]], new_tokens: int, temperature: float = 0.0
) -> list[Divergence]:
    """The first divergence of every prompt that has one, with the gap that explains it or does not."""
    found = []
    for seed, row in enumerate(rows):
        ids = torch.tensor([row], device=target.device)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1, "temperature": temperature}
        plain = generate(target, None, ids, seed=seed, **settings).new_tokens[0]
        drafted = generate(target, drafter, ids, seed=seed, **settings)
        nodes = nodes_by_token([step.emitted[0] for step in drafted.steps], [step.nodes for step in drafted.steps])
        found.append(audit(target, row, plain, drafted.new_tokens[0], nodes, temperature, seed))
    return [one for one in found if one is not None]


def nodes_by_token(emitted: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Tokens of the forward that chose each token of a text, from what its steps added and the nodes of their trees. The
    first one comes of the prompt's forward."""
    return [1, *(size for count, size in zip(emitted, nodes, strict=True) for _ in range(count))]


def audit(
    target: Target,
    prompt: list[int],
    plain: list[int],
    drafted: list[int],
    nodes: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> Divergence | None:
    """Where two continuations of a prompt differ first, with the gap that explains it or does not; None where they do not.
    nodes: of the drafted one, see `nodes_by_token`. seed: of both, and the divergence's number."""
    index = next((i for i, (a, b) in enumerate(zip(plain, drafted)) if a != b), None)
    if index is None:
        assert len(plain) == len(drafted), "one text continues where the other ends, with the same tokens before"
        return None
    text = prompt + plain[:index]
    one, many = (recompute_logits(target, text, len(prompt), size) for size in (1, nodes[index]))
    scores = one
    if temperature > 0:
        scores = scores / temperature
        position = torch.tensor([[len(text)]], device=target.device)
        scores = scores + Noise([seed], target.vocab_size, target.device).at(position)[0, 0]
    gap = (scores[plain[index]] - scores[drafted[index]]).abs().item()
    pair = [plain[index], drafted[index]]
    unit = torch.finfo(target.dtype).eps * one[pair].abs().max()
    difference = max((one - many)[pair].abs().sum(), unit).item() / (temperature or 1.0)
    return Divergence(seed, index, gap, difference)


@torch.inference_mode()
def recompute_logits(target: Target, text: list[int], prompt: int, size: int) -> Tensor:
    """The last logits (vocab,) float32 of `text` when the tokens after its prompt come `size` at a time."""
    ids = torch.tensor([text], device=target.device)
    cache = target.new_cache(1, len(text) + size, size)
    start = min(prompt, len(text) - 1)
    target.prefill(ids[:, :start], [start], cache)
    cache.set_lengths([start])
    logits = torch.empty(0)
    for first in range(start, len(text), size):
        piece = ids[:, first : first + size]
        real = piece.shape[1]
        padded = torch.cat([piece, piece.new_full((1, size - real), -1)], dim=1)
        tree = chain(padded)
        output = target.forward_tree(tree.tokens, cache.seq_lens + tree.depths, cache.mask(tree.ancestors), cache)
        cache.commit([list(range(real))])
        logits = output.logits[0, real - 1].float()
    return logits
