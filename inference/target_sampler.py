"""The target's choice after each node of a tree, and which nodes are accepted."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.caches.cuda_graphs import CudaGraphs
from foredraft.heads.caches.device import HostCopy
from foredraft.heads.target_model import Target
from foredraft.inference.grammar import GrammarState, allowed_tokens, mask_forbidden
from foredraft.inference.request import SequenceState
from foredraft.inference.sampling import TOP_P_CANDIDATES, Noise, Sampling
from foredraft.inference.tree import TokenTree
from foredraft.inference.verify import Outcome, Validity, Verification, to_host, validity, verify


class TargetSampler:
    """Choose the target's token after each node: argmax of the processed logits plus the keyed noise of its position."""

    def __init__(self, sequences: Sequence[SequenceState], target: Target):
        vocab, device = target.vocab_size, target.device
        requests = [sequence.request for sequence in sequences]
        params = [request.params for request in requests]
        self.sequences, self.vocab = sequences, vocab
        self.sampling = Sampling.of(params, vocab, device)
        self.host_tree: HostCopy | None = None
        self.noise: Noise | None = None
        if self.sampling.temperature is not None:
            seeds = [request.seed if request.params.temperature > 0 else None for request in requests]
            self.noise = Noise(seeds, vocab, device)
        self.seen: Tensor | None = None  # (batch, vocab) bool: whether prompt or text contain the token
        self.counts: Tensor | None = None  # (batch, vocab) int64: occurrences of the token in the new text
        penalties = self.sampling.repetition_penalty, self.sampling.presence_penalty, self.sampling.frequency_penalty
        if any(penalty is not None for penalty in penalties):
            counts = [
                [torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=vocab)[:vocab] for text in texts]
                for texts in zip(*((sequence.text, sequence.new_tokens) for sequence in sequences))
            ]
            self.seen, self.counts = torch.stack(counts[0]).to(device) > 0, torch.stack(counts[1]).to(device)
        # Positions from which texts may end (batch, 1), and their end tokens (batch, 1, vocab); None if all may end.
        self.ends: tuple[Tensor, Tensor] | None = None
        if self.below_min_tokens():
            ends = torch.zeros(len(requests), 1, vocab, dtype=torch.bool)
            for row, request in enumerate(requests):
                for end in request.eos_token_ids:
                    if 0 <= end < vocab:  # -1 disables end tokens
                        ends[row, 0, end] = True
            first = torch.tensor([[len(request.prompt) + request.min_new_tokens] for request in requests])
            self.ends = first.to(device), ends.to(device)

    def below_min_tokens(self) -> bool:
        """Return whether an unfinished sequence has fewer new tokens than its minimum."""
        going = (sequence for sequence in self.sequences if sequence.finish_reason is None)
        return any(len(sequence.new_tokens) < sequence.request.min_new_tokens for sequence in going)

    def gumbel(self, starts: Tensor, count: int) -> Tensor | None:
        """Return the noise (batch, count, vocab) of positions starts + 0 .. count - 1, which drafters share. starts: (batch,
        1). None if all sequences are greedy; 0 for greedy ones in a mixed batch."""
        if self.noise is None:
            return None
        return self.noise.at(starts + torch.arange(count, device=starts.device))

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Count new text: the first `counts` (batch,) of `tokens` (batch, new) in each sequence."""
        if self.seen is not None and self.counts is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
            self.counts.scatter_add_(1, tokens.clamp(min=0), real.long())
            self.seen |= self.counts > 0

    def start_host_copy(self, tree: TokenTree) -> None:
        """Copy the tree to the host while the forward runs, if grammars will need it in `verify`."""
        if any(sequence.request.params.grammar for sequence in self.sequences):
            self.host_tree = host_copy(tree)

    def verify(
        self, logits: Tensor, tree: TokenTree, gumbel: Tensor | None, depth: int, starts: Tensor, graphs: CudaGraphs
    ) -> tuple[Verification, Outcome]:
        """Verify a tree of at most `depth` levels, and copy the outcome to the host. gumbel: the noise that `gumbel` returns
        for these starts, or None if no drafter uses it."""
        gumbel = self.gumbel(starts, depth + 1) if gumbel is None else gumbel
        allowed, failed = self.allowed(tree)
        if not self.below_min_tokens():
            self.ends = None
        state = gumbel, self.seen, self.counts, allowed, *((starts, *self.ends) if self.ends else (None,) * 3)
        # How many tokens top-p considers: on a host as many as each node needs, because nothing waits for a device.
        on_host = logits.device.type == "cpu" and not graphs.active
        for candidates in (None,) if on_host else (TOP_P_CANDIDATES, self.vocab):
            how = self.sampling.largest_k, candidates, depth
            choose = partial(choose_and_verify, *how)
            verification, valid = graphs(("verify", *how), choose, logits, *state, *tree, *self.sampling[:-1])
            outcome = to_host(verification, valid if failed is None else valid.masked_fill(failed, Validity.INVALID))
            if Validity.TOO_FEW not in outcome.valid:
                break
        return verification, outcome

    def allowed(self, tree: TokenTree) -> tuple[Tensor | None, Tensor | None]:
        """Return the tokens that the grammars allow after each node, and which grammars failed (see `allowed_tokens`). None,
        without waiting for the device, if no sequence has a grammar."""
        states: list[GrammarState | None] = []
        for sequence in self.sequences:
            grammar = sequence.request.params.grammar
            if grammar is not None and sequence.grammar is None:
                sequence.grammar = GrammarState(grammar)
            states.append(sequence.grammar if sequence.finish_reason is None else None)
        if not any(states):
            return None, None
        texts = [sequence.new_tokens for sequence in self.sequences]
        copy, self.host_tree = self.host_tree or host_copy(tree), None
        return allowed_tokens(states, texts, copy, self.vocab)


def host_copy(tree: TokenTree) -> HostCopy:
    return HostCopy(torch.stack([tree.tokens, tree.parents]))


def choose_and_verify(
    largest_k: int,
    candidates: int | None,
    depth: int,
    logits: Tensor,
    *state: Tensor | None,
) -> Any:
    """Verify as a function of tensors, which CUDA graphs can capture. candidates: as in `Sampling.warp`."""
    gumbel, seen, counts, allowed, starts, first, ends, *parts = state
    tree: Any = TokenTree(*parts[:4])  # type: ignore[arg-type]
    sampling = Sampling(*parts[4:], largest_k)  # type: ignore[call-arg,arg-type]
    logits = process_logits(sampling, logits, tree, seen, counts)
    logits = logits if allowed is None else mask_forbidden(logits, allowed)
    if starts is not None and first is not None and ends is not None:
        too_early = starts + tree.depths < first
        longer = logits.masked_fill(too_early[..., None] & ends, float("-inf"))
        is_complete = longer.amax(-1, keepdim=True) == float("-inf")  # a grammar or a bias only allows the end
        logits = torch.where(is_complete, logits, longer)
    logits, too_few = sampling.warp(logits, candidates)
    if gumbel is not None:
        rows = torch.arange(len(gumbel), device=logits.device)[:, None]
        logits = logits + gumbel[rows, tree.depths]
    verification = verify(tree, logits, depth)
    best = logits.gather(-1, verification.choices[..., None])[..., 0]  # argmax treats NaN as the maximum
    no_choice = ~(best > float("-inf"))
    return verification, validity(verification, no_choice, too_few)


def process_logits(
    sampling: Sampling,
    logits: Tensor,
    tree: TokenTree,
    seen: Tensor | None,
    counts: Tensor | None,
) -> Tensor:
    """Return logits (batch, nodes, vocab) after penalties and biases, each node with the text that leads to it. seen, counts:
    (batch, vocab), of the text so far, including the bonus token."""
    if seen is not None and counts is not None:
        nodes = tree.tokens.shape[1]
        path = tree.ancestors.clone()
        path[:, :, 0] = False  # `counts` includes the bonus token
        tokens = tree.tokens.clamp(min=0, max=counts.shape[-1] - 1)[:, None, :].expand(-1, nodes, -1)
        counts = counts[:, None].expand(-1, nodes, -1).scatter_add(2, tokens, path.long())
        seen = seen[:, None] | (counts > 0)
    return sampling.process(logits, counts, seen)
