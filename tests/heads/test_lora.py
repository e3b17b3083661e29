"""A small addition to a trained head's matrices learns alone, and is gone from what is saved."""

import copy

import pytest
import torch

from foredraft.heads import lora
from foredraft.train import checks
from tests.support.batches import batch
from tests.support.configs import composed
from tests.support.head_factory import criterion, make_head


@pytest.mark.parametrize("kind", ["eagle3", "hydra_pp", "medusa", "mtp", "dspark rnn", "domino", "p_eagle"])
def test_the_addition_learns_alone_and_is_merged_in_the_end(target, kind):
    torch.manual_seed(0)
    head, text = make_head(kind, target), batch(20, 12)
    before = copy.deepcopy(head, {id(target): target})
    loss = criterion(kind, head, target)(*text).loss
    lora.add(head, 3)
    made = criterion(kind, head, target)
    torch.testing.assert_close(made(*text).loss, loss)
    made(*text).loss.backward()
    learned = {name for name, parameter in head.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in head.named_parameters() if name.endswith(("0.up", "0.down"))} != set()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("0.up"):
                parameter.normal_(std=0.1)
    adapted = made(*text).loss
    assert adapted != loss
    copied = copy.deepcopy(head, {id(target): target})  # as a checkpoint is written while training goes on
    lora.merge(copied)
    assert copied.state_dict().keys() == before.state_dict().keys() != head.state_dict().keys()
    torch.testing.assert_close(criterion(kind, copied, target)(*text).loss, adapted)
    torch.testing.assert_close(made(*text).loss, adapted)  # which the copy has left as it was
    ours, theirs = copied.state_dict(), before.state_dict()
    rows = before.projections if before.lm_head_is_targets else []
    modules = [(name, part) for name, part in before.named_modules() if part not in rows]
    linear = {f"{name}.weight" for name, part in modules if isinstance(part, torch.nn.Linear)}
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == linear


def test_what_cannot_be_adapted_is_said(fresh):
    with pytest.raises(ValueError, match="lora_r=0 is the rank"):
        lora.add(make_head("medusa", fresh), 0)
    with pytest.raises(ValueError, match=r"lora_r=4 and head\.lora_r tune the same layers"):
        lora.add(make_head("draft_model", fresh, lora_r=2), 4)
    with pytest.raises(ValueError, match="lora_r=4 works with strategy=single or ddp, and this is zero1"):
        checks.check_config(composed("train", "lora_r=4", "init_from=x", "strategy=zero1"))
    with pytest.raises(ValueError, match="lora_r=3 works with strategy=single or ddp, and this is fsdp"):
        checks.check_config(composed("train", "head=draft_model", "head.lora_r=3", "strategy=fsdp"))
