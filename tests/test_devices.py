"""A step puts nothing on another device than the target's: all of it runs on one that holds no numbers."""

import contextlib
import copy

import pytest
import torch
from torch import Tensor

import inference.engine
from heads import Target
from heads.draft_model import DraftModelHead
from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head
from heads.hydra import HydraHead
from heads.medusa import MedusaHead
from inference import Engine, Request, SamplingParams
from inference.drafters import Drafter, DraftModel, DynamicTree, NgramDrafter, StaticTree
from inference.verify import Verification
from tests.support.batches import prompt


def drafter(name: str, target: Target, elsewhere: Target) -> Drafter | None:
    """For the target `elsewhere`, on the meta device; heads are made for `target`, which has numbers."""
    counts = torch.arange(target.vocab_size)
    heads = {
        "eagle": lambda: EagleHead.for_target(target),
        "eagle3": lambda: Eagle3Head.for_target(target, depth=3, draft_vocab_size=200, counts=counts),
        "hydra++": lambda: HydraHead.for_target(target, prefix=True),
        "medusa": lambda: MedusaHead.for_target(target, depth=3),
    }
    if name in heads:
        head = heads[name]().eval().to("meta")
        head.attach(elsewhere)
        return StaticTree(head, elsewhere) if name == "medusa" else DynamicTree(head, elsewhere, 8, 3, 2)
    others = {
        "plain": lambda: None,
        "ngram": NgramDrafter,
        "draft model": lambda: DraftModel(DraftModelHead(elsewhere, elsewhere.vocab_size), elsewhere, 6, 3, 2),
    }
    return others[name]()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, top_p=0.9, repetition_penalty=1.2)])
@pytest.mark.parametrize("name", ["plain", "ngram", "eagle", "eagle3", "hydra++", "medusa", "draft model"])
def test_a_step_stays_on_its_device(fresh, name, params, monkeypatch):
    def made_up(verification: Verification, broken: Tensor):
        """What the host would learn: in every row the root and its first child are accepted, where there is one."""
        assert {part.device.type for part in (*verification, broken)} == {"meta"}
        rows, width = verification.path.shape
        count = min(2, width)
        return [False] * rows, [count] * rows, [list(range(width))] * rows, [[7] * width] * rows

    monkeypatch.setattr(inference.engine, "to_host", made_up)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # knows no such device
    elsewhere = Target(copy.deepcopy(fresh.model).to("meta"), fresh.tokenizer, "meta")
    engine = Engine(elsewhere, drafter(name, fresh, elsewhere))
    for number, length in enumerate((9, 5)):
        engine.add(Request(prompt(length, number)[0].tolist(), params, 8, seed=number))
    steps = 0
    with torch.no_grad():
        while engine.has_work:
            engine.step()
            steps += 1
    assert steps >= (8 if name == "plain" else 4)
