"""A run that is stopped, however and whenever, is the run that was not: tests/train/test_run.py stops one by Ctrl-C."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.train.runtime import checkpoints
from tests.support import ROOT, nightly_but
from tests.support.processes import (
    HELD,
    ONE,
    SMALL_EAGLE3,
    TWO,
    complaint,
    end,
    program,
    script,
    start,
    succeeded,
    torchrun,
    until,
    wait_until,
)

RUN = [*SMALL_EAGLE3, ONE, "trainer.optim=adamw", "trainer.max_steps=12", "trainer.save_steps=2", "eval.steps=4"]


@pytest.fixture(scope="module")
def given(tiny_path: Path, folder: Path) -> list[str]:
    return [*RUN, f"target.path={tiny_path}", f"data.path={folder}"]


def killed(seed: int, kills: int, *arguments: str, cwd: Path) -> list[int]:
    """Return how the runs ended: negative numbers are signals."""
    ended = succeeded(script("tests/support/kill_probe.py", str(seed), str(kills), *arguments, cwd=cwd))
    return json.loads(ended.out.splitlines()[-1])


@pytest.fixture(scope="module")
def reference(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("reference")
    assert killed(0, 0, *given, "output_dir=out", cwd=cwd) == [0]
    return cwd / "out"


@pytest.mark.parametrize("kills", nightly_but([4, 10]))
def test_kills_change_nothing(kills: int, given: list[str], reference: Path, tmp_path: Path):
    seed = int(os.environ.get("FOREDRAFT_KILL_SEED", "0"))
    ends = killed(seed, kills, *given, "output_dir=out", cwd=tmp_path)
    # A SIGTERM before the first step or after the last one finds nothing to save, and kills.
    assert ends[-1] == 0 and set(ends[:-1]) <= {-signal.SIGKILL, -signal.SIGTERM, 130}
    assert len(ends) > kills // 3 and -signal.SIGKILL in ends
    weights = [load_file(path / "head/model.safetensors") for path in (tmp_path / "out", reference)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    histories = [json.loads((path / "history.json").read_text()) for path in (tmp_path / "out", reference)]
    losses = [[(entry["step"], entry["loss"]) for entry in history if "loss" in entry] for history in histories]
    assert losses[0] == losses[1] and len(losses[0]) == 12


@pytest.mark.nightly
def test_a_finished_run_keeps_no_checkpoints(reference: Path):
    assert {path.name for path in reference.iterdir()} == {
        ".lock",
        "config.yaml",
        "head",
        "figures.csv",
        "figures.json",
        "history.json",
        "metrics.json",
        "report.html",
        "data_card.json",
    }
    assert len(json.loads((reference / "data_card.json").read_text())["weights_digest"]) == 16


def test_a_directory_is_written_by_one_run_at_a_time(given: list[str], tmp_path: Path):
    """Check that a killed run locks nothing any more: not even by the workers that read its samples, which end a little
    later."""
    endless = [*given, "output_dir=out", "+trainer.dataloader_num_workers=1", "trainer.save_steps=1"]
    first = program(*endless, "trainer.max_steps=100000", cwd=tmp_path)
    wait_until(lambda: list(tmp_path.glob("out/checkpoints/checkpoint-*")) or first.poll() is not None)
    assert first.poll() is None, first.communicate()[1]
    before = (tmp_path / "out/config.yaml").read_text()
    second = end(program(*endless, "trainer.max_steps=100000", cwd=tmp_path))
    (pid,) = re.findall(r"^error: output_dir=out is being written by process (\d+): ", second.err, re.MULTILINE)
    assert second.code == 2 and (tmp_path / "out/config.yaml").read_text() == before
    os.kill(int(pid), signal.SIGKILL)
    first.wait()
    third = program(*endless, "trainer.max_steps=100000", cwd=tmp_path)
    until(third, "resuming from out/checkpoints/checkpoint-")
    third.kill()


def test_a_checkpoint_appears_only_when_it_is_whole(tmp_path: Path):
    written = tmp_path / checkpoints.UNFINISHED / "checkpoint-5"
    written.mkdir(parents=True)
    (written / checkpoints.STATE).write_text("{")  # killed here
    assert checkpoints.newest(tmp_path) is None
    checkpoints.clear_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())  # what was left there is gone
    written.mkdir(parents=True)
    (written / checkpoints.STATE).write_text("{}")
    checkpoints.complete(tmp_path, 5)
    assert checkpoints.newest(tmp_path) == str(tmp_path / "checkpoint-5")
    for step, state in ((9, True), (20, True), (100, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if state:
            (tmp_path / f"checkpoint-{step}" / checkpoints.STATE).touch()
    assert checkpoints.newest(tmp_path) == str(tmp_path / "checkpoint-20")


def test_copies_of_checkpoints_are_the_users(tmp_path: Path):
    """Resume next to what a user or a converter has put there (NVIDIA-NeMo/RL#1107), and delete none of it."""
    copies = {"checkpoint-9.bak", "checkpoint-3-hf", "best-copy", "checkpoint-old"}
    for name in {"checkpoint-3", "checkpoint-9", "checkpoint-12", "best-3", *copies}:
        (tmp_path / name).mkdir()
        (tmp_path / name / checkpoints.STATE).touch()
    (tmp_path / checkpoints.UNFINISHED).mkdir()
    assert checkpoints.newest(tmp_path) == str(tmp_path / "checkpoint-12")
    checkpoints.rotate(tmp_path, 1, None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-12", checkpoints.UNFINISHED, *copies}


@pytest.mark.parametrize("content", [b"", b"half", b"[]", b"null", None])
@pytest.mark.parametrize("name", [checkpoints.STATE, "optimizer.pt", checkpoints.SIZES])
def test_a_damaged_checkpoint_is_named(name: str, content: bytes | None, tmp_path: Path):
    """Cut or remove files of a checkpoint, as a machine that goes down does (huggingface/transformers#35782). Without its
    optimizer a run would go on with a new one."""
    written, checkpoint = tmp_path / checkpoints.UNFINISHED / "checkpoint-5", tmp_path / "checkpoint-5"
    (written / "head").mkdir(parents=True)
    for file in (checkpoints.STATE, "optimizer.pt", "head/config.json"):
        (written / file).write_text("whole file")
    checkpoints.complete(tmp_path, 5)
    (checkpoint / "head/config.json").unlink()  # no run resumes from it
    checkpoints.check_whole(checkpoint)
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_bytes(content)
    if (name, content) == (checkpoints.SIZES, None):
        checkpoints.check_whole(checkpoint)  # of an earlier version
        return
    remedy = (
        f"{checkpoint / name} to go on without" if name == checkpoints.SIZES else "this directory to go on from the ch"
    )
    with pytest.raises(ValueError, match=f"{checkpoint} is damaged: {name} is .* or delete {remedy}"):
        checkpoints.check_whole(checkpoint)


def test_the_best_weights_are_those_that_drafted_best():
    history = [
        {"step": 2, "loss": 1.0},
        *(
            {"step": step, "acceptance_length": length, "acceptance_error": 0.1}
            for step, length in ((2, 1.5), (4, 1.95), (6, 1.9), (8, 1.8))
        ),
    ]
    assert checkpoints.best_step(history[:1]) is None
    # 6 is not worse than 4 as far as one can see; 8 is, and no further from 6.
    assert [checkpoints.best_step(history[:count]) for count in (2, 3, 4, 5)] == [2, 4, 6, 6]


@pytest.mark.nightly
def test_a_checkpoint_that_lacks_weights_is_not_resumed(given: list[str], here, tmp_path: Path):
    """Use one of a version whose `fc` had no sizes."""
    run = [*given, "output_dir=out", "keep_checkpoints=true"]
    assert here(*run, "trainer.max_steps=3").code == 0
    (tmp_path / "out/metrics.json").unlink()
    file = tmp_path / "out/checkpoints/checkpoint-3/model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if name != "head.norm.weight"}, file)
    message = complaint(here(*run, "trainer.max_steps=6"))
    assert "checkpoint-3 is damaged: model.safetensors is missing or not of the size that was written" in message
    file.with_name(checkpoints.SIZES).unlink()
    message = complaint(here(*run, "trainer.max_steps=6"))
    assert "were written by another version of foredraft, which has not the same weights (head.norm.weight)" in message


LEADER = """import os
if os.getpgrp() != os.getpid():
    os.setpgid(0, 0)
print(os.getpid(), flush=True)
from foredraft.train.run import main
main()
"""


@pytest.mark.nightly
def test_a_scheduler_that_signals_all_processes_twice_loses_nothing(given: list[str], tmp_path: Path):
    """Kill the workers that read samples, too."""
    (tmp_path / "leader.py").write_text(LEADER)
    stored = [*given, "output_dir=out", "hidden_states=offline", "trainer.dataloader_num_workers=2"]
    process = start(sys.executable, "leader.py", *stored, "trainer.max_steps=100000", cwd=tmp_path)
    group = int(until(process, "^step 5/").split("\n")[0])
    threads = Path(f"/proc/{group}/task").glob("*/children")
    workers = [int(worker) for thread in threads for worker in thread.read_text().split()]
    for _ in range(2):
        os.killpg(group, signal.SIGTERM)
        for worker in workers:  # which have separate groups
            os.kill(worker, signal.SIGTERM)
    ended = end(process)
    assert ended.code == 130, ended.err
    step = int(re.findall(r"stopped at step (\d+); the same command resumes", ended.out)[0])
    ended = end(program(*stored, f"trainer.max_steps={step + 1}", cwd=tmp_path))
    assert ended.code == 0 and f"resuming from out/checkpoints/checkpoint-{step}\n" in ended.out


# Sweeps, other heads, other processes


@pytest.mark.nightly
def test_a_sweep_that_is_repeated_passes_over_what_is_done(given: list[str], reference: Path, here, tmp_path):
    shutil.copytree(reference, tmp_path / "out/trainer.optim-adamw")
    config = tmp_path / "out/trainer.optim-adamw/config.yaml"
    config.write_text(config.read_text().replace("output_dir: out", "output_dir: out/trainer.optim-adamw"))
    ended = succeeded(here("-m", *given, "output_dir=out", "trainer.optim=adamw,muon"))
    assert "out/trainer.optim-adamw holds a finished run of this config; delete it to train again" in ended.out
    assert not (tmp_path / "out/trainer.optim-adamw.1").exists()
    assert (tmp_path / "out/trainer.optim-muon/metrics.json").exists()


@pytest.mark.parametrize("name", nightly_but(["ddp", "fsdp"]))
def test_two_processes_stop_together_and_one_may_go_on(name: str, given: list[str], reference: Path, tmp_path: Path):
    """Send SIGTERM to torchrun, as a scheduler does; then continue the same run in one process, if the engine allows
    that."""
    arguments = [*given, TWO, f"strategy={name}", "output_dir=out"]
    (tmp_path / "held.py").write_text(HELD.format(step=5))
    process = torchrun("held.py", *arguments, cwd=tmp_path)
    until(process, "^step 5/")
    process.send_signal(signal.SIGTERM)
    ended = end(process)
    assert "the same command resumes from there" in ended.out, ended.err
    assert checkpoints.newest(tmp_path / "out/checkpoints") is not None
    if name == "ddp":
        ended = end(program(*given, "output_dir=out", cwd=tmp_path))
    else:
        ended = end(torchrun(str(ROOT / "train/run.py"), *arguments, cwd=tmp_path))
    assert ended.code == 0, ended.err
    weights = [load_file(path / "head/model.safetensors") for path in (tmp_path / "out", reference)]
    for key in weights[0]:
        torch.testing.assert_close(weights[0][key], weights[1][key], rtol=1e-3, atol=1e-4)
