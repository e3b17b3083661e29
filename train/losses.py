"""How far a draft is from what the target says. Every loss has one signature, so that a yaml can name any of them.

    loss(draft, answer) -> (n,) float32, one number per draft

draft: (n, draft vocab) logits of the head. answer: (n, draft vocab) logits of the target for the same token, cut to the
draft vocabulary (its softmax is then the target's law given that the token can be drafted). Reduction, weights per depth and
masks are the trainer's business.
"""

from torch import Tensor
from torch.nn import functional as F


def hard(draft: Tensor, answer: Tensor) -> Tensor:
    """Cross-entropy with the target's most probable token (Medusa, arXiv:2401.10774)."""
    return F.cross_entropy(draft.float(), answer.argmax(-1), reduction="none")


def soft(draft: Tensor, answer: Tensor) -> Tensor:
    """Cross-entropy with the target's distribution (EAGLE-3, arXiv:2503.01840); its gradient is that of the forward KL."""
    return -(answer.float().softmax(-1) * draft.float().log_softmax(-1)).sum(-1)


def total_variation(draft: Tensor, answer: Tensor) -> Tensor:
    """1 - sum min(p, q): the chance that a draft is rejected by the token-wise rule (DistillSpec, arXiv:2310.08461)."""
    return 0.5 * (answer.float().softmax(-1) - draft.float().softmax(-1)).abs().sum(-1)
