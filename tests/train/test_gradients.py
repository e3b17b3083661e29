"""Gradients that are taken while the loss is computed are those that autograd finds afterwards, in less memory."""

import pytest
import torch
from torch import Tensor

from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.target_model import Target
from foredraft.train import losses
from foredraft.train.gradients import PartialGradients
from foredraft.train.module import DistillationModel
from tests.support import nightly_but
from tests.support.batches import batch
from tests.support.head_factory import criterion, make_head
from tests.support.modes import LiveBytes


class Kept(PartialGradients):
    """Replace PartialGradients: autograd keeps all parts until the backward pass."""

    def part(self, compute, number: int, rows: Tensor, scale: Tensor) -> Tensor:
        return compute(self.states[number][rows])

    def attach(self, loss: Tensor) -> Tensor:
        return loss


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp", "hass", "dflash", "jetspec"])
def test_gradients_are_autograds(fresh: Target, kind: str, monkeypatch):
    head, text = make_head(kind, fresh), batch(40, 25, 33)
    made, found = criterion(kind, head, fresh), []
    made.chunk, made.num_items = 17, torch.arange(head.depth) + 50
    for gradients in (PartialGradients, Kept):
        for module in ("foredraft.train.module", "foredraft.train.blocks"):
            monkeypatch.setattr(f"{module}.PartialGradients", gradients)
        made.zero_grad()
        outcome = made(*text[:4])
        outcome.loss.backward()
        found.append([outcome.loss, outcome.hits, *(p.grad for p in head.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 3
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_the_gradient_follows_what_is_done_to_the_loss(target: Target):
    head, text, found = make_head("eagle3", target), batch(40), []
    for factor in (1, 2):
        head.zero_grad()
        (factor * criterion("eagle3", head, target)(*text[:4]).loss).backward()
        found.append(torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None]))
    assert found[0].abs().max() > 0 and torch.equal(2 * found[0], found[1])


def test_logits_of_one_depth_and_part_are_all_that_lives(target: Target):
    """Bound memory: 16 rows of both, with their probabilities, are far from one depth of 256 rows."""
    head = Eagle3Head.for_target(target, ttt_steps=7)
    distillation = DistillationModel(head, target, losses.kl_div, chunk=16)
    text = batch(256)
    with torch.no_grad():
        aux_hidden_states, last = distillation.forward_target(text)
        outs = head(aux_hidden_states, target.embed(text.tokens), text)
    distillation.head.forward = lambda *_: [out.detach().requires_grad_() for out in outs]  # type: ignore[method-assign]
    with LiveBytes(
        [*distillation.parameters(), *target.model.parameters(), *text[:4], aux_hidden_states, last, *outs]
    ) as live:
        distillation.compute_loss(text, aux_hidden_states, last)
    one_step = 4 * 256 * target.vocab_size
    weights = sum(p.nbytes for p in head.lm_head.parameters())
    states = 2 * sum(out.nbytes for out in outs)  # of the slots that count, and their gradients
    assert live.peak - 3 * weights - states < one_step / 4


GROWING = ["eagle3", "mtp", "hydra_pp", "dflash", "dspark", "p_eagle", "xpress"]


@pytest.mark.parametrize("kind", nightly_but(GROWING, "eagle3", "dflash"))
def test_memory_of_a_step_grows_with_the_length_of_a_row(target: Target, kind: str):
    head, peaks = make_head(kind, target), []
    for length in (512, 4096):
        made, text = criterion(kind, head, target), batch(length)
        text = text._replace(anchors=made.choose_anchors(text, 0))
        aux_hidden_states, last = made.forward_target(text)
        before = [*made.parameters(), *made.buffers(), *target.model.parameters(), *text[:4], aux_hidden_states, last]
        with LiveBytes(before) as live:
            made.compute_loss(text, aux_hidden_states, last).loss.backward()
        peaks.append(live.peak)
        head.zero_grad()
    assert peaks[1] < 9 * peaks[0]
