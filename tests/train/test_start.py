"""Where a run starts and how it may continue: a head that was trained before, other settings, too little memory."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn

from foredraft.heads import Target, eagle3, save_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.hydra import HydraHead
from foredraft.train.runtime import memory
from foredraft.train.start import init_from, limit_window
from foredraft.train.trainer import HeadTrainer
from tests.support import ROOT
from tests.support.head_factory import make_head
from tests.support.processes import ONE, SMALL_EAGLE3, complaint, end, inherited, program, python_for, succeeded

SHORT = [*SMALL_EAGLE3, ONE, "trainer.max_steps=2", "eval.steps=0"]


@pytest.fixture(scope="module")
def published(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    head = Eagle3Head.for_target(target, ttt_steps=3, draft_vocab_size=96, counts=torch.arange(target.vocab_size))
    save_head(head, path := tmp_path_factory.mktemp("published"), target)
    return path


def test_a_run_begins_with_the_weights_and_the_vocabulary_of_another_head(
    here, tiny_path: Path, folder: Path, published: Path, tmp_path: Path
):
    given = [*SHORT, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", f"init_from={published}"]
    succeeded(here(*given, "trainer.learning_rate=0.0", "trainer.optim=adamw", "head.ttt_steps=2"))
    before, after = (load_file(path / "model.safetensors") for path in (published, tmp_path / "out/head"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for more, said in (
        ([], f"init_from={published} is of the kind eagle3, and head=medusa: set head=eagle3"),
        (["init_from=null", "lora_r=4"], "lora_r=4 adapts a head that was trained before: give it as init_from"),
    ):
        assert complaint(here(*given, "output_dir=other", "head=medusa", *more)) == said


def test_a_head_to_start_from_goes_to_the_device_of_the_target(
    target: Target, published: Path, monkeypatch: pytest.MonkeyPatch
):
    fresh = Eagle3Head.for_target(target, draft_vocab_size=96, counts=torch.arange(target.vocab_size))
    monkeypatch.setattr(Target, "device", torch.device("meta"))  # a device without numbers, in place of a GPU
    head = init_from(str(published), fresh, target)
    assert {part.device.type for part in (*head.parameters(), *head.buffers())} == {"meta"}


def test_a_head_looks_back_as_far_as_the_rows_that_it_learned_from(target: Target, published: Path, tmp_path: Path):
    save_head(Eagle3Head.for_target(target, ttt_steps=2, window=40, draft_vocab_size=None), tmp_path / "short", target)

    def looks_back(init: Path | None, window: int | None = None, max_length: int = 64) -> int | None:
        cfg = OmegaConf.create({"head": {"window": window}, "init_from": init and str(init), "max_length": max_length})
        head = Eagle3Head.for_target(target, ttt_steps=2, window=window)
        head = head if init is None else init_from(str(init), head, target)
        limit_window(head, cfg)
        return head.window

    assert [looks_back(None), looks_back(None, window=16), looks_back(None, max_length=2)] == [64, 16, 3]
    assert [looks_back(tmp_path / "short"), looks_back(tmp_path / "short", 16)] == [64, 16]
    assert looks_back(tmp_path / "short", max_length=32) == 40
    assert looks_back(published) == 64
    shutil.copytree(published, tmp_path / "foreign")
    config = json.loads((published / "config.json").read_text())
    del config["foredraft"]
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config))
    assert looks_back(tmp_path / "foreign") is None  # its rows are unknown
    for wrong in (2, "9", None):
        (tmp_path / "foreign" / "config.json").write_text(
            json.dumps(config | eagle3.WINDOWED | {"sliding_window": wrong})
        )
        with pytest.raises(ValueError, match=f"foreign.*sliding_window={wrong!r}, and a number above 7 is needed"):
            looks_back(tmp_path / "foreign")


def test_a_trained_head_gets_the_window_and_the_rope_that_are_chosen(target: Target, published: Path, tmp_path: Path):
    linear = {"rope_type": "linear", "factor": 4.0}
    common = {"draft_vocab_size": 96, "counts": torch.arange(target.vocab_size)}
    head = init_from(str(published), Eagle3Head.for_target(target, window=12, rope=linear, **common), target)
    save_head(head, tmp_path / "both", target)
    plain = Eagle3Head.for_target(target, **common)
    again = init_from(str(tmp_path / "both"), plain, target)  # keeps what it has
    assert (again.window, again.own_rope) == (12, True)
    assert again.config.rope_parameters == head.config.rope_parameters
    assert again.config.rope_parameters["rope_type"] == "linear"
    for scaled in (head, again):  # a quarter of the position
        angles = [one.rotary(torch.tensor([[at]]), 16, torch.float32)[0] for one, at in ((scaled, 8), (plain, 2))]
        torch.testing.assert_close(*angles)


def test_a_trained_head_trains_as_is_set_now(target: Target, tmp_path: Path):
    counts = torch.arange(target.vocab_size)
    eagle3_head = Eagle3Head.for_target(target, draft_vocab_size=96, counts=counts)
    save_head(eagle3_head, tmp_path / "eagle3", target)
    trained = Eagle3Head.for_target(target, draft_vocab_size=96, counts=counts, lm_head="trained")
    head = init_from(str(tmp_path / "eagle3"), trained, target)
    assert head.lm_head.weight.requires_grad and not head.lm_head_is_targets
    assert not init_from(str(tmp_path / "eagle3"), eagle3_head, target).lm_head.weight.requires_grad
    save_head(make_head("dflash pruned", target), tmp_path / "dflash", target)
    head = init_from(str(tmp_path / "dflash"), make_head("dflash", target), target)  # which has no rows to train
    assert head.projections and not any(projection.weight.requires_grad for projection in head.projections)
    save_head(HydraHead.for_target(target, 2, prefix=True), tmp_path / "hydra", target)
    head = init_from(str(tmp_path / "hydra"), HydraHead.for_target(target, 2, prefix=True, dropout=0.5), target)
    chances = {module.p for module in head.modules() if isinstance(module, nn.Dropout)}
    assert chances == {0.5} == {head.to_config()["foredraft"]["dropout"]}


def test_what_stays_of_a_trained_head_although_another_is_set_is_said(
    target: Target, published: Path, capsys: pytest.CaptureFixture[str]
):
    common = {"ttt_steps": 5, "window": 16, "counts": torch.arange(target.vocab_size)}
    init_from(str(published), Eagle3Head.for_target(target, draft_vocab_size=96, **common), target)
    assert capsys.readouterr().out == ""
    other = Eagle3Head.for_target(target, target_layer_ids=[1, 3, 5], draft_vocab_size=64, fc_norm=True, **common)
    init_from(str(published), other, target)
    kept = "head.draft_vocab_size=96 head.fc_norm=False head.target_layer_ids=[1, 3, 4]"
    assert capsys.readouterr().out == f"init_from={published} keeps {kept}: its vocabulary, layers and shape stay\n"


@pytest.mark.nightly
def test_a_damaged_shard_that_a_loaders_worker_meets_is_named(here, tiny_path: Path, folder: Path, tmp_path: Path):
    data = [f"target.path={tiny_path}", f"data.path={folder}"]
    given = [*SHORT, *data, "hidden_states=offline", "hidden_states.path=stored"]
    succeeded(here(*given, "output_dir=out"))
    file = tmp_path / "stored/shard-00000.safetensors"
    os.truncate(file, file.stat().st_size - 9)
    said = complaint(end(program(*given, "output_dir=again", "trainer.dataloader_num_workers=2", cwd=tmp_path)))
    assert said.startswith("stored/shard-00000.safetensors is damaged (")
    assert said.endswith("; delete it and the manifest, and both are written again")
    for name in ("shard-00000.safetensors", "manifest.json"):
        (tmp_path / "stored" / name).unlink()
    assert here(*given, "output_dir=again").code == 0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_says_which_setting_to_change(error, here, tiny_path: Path, folder: Path, monkeypatch):
    def train(self: HeadTrainer, **settings: object) -> None:
        raise error

    monkeypatch.setattr(HeadTrainer, "train", train)
    given = [*SHORT, f"target.path={tiny_path}", f"data.path={folder}"]
    said = complaint(here(*given, "output_dir=out"))
    assert said.startswith(
        "out of memory with trainer.per_device_train_batch_size=4 and max_length=64: halve the first"
    )
    command = f"foredraft plan target={tiny_path} head=eagle3 strategy=single gpus=1 "
    command += "trainer.per_device_train_batch_size=4 max_length=64"
    assert said.endswith(f"; `{command}` says what fits")
    said = complaint(here(*given, "output_dir=one", "trainer.per_device_train_batch_size=1"))
    assert "hidden_states=offline" in said and "halve" not in said


def test_the_c_library_keeps_what_is_freed_on_a_cpu_only(monkeypatch):
    """Leave out the host of a GPU, which reads sequences of megabytes and shards that would never be freed."""
    called = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(mallopt=lambda *given: called.append(given)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory.disable_malloc_trim()
    assert called == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory.disable_malloc_trim()
    assert len(called) == 2


@pytest.mark.nightly
def test_a_terminal_gets_a_bar_and_a_file_gets_lines(tiny_path: Path, folder: Path, tmp_path: Path):
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    data = [f"target.path={tiny_path}", f"data.path={folder}"]
    given = [*SHORT, *data, "output_dir=out", "eval.steps=60", "trainer.max_steps=60"]
    command = [python_for({}), str(ROOT / "train/run.py"), *given]
    process = subprocess.Popen(command, cwd=tmp_path, env=inherited(), stdout=writer, stderr=writer)
    os.close(writer)
    seen = b""
    try:
        while part := os.read(reader, 1 << 16):
            seen += part
    except OSError:  # the other end is closed
        pass
    assert process.wait() == 0
    said = seen.decode()
    assert re.search(r"/60 \[.*loss \d+\.\d+  accuracy by depth", said) and "\nstep 1/60  loss" not in said
    assert re.search(r"step 60/60  acceptance length", said)
    assert "unable to detect" not in said  # of DeepSpeed, which misses a GPU
