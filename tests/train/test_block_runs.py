"""Heads that draft in blocks through a whole run: features on disk, stopped and continued, spread over processes."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foredraft.heads import dflash, save_head
from foredraft.heads.base import PackedBatch
from foredraft.train.data.packing import Packed
from foredraft.train.hidden_states import offline
from foredraft.train.trainer import HeadTrainer
from tests.support import ROOT
from tests.support.batches import batch_of, documents
from tests.support.head_factory import criterion, make_head
from tests.support.processes import ONE, SMALL_EAGLE3, TWO, end, losses, succeeded, torchrun

RUN = [*SMALL_EAGLE3[2:], "trainer.optim=adamw", "trainer.max_steps=4", "trainer.save_steps=2", "eval.steps=0"]
P_EAGLE = ["head=p_eagle", "head.num_depths=3", "head.num_hidden_layers=2", "head.draft_vocab_size=128"]
DSPARK = ["head=dspark", "head.block_size=3", "head.num_hidden_layers=1", "head.draft_vocab_size=128"]


@pytest.fixture
def given(tiny_path: Path, folder: Path) -> list[str]:
    return [*RUN, f"target.path={tiny_path}", f"data.path={folder}"]


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "dspark pruned", "dflash2"])
def test_from_disk_the_losses_are_those_of_training_online(kind, target, tmp_path):
    made, found = criterion(kind, make_head(kind, target), target), []
    packed = Packed(documents(40, 25, 33, 60, 21, 50, 44), length=32, seed=0)
    written = offline.offline(packed, target, made.head.layers, 2, str(tmp_path), dtype="float32", shard_rows=2)
    for source in (packed, written):
        batch = batch_of(source)
        text = PackedBatch(*(batch[name] for name in PackedBatch._fields[:4]))
        found.append(made(**batch, anchors=made.choose_anchors(text, 0)))
    online, stored = found
    torch.testing.assert_close(stored.loss, online.loss, atol=1e-5, rtol=1e-5)
    assert torch.equal(stored.hits, online.hits) and torch.equal(stored.counts, online.counts) and online.counts.all()


@pytest.mark.parametrize("head", [DSPARK, P_EAGLE])
def test_a_resumed_run_keeps_its_mask_token(given, here, monkeypatch, head):
    """Resume with a version that would choose another one."""
    run = [*given, *head, ONE, "output_dir=out", "keep_checkpoints=true"]
    for token, steps in ((7, 2), (9, 4)):
        monkeypatch.setattr(dflash, "mask_token", lambda target, token=token: token)
        assert here(*run, f"trainer.max_steps={steps}").code == 0
        Path("out/metrics.json").unlink()
    config = json.loads(Path("out/head/config.json").read_text())
    assert config.get("dflash_config", {}).get("mask_token_id", config.get("pard_token")) == 7


@pytest.mark.nightly
@pytest.mark.parametrize(("head", "lora"), [(DSPARK, 2), (P_EAGLE, None)])
def test_a_run_that_is_stopped_is_the_run_that_was_not(given, here, monkeypatch, target, head, lora):
    given = [*given, *head]
    if lora is not None:
        save_head(make_head("dspark pruned", target), "trained", target)
        given += ["init_from=trained", f"lora_r={lora}"]
    assert here(*given, ONE, "output_dir=whole").code == 0
    original = HeadTrainer.get_batch_samples

    def interrupt(self: HeadTrainer, *args):
        if self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(HeadTrainer, "get_batch_samples", interrupt)
        assert here(*given, ONE, "output_dir=out").code == 130
    assert here(*given, ONE, "output_dir=out").code == 0
    assert losses(Path("out")) == losses(Path("whole")) and len(losses(Path("out"))) == 4
    ours, theirs = (load_file(next(Path(path, "head").glob("*.safetensors"))) for path in ("out", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    if lora is not None:  # in the layout of the head that it began with, and no norm has learned
        began = load_file("trained/model.safetensors")
        same = {name for name in began if torch.equal(began[name].float(), ours[name].float())}
        assert began.keys() == ours.keys() and "norm.weight" in same and "fc.weight" not in same


@pytest.mark.nightly
def test_two_processes_learn_what_one_does(given, here, tmp_path):
    given = [*given, *P_EAGLE]
    assert here(*given, ONE, "output_dir=one").code == 0
    succeeded(end(torchrun(str(ROOT / "train/run.py"), *given, TWO, "strategy=ddp", "output_dir=two", cwd=tmp_path)))
    one, two = (torch.tensor(losses(Path(name))) for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-3, atol=0)
