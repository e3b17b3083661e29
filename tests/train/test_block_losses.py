"""The losses of xPress against its paper's equations, one draft at a time."""

import pytest
import torch

from foredraft.train.block_losses import SelfFedDistillation
from foredraft.train.blocks import Drafts
from foredraft.train.losses import kl_div
from tests.support.head_factory import make_head


@torch.no_grad()
@pytest.mark.parametrize("kind", ["xpress", "xpress pruned, anchor first", "dspark", "domino"])
def test_xpress_learns_behind_its_own_drafts(target, kind):
    head = make_head(kind, target)
    made = SelfFedDistillation(head, target, kl_div, rounds=2, rounds_weight=0.4, before_weight=0.6)
    states = torch.randn(3, head.depth, head.width)
    base, bonus, seen = head.base_logits(states), torch.tensor([5, 6, 7]), []
    taught = head.condition_on_text(states, torch.randint(1, 300, (3, head.depth)))[..., head.width :]
    logits, tokens = made.corrected(base, states, taught), torch.zeros(3, head.depth).long()
    drafts = Drafts(states, taught, base, logits, base, tokens, bonus)

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
    for kind in ("dflash", "dflash2"):
        with pytest.raises(ValueError, match=f"this objective is for .* and {kind} does not"):
            SelfFedDistillation(make_head(kind, target), target, kl_div)
    with pytest.raises(ValueError, match=r"objective\.rounds=0"):
        SelfFedDistillation(make_head("xpress", target), target, kl_div, rounds=0)
