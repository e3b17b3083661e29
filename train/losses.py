"""Measure how far a draft is from the target's distribution: the losses that `loss=NAME` selects from the table LOSSES.

    loss(draft, teacher) -> (n,) float32, one number per draft

Both are a `Prediction` of the same token, by the head and by the target. Reduction, weights per depth and masks belong to
train/module.py. p is the target's distribution and q the draft's; where the draft vocabulary is pruned, p is the target's
distribution given that the token can be drafted.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def to_float32(logits: Tensor) -> Tensor:
    """Convert to float32 at least: a softmax over a vocabulary is not for half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Prediction:
    """Hold logits. The teacher's are compared with the drafts of all depths, so probabilities are computed once."""

    logits: Tensor  # (n, draft vocab)
    hidden: Tensor  # (n, width): the hidden states that the logits were made of; the target's are (n, hidden)
    # (n,) int64, of a teacher: the tokens of the text as draft ids, -1 for those that have none.
    tokens: Tensor | None = None

    @cached_property
    def probabilities(self) -> Tensor:
        return to_float32(self.logits).softmax(-1)

    @cached_property
    def log_probabilities(self) -> Tensor:
        return to_float32(self.logits).log_softmax(-1)


def ce(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute the cross-entropy with the target's most probable token (Medusa, arXiv:2401.10774)."""
    return F.cross_entropy(to_float32(draft.logits), teacher.logits.argmax(-1), reduction="none")


def kl_div(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute the cross-entropy with the target's distribution (EAGLE-3, arXiv:2503.01840), with KL(p, q)'s gradient."""
    return SoftCrossEntropy.apply(to_float32(draft.logits), teacher.probabilities)


class SoftCrossEntropy(torch.autograd.Function):
    """Compute -sum p log softmax(logits), whose gradient q - p takes half of autograd's passes over the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1)
        ctx.save_for_backward(log_q, p)
        return -(p * log_q).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_q, p = ctx.saved_tensors
        return log_q.exp().sub_(p).mul_(gradient[..., None]), None


def rkl(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute KL(q, p): a draft that cannot follow all of p keeps to its peaks (DistillSpec, arXiv:2310.08461)."""
    q, p = to_float32(draft.logits).log_softmax(-1), teacher.log_probabilities
    return (q.exp() * (q - p)).sum(-1)


def tv(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute 1 - sum min(p, q): the chance that a draft is rejected (DistillSpec, arXiv:2310.08461)."""
    return 0.5 * (teacher.probabilities - to_float32(draft.logits).softmax(-1)).abs().sum(-1)


def l1(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute sum |p - q|, twice the total variation (DSpark, arXiv:2607.05147, whose code has the name)."""
    return 2 * tv(draft, teacher)


def label(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute the cross-entropy with the token of the text, which the target wrote itself, greedily or not (DFlash,
    arXiv:2602.06036). Raise ValueError if the tokens are not known."""
    if teacher.tokens is None:
        raise ValueError(
            "loss=label learns from the tokens of the text, and only heads that draft in blocks are given them: set loss=ce"
        )
    return F.cross_entropy(to_float32(draft.logits), teacher.tokens, reduction="none", ignore_index=-1)


def weighted_sum(draft: Prediction, teacher: Prediction, weights: dict[str, float]) -> Tensor:
    """Return the sum of the losses of these names, each with its default arguments and times its weight."""
    losses = [LOSSES[name].function(draft, teacher, **LOSSES[name].arguments) for name in weights]
    return torch.stack([weight * loss for weight, loss in zip(weights.values(), losses, strict=True)]).sum(0)


def lk_hybrid(draft: Prediction, teacher: Prediction, eta: float = 3.0) -> Tensor:
    """Compute w KL(p, q) + (1 - w) TV, w = exp(-eta * acceptance): total variation alone has no gradient from a bad start
    (arXiv:2602.23881, section 3, where w is one per depth and batch; here one per draft)."""
    distance = tv(draft, teacher)
    share = torch.exp(-eta * (1 - distance.detach()))
    p = teacher.log_probabilities
    return share * (kl_div(draft, teacher) + (p.exp() * p).sum(-1)) + (1 - share) * distance


def nla(draft: Prediction, teacher: Prediction) -> Tensor:
    """Compute -log sum min(p, q) of the expected acceptance (arXiv:2602.23881). Its gradient is total variation's over the
    acceptance, so that it learns from a bad start too, where total variation has hardly any gradient."""
    q, p = to_float32(draft.logits).log_softmax(-1), teacher.log_probabilities
    return -torch.minimum(q, p).logsumexp(-1)


def top_k(draft: Prediction, teacher: Prediction, k: int = 10) -> Tensor:
    """Compute the cross-entropy over the target's k likeliest tokens, p not renormalized (HASS, arXiv:2408.15766)."""
    p = teacher.probabilities
    best = p.topk(min(k, p.shape[-1]))
    return -(best.values * to_float32(draft.logits).log_softmax(-1).gather(-1, best.indices)).sum(-1)


def regression(
    draft: Prediction, teacher: Prediction, kl_weight: float = 0.1, top_k_weight: float = 0.0, k: int = 10
) -> Tensor:
    """Compute smooth L1 between hidden states, mean over their width, plus cross-entropies (EAGLE-1, arXiv:2401.15077,
    section 4.2; HASS with top_k_weight 1). Raise ValueError for a head whose drafts are not hidden states of the target."""
    if draft.hidden.shape != teacher.hidden.shape:
        raise ValueError(
            f"loss=regression compares hidden states of width {teacher.hidden.shape[-1]}, this head's have "
            f"{draft.hidden.shape[-1]}: choose loss=kl_div, or head=eagle"
        )
    loss = F.smooth_l1_loss(to_float32(draft.hidden), to_float32(teacher.hidden), reduction="none").mean(-1)
    if kl_weight:
        loss = loss + kl_weight * kl_div(draft, teacher)
    return loss + top_k_weight * top_k(draft, teacher, k) if top_k_weight else loss


class Loss(NamedTuple):
    """Describe an entry of the table of losses; `--help` shows its description."""

    description: str
    function: Callable[..., Tensor]
    arguments: dict[str, Any] = {}  # noqa: RUF012 -- in place of the function's own defaults


LOSSES = {
    "kl_div": Loss("cross-entropy with the target's whole distribution (EAGLE-3, Hydra++)", kl_div),
    "ce": Loss("cross-entropy with the target's most probable token (Medusa)", ce),
    "label": Loss("cross-entropy with the token of the text, for heads that draft in blocks (DFlash)", label),
    "tv": Loss("total variation distance, the probability that a draft is rejected (DistillSpec)", tv),
    "l1": Loss("sum of |p - q|, twice the total variation distance", l1),
    "rkl": Loss("KL divergence from the target's distribution to the head's, mode-seeking (DistillSpec)", rkl),
    "nla": Loss("negative log of the acceptance probability (LK, arXiv:2602.23881)", nla),
    "lk_hybrid": Loss("KL divergence for a bad draft, total variation for a good one (LK); eta=3.0", lk_hybrid),
    "top_k": Loss("cross-entropy over the target's k most probable tokens; k=10", top_k),
    "regression": Loss("smooth L1 on hidden states plus a small cross-entropy (EAGLE-1); kl_weight=0.1", regression),
    "hass": Loss(
        "regression plus top_k (HASS); kl_weight=0.1, top_k_weight=1.0, k=10", regression, {"top_k_weight": 1.0}
    ),
    "dspark": Loss(
        "0.9 l1 + 0.1 label (DSpark); other weights={NAME: W}", weighted_sum, {"weights": {"l1": 0.9, "label": 0.1}}
    ),
    "xpress": Loss("0.9 tv + 0.1 ce (xPress); weights={NAME: W}", weighted_sum, {"weights": {"tv": 0.9, "ce": 0.1}}),
}


def are_numbers(arguments: Any) -> bool:
    """Return whether the arguments of a loss, and its weights, are numbers as the losses take them."""
    if not isinstance(arguments, Mapping) or not isinstance(arguments.get("weights", {}), Mapping):
        return False
    values = [part for x in arguments.values() for part in (x.values() if isinstance(x, Mapping) else [x])]
    k = arguments.get("k", 1)
    return all(isinstance(value, int | float) for value in values) and type(k) is int and k > 0


def parts(name: str, arguments: Mapping[str, Any] | None = None) -> set[str]:
    """Return the names of the losses that such a loss is made of: its own, or those that it weighs."""
    given = LOSSES[name].arguments | dict(arguments or {})
    return set(given["weights"]) if LOSSES[name].function is weighted_sum else {name}


def build(name: str, arguments: Mapping[str, Any] | None = None) -> Callable[[Prediction, Prediction], Tensor]:
    """Return the loss that `loss=NAME loss_args={...}` selects. Raise ValueError for an unknown name or argument."""
    if name not in LOSSES:
        raise ValueError(f"loss={name} is not one of {', '.join(LOSSES)}")
    chosen = LOSSES[name]
    if not are_numbers({} if arguments is None else arguments):
        raise ValueError(f"loss_args={arguments} of loss={name}: give numbers, k a whole one above 0")
    given = chosen.arguments | dict(arguments or {})
    try:
        inspect.signature(chosen.function).bind(None, None, **given)
    except TypeError as error:
        raise ValueError(f"loss_args={dict(arguments or {})} of loss={name}: {error}") from None
    if chosen.function is weighted_sum:
        parts = given["weights"]
        unknown = sorted(part for part in parts if part not in LOSSES or LOSSES[part].function is weighted_sum)
        if unknown or not parts:
            raise ValueError(
                f"loss_args: weights names {unknown or 'nothing'}, and it weighs some of {', '.join(LOSSES)}"
            )
    return partial(chosen.function, **given)
