"""What the target writes after each node of a tree, and so what is accepted of it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from heads.target.cuda_graphs import CudaGraphs
from inference.acceptance_rules import RULES
from inference.sampling import Noise, Sampling
from inference.tree import TokenTree
from inference.verify import Verification, verify

# Heads draft their best guesses, not samples of a law q: only these rules know how to judge that.
HEAD_RULES = ("tree_deterministic", "typical")


class TargetSampler:
    """The target's own choice after each node: warped logits plus the keyed noise of its position, then argmax."""

    def __init__(
        self, sampling: Sampling, noise: Noise | None, prompts: list[list[int]], vocab: int, device: torch.device
    ):
        self.sampling, self.noise = sampling, noise
        self.seen: Tensor | None = None
        if sampling.repetition_penalty is not None:
            self.seen = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self.seen[row, torch.tensor(prompt, device=device)] = True

    def gumbel(self, starts: Tensor, count: int) -> Tensor | None:
        """(batch, count, vocab): noise of the tokens at positions starts + 0 .. count - 1; starts (batch, 1)."""
        if self.noise is None:
            return None
        return self.noise.at(starts + torch.arange(count, device=starts.device))

    def note(self, tokens: Tensor, counts: Tensor) -> None:
        """Text that was added: of each row of `tokens` (batch, new) the first `counts` (batch,)."""
        if self.seen is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
            self.seen.scatter_(1, torch.where(real, tokens, tokens[:, :1]), True)

    def verdict(
        self, logits: Tensor, tree: TokenTree, gumbel: Tensor | None, depth: int, graphs: CudaGraphs
    ) -> tuple[Verification, Tensor]:
        """What is accepted of a tree at most `depth` deep, and whether any logit was not a number (a bool scalar)."""
        judge = partial(judged, self.sampling, depth)
        return graphs(("verify", self.sampling, depth), judge, logits, gumbel, self.seen, *tree)


def judged(
    sampling: Sampling, depth: int, logits: Tensor, gumbel: Tensor | None, seen: Tensor | None, *parts: Tensor
) -> tuple[Verification, Tensor]:
    """`Chooser.verdict` as a function of tensors, which can be replayed. parts: of a TokenTree."""
    tree = TokenTree(*parts)
    logits = warped(sampling, logits, tree, seen)
    if gumbel is not None:
        rows = torch.arange(len(gumbel), device=logits.device)[:, None]
        logits = logits + gumbel[rows, tree.depths]
    best = logits.max(-1)  # `max` carries a NaN on, so looking for one costs nothing more
    return verify(tree, best.indices, depth), best.values.isnan().any()


def warped(sampling: Sampling, logits: Tensor, tree: TokenTree, seen: Tensor | None) -> Tensor:
    """Logits (batch, nodes, vocab) after penalties and warpers, each node with the text that leads to it. seen: (batch,
    vocab) bool, tokens of the text so far."""
    if seen is None:
        return sampling.warp(logits)
    # A node's text is the row's and its ancestors'; where it has fewer, its root stands in.
    above = torch.where(tree.ancestors, tree.tokens[:, None, :], tree.tokens[:, :1, None]).clamp(min=0)
    of_nodes = seen[:, None].expand(-1, above.shape[1], -1).clone()
    return sampling.warp(logits.float(), of_nodes.scatter_(2, above, True))


class RuleSampler(TargetSampler):
    """A published rule in the place of the coupled one, to reproduce and compare: its draws are its own, not keyed by
    position, so a text depends on the drafter and equals the target's in law only. Plain Python, a host wait per node."""

    def __init__(self, rule: str, seeds: list[int], lossless: bool, *args: Any):
        super().__init__(*args)
        if rule not in HEAD_RULES:
            raise ValueError(f"rule={rule} is not one of coupled, {', '.join(HEAD_RULES)}")
        self.rule = partial(RULES[rule], lossless=lossless) if rule == "typical" else RULES[rule]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def verdict(
        self, logits: Tensor, tree: TokenTree, gumbel: Tensor | None, depth: int, graphs: CudaGraphs
    ) -> tuple[Verification, Tensor]:
        logits = warped(self.sampling, logits, tree, self.seen)
        if self.sampling.temperature == 0:
            laws = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        else:
            laws = logits.double().softmax(-1)
        counts, paths, tokens = [], [], []
        for row, generator in enumerate(self.generators):

            def draw(weights: Tensor, generator: torch.Generator = generator) -> int:
                return int(torch.multinomial(weights.cpu(), 1, generator=generator))

            parents = tree.parents[row].clone()
            parents[0] = -1
            path, last = self.rule(tree.tokens[row], parents, laws[row], None, draw)
            rest = [0] * (depth + 1 - len(path))
            counts.append(len(path))
            paths.append(path + rest)
            tokens.append([*tree.tokens[row, path[1:]].tolist(), last, *rest])
        # It draws behind the last accepted node only; of the others, drafters learn what is likeliest.
        new = tree.tokens.new_tensor
        verdict = Verification(new(counts), new(paths), new(tokens), laws.argmax(-1))
        return verdict, logits.isnan().any()
