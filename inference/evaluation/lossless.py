"""The meaning of "lossless" on a machine, in levels (rounding depends on the number of tokens per forward).

L1  float32, any shapes: text with drafts identical to the baseline, greedy and sampled, with warpers and penalties, but for
    ties within rounding, as in L3
L2  identical to the baseline, logits in every bit, on a CPU that keeps them (`Capabilities.keeps_bits`, and `prefers_chains`
    for chains); otherwise, in half precision, texts identical to a baseline whose forwards have as many tokens
L3  half precision, other shapes: where two texts first differ, the gap between the scores of the two tokens is at most the
    change of the scores between the two shapes. A tiny gap is rounding, a large one is a bug.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Accepted, Drafter, Wrapper
from foredraft.inference.engine import Engine
from foredraft.inference.evaluation.progress import track
from foredraft.inference.generation import generate
from foredraft.inference.request import Request
from foredraft.inference.sampling import Noise, Sampling, SamplingParams
from foredraft.inference.tree import TokenTree, chain, pad_nodes
from foredraft.inference.verify import Outcome, Verification

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1, repetition penalty 1.2": {"temperature": 1.0, "repetition_penalty": 1.2},
}
GREEDY = SamplingParams()
CHUNK, PREEMPT_EVERY = 100, 40  # tokens of a prompt per step, and steps between preemptions, where bits are compared


class PaddedDrafter(Wrapper):
    """Pad all trees of `inner` to one size, because a drafter may propose smaller ones."""

    def __init__(self, inner: Drafter, nodes: int | None = None):
        """Set the size. None is the size of the largest tree, at least 2."""
        super().__init__(inner)
        self.nodes = nodes or max(2, inner.nodes)

    @property
    def depth(self) -> int:  # type: ignore[override]
        return max(1, self.inner.depth)  # padding nodes are at depth 1

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return pad_nodes(self.inner.propose(accepted, gumbel), self.nodes)


class BitRecorder(Engine):
    """Record texts, and a digest of the bits of the logits that chose each token: `rows` by the request's seed and the
    position."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.texts: dict[int, list[int]] = {}  # new tokens, by the request's seed
        self.rows: dict[tuple[int, int], bytes] = {}
        self.accepted = 0  # drafts

    def verify(self, tree: TokenTree, logits: Tensor, gumbel: Tensor | None) -> tuple[Verification, Outcome]:
        verification, outcome = super().verify(tree, logits, gumbel)
        for slot, sequence in enumerate(self.slots.sequences):
            if sequence.finish_reason is None:
                path = verification.path[slot, : verification.counts[slot]].tolist()
                for position, node in enumerate(path, start=len(sequence.text)):
                    bits = logits[slot, node].contiguous().view(torch.uint8).cpu().numpy().tobytes()
                    self.rows[sequence.request.seed, position] = hashlib.sha256(bits).digest()
        return verification, outcome

    def decode(self, requests: Sequence[Request], preempt_every: int | None = None) -> Self:
        """Decode all requests. preempt_every: steps after which all sequences are prefilled again with what they wrote."""
        for request in requests:
            self.add(request)
        for step in itertools.count(1):
            if not self.has_work:
                break
            if preempt_every and step % preempt_every == 0 and not self.waiting and not self.prefilling:
                self.preempt()
            for output in self.step():
                self.texts.setdefault(output.request.seed, []).extend(output.tokens)
                self.accepted += output.accepted or 0
        self.close()
        return self


class BitComparison(NamedTuple):
    """Compare with the baseline: texts, and rows of logits of one token each that both decoded."""

    texts: int
    identical: int
    rows: int
    unequal: int  # in any bit

    @classmethod
    def of(cls, baseline: BitRecorder, drafted: BitRecorder) -> "BitComparison":
        same = sum(text == drafted.texts[seed] for seed, text in baseline.texts.items())
        shared = baseline.rows.keys() & drafted.rows.keys()
        unequal = sum(baseline.rows[place] != drafted.rows[place] for place in shared)
        return cls(len(baseline.texts), same, len(shared), unequal)

    @property
    def is_equal(self) -> bool:
        return self.identical == self.texts and not self.unequal

    def __str__(self) -> str:
        texts = f"{self.identical} of {self.texts} texts identical"
        return f"{texts}, {self.unequal} of {self.rows} rows of logits differ in any bit"


