"""The parity gate: training forward, drafter, and the files read back must draft the same logits.

"Training accuracy is high, acceptance in the engine is bad" is the field's commonest complaint; its causes (positions,
aux hidden states of another layer, a norm, a shift, a lost config field) all show as a difference here. It runs before the
first step, so that a head that cannot be saved fails then, and before every save that is final.

The head and the target's lm_head compute in float32, and the target's layers in the dtype they were loaded in: a second copy
in float32 would need as much memory again. A target in half precision rounds a short and a long forward differently, so there
both get the aux hidden states of one.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.heads.base import BlockHead, DraftHead, PackedBatch, RecurrentHead
from foredraft.heads.caches import cuda_graphs
from foredraft.heads.checkpoint import load_head
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.packing import PackedLinear
from foredraft.heads.target_model.sharding import full_tensor
from foredraft.inference.drafters import drafter_for
from foredraft.inference.drafters.base import Accepted
from foredraft.inference.sampling import Sampling, SamplingParams

TOLERANCE = 1e-3  # of logits that are computed in float32
ROUNDINGS = 8  # of the largest logit, where a target in half precision computes it
ROWS = 1 << 13  # of the target's lm_head that are in float32 at a time


@contextlib.contextmanager
def float32_lm_head(target: Target) -> Iterator[bool]:
    """Let `target.logits` compute in float32, where its lm_head has plain weights; whether it does. A tolerance for the
    rounding of a bfloat16 lm_head would hide every small mistake of a head that drafts with it."""
    head = target.model.get_output_embeddings()
    plain = isinstance(head, nn.Linear | PackedLinear)
    weight = full_tensor(head.weight) if plain else torch.empty(0, dtype=torch.int8)
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        yield False
        return

    def logits(hidden: Tensor) -> Tensor:
        parts = [F.linear(hidden.float(), rows.float()) for rows in weight.to(hidden.device).split(ROWS)]
        bias = 0 if head.bias is None else head.bias.float().to(hidden.device)
        return target.scaled((torch.cat(parts, dim=-1) + bias)[..., : target.vocab_size])

    target.logits = logits  # type: ignore[method-assign]
    try:
        yield True
    finally:
        del target.logits


def tolerance(head: DraftHead, target: Target, exact: bool, logits: Tensor) -> float:
    """Return the difference that rounding may make. exact: are the target's logits in float32?"""
    if head.projections or exact or target.dtype == torch.float32 or not target.dtype.is_floating_point:
        return TOLERANCE
    return max(TOLERANCE, ROUNDINGS * torch.finfo(target.dtype).eps * logits.abs().max().item())


def read(target: Target, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    """Return the aux hidden states of a text (1, length). If the target's layers are not loaded, return a substitute: what
    is compared must be the same whatever a head takes."""
    if not target.embeddings_only:
        return target.forward(tokens, layers=layers, keep_logits=1).aux_hidden_states
    embeddings = target.embed(tokens)
    return torch.cat([embeddings[..., :0], *(embeddings.roll(layer, -1) for layer in layers)], dim=-1)


def drafted_logits(head: DraftHead, target: Target, prompt: list[int], bonus: int) -> tuple[list[int], list[Tensor]]:
    """Return what the drafter itself drafts after `prompt` and `bonus`: a chain, and the logits of each depth."""
    options: dict[str, Any] = {}
    if isinstance(head, RecurrentHead | BlockHead):
        options = {"width": 1, "depth": head.depth, "min_probability": 0.0}
    only_first = [[1.0] for _ in range(head.depth)]  # for a static tree: the best guess of every depth, a chain
    with cuda_graphs.disabled():  # a capture calls the head once more
        drafter = drafter_for(head, target, accuracies=only_first, nodes=head.depth + 1, **options)
    seen: list[Tensor] = []
    name = "correct" if isinstance(head, BlockHead) else "logits"  # the last to see a draft's logits
    original = getattr(head, name)

    def record(*args: Any) -> Tensor:
        seen.append(original(*args))
        return seen[-1]

    tokens = torch.tensor([prompt], device=target.device)
    text = [*prompt, bonus]
    states = read(target, tokens, drafter.layers)
    accepted = Accepted(torch.tensor([text[1:]], device=target.device), states, [len(prompt)], [text])
    drafter.begin(1, len(prompt) + 2 * head.depth + 2, Sampling.of([SamplingParams()], target.vocab_size))
    setattr(head, name, record)
    try:
        chain = drafter.propose(accepted, None).tokens[0].tolist()[1:]
    finally:
        delattr(head, name)
    return chain, list(torch.cat([logits.flatten(0, -2) for logits in seen]).float())


def trained_logits(head: DraftHead, target: Target, text: list[int], start: int) -> list[Tensor]:
    """Return draft logits per depth of the training forward, for drafts that start at position `start` of `text`."""
    tokens = torch.tensor([text], device=target.device)
    length = torch.arange(len(text), device=target.device)[None]
    batch = PackedBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), length)
    aux_hidden_states = read(target, tokens, head.layers)
    if target.dtype != torch.float32:  # of the drafter's own forward, up to where the drafts start
        prompt = tokens[:, : start + 1]
        aux_hidden_states[:, : start + 1] = read(target, prompt, head.layers)
    outs = head(aux_hidden_states, target.embed(tokens), batch)
    if len(outs) != head.depth:
        raise ValueError(
            f"{type(head).__name__}.forward returns drafts of {len(outs)} depths, and its depth is {head.depth}"
        )
    return [head.logits(out, depth)[0, start + depth - 1].float() for depth, out in enumerate(outs, start=1)]


@torch.no_grad()
def check(head: DraftHead, target: Target, prompt: list[int], saved: Path | None = None) -> float:
    """Return the largest difference between the three; raise ValueError if one is above `tolerance`, with its place. `prompt`
    needs two tokens.

    head: in float32. saved: the directory to read back.
    """
    heads = {"the drafter": head}
    if saved is not None:
        heads["the drafter with the saved files"] = load_head(saved, target, dtype=torch.float32, strict=True)
    head.eval()
    head.attach(target)
    worst = 0.0
    with float32_lm_head(target) as exact:
        for cut in (len(prompt) // 2, len(prompt) - 1):
            before, bonus = prompt[:cut], prompt[cut]
            for who, reader in heads.items():
                chain, drafted = drafted_logits(reader, target, before, bonus)
                text = [*before, bonus, *chain, 0]
                # A GPU compiles its kernel for one length.
                text += [0] * (len(prompt) + head.depth + 1 - len(text))
                trained = trained_logits(head, target, text, cut - 1)
                for depth, (ours, theirs) in enumerate(zip(trained, drafted, strict=True), start=1):
                    difference, most = (ours - theirs).abs().max().item(), tolerance(head, target, exact, ours)
                    if not math.isfinite(difference):
                        raise ValueError(f"parity gate: at depth {depth} the draft's logits are not finite numbers")
                    if difference > most:
                        raise ValueError(
                            f"parity gate: at depth {depth} the training forward and {who} differ by {difference:.3g} in the "
                            f"draft's logits (more than {most:.3g}); nothing is called final until they agree"
                        )
                    worst = max(worst, difference)
    return worst
