"""Loss, hits and counts of a batch against a loop over every draft."""

import pytest
import torch

from foredraft.heads import Target
from foredraft.train.losses import Prediction, kl_div
from foredraft.train.module import DistillationModel
from tests.support.batches import packed
from tests.support.head_factory import make_head


@pytest.mark.parametrize(("kind", "few"), [("eagle3", False), ("medusa", False), ("medusa", True)])
def test_the_objective_is_the_sum_over_all_drafts(target: Target, kind: str, few: bool) -> None:
    text = packed((9, 6), (8,))
    text.loss_mask[:, 2] = False
    if few:  # tokens in the loss: the first depths have one draft, the others have none
        text.loss_mask[:] = False
        text.loss_mask[0, 3] = True
    head, wanted = make_head(kind, target), torch.zeros(())
    made = DistillationModel(head, target, kl_div, depth_decay=0.5, chunk=4)
    weights = torch.rand(text.tokens.shape)
    outcome = made(*text[:4], weights=weights)
    hidden, last = made.forward_target(text)
    logits, ids = target.logits(last), torch.arange(target.vocab_size) if head.draft_ids is None else head.draft_ids
    for depth, states in enumerate(head(hidden, target.embed(text.tokens), text), start=1):
        losses, hits = [], 0
        for row, documents in enumerate(text.documents.tolist()):
            for start in range(len(documents) - 1 - depth):
                named = start + 1 + depth
                if documents[start] == documents[named] >= 0 and text.loss_mask[row, named]:
                    state, teacher = states[row, named - 2], logits[row, named - 1]
                    draft = head.logits(state, depth)
                    best = teacher.argmax()
                    hits += int(ids[draft.argmax()] == best)
                    loss = kl_div(Prediction(draft, state), Prediction(teacher[ids], last[row, named - 1]))
                    losses.append(weights[row, named] * loss if best in ids else 0 * loss)
        assert (outcome.counts[depth - 1], outcome.hits[depth - 1]) == (len(losses), hits)
        wanted = wanted + 0.5 ** (depth - 1) * sum(losses) / max(1, len(losses))
    assert outcome.hits.sum() > 0 or kind == "eagle3" or few
    torch.testing.assert_close(outcome.loss, wanted)
