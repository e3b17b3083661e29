"""The losses of LiLiCorr and xPress against their papers' equations, one draft at a time."""

import pytest
import torch

from foredraft.train.block_losses import LatticeDistillation, SelfFedDistillation
from foredraft.train.blocks import Drafts
from foredraft.train.losses import kl_div, label
from tests.support.head_factory import make_head


@torch.no_grad()
@pytest.mark.parametrize("loss", [label, kl_div])
def test_lilicorr_learns_the_choice_after_the_texts_tokens_while_they_are_candidates(target, loss):
    weights = {"candidates_weight": 0.3, "margin_weight": 0.5, "regret_weight": 0.7}
    made = LatticeDistillation(make_head("lilicorr", target), target, loss, **weights)
    k = made.head.top_k
    scores, ids = torch.randn(3, 3, k), torch.stack([torch.randperm(320)[:k] for _ in range(9)]).view(3, 3, k)
    tokens = ids[..., 1].clone()  # the second candidate
    tokens[1, 1] = (set(range(320)) - set(ids[1, 1].tolist())).pop()
    counted = torch.ones_like(tokens).bool()
    counted[2, 0] = False
    base, teacher = torch.randn(3, 3, 320), torch.randn(3, 3, 320)
    correction = torch.cat([scores, ids.float()], -1)
    drafts = Drafts(base, correction, base, base, teacher, tokens, tokens[:, 0], counted)
    found = made.draft_loss(drafts, lambda logits: torch.zeros(3, 3))
    assert (found[1, 1:] == 0).all() and (found[2] == 0).all()
    for b, d in ((0, 0), (0, 1), (0, 2), (1, 0)):
        z, theirs = scores[b, d], drafts.teacher[b, d, ids[b, d]]
        right = theirs.softmax(0) if loss is kl_div else torch.eye(k)[1]
        ce = -(right * z.log_softmax(0)).sum()
        hinge = max(0.0, 2.0 - (z[1] - max(z[j] for j in range(k) if j != 1)).item())
        regret = sum(z.softmax(0)[j] * max(0.0, (theirs[1] - theirs[j]).item()) for j in range(k))
        assert found[b, d].item() == pytest.approx((0.3 * ce + 0.5 * hinge + 0.7 * regret).item(), rel=1e-4)
    before = made.draft_loss(drafts, lambda logits: logits.sum(-1)) - found
    torch.testing.assert_close(before, base.sum(-1), atol=1e-3, rtol=1e-4)  # of the logits before the choice


@torch.no_grad()
@pytest.mark.parametrize("kind", ["xpress", "xpress pruned, anchor first", "dspark", "domino"])
def test_xpress_learns_behind_its_own_drafts(target, kind):
    head = make_head(kind, target)
    made = SelfFedDistillation(head, target, kl_div, rounds=2, rounds_weight=0.4, before_weight=0.6)
    states = torch.randn(3, head.depth, head.width)
    base, bonus, seen = head.base_logits(states), torch.tensor([5, 6, 7]), []
    taught = head.condition_on_text(states, torch.randint(1, 300, (3, head.depth)))[..., head.width :]
    logits, tokens = made.corrected(base, states, taught), torch.zeros(3, head.depth).long()
    drafts = Drafts(states, taught, base, logits, base, tokens, bonus, tokens == 0)

    def compare(logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return logits.logsumexp(-1)

    found = made.draft_loss(drafts, compare)
    assert len(seen) == 4 and torch.equal(seen[0], logits) and torch.equal(seen[1], base)
    before = base
    for fed in seen[2:]:
        memory, token = torch.zeros(3, head.memory), bonus
        for d in range(head.depth):
            correction, memory = head.condition(d + 1, states[:, d], token, memory)
            expected = head.correct(base[:, d], states[:, d], correction, d + 1)
            torch.testing.assert_close(fed[:, d], expected, atol=1e-4, rtol=1e-4)
            token = head.to_target_ids(before[:, d].argmax(-1))
        before = fed
    parts = [each.logsumexp(-1) for each in seen]
    torch.testing.assert_close(found, parts[0] + 0.6 * parts[1] + 0.4 * (parts[2] + parts[3]) / 2)


def test_each_is_for_heads_of_its_own(target):
    with pytest.raises(ValueError, match="this objective is for head=lilicorr, and this is dspark"):
        LatticeDistillation(make_head("dspark", target), target, kl_div)
    for kind in ("dflash", "dflash2", "lilicorr"):
        with pytest.raises(ValueError, match=f"this objective is for .* and {kind} does not"):
            SelfFedDistillation(make_head(kind, target), target, kl_div)
    with pytest.raises(ValueError, match=r"objective\.rounds=0"):
        SelfFedDistillation(make_head("xpress", target), target, kl_div, rounds=0)
