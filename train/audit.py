"""Find out why a head's acceptance is low: compare its first guesses with the target's tokens on different text.

far more on training rows than on held-out rows   too little text: the head knows it by heart
far more on held-out rows than on the answers     another domain: the text is not what the prompts ask for
many tokens outside the vocabulary, or rare       the draft vocabulary is too small, or such text is missing
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.base import DraftHead
from foredraft.heads.target_model import Target
from foredraft.inference import generate
from foredraft.train import held_out
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.documents import Document, Documents
from foredraft.train.losses import kl_div
from foredraft.train.module import DistillationModel

RARE = 6  # occurrences in the training text below which a token is rare
LENGTH = 512  # of the packed rows


class Line(NamedTuple):
    text: str
    tokens: int  # that the first drafts name
    agreement: list[float]  # per depth: how often the first guess is the target's token
    outside: float  # share of the target's tokens that the draft vocabulary lacks
    rare: float  # share that occurs fewer than RARE times in the training text


def texts_of(
    target: Target, data: Corpus, prompts: Sequence[list[int]], max_new_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Return packed rows of what is compared, each of at most about 16,000 tokens: training and held-out text of `data`, and
    the target's greedy answers to `prompts`."""
    texts = {
        "training rows": data.train,
        "held-out rows": held_out.documents(target.text_tokenizer, data),
        "answers to the prompts": Documents.of([answer(target, prompt, max_new_tokens) for prompt in prompts]),
    }
    return {name: held_out.rows(documents, LENGTH, 0, target.context) for name, documents in texts.items()}


def audit(head: DraftHead, target: Target, texts: dict[str, list[dict[str, Any]]], counts: Tensor) -> list[Line]:
    """Return a line for each text of `texts_of`. head: in float32. counts: (vocab,) int64, of the training text's tokens."""
    model = DistillationModel(head, target, kl_div)
    return [line(name, model, rows, counts) for name, rows in texts.items()]


def answer(target: Target, prompt: list[int], max_new_tokens: int) -> Document:
    """Return a prompt and the target's greedy answer. Only the answer counts."""
    input_ids = torch.tensor([prompt], device=target.device)
    new = generate(target, None, input_ids, max_new_tokens=max_new_tokens).new_tokens[0]
    return Document([*prompt, *new], [False] * len(prompt) + [True] * len(new))


@torch.no_grad()
def line(name: str, model: DistillationModel, rows: list[dict[str, Any]], counts: Tensor) -> Line:
    head = model.head
    hits, named = torch.zeros(head.depth), torch.zeros(head.depth)
    seen: list[Tensor] = []
    for depth, guesses, best in model.guesses_of(rows):
        hits[depth - 1] += (guesses[:, 0] == best).sum().cpu()
        named[depth - 1] += len(best)
        if depth == 1:
            seen.append(best.cpu())
    tokens, ids = torch.cat(seen), head.draft_ids
    outside = 0.0 if ids is None else (~torch.isin(tokens, ids.cpu())).float().mean().item()
    rare = (counts[tokens] < RARE).float().mean().item()
    return Line(name, len(tokens), (hits / named.clamp(min=1)).tolist(), outside, rare)


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a table."""
    rows = [f"{'right first guesses':24}{'by depth':30}{'outside':>9}{'rare':>7}{'tokens':>8}"]
    for one in lines:
        shares = " ".join(f"{share:.2f}" for share in one.agreement[:6])
        rows.append(f"{one.text:24}{shares:30}{one.outside:9.1%}{one.rare:7.1%}{one.tokens:8,}")
    return "\n".join(rows)
