"""Many nodes, which are one machine here: what scripts/slurm.sh, scripts/kubernetes.yaml, accelerate launch and DeepSpeed's
launcher start, and what becomes of the run where the time is up, a node dies or a pod is evicted."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from foredraft.train.runtime import checkpoints
from tests.support import ROOT
from tests.support.processes import SMALL_EAGLE3, TWO, Ended, end, forking_python, reserved_port, start, until

pytestmark = pytest.mark.linux  # Slurm's nodes; /proc says which processes a node has

PYTHON = sys.executable
# Without a schedule the steps are the same however many follow: runs are stopped at any of them.
STEADY = ["trainer.lr_scheduler_type=constant", "trainer.warmup_steps=0", "trainer.save_steps=10"]
NO_END = "trainer.max_steps=100000"

SRUN = """import os, signal, subprocess, sys
assert sys.argv[1] == "--kill-on-bad-exit=1" and os.environ["SRUN_CPUS_PER_TASK"] == "64"
tasks = [subprocess.Popen(sys.argv[2:]) for _ in range(int(os.environ["SLURM_NNODES"]))]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """import os, sys
if sys.argv[1:] == ["show", "hostnames", "node[1-2]"]:
    print("localhost\\nlocalhost")
else:
    open(os.environ["REQUEUED"], "a").write(" ".join(sys.argv[1:]) + "\\n")
"""


class Cluster(NamedTuple):
    """Describe a folder that all nodes share, and what a user gives for a run in it."""

    shared: Path
    given: list[str]

    @property
    def step(self) -> int:
        """Return the step of the newest checkpoint."""
        newest = checkpoints.newest(self.shared / "out/checkpoints")
        assert newest is not None
        return checkpoints.step_of(Path(newest))

    def history(self, name: str) -> list[tuple[int, float]]:
        entries = json.loads((self.shared / name / "history.json").read_text())
        return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


