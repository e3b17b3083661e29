"""Each loss of the table against its formula, and its gradient against differences."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from foredraft.train import losses
from foredraft.train.losses import Prediction

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


def test_the_soft_loss_is_autograds_in_mixed_precision_too():
    logits, p, scale, found = torch.randn(5, 11), torch.rand(5, 11).softmax(-1), torch.rand(5), []
    for loss in (losses.SoftCrossEntropy.apply, lambda x, p: -(p * x.log_softmax(-1)).sum(-1)):
        x = logits.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = loss(x, p)
            out.backward(scale)
        found.append([out.detach(), x.grad])
    torch.testing.assert_close(*found)
