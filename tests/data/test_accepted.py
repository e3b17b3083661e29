"""Continual training on a server's log: which tokens stand where drafts were rejected, and what they weigh."""

import json
from pathlib import Path

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.medusa import MedusaHead
from foredraft.train import losses
from foredraft.train.data.accepted import corpus
from foredraft.train.data.documents import REJECTED
from foredraft.train.data.packing import Packed
from foredraft.train.module import DistillationModel
from tests.support.batches import batch_of
from tests.support.configs import composed
from tests.support.processes import SMALL, complaint, printed, succeeded


def log(path: Path, count: int) -> Path:
    torch.manual_seed(3)
    rows = []
    for number in range(count):
        prompt, ids = torch.randint(1, 250, (6,)).tolist(), torch.randint(1, 250, (12,)).tolist()
        # 1 of the prompt's step, then 3, 1, 4 (nothing rejected) and 3 tokens.
        steps = {"accepted": [2, 0, 3, 2], "drafted": [3, 3, 3, 3]}
        rows.append({"id": f"r{number}", "created": 0, "prompt_ids": prompt, "ids": ids, **steps})
    rows += [{"id": "x", "created": 0, "prompt_ids": None, "ids": None, "accepted": [1], "drafted": [2]}, {"other": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_token_in_the_place_of_a_rejected_draft_is_marked(target: Target, tmp_path: Path):
    data = corpus(target.tokenizer, str(log(tmp_path / "log.jsonl", 30)), cache_dir=str(tmp_path), val_split=0.1)
    assert data.card["rows"] == 32 and data.card["used"] == 30
    assert {reason.split(":")[0]: n for reason, n in data.card["dropped"].items()} == {
        "no tokens in it": 1,
        "no conversation and no text in it": 1,
    }
    for number in range(len(data.train)):
        _, flags = data.train.token_slice(number, 0, 18)
        assert flags.tolist() == [0] * 6 + [1, 1, 1, REJECTED, REJECTED, 1, 1, 1, 1, 1, 1, REJECTED]
    assert data.card["rejected_share"] == 0.25
    weights = data.train.weights
    assert weights is not None and weights[2] == 2 * weights[1]
    assert 0.75 * weights[1] + 0.25 * weights[2] == pytest.approx(1.0)
    assert corpus(target.tokenizer, str(tmp_path / "log.jsonl"), 1.0, cache_dir=str(tmp_path)).train.weights is None
    with pytest.raises(ValueError, match=r"data\.rejection_weight=0 must be above 0"):
        corpus(target.tokenizer, str(tmp_path / "log.jsonl"), 0, cache_dir=str(tmp_path))


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_the_loss_of_a_draft_has_the_weight_of_the_token_that_it_names(target: Target, tmp_path: Path, chunk: int):
    data = corpus(target.tokenizer, str(log(tmp_path / "log.jsonl", 8)), 5.0, cache_dir=str(tmp_path), val_split=0.2)
    batch = batch_of(Packed(data.train, 36, seed=0, long="truncate"))
    model = DistillationModel(MedusaHead.for_target(target, 1), target, losses.kl_div, chunk=chunk)
    found = model(**batch).loss
    whole = plain = count = 0.0
    for row, document in (
        (r, d) for r in range(len(batch["tokens"])) for d in batch["documents"][r].unique() if d >= 0
    ):
        alone = {name: value[row][batch["documents"][row] == document][None] for name, value in batch.items()}
        weights = alone.pop("weights")
        for place in range(2, 18):
            if alone["loss_mask"][0, place]:
                one = torch.zeros_like(alone["loss_mask"])
                one[0, place] = True
                loss = model(**alone | {"loss_mask": one}).loss.item()
                whole, plain, count = whole + weights[0, place].item() * loss, plain + loss, count + 1
    assert found.item() == pytest.approx(whole / count, rel=1e-4) != pytest.approx(plain / count, rel=1e-3)


def test_a_run_on_a_log(here, tiny_path: Path, tmp_path: Path):
    file = log(tmp_path / "log.jsonl", 60)
    given = [*(word for word in SMALL if word != "data=text"), "data=accepted", f"data.path={file}", "output_dir=out"]
    fast = ["trainer.max_steps=3", "eval.steps=0", "eval.check_float32=false", "eval.timed_prompts=1"]
    ended = succeeded(here(*given, *fast, f"target.path={tiny_path}", "head=medusa", "data.val_split=0.1"))
    assert len(printed(ended.out)) == 3 and "rejected share" in ended.out
    said = complaint(here(*given, *fast, f"target.path={tiny_path}", "head=dflash", "output_dir=other"))
    assert said.startswith("data.rejection_weight is for heads that learn token by token")
    said = complaint(here(*given, *fast, f"target.path={tiny_path}", "self_generated_tokens=99", "output_dir=other"))
    assert said.startswith("self_generated_tokens=99 would put other text in the place of what was logged: give 0")


def test_a_head_for_the_test_model_goes_on_gently():
    log = ["data=accepted", "data.path=log.jsonl"]
    small = ["target=test_model"]
    runs = small, [*small, *log], [*log, "target.path=ORG/NAME"]
    new, goes_on, other = (composed("train", *given) for given in runs)
    assert goes_on.self_generated_tokens == 0 and goes_on.trainer.optim == "adamw"
    assert goes_on.trainer.learning_rate < new.trainer.learning_rate and goes_on.max_length == new.max_length
    assert other.trainer.learning_rate == 1e-4 and other.max_length == 2048
