"""How far a draft is from the target's distribution. Every loss has one signature, so that a yaml can name any of them.

    loss(draft, teacher) -> (n,) float32, one number per draft

Both are a `Prediction` of the same token, by the head and by the target. Reduction, weights per depth and masks belong to
train/module.py. p is the target's distribution and q the draft's; where the draft vocabulary is pruned, p is the target's
distribution given that the token can be drafted.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def exact(logits: Tensor) -> Tensor:
    """In float32 at least: a softmax over a vocabulary is not for half precision."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True)
class Prediction:
    """The teacher's are compared with the drafts of all depths: their probabilities are computed once."""

    logits: Tensor  # (n, draft vocab)
    hidden: Tensor  # (n, width): the hidden states that the logits were made of; the target's are (n, hidden)
    # (n,) int64, of a teacher: the tokens of the text as draft ids, -1 for those that have none.
    tokens: Tensor | None = None

    @cached_property
    def probabilities(self) -> Tensor:
        return exact(self.logits).softmax(-1)

    @cached_property
    def log_probabilities(self) -> Tensor:
        return exact(self.logits).log_softmax(-1)


def hard(draft: Prediction, teacher: Prediction) -> Tensor:
    """Cross-entropy with the target's most probable token (Medusa, arXiv:2401.10774)."""
    return F.cross_entropy(exact(draft.logits), teacher.logits.argmax(-1), reduction="none")


def soft(draft: Prediction, teacher: Prediction) -> Tensor:
    """Cross-entropy with the target's distribution (EAGLE-3, arXiv:2503.01840); its gradient is that of KL(p, q)."""
    return SoftCrossEntropy.apply(exact(draft.logits), teacher.probabilities)


class SoftCrossEntropy(torch.autograd.Function):
    """-sum p log softmax(logits), whose gradient q - p takes half of autograd's passes over the vocabulary."""

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


def reverse_kl(draft: Prediction, teacher: Prediction) -> Tensor:
    """KL(q, p): a draft that cannot follow all of p keeps to its peaks (DistillSpec, arXiv:2310.08461)."""
    q, p = exact(draft.logits).log_softmax(-1), teacher.log_probabilities
    return (q.exp() * (q - p)).sum(-1)


def total_variation(draft: Prediction, teacher: Prediction) -> Tensor:
    """1 - sum min(p, q): the chance that a draft is rejected by the token-wise rule (DistillSpec, arXiv:2310.08461)."""
    return 0.5 * (teacher.probabilities - exact(draft.logits).softmax(-1)).abs().sum(-1)


def l1(draft: Prediction, teacher: Prediction) -> Tensor:
    """sum |p - q|, twice the total variation (DSpark, arXiv:2607.05147, in whose code it is called that)."""
    return 2 * total_variation(draft, teacher)


def label(draft: Prediction, teacher: Prediction) -> Tensor:
    """Cross-entropy with the token that stands in the text, which the target wrote itself, greedily or not (DFlash,
    arXiv:2602.06036). Raises ValueError where nobody says which that is."""
    if teacher.tokens is None:
        raise ValueError(
            "loss=label learns from the tokens of the text, which criterion=block has: choose loss=hard here"
        )
    return F.cross_entropy(exact(draft.logits), teacher.tokens, reduction="none", ignore_index=-1)


def weighted_sum(draft: Prediction, teacher: Prediction, weights: dict[str, float]) -> Tensor:
    """The losses of these names, each times its weight. Raises ValueError for one that is not here."""
    known = {loss.__name__: loss for loss in (hard, soft, reverse_kl, total_variation, l1, lk, coupled, top_k, label)}
    unknown = sorted(weights.keys() - known.keys())
    if unknown or not weights:
        raise ValueError(f"loss.weights names {unknown or 'nothing'}: it weighs some of {', '.join(known)}")
    return torch.stack([weight * known[name](draft, teacher) for name, weight in weights.items()]).sum(0)


def adaptive_lk(draft: Prediction, teacher: Prediction, eta: float = 3.0) -> Tensor:
    """w KL(p, q) + (1 - w) TV, w = exp(-eta * acceptance): total variation alone has no gradient from a bad start
    (arXiv:2602.23881, section 3, where w is one per depth and batch; here one per draft)."""
    distance = total_variation(draft, teacher)
    share = torch.exp(-eta * (1 - distance.detach()))
    p = teacher.log_probabilities
    return share * (soft(draft, teacher) + (p.exp() * p).sum(-1)) + (1 - share) * distance


def lk(draft: Prediction, teacher: Prediction) -> Tensor:
    """-log sum min(p, q): expected acceptance (arXiv:2602.23881). Its gradient is total variation's over the acceptance, so
    that it learns from a bad start too, where total variation has hardly any gradient."""
    q, p = exact(draft.logits).log_softmax(-1), teacher.log_probabilities
    return -torch.minimum(q, p).logsumexp(-1)


def coupled(draft: Prediction, teacher: Prediction, temperature: float = 1.0) -> Tensor:
    """-log of the chance that draft and target choose the same token at this temperature by the same noise, as the verifier
    has them do. With shared Gumbel noise token i wins both races with probability 1 / sum_j max(p_j / p_i, q_j / q_i), so
    no noise need be drawn: sorted by q / p, each such sum is a part of p's and a part of q's cumulative sum. Ours."""
    log_q = (exact(draft.logits) / temperature).log_softmax(-1)
    log_p = teacher.log_probabilities if temperature == 1 else (exact(teacher.logits) / temperature).log_softmax(-1)
    order = (log_q.detach() - log_p).argsort(-1)
    log_p, log_q = log_p.gather(-1, order), log_q.gather(-1, order)
    tiny = torch.finfo(log_q.dtype).tiny
    below = log_p.exp().cumsum(-1).clamp(min=tiny).log()
    q = log_q.exp()
    above = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp(min=tiny).log()
    return -(log_p + log_q - torch.logaddexp(below + log_q, above + log_p)).logsumexp(-1)


def top_k(draft: Prediction, teacher: Prediction, k: int = 10) -> Tensor:
    """Cross-entropy over the target's k most probable tokens only, p not renormalised (HASS, arXiv:2408.15766)."""
    p = teacher.probabilities
    best = p.topk(min(k, p.shape[-1]))
    return -(best.values * exact(draft.logits).log_softmax(-1).gather(-1, best.indices)).sum(-1)


def regression(
    draft: Prediction, teacher: Prediction, soft_weight: float = 0.1, top_k_weight: float = 0.0, k: int = 10
) -> Tensor:
    """Smooth L1 between hidden states, mean over their width, plus cross-entropies (EAGLE-1, arXiv:2401.15077, section 4.2;
    HASS with top_k_weight 1). Raises ValueError for a head whose drafts are no hidden states of the target."""
    if draft.hidden.shape != teacher.hidden.shape:
        raise ValueError(
            f"loss=regression compares hidden states of width {teacher.hidden.shape[-1]}, this head's have "
            f"{draft.hidden.shape[-1]}: choose loss=soft, or head=eagle"
        )
    loss = F.smooth_l1_loss(exact(draft.hidden), exact(teacher.hidden), reduction="none").mean(-1)
    if soft_weight:
        loss = loss + soft_weight * soft(draft, teacher)
    return loss + top_k_weight * top_k(draft, teacher, k) if top_k_weight else loss
