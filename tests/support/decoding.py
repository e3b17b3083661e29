"""Requests, an engine that decodes them to their end, and drafters: random guesses, the same in every step, and one of each
sort."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.heads import Target
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.inference import Engine, Request, SamplingParams, generate
from foredraft.inference import drafters as kinds
from foredraft.inference.drafters import AutoTree, DraftModel, DynamicTree, NgramDrafter, StaticTree, Union
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only, chains
from foredraft.inference.sampling import Sampling
from foredraft.inference.tree import from_parents
from tests.support import batches
from tests.support.tiny import random_model


def with_trees(target: Target) -> Target:
    """Let drafts be trees by default, as on a GPU."""
    target.capabilities.prefers_chains = False
    return target


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.3},
    "greedy with penalty": {"repetition_penalty": 1.3},
}
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(frequency_penalty=0.6, logit_bias=((7, 2.0), (9, float("-inf")))),
]


def prompt(length: int, seed: int) -> list[int]:
    return batches.prompt(length, seed)[0].tolist()


def requests() -> list[Request]:
    """Return six requests of different lengths, budgets and settings."""
    sizes = zip((3, 11, 1, 7, 5, 9), (12, 30, 5, 18, 1, 24), PARAMS, strict=True)
    return [Request(prompt(length, i), params, new, seed=i) for i, (length, new, params) in enumerate(sizes)]


def run(
    engine: Engine, asked: Sequence[Request], between: Callable[[int], object] = lambda step: None, *late: Request
) -> tuple[list[list[int]], list[str | None]]:
    """Return texts and reasons; between(step) is called before each step, and adds late requests."""
    texts, reasons = {request: [] for request in (*asked, *late)}, dict.fromkeys((*asked, *late))
    for request in asked:
        engine.add(request)
    step = 0
    while engine.has_work:
        between(step)
        if engine.has_work:
            for output in engine.step():
                texts[output.request] += output.tokens
                reasons[output.request] = output.finish_reason
        step += 1
    return list(texts.values()), list(reasons.values())


def alone(target: Target, asked: Sequence[Request]) -> list[list[int]]:
    """Return each request's text, decoded separately and without drafts."""
    return [run(Engine(target), [request])[0][0] for request in asked]


def check_drafts(target: Target, drafter: Drafter | None, prompt: Tensor, *mask: Tensor, **settings: Any) -> None:
    """Check that something is drafted, and that the text is the target's own."""
    settings = {"max_new_tokens": 12, "eos_token_id": -1} | settings
    drafted = generate(target, drafter, prompt, *mask, **settings)
    assert drafted.new_tokens == generate(target, None, prompt, *mask, **settings).new_tokens
    assert any(step.nodes > 1 for step in drafted.steps)


class Random(Drafter):
    """Draft a random tree of random tokens, another one in every step."""

    depth, nodes = 4, 9

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.generator = torch.Generator().manual_seed(batch)

    def propose(self, accepted: Accepted, gumbel: Tensor | None):
        bonus = bonus_only(accepted).tokens
        tokens = torch.randint(0, 40, (len(bonus), 8), generator=self.generator)
        parents = torch.tensor([[0, 0, 0, 1, 1, 3, 3, 5, 5]] * len(bonus))
        return from_parents(torch.cat([bonus, tokens], 1), parents, 4)


class OneBranch(Drafter):
    """Draft the same tokens in every step and record what it observes."""

    def __init__(self, draft: list[int]):
        self.drafted, self.depth, self.nodes = draft, len(draft), len(draft) + 1
        self.observed: list = []

    def propose(self, step: Accepted, gumbel: Tensor | None):
        return chains(step, [self.drafted] * len(step.text))

    def observe(self, paths: list[list[int]], choices: Tensor) -> None:
        self.observed.append((paths, choices.tolist()))


class Oracle(Drafter):
    """Draft what each sequence will write, correctly up to a random depth and incorrectly from there on, or always
    correctly."""

    depth, nodes, branches = 5, 6, False

    def __init__(self, texts: list[list[int]], vocab: int, right: bool = False):
        """Remember texts, which are prompts with their continuations."""
        self.texts, self.vocab, self.right = texts, vocab, right

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        self.luck = random.Random(7)

    def propose(self, accepted: Accepted, gumbel: Tensor | None):
        drafts = []
        for so_far in accepted.text:
            text = next((text for text in self.texts if text[: len(so_far)] == so_far), so_far)
            draft = text[len(so_far) :][: self.depth]
            right = self.depth if self.right else self.luck.randrange(self.depth + 1)
            drafts.append(draft[:right] + [(token + 1) % self.vocab for token in draft[right:]])
        return chains(accepted, drafts)


def drafters(target) -> dict[str, Drafter]:
    counts = torch.arange(target.vocab_size)
    head = Eagle3Head.for_target(target, ttt_steps=4, draft_vocab_size=200, counts=counts).eval()

    def tree() -> DynamicTree:
        return DynamicTree(head, target, nodes=10, depth=4, width=3, min_probability=0)

    block = DFlashHead.for_target(target, block_size=4, num_hidden_layers=2, target_layer_ids=[1]).eval()
    medusa = MedusaHead.for_target(target, num_heads=3)
    for stack in medusa.stacks:
        torch.nn.init.normal_(stack[-1].weight, std=0.5)
    return {
        "random": Random(),
        "ngram": NgramDrafter(),
        "suffix": kinds.SuffixDrafter(),
        "lookahead": kinds.Lookahead(),
        "medusa": StaticTree(medusa.eval(), target, nodes=9),
        "eagle3": tree(),
        "eagle3 auto": AutoTree(tree(), target),
        "medusa auto": AutoTree(StaticTree(medusa.eval(), target, nodes=9), target),
        "draft model": DraftModel(random_model(5, device=target.device), target, min_probability=0),
        "itself": DraftModel(target, target, nodes=5, depth=3, width=2, min_probability=0),
        "eagle3 chain": DynamicTree(head, target, nodes=5, depth=4, width=1, min_probability=0),
        "dflash": kinds.BlockTree(block, target, nodes=8),
        "union": Union([tree(), NgramDrafter()]),
        "union of auto": Union([AutoTree(tree(), target), NgramDrafter(depth=2)]),
    }
