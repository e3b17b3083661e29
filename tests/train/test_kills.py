"""A run on two nodes that ends again and again at random moments: a process, a loader's worker, a node or all are killed, the
disk is full, the data are others. It has the losses and the weights of the run that was left alone, and each end says why."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from foredraft.train.runtime import checkpoints
from tests.support import ROOT
from tests.support.processes import SMALL_EAGLE3, TWO, end, losses, reserved_port, small_disk, start, until, wait_until

pytestmark = pytest.mark.linux  # /proc says which processes there are

KILLS = int(os.environ.get("FOREDRAFT_KILLS", "8"))  # one of each sort
STEPS = 6 * KILLS  # more than they can take
RUN = [*SMALL_EAGLE3, TWO, "strategy=ddp", "trainer.optim=adamw", f"trainer.max_steps={STEPS}", "trainer.save_steps=4"]
RUN += ["eval.steps=0", "+trainer.dataloader_num_workers=2", "data.path=texts", "output_dir=out"]
# What ends it, and what is said then.
ENDS = {
    "SIGKILL of a process": r"process \d of 2 lost another one, .*resumes from the newest checkpoint",
    "SIGTERM to a process": r"stopped at step \d+; the same command resumes from there.*",
    "SIGKILL of a worker": r"a process that reads rows has ended \(DataLoader worker .* Killed\): the same .*",
    "SIGKILL of a node": r"process \d of 2 lost another one, .*resumes from the newest checkpoint",
    "SIGTERM to a node": r"stopped at step \d+; the same command resumes from there.*",
    "SIGTERM to all": r"stopped at step \d+; the same command resumes from there.*",
    "a full disk": "no space left in out",
    "other data": r"output_dir=out holds an unfinished run on other data \(hash .*",
}
NODE = """import os, signal
from foredraft.train.run import main
from foredraft.train.trainer import HeadTrainer
from tests.support.kill_probe import Fate, of_a_run
own = os.getpid()
def stop():
    if os.getpid() == own:  # and not a worker, which is a fork of it
        os.write(1, b"moment of %d\\n" % own)
        os.kill(own, signal.SIGSTOP)
def train(*args, train=HeadTrainer.train, **kwargs):
    rank, moment, number = map(int, os.environ["MOMENT"].split())
    if rank == int(os.environ["RANK"]):
        of_a_run(Fate(moment, number, stop))
    return train(*args, **kwargs)
HeadTrainer.train = train
main()
"""


def nodes(given: list[str], cwd: Path, moment: str = "2 0 0") -> list[subprocess.Popen]:
    """Start two agents of torchrun, of one process each, of which one stops at a moment of its training."""
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "localhost"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, "--master-port", str(reserved_port())]
    (cwd / "node.py").write_text(NODE)
    return [start(*command, "--node-rank", rank, "node.py", *given, cwd=cwd, MOMENT=moment) for rank in "01"]


def workers(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def fill(file: Path) -> None:
    """Write all that is left of its disk."""
    with file.open("wb", buffering=0) as opened:
        try:
            while True:
                opened.write(bytes(4096))
        except OSError:
            pass


def bring_about(what: str, draw: random.Random, agents: list[subprocess.Popen], victim: int, disk: Path) -> None:
    """Do it while the process of node `victim` stands still at its moment: it goes on when the signal is there."""
    pid = int(until(agents[victim], r"^moment of \d+").split()[-1])
    wait_until(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text())
    if what == "a full disk":
        fill(disk / "theirs")
    elif what == "SIGKILL of a worker":
        os.kill(draw.choice(workers(pid)), signal.SIGKILL)
        wait_until(lambda: has_pending(pid, signal.SIGCHLD))
    elif what.startswith("SIGKILL"):
        if what == "SIGKILL of a node":
            os.kill(agents[victim].pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        return
    else:
        for agent in {"SIGTERM to a node": [agents[victim]], "SIGTERM to all": agents}.get(what, []):
            agent.terminate()
        if what == "SIGTERM to a process":
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: has_pending(pid, signal.SIGTERM))
    os.kill(pid, signal.SIGCONT)


def has_pending(pid: int, number: int) -> bool:
    """Return whether this signal waits for the process to continue."""
    found = re.search(r"^ShdPnd:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return found is not None and bool(int(found[1], 16) >> number - 1 & 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", "32m")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_whatever_ends_a_run_nothing_is_lost(tiny_path: Path, folder: Path, disk: Path, tmp_path: Path):
    draw = random.Random(int(os.environ.get("FOREDRAFT_KILL_SEED", "0")))
    given, alone = [*RUN, f"target.path={tiny_path}"], tmp_path / "alone"
    for place in (alone, disk):
        shutil.copytree(folder, place / "texts")
    ended = [end(one) for one in nodes(given, alone)]
    assert [one.code for one in ended] == [0, 0], ended
    step = 0
    for what in (draw.sample([*ENDS], len(ENDS)) + draw.choices([*ENDS], k=KILLS))[:KILLS]:
        what = "SIGTERM to all" if what == "other data" and step == 0 else what  # nothing has been learned from the old
        victim, moment = draw.randrange(2), draw.randint(1, 20)
        if what == "other data":
            (disk / "texts/0.txt").write_text("another text\n" * 200)
            agents = nodes(given, disk)
        else:
            number = signal.SIGKILL if "SIGKILL" in what else signal.SIGTERM
            agents = nodes(given, disk, f"{victim} {moment} {number:d}")
            bring_about(what, draw, agents, victim, disk)
        ended = [end(one) for one in agents]
        (disk / "theirs").unlink(missing_ok=True)
        shutil.copy(folder / "0.txt", disk / "texts/0.txt")
        newest = checkpoints.newest(disk / "out/checkpoints")
        before, step = step, 0 if newest is None else checkpoints.step_of(Path(newest))
        said = [line for one in ended for line in re.findall(r"^(?:error: )?(.*)", one.out + one.err, re.M)]
        said = [line for line in said if any(re.fullmatch(text, line) for text in ENDS.values())]
        print(
            f"{what}, node {victim}, moment {moment}: {[one.code for one in ended]}, checkpoint {step}, {said}",
            flush=True,
        )
        assert step >= before and any(re.fullmatch(ENDS[what], line) for line in said), ended
        assert all(f'File "{ROOT}/foredraft/train' not in one.err for one in ended), ended
    ended = [end(one) for one in nodes(given, disk)]
    assert [one.code for one in ended] == [0, 0], ended
    assert losses(disk / "out") == losses(alone / "out") and len(losses(disk / "out")) == STEPS
    ours, theirs = (load_file(place / "out/head/model.safetensors") for place in (disk, alone))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
