"""Each loss of the table against its formula, its gradient against differences, and objectives against loops over drafts."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from foredraft.heads import Target
from foredraft.train import losses
from foredraft.train.blocks import Drafts, SelfFedDistillation
from foredraft.train.losses import Prediction, kl_div
from foredraft.train.module import DistillationModel
from tests.support.batches import packed
from tests.support.head_factory import make_head

LOSSES = {name: losses.build(name) for name in losses.LOSSES}


def pair() -> tuple[Prediction, Prediction]:
    tokens = torch.tensor([0, 8, 3, 3, 5])
    return tuple(Prediction(2 * torch.randn(5, 12), 2 * torch.randn(5, 4), tokens) for _ in range(2))  # type: ignore[return-value]


def cast(prediction: Prediction, dtype: torch.dtype) -> Prediction:
    return replace(prediction, logits=prediction.logits.to(dtype), hidden=prediction.hidden.to(dtype))


def formulas(draft: Prediction, answer: Prediction) -> dict[str, torch.Tensor]:
    """Return every loss written out token by token, with no function of torch that the losses use but exp, log and abs."""
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for row in range(len(draft.logits)):
        q = torch.exp(draft.logits[row]) / torch.exp(draft.logits[row]).sum()
        p = torch.exp(answer.logits[row]) / torch.exp(answer.logits[row]).sum()
        order = sorted(range(len(p)), key=lambda token: -p[token])
        rows["ce"].append(-q[order[0]].log())
        rows["kl_div"].append(sum(-p[token] * q[token].log() for token in order))
        rows["rkl"].append(sum(q[token] * (q[token] / p[token]).log() for token in order))
        overlap = sum(min(p[token], q[token]) for token in order)
        rows["tv"].append(1 - overlap)
        rows["nla"].append(-overlap.log())
        rows["top_k"].append(sum(-p[token] * q[token].log() for token in order[:10]))
        rows["l1"].append(sum((p[token] - q[token]).abs() for token in order))
        rows["label"].append(-q[answer.tokens[row]].log())
        rows["dspark"].append(0.9 * rows["l1"][-1] + 0.1 * rows["label"][-1])
        rows["xpress"].append(0.9 * rows["tv"][-1] + 0.1 * rows["ce"][-1])
        divergence = sum(p[token] * (p[token] / q[token]).log() for token in order)
        share = torch.exp(-3 * overlap)
        rows["lk_hybrid"].append(share * divergence + (1 - share) * (1 - overlap))
        gaps = (draft.hidden[row] - answer.hidden[row]).abs()
        smooth = sum(gap - 0.5 if gap > 1 else 0.5 * gap * gap for gap in gaps) / len(gaps)
        rows["regression"].append(smooth + 0.1 * rows["kl_div"][-1])
        rows["hass"].append(rows["regression"][-1] + rows["top_k"][-1])
    return {name: torch.stack(values) for name, values in rows.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name):
    draft, answer = pair()
    torch.testing.assert_close(LOSSES[name](draft, answer), formulas(draft, answer)[name])


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"lk_hybrid"}))  # whose share has no gradient
def test_a_gradient_is_the_losss(name):
    draft, answer = (cast(prediction, torch.float64) for prediction in pair())
    inputs = draft.logits.requires_grad_(), draft.hidden.requires_grad_()
    assert torch.autograd.gradcheck(lambda logits, hidden: LOSSES[name](Prediction(logits, hidden), answer), inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name):
    draft, answer = (cast(prediction, torch.bfloat16) for prediction in pair())
    wide = [cast(prediction, torch.float32) for prediction in (draft, answer)]
    loss = LOSSES[name](draft, answer)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, LOSSES[name](*wide))


def test_lk_learns_where_total_variation_hardly_does():
    """Use a draft that is certain of the wrong token: its acceptance is 1e-8, and so is the gradient of total variation."""
    logits = torch.tensor([[20.0, 0.0]], requires_grad=True)
    answer = Prediction(torch.tensor([[0.0, 20.0]]), torch.zeros(1, 1))
    sizes = []
    for loss in (losses.tv, losses.nla):
        (gradient,) = torch.autograd.grad(loss(Prediction(logits, torch.zeros(1, 1)), answer).sum(), logits)
        sizes.append(gradient.abs().max().item())
    assert sizes[0] < 1e-6 and sizes[1] > 0.1


def test_regression_refuses_heads_that_draft_no_features():
    draft, answer = pair()
    with pytest.raises(ValueError, match=r"loss=regression compares hidden states of width 4, this head's have 8"):
        losses.regression(replace(draft, hidden=torch.zeros(5, 8)), answer)


def test_a_sum_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"weights names \['dspark', 'l3'\], and it weighs some of kl_div, ce"):
        losses.build("xpress", {"weights": {"l1": 1.0, "l3": 1.0, "dspark": 0.5}})
    with pytest.raises(ValueError, match=r"loss=soft is not one of kl_div, ce"):
        losses.build("soft")
    with pytest.raises(
        ValueError, match=r"loss_args=\{'eta': 1\} of loss=top_k: got an unexpected keyword argument 'eta'"
    ):
        losses.build("top_k", {"eta": 1})
    with pytest.raises(ValueError, match=r"loss=label learns from the tokens of the text"):
        losses.label(*(replace(prediction, tokens=None) for prediction in pair()))


def test_a_sum_takes_each_loss_as_its_name_alone_does():
    draft, answer = pair()
    for name in LOSSES.keys() - {"dspark", "xpress"}:
        summed = losses.build("xpress", {"weights": {name: 2.0}})
        torch.testing.assert_close(summed(draft, answer), 2 * LOSSES[name](draft, answer))


def test_the_soft_loss_is_autograds_in_mixed_precision_too():
    logits, p, scale, found = torch.randn(5, 11), torch.rand(5, 11).softmax(-1), torch.rand(5), []
    for loss in (losses.SoftCrossEntropy.apply, lambda x, p: -(p * x.log_softmax(-1)).sum(-1)):
        x = logits.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(x, p)
            out.backward(scale)
        found.append([out.detach(), x.grad])
    torch.testing.assert_close(*found)


# Objectives


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


@torch.no_grad()
@pytest.mark.parametrize("kind", ["xpress", "xpress pruned, anchor first", "dspark", "domino"])
def test_xpress_learns_behind_its_own_drafts(target, kind):
    """Compare with the equations of its paper, one draft at a time."""
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