def compare_bits(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], new_tokens: int, temperature: float, batch: int
) -> Iterator[tuple[str, BitComparison]]:
    """Decode prompts one by one without drafts, and compare decoding with drafts: one by one, and in batches of `batch` that
    others join and leave, with prompts in chunks and after prefixes of others, and with preemption (if the target
    `keeps_bits`)."""
    requests = [
        Request(list(prompt), SamplingParams(temperature), new_tokens, seed) for seed, prompt in enumerate(prompts)
    ]
    baseline = BitRecorder(target, None, max_num_seqs=1).decode(requests)
    yield "alone", BitComparison.of(baseline, BitRecorder(target, drafter, max_num_seqs=1).decode(requests))
    if not target.capabilities.keeps_bits:
        return
    together = BitRecorder(target, drafter, max_num_seqs=batch, prefill_chunk=CHUNK, reuse_prefixes=True)
    yield f"in batches of {batch}", BitComparison.of(baseline, together.decode(requests, PREEMPT_EVERY))


class Divergence(NamedTuple):
    """Describe the first token where a text with drafts differs from the baseline."""

    prompt: int
    token: int  # index of the new token, from 0
    gap: float  # difference of the scores of the two tokens, in the forward over one token
    # Change of both scores together, between the forwards over one and over many tokens. It is at least one unit in the last
    # place, because neither forward is exactly the one that drafted. Up to twice as much is rounding.
    difference: float
    filtered: bool = False  # whether a filter such as top-p keeps each token in the forward that chose it, not in both

    @property
    def is_arithmetic(self) -> bool:
        return self.filtered or self.gap <= 2 * self.difference


def divergences(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    new_tokens: int,
    baseline: Drafter | None = None,
    **settings: Any,
) -> list[Divergence]:
    """Return the first divergence of each prompt that has one, with the gap that may explain it. baseline: None decodes
    without drafts. settings: of SamplingParams."""
    found = []
    for seed, prompt in enumerate(track(prompts, "checking losslessness", "prompts")):
        ids = torch.tensor([prompt], device=target.device)
        both: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1, "seed": seed, **settings}
        expected = generate(target, baseline, ids, **both).new_tokens[0]
        drafted = generate(target, drafter, ids, **both)
        nodes = nodes_by_token([step.emitted[0] for step in drafted.steps], [step.nodes for step in drafted.steps])
        params = SamplingParams(**settings)
        found.append(audit(target, prompt, expected, drafted.new_tokens[0], nodes, params, seed))
    return [divergence for divergence in found if divergence is not None]


def nodes_by_token(emitted: Sequence[int], nodes: Sequence[int]) -> list[int]:
    """Return the number of tokens in the forward that chose each token of a text, from what its steps added and the nodes of
    their trees. The first token comes from the prompt's forward."""
    return [1, *(size for count, size in zip(emitted, nodes, strict=True) for _ in range(count))]


def audit(
    target: Target,
    prompt: list[int],
    baseline: list[int],
    drafted: list[int],
    nodes: Sequence[int],
    params: SamplingParams = GREEDY,
    seed: int = 0,
) -> Divergence | None:
    """Return the first divergence of two continuations of a prompt; None if they are identical. nodes: of `drafted`, see
    `nodes_by_token`. params, seed: of both texts. The seed becomes the divergence's prompt number."""
    index = next((i for i, (a, b) in enumerate(zip(baseline, drafted)) if a != b), None)
    if index is None:
        assert len(baseline) == len(drafted), "one text ends early, after the same tokens"
        return None
    pair, text = [baseline[index], drafted[index]], prompt + baseline[:index]
    sampling = Sampling.of([params], target.vocab_size, target.device)
    counts, seen = (
        torch.bincount(torch.tensor(some, dtype=torch.long, device=target.device), minlength=target.vocab_size)
        for some in (baseline[:index], text)
    )
    both = [
        sampling.process(recompute_logits(target, text, len(prompt), size)[None, None], counts, seen > 0)
        for size in (1, nodes[index])
    ]
    kept = [sampling.warp(logits, target.vocab_size)[0][0, 0, pair].isfinite().tolist() for logits in both]
    filtered = kept[0][0] and kept[1][1] and not (kept[0][1] and kept[1][0])
    one, many = (logits[0, 0] for logits in both)
    scores, temperature = one, params.temperature
    if temperature > 0:
        scores = scores / temperature
        position = torch.tensor([[len(text)]], device=target.device)
        scores = scores + Noise([seed], target.vocab_size, target.device).at(position)[0, 0]
    gap = (scores[pair[0]] - scores[pair[1]]).abs().item()
    unit = torch.finfo(target.dtype).eps * one[pair].abs().max()
    difference = max((one - many)[pair].abs().sum(), unit).item() / (temperature or 1.0)
    return Divergence(seed, index, gap, difference, filtered)


@torch.inference_mode()
def recompute_logits(target: Target, text: list[int], prompt: int, size: int) -> Tensor:
    """Return the last logits (vocab,) float32 of `text` if the tokens after its prompt are processed `size` at a time."""
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