@pytest.fixture(scope="module")
def cluster(tiny_path: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    data = [f"target.path={tiny_path}", f"data.path={folder}", "eval.steps=0"]
    given = [*SMALL_EAGLE3, TWO, *STEADY, *data, "trainer.optim=adamw", "strategy=ddp"]
    return Cluster(tmp_path_factory.mktemp("shared"), given)


class Stopped(NamedTuple):
    """Record how a run ended, whether Slurm has it again, and at which step it can be resumed."""

    ended: Ended
    requeued: str
    step: int


def slurm(cluster: Cluster, job: int) -> subprocess.Popen:
    """Run the job's script, as Slurm starts it on the first of two nodes of one accelerator each."""
    shims = cluster.shared / "shims"
    shims.mkdir(exist_ok=True)
    torchrun = f'exec {forking_python()} -m torch.distributed.run "$@"\n'
    for name, shell, text in (
        ("srun", PYTHON, SRUN),
        ("scontrol", PYTHON, SCONTROL),
        ("torchrun", "/bin/sh", torchrun),
    ):
        (shims / name).write_text(f"#!{shell}\n{text}")
        (shims / name).chmod(0o755)
    facts = {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "64",
    }
    facts["REQUEUED"] = str(cluster.shared / "requeued")
    script = ["bash", "scripts/slurm.sh", *cluster.given, NO_END, f"output_dir={cluster.shared / 'out'}"]
    return start(*script, cwd=ROOT, **facts, PATH=f"{shims}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def job() -> int:
    """Return a job number that gives a free port."""
    for number in range(os.getpid() % 10000, 20000):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", 10000 + number)) != 0:
                return number
    raise AssertionError("no port is free")


def after(process: subprocess.Popen, cluster: Cluster, printed: str) -> Stopped:
    ended = end(process)
    requeued = cluster.shared / "requeued"
    text = requeued.read_text() if requeued.exists() else ""
    return Stopped(ended._replace(out=printed + ended.out), text, cluster.step)


@pytest.fixture(scope="module")
def timed_out(cluster: Cluster, job: int) -> Stopped:
    process = slurm(cluster, job)
    printed = until(process, "^step 3/")
    process.send_signal(signal.SIGUSR1)
    return after(process, cluster, printed)


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict]:
    return {part["kind"]: part for part in yaml.safe_load_all((ROOT / "scripts/kubernetes.yaml").read_text())}


def pod(manifest: dict[str, dict], index: int, port: int, given: list[str]) -> subprocess.Popen:
    """Run the container's command, as the kubelet starts it, but with one accelerator, and another run at its end."""
    container = manifest["Job"]["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["torchrun"]
    options = container["args"][: container["args"].index("foredraft.train.run") + 1]
    text = (
        " ".join(options).replace("$(JOB_COMPLETION_INDEX)", str(index)).replace("proc-per-node=8", "proc-per-node=1")
    )
    text = text.replace("foredraft-0.foredraft", "localhost").replace("=29500", f"={port}")
    environment = {e["name"]: e["value"] for e in container["env"] if e["name"].startswith("TORCH_")}  # no /data here
    return start(PYTHON, "-m", "torch.distributed.run", *text.split(), *given, cwd=ROOT, **environment)


@pytest.fixture(scope="module")
def evicted(cluster: Cluster, timed_out: Stopped, manifest: dict[str, dict]) -> tuple[Stopped, Ended]:
    """Run the same in two pods, one of which Kubernetes evicts."""
    port, given = reserved_port(), [*cluster.given, NO_END, f"output_dir={cluster.shared / 'out'}"]
    pods = [pod(manifest, index, port, given) for index in (0, 1)]
    printed = until(pods[0], f"^step {timed_out.step + 3}/")
    pods[1].send_signal(signal.SIGTERM)
    return after(pods[0], cluster, printed), end(pods[1])


@pytest.fixture(scope="module")
def finished(cluster: Cluster, evicted: tuple[Stopped, Ended]) -> Stopped:
    """Run the same by accelerate on two machines, three steps further, which are its last."""
    last = evicted[0].step + 3
    options = f"--num_machines 2 --num_processes 2 --main_process_ip localhost --main_process_port {reserved_port()}"
    machines = [
        start(
            *(PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", *options.split(), "--machine_rank", rank),
            *(
                str(ROOT / "train/run.py"),
                *cluster.given,
                f"trainer.max_steps={last}",
                "eval.final_num_prompts=3",
                "output_dir=out",
            ),
            cwd=cluster.shared,
        )
        for rank in ("0", "1")
    ]
    ended = [end(machine) for machine in machines]
    assert [one.code for one in ended] == [0, 0], ended
    return Stopped(ended[0], "", last)


@pytest.fixture(scope="module")
def unbroken(cluster: Cluster, finished: Stopped) -> Path:
    """Run as many steps on one node of two processes, by DeepSpeed's launcher."""
    given = [str(ROOT / "train/run.py"), *cluster.given, f"trainer.max_steps={finished.step}", "output_dir=unbroken"]
    options = ["--num_gpus", "2", "--master_port", str(reserved_port())]
    process = start(PYTHON, "-m", "deepspeed.launcher.runner", *options, *given, cwd=cluster.shared)
    ended = end(process)
    assert ended.code == 0, ended.err
    return cluster.shared / "unbroken"


def test_when_slurms_time_is_up_the_run_saves_and_is_queued_again(timed_out: Stopped, job: int):
    ended, requeued, step = timed_out
    assert ended.code == 0, ended.err
    assert f"stopped at step {step}; the same command resumes from there" in ended.out and step >= 3
    assert requeued == f"requeue {job}\n"


@pytest.mark.nightly
def test_an_evicted_pod_stops_all_pods_at_one_step(timed_out: Stopped, evicted: tuple[Stopped, Ended]):
    (first, _, step), second = evicted
    assert f"/checkpoint-{timed_out.step}\n" in first.out and step >= timed_out.step + 3
    assert f"stopped at step {step}; the same command resumes from there" in first.out
    assert first.code != 0 and second.code != 0  # so that both are restarted
    assert "stopping after this step ..." in second.err and "error: " not in first.err + second.err


@pytest.mark.nightly
def test_by_whatever_launcher_and_with_whatever_stops_it_is_the_same_run(
    cluster: Cluster, evicted: tuple[Stopped, Ended], finished: Stopped, unbroken: Path
):
    assert f"resuming from out/checkpoints/checkpoint-{evicted[0].step}\n" in finished.ended.out
    assert (
        "resuming with other settings: eval.final_num_prompts is 2 there, 3 here; trainer.max_steps is 100000 there, "
        f"{finished.step} here" in finished.ended.out
    )
    losses = cluster.history("out")
    assert losses == cluster.history("unbroken") and [step for step, _ in losses] == [*range(1, finished.step + 1)]
    weights = [load_file(run / "head/model.safetensors") for run in (cluster.shared / "out", unbroken)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# The files themselves


def test_slurm_gives_the_run_time_to_save():
    text = (ROOT / "scripts/slurm.sh").read_text()
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.M))
    assert {"requeue", "nodes", "gpus-per-node", "time"} <= given.keys() and given["open-mode"] == "append"
    seconds = re.fullmatch(r"B:USR1@(\d+)", given["signal"])
    patience = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text)
    assert seconds and patience and 30 < int(patience[1]) < int(seconds[1])


def test_the_pods_of_the_manifest_find_each_other_and_their_volume(manifest: dict[str, dict]):
    job, service = manifest["Job"]["spec"], manifest["Service"]
    template, name = job["template"]["spec"], manifest["Job"]["metadata"]["name"]
    (container,) = template["containers"]
    args = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"])
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == int(args["nnodes"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert template["subdomain"] == service["metadata"]["name"]
    assert args["master-addr"] == f"{name}-0.{template['subdomain']}"
    assert int(args["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    patience = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert 30 < patience < template["terminationGracePeriodSeconds"] and template["restartPolicy"] == "OnFailure"
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert "persistentVolumeClaim" in mounted["/data"] and "emptyDir" in mounted["/dev/shm"]
    assert all(args[key].startswith("/data/") for key in ("data.path", "output_dir"))
    assert (ROOT / f"conf/recipe/{args['recipe']}.yaml").is_file()
    assert f"\nUSER {template['securityContext']['fsGroup']}\n" in (ROOT / "scripts/docker/Dockerfile").read_text()


WRITER = """import os, signal
from foredraft.train.hidden_states import offline
from foredraft.train.run import main
if os.environ["RANK"] == "1":
    offline.save_tensors = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_a_node_that_dies_while_features_are_written_is_not_waited_for(tiny_path: Path, folder: Path, tmp_path: Path):
    (tmp_path / "writer.py").write_text(WRITER)
    given = [*SMALL_EAGLE3, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "strategy=ddp"]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(reserved_port())}
    nodes = [
        start(
            PYTHON,
            "writer.py",
            *given,
            "hidden_states=offline",
            "hidden_states.shard_rows=2",
            cwd=tmp_path,
            RANK=rank,
            **group,
        )
        for rank in ("0", "1")
    ]
    first, second = map(end, nodes)
    assert second.code == -signal.SIGKILL and first.code == 2, first
    assert "error: process 0 of 2 lost another one, whose own output says why" in first.err


def test_a_node_that_lacks_a_file_is_not_waited_for(tiny_path: Path, folder: Path, tmp_path: Path):
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(reserved_port())}
    given = [*SMALL_EAGLE3, TWO, f"target.path={tiny_path}", "output_dir=out", "strategy=ddp"]
    nodes = [
        start(PYTHON, str(ROOT / "train/run.py"), *given, f"data.path={data}", cwd=tmp_path, RANK=rank, **group)
        for rank, data in (("0", folder), ("1", "nothing"))
    ]
    first, second = map(end, nodes)
    assert second.code == 2 and "error: data.path=nothing does not exist" in second.err
    assert first.code == 2 and "error: process 0 of 2 lost another one, whose own output says why" in first.err


# Bad input

SHARED = """import os, sys
from pathlib import Path
import torch.distributed as dist
from foredraft.train.runtime import distributed
both, own = map(Path, sys.argv[1:])
dist.init_process_group("gloo", f"file://{both}/rendezvous", rank=distributed.rank(), world_size=2)
distributed.NFS_DELAY_S = 0.5
distributed.check_shared(both, "output_dir")
for directory in (own, both):
    try:
        distributed.check_shared(directory, "output_dir")
    except ValueError as error:
        print(error)
    os.access = lambda *_: distributed.rank() == 0  # a mount that is read-only in the second process
distributed.check_shared(both, "hidden_states.path", both / "rendezvous")
distributed.shutdown()
"""


def test_nodes_that_do_not_share_or_cannot_write_the_output_are_told_so(tmp_path: Path):
    directories = [tmp_path / "a", tmp_path / "b"]
    nodes = [
        start(PYTHON, "-c", SHARED, str(tmp_path), str(own), cwd=tmp_path, RANK=str(rank), WORLD_SIZE="2")
        for rank, own in enumerate(directories)
    ]
    for own, ended in zip(directories, map(end, nodes), strict=True):
        message = (
            "output_dir={} is one directory for only 1 of the 2 processes: give an absolute path on a file system that "
            "all nodes share and can write\n"
        )
        assert ended.out == message.format(own) + message.format(tmp_path) and ended.code == 0, ended.err
    assert not list(tmp_path.rglob(".*"))  # what was looked for


def test_nodes_that_read_other_rows_are_told_so_before_the_first_step(tiny_path: Path, folder: Path, tmp_path: Path):
    """Expect an error: their steps would be of other numbers, and the one that ends first would be waited for."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(reserved_port())}
    given = [*SMALL_EAGLE3, TWO, f"target.path={tiny_path}", "data.path=texts", f"output_dir={tmp_path / 'out'}"]
    nodes = []
    for rank in ("0", "1"):
        shutil.copytree(folder, texts := tmp_path / rank / "texts")
        if rank == "1":
            (texts / "3.txt").write_text("x = 1\n" * 90)
        command = [PYTHON, str(ROOT / "train/run.py"), *given, "strategy=ddp"]
        nodes.append(start(*command, cwd=tmp_path / rank, RANK=rank, LOCAL_RANK="0", **group))
    for ended in map(end, nodes):
        assert ended.code == 2, ended
        assert (
            "error: 1 of the 2 processes have other training rows, of texts, than the first: give all nodes"
            in ended.err
        )
