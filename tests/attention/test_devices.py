"""A step puts nothing on another device than the target's, waits for it once, and sends it nothing: all of it runs on
a device without numbers."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import foredraft.inference.target_sampler
from foredraft.heads import Target
from foredraft.heads.draft_model import DraftModelHead
from foredraft.inference import Engine, Request, SamplingParams
from foredraft.inference.drafters import Drafter, DraftModel, NgramDrafter, drafter_for
from foredraft.inference.verify import Outcome, Verification
from tests.support import nightly_but
from tests.support.batches import prompt
from tests.support.head_factory import make_head

BLOCKS = ["dflash", "jetspec", "dflash2", "dspark", "domino", "p_eagle", "xpress"]
HEADS = ["eagle", "eagle3", "hydra_pp", "mtp", "medusa", *BLOCKS]


def drafter(name: str, target: Target, elsewhere: Target) -> Drafter | None:
    """Make a drafter for the target `elsewhere`, on the meta device; heads are made for `target`, which has numbers."""
    if name in HEADS:
        head = make_head(name, target).to("meta")
        head.attach(elsewhere)
        return drafter_for(head, elsewhere, nodes=8)
    if name == "draft model":
        return DraftModel(DraftModelHead(elsewhere, elsewhere.vocab_size), elsewhere, 6, 3, 2)
    return NgramDrafter() if name == "ngram" else None


class Sent(TorchDispatchMode):
    """Count transfers from the host to the device, except single numbers, which are passed with the kernel that uses
    them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim}
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, Tensor)}
        self.count += "cpu" in given and "meta" in given | made
        return out


CASES = [(name, "sampled") for name in ("plain", "ngram", "draft model", *HEADS)]
CASES += [(name, "greedy") for name in ("plain", "eagle3", "dflash")]
BY_DAY = [("plain", "greedy"), ("eagle3", "sampled"), ("dflash", "sampled")]


@pytest.mark.parametrize(("name", "settings"), nightly_but(CASES, *BY_DAY))
def test_a_step_stays_on_its_device(fresh, name, settings, monkeypatch):
    params = SamplingParams() if settings == "greedy" else SamplingParams(1.0, top_p=0.9, repetition_penalty=1.2)
    reads = 0

    def made_up(verification: Verification, validity: Tensor):
        """Return what the host would learn: the bonus token and its first child of every sequence are accepted."""
        nonlocal reads
        reads += 1
        assert {part.device.type for part in (*verification, validity)} == {"meta"}
        rows, width = verification.path.shape
        count = min(2, width)
        return Outcome([0] * rows, [count] * rows, [list(range(width))] * rows, [[7] * width] * rows)

    monkeypatch.setattr(foredraft.inference.target_sampler, "to_host", made_up)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # does not support such a device
    elsewhere = Target(copy.deepcopy(fresh.model).to("meta"), fresh.tokenizer, "meta")
    engine = Engine(elsewhere, drafter(name, fresh, elsewhere))
    for number, (length, new) in enumerate(((9, 12), (5, 8))):
        engine.add(Request(prompt(length, number)[0].tolist(), params, new, seed=number))
    sent = []
    with torch.no_grad():
        while engine.has_work:
            with Sent() as numbers:
                engine.step()
            sent.append(numbers.count)
    assert reads == len(sent) >= (8 if name == "plain" else 4)
    # The prompts, and where a row has ended, which it is and which takes its slot; n-gram's drafts come from the host.
    assert (
        set(sent[2:4]) == {1 if name == "ngram" else 0}
        and sent[-1] == sent[2]
        and sum(sent[4:]) <= len(sent) * sent[2] + 6
    )
