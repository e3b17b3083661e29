"""What the target writes after each node of a tree, and so what is accepted of it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.target.cuda_graphs import CudaGraphs
from foredraft.inference.acceptance_rules import RULES
from foredraft.inference.grammar import GrammarState, allowed_tokens, forbid
from foredraft.inference.request import SequenceState
from foredraft.inference.sampling import Noise, Sampling
from foredraft.inference.tree import TokenTree
from foredraft.inference.verify import Verification, verify

# Heads draft their best guesses, not samples of a distribution q: only these rules know how to judge that.
HEAD_RULES = ("tree_deterministic", "typical")


class TargetSampler:
    """The target's own choice after each node: processed logits plus the keyed noise of its position, then argmax."""

    def __init__(self, rows: Sequence[SequenceState], vocab: int, device: torch.device):
        params = [row.request.params for row in rows]
        self.rows, self.vocab = rows, vocab
        self.sampling = Sampling.of(params, vocab, device)
        self.noise: Noise | None = None
        if self.sampling.temperature is not None:
            self.noise = Noise([row.request.seed for row in rows], vocab, device)
        self.seen: Tensor | None = None  # (batch, vocab) bool: tokens of prompt and text
        self.counts: Tensor | None = None  # (batch, vocab) int64: how often the new text has each
        if any(one.penalises for one in params):
            self.seen = torch.zeros(len(rows), vocab, dtype=torch.bool, device=device)
            self.counts = torch.zeros(len(rows), vocab, dtype=torch.int64, device=device)
            for number, row in enumerate(rows):
                self.seen[number, torch.tensor(row.text, device=device)] = True
                self.counts[number] = torch.bincount(torch.tensor(row.new_tokens, dtype=torch.int64), minlength=vocab)

    def gumbel(self, starts: Tensor, count: int) -> Tensor | None:
        """(batch, count, vocab): noise of the tokens at positions starts + 0 .. count - 1; starts (batch, 1). None where
        all rows are greedy, 0 in greedy rows among others."""
        if self.noise is None:
            return None
        noise = self.noise.at(starts + torch.arange(count, device=starts.device))
        assert self.sampling.temperature is not None
        return noise * (self.sampling.temperature > 0) if self.sampling.mixed else noise

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Text that was added: of each row of `tokens` (batch, new) the first `counts` (batch,)."""
        if self.seen is not None and self.counts is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
            self.counts.scatter_add_(1, tokens.clamp(min=0), real.long())
            self.seen |= self.counts > 0

    def verify(
        self, logits: Tensor, tree: TokenTree, gumbel: Tensor | None, depth: int, graphs: CudaGraphs
    ) -> tuple[Verification, Tensor]:
        """What is accepted of a tree at most `depth` deep, and in which rows a logit was not a number (batch,) bool."""
        choose = partial(choose_and_verify, self.sampling.key, depth)
        allowed, failed = self.allowed(tree)
        state = gumbel, self.seen, self.counts, allowed
        key = "verify", self.sampling.key, depth
        verification, broken = graphs(key, choose, logits, *state, *tree, *self.sampling.tensors)
        return verification, broken if failed is None else broken | failed

    def allowed(self, tree: TokenTree) -> tuple[Tensor | None, Tensor | None]:
        """What the rows' grammars allow after each node, and which of them failed (see `allowed_tokens`); None and no wait
        for the device where no row has a grammar."""
        states: list[GrammarState | None] = []
        for row in self.rows:
            grammar = row.request.params.grammar
            if grammar is not None and row.grammar is None:
                row.grammar = GrammarState(grammar)
            states.append(row.grammar if row.finish_reason is None else None)
        if not any(states):
            return None, None
        return allowed_tokens(states, [row.new_tokens for row in self.rows], tree.tokens, tree.parents, self.vocab)


def choose_and_verify(key: tuple[bool, int], depth: int, logits: Tensor, *state: Tensor | None) -> Any:
    """`TargetSampler.verify` as a function of tensors, which can be captured."""
    gumbel, seen, counts, allowed, *parts = state
    tree: Any = TokenTree(*parts[:4])  # type: ignore[arg-type]
    logits = processed(Sampling.from_tensors(parts[4:], key), logits, tree, seen, counts, allowed)
    if gumbel is not None:
        rows = torch.arange(len(gumbel), device=logits.device)[:, None]
        logits = logits + gumbel[rows, tree.depths]
    best = logits.max(-1)  # `max` carries a NaN on, so looking for one costs nothing more
    return verify(tree, best.indices, depth), best.values.isnan().any(1)


def processed(
    sampling: Sampling,
    logits: Tensor,
    tree: TokenTree,
    seen: Tensor | None,
    counts: Tensor | None,
    allowed: Tensor | None,
) -> Tensor:
    """Logits (batch, nodes, vocab) after penalties, biases, grammars and warpers, each node with the text that leads to it.
    seen, counts: (batch, vocab), of the text so far, the root included. allowed: see `allowed_tokens`."""
    if seen is not None and counts is not None:
        nodes = tree.tokens.shape[1]
        path = tree.ancestors.clone()
        path[:, :, 0] = False  # the root is counted already
        tokens = tree.tokens.clamp(min=0)[:, None, :].expand(-1, nodes, -1)
        counts = counts[:, None].expand(-1, nodes, -1).scatter_add(2, tokens, path.long())
        seen = seen[:, None] | (counts > 0)
    logits = sampling.process(logits, counts, seen)
    return sampling.warp(logits if allowed is None else forbid(logits, allowed))


class RuleSampler(TargetSampler):
    """A published rule in the place of the coupled one, to reproduce and compare: its draws are its own, not keyed by
    position, so a text depends on the drafter and equals the target's in distribution only. Plain Python, a host wait
    per node."""

    def __init__(self, rule: str, lossless: bool, rows: Sequence[SequenceState], vocab: int, device: torch.device):
        super().__init__(rows, vocab, device)
        if rule not in HEAD_RULES:
            raise ValueError(f"rule={rule} is not one of coupled, {', '.join(HEAD_RULES)}")
        self.rule = partial(RULES[rule], lossless=lossless) if rule == "typical" else RULES[rule]
        self.noise = None
        for row in rows:
            row.generator = row.generator or torch.Generator().manual_seed(row.request.seed)
        self.generators = [row.generator for row in rows]

    def verify(
        self, logits: Tensor, tree: TokenTree, gumbel: Tensor | None, depth: int, graphs: CudaGraphs
    ) -> tuple[Verification, Tensor]:
        allowed, failed = self.allowed(tree)
        logits = processed(self.sampling, logits, tree, self.seen, self.counts, allowed)
        probabilities = logits.double().softmax(-1)
        if self.sampling.temperature is None:
            probabilities = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        counts, paths, tokens = [], [], []
        for row, generator in enumerate(self.generators):
            path, last = self.judge(tree, row, probabilities[row], generator)
            rest = [0] * (depth + 1 - len(path))
            counts.append(len(path))
            paths.append(path + rest)
            tokens.append([*tree.tokens[row, path[1:]].tolist(), last, *rest])
        # It draws after the last accepted node only; of the others, drafters learn what is likeliest.
        new = tree.tokens.new_tensor
        broken = logits.isnan().flatten(1).any(1)
        broken = broken if failed is None else broken | failed
        return Verification(new(counts), new(paths), new(tokens), probabilities.argmax(-1)), broken

    def judge(
        self, tree: TokenTree, row: int, probabilities: Tensor, generator: torch.Generator | None
    ) -> tuple[list[int], int]:
        """The accepted path of one row, and the token after it. Padding (token -1) is not shown to the rule."""
        real = [node for node, token in enumerate(tree.tokens[row].tolist()) if node == 0 or token >= 0]
        place = {node: number for number, node in enumerate(real)}
        parents = [-1] + [place[parent] for parent in tree.parents[row, real[1:]].tolist()]

        def draw(weights: Tensor) -> int:
            return int(torch.multinomial(weights.cpu(), 1, generator=generator))

        tokens = tree.tokens[row, real]
        path, last = self.rule(tokens, tokens.new_tensor(parents), probabilities[real], None, draw)
        return [real[node] for node in path], last
