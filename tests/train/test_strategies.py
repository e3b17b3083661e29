"""However a head is spread over processes, it is the same head: two real processes with gloo against one."""

import importlib.util
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from foredraft.heads import Target
from foredraft.heads.target_model.packing import num_weights
from foredraft.inference import generate, load_drafter
from foredraft.inference.drafters import AutoTree
from foredraft.train import run
from foredraft.train.data.row_order import EpochStream
from foredraft.train.runtime import distributed, strategy
from foredraft.train.trainer import HeadTrainer
from foredraft.train.writing import self_generated
from foredraft.train.writing.written_rows import RowFile
from tests.support import ROOT, nightly_but
from tests.support.processes import ONE, SMALL_EAGLE3, STEPS, TWO, children, end, losses, program, torchrun, until
from tests.support.tiny import TEXT

HALVES = {"ddp": "MULTI_CPU", "fsdp": "FSDP"}
if sys.platform.startswith("linux"):  # DeepSpeed
    HALVES |= {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
HALVES_BY_DAY = nightly_but(HALVES, "ddp", "fsdp")
WHOLE = "strategy_args={deepspeed:{zero_optimization:{stage3_param_persistence_threshold:0}}}"
BY_DAY = ["ddp,trainer.optim=adamw", "fsdp,trainer.optim=adamw", "ddp,trainer.optim=adamw,context_parallel=2"]
ROUNDED = [name for name in HALVES if name in ("fsdp", "zero3")]  # in bfloat16
# A sharded target next to it, and one that writes first, which all processes do together; features by both.
BY_NIGHT = [
    "ddp,trainer.optim=adamw,target.sharding=fsdp",
    "ddp,trainer.optim=adamw,target.sharding=fsdp,trainer.max_steps=4,self_generated_tokens=512",
    *(f"{name},trainer.optim=adamw,trainer.bf16=true" for name in ROUNDED if name == "fsdp"),
    "fsdp,trainer.optim=muon",
    "fsdp,trainer.optim=adamw,context_parallel=2",
    "fsdp,trainer.optim=adamw,target.sharding=tensor",
    "ddp,trainer.optim=adamw,hidden_states.dtype=float32,hidden_states.shard_rows=4,hidden_states=offline",
    "fsdp,trainer.optim=adamw,trainer.compile_head=aot_eager",
    # DeepSpeed last: it leaves marks in the process that a later run stumbles over.
    *(f"{name}{f',{WHOLE}' * (name == 'zero3')},trainer.optim=adamw" for name in HALVES if name.startswith("zero")),
    *(f"{name},trainer.optim=adamw,trainer.bf16=true" for name in ROUNDED if name == "zero3"),
]


@pytest.fixture(scope="module")
def given(tiny_path: Path, folder: Path) -> list[str]:
    return [*SMALL_EAGLE3, f"target.path={tiny_path}", f"data.path={folder}"]


def by_night(request: pytest.FixtureRequest) -> bool:
    """Return whether any of this file's nightly tests is to run."""
    chosen = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("nightly") for item in chosen)


@pytest.fixture(scope="module")
def alone(given: list[str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in one process: by AdamW, by night by Muon, and by AdamW with a step split in two."""
    cwd = tmp_path_factory.mktemp("alone")
    for optimizer in ("adamw", "muon")[: 1 + by_night(request)]:
        ended = end(program(*given, ONE, f"trainer.optim={optimizer}", f"output_dir={optimizer}", cwd=cwd))
        assert ended.code == 0, ended.err
    halves = [TWO, "trainer.gradient_accumulation_steps=2", "trainer.optim=adamw", "output_dir=halves"]
    ended = end(program(*given, *halves, cwd=cwd))
    assert ended.code == 0, ended.err
    return cwd


@pytest.fixture(scope="module")
def together(given: list[str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = BY_DAY + BY_NIGHT * by_night(request)
    # Twice, because a thread of torch's gloo crashed inside malloc in one run of CI (torch 2.13). The cause was
    # not found: fifteen more runs, one of them with glibc's checks of its heap, had none.
    for _ in range(2):
        cwd = tmp_path_factory.mktemp("together")
        ended = end(torchrun(__file__, str(cwd), *runs, "--", *given, TWO, cwd=cwd))
        if "(SIGSEGV)" not in ended.err:
            break
    assert ended.code == 0, ended.err[-3000:]
    return cwd


def of(together: Path, name: str, optimizer: str = "adamw") -> Path:
    return together / f"{name}-{optimizer}"


# What learns the same: two runs, and the relative difference that their losses may have.
SAME = {
    **{f"together/{name}-adamw": ("alone/adamw", 1e-3) for name in HALVES},
    "alone/halves": ("alone/adamw", 1e-3),  # a step in two batches
    "together/ddp-offline": ("alone/adamw", 1e-3),
    "together/ddp-2": ("together/ddp-adamw", 1e-5),  # context_parallel
    "together/fsdp-2": ("together/fsdp-adamw", 1e-5),
    "together/fsdp-aot_eager": ("together/fsdp-adamw", 1e-4),
    # torch's Muon makes updates orthogonal in bfloat16: the last digit of a gradient moves a loss by up to 1.3e-3 here.
    "together/fsdp-muon": ("alone/muon", 2e-3),
}


@pytest.mark.parametrize(
    "name", nightly_but(SAME, "together/ddp-adamw", "together/fsdp-adamw", "together/ddp-2", "alone/halves")
)
def test_however_it_is_spread_it_learns_the_same(alone: Path, together: Path, name: str):
    places = {"alone": alone, "together": together}
    other, tolerance = SAME[name]
    ours, theirs = (losses(places[run.partition("/")[0]] / run.partition("/")[2]) for run in (name, other))
    assert len(ours) == STEPS
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=tolerance, atol=0)
    if name.endswith("offline"):
        stored = sorted((together / "ddp-offline.hidden_states").glob("shard-*.safetensors"))
        assert len(stored) > 2  # so that each process wrote some


@pytest.fixture(scope="module")
def alone_in_bfloat16(given: list[str], alone: Path) -> Path:
    ended = end(program(*given, ONE, "trainer.optim=adamw", "trainer.bf16=true", "output_dir=bf16", cwd=alone))
    assert ended.code == 0, ended.err
    return alone / "bf16"


@pytest.mark.parametrize("name", nightly_but(ROUNDED))
def test_two_processes_learn_in_bfloat16_what_one_does(alone: Path, alone_in_bfloat16: Path, together: Path, name: str):
    """Round only products, which moves losses by up to 2 %; here they are the same to 1.4e-4."""
    directory = of(together, name, "true")
    ours, theirs = losses(directory), losses(alone_in_bfloat16)
    assert len(ours) == STEPS and theirs != losses(alone / "adamw")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=0)
    for rank in (0, 1):
        assert json.loads((directory / f"facts-{rank}.json").read_text())["dtypes"] == ["torch.float32"]


@pytest.mark.parametrize("name", nightly_but(["ddp-fsdp", "fsdp-tensor"]))
def test_a_head_learns_the_same_from_a_target_in_pieces(alone: Path, together: Path, tiny_path: Path, name: str):
    whole = alone / "adamw"
    torch.testing.assert_close(*map(torch.tensor, (losses(together / name), losses(whole))), rtol=1e-3, atol=0)
    gained = [json.loads((run / "metrics.json").read_text())["acceptance_length"] for run in (together / name, whole)]
    assert gained[0] == gained[1]
    parameters = num_weights(Target.from_pretrained(tiny_path, device="cpu").model)
    for rank in (0, 1):
        facts = json.loads((together / name / f"facts-{rank}.json").read_text())
        assert facts["local_target"] < 0.7 * parameters  # its embedding and lm_head may stay whole


@pytest.mark.nightly
def test_a_target_in_pieces_writes_its_own_text(together: Path):
    written = self_generated.documents(RowFile(together / "ddp-512" / "self_generated.jsonl"))
    assert len(written) == 8 and all(any(document.loss_mask) for document in written)  # of 64 new tokens each
    assert len(losses(together / "ddp-512")) == 4


@pytest.mark.parametrize("name", HALVES_BY_DAY)
def test_what_is_said_to_be_in_shards_is(together: Path, name: str):
    directory = of(together, name)
    facts = [json.loads((directory / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    whole = json.loads((directory / "metrics.json").read_text())["parameters"]
    learned = whole - load_file(directory / "head/model.safetensors")["lm_head.weight"].numel()
    assert [fact["distributed_type"] for fact in facts] == [HALVES[name]] * 2
    assert [fact["processes"] for fact in facts] == [2, 2]
    weights, moments = [[fact[part] for fact in facts] for part in ("local_weights", "local_moments")]
    assert all(0.45 * learned < part < 0.6 * learned for part in moments) if name != "ddp" else moments == [learned] * 2
    assert (
        all(0.45 * whole < part < 0.6 * whole for part in weights)
        if name in ("fsdp", "zero3")
        else weights == [whole] * 2
    )


@pytest.mark.parametrize("name", HALVES_BY_DAY)
def test_the_saved_head_drafts_like_that_of_one_process(alone: Path, together: Path, tiny_path: Path, name: str):
    saved = of(together, name) / "head", alone / "adamw/head"
    ours, theirs = (load_file(path / "model.safetensors") for path in saved)
    assert ours.keys() == theirs.keys()
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    ids = torch.tensor([target.tokenizer(TEXT)["input_ids"][:20]])
    drafted = [
        generate(target, load_drafter(str(path), target, tree="fixed"), ids, max_new_tokens=24) for path in saved
    ]
    assert drafted[0].new_tokens == drafted[1].new_tokens
    assert [step.emitted for step in drafted[0].steps] == [step.emitted for step in drafted[1].steps]


def test_the_order_of_rows_knows_no_batches():
    rows = [{"row": torch.tensor(number)} for number in range(5)]
    order = [int(row["row"]) for row in (EpochStream(rows, 12, seed=3)[i] for i in range(12))]
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4] and order[:5] != order[5:10]
    assert int(EpochStream(rows, 12, seed=3)[11]["row"]) == order[11]  # where a resumed run starts


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_worker_ends_when_its_trainer_says_so(method: str):
    """Start it in each way, by one of which its parent is another process."""
    rows = [{"row": torch.tensor(number)} for number in range(5)]
    read = iter(
        DataLoader(EpochStream(rows, 50, seed=3), batch_size=None, num_workers=1, multiprocessing_context=method)
    )
    next(read)
    (worker,) = read._workers
    worker.terminate()
    worker.join(60)
    assert not worker.is_alive()


# Bad input

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "environment, name, message",
    [
        ({}, "ddp", "strategy=ddp works in processes that torchrun starts: torchrun"),
        (TWO_RANKS, "single", "torchrun started 2: set strategy=ddp"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "single", "torchrun started 1: set strategy=ddp"),
        ({"SLURM_STEP_NUM_TASKS": "64"}, "auto", "64 tasks of srun or mpirun run this program without torchrun"),
        (TWO_RANKS, "zero2", "set trainer.optim=adamw trainer.learning_rate=6e-4, or strategy=fsdp"),
    ],
)
def test_an_engine_that_cannot_work_says_why(environment, name, message, monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    assert strategy.choose("auto", "muon") == "single"
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        strategy.choose(name, "muon")
    if name != "auto":
        assert strategy.choose("auto", "muon") == ("ddp" if environment else "single")


def test_processes_that_cannot_connect_are_told_where(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {**TWO_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(
            ConnectionError, match=f"^process 0 of 2 could not connect to the others at 127.0.0.1:{port}: "
        ):
            distributed.join({})


def test_a_sweep_in_several_processes_is_refused(here, monkeypatch):
    """Expect an error before the first run, after which the processes could not find each other again."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ended = here("-m", *SMALL_EAGLE3, "target.path=none", "output_dir=out", "seed=1,2")
    message = "error: -m trains one run after the other in one process, and strategy=ddp shares each with others"
    assert ended.code == 2 and ended.err.count(message) == 2, ended


def test_a_strategy_that_accelerate_was_told_otherwise_says_so():
    strategy.check_distributed_type("fsdp", DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"strategy=ddp became FSDP: with accelerate launch take --multi_gpu"):
        strategy.check_distributed_type("ddp", DistributedType.FSDP)


@pytest.mark.nightly
def test_more_processes_than_rows(given: list[str], tmp_path: Path):
    """Check that every process ends by itself, with code 2, since it is bad input."""
    (tmp_path / "few.py").write_text("value = 1\n" * 40)
    little = [TWO, "strategy=ddp", "data.path=few.py", "max_length=256"]
    ended = end(torchrun(str(ROOT / "train/run.py"), *given, *little, cwd=tmp_path))
    assert ended.code != 0
    assert "error: the data gives 1 sequences of max_length=256 for 2 processes: use fewer" in ended.err
    assert "exitcode  : 2" in ended.err


@pytest.mark.linux
@pytest.mark.timeout(120)  # a minute is what is promised, and the run has to get there
def test_a_dead_process_takes_the_others_with_it(given: list[str], tmp_path: Path):
    process = torchrun(
        str(ROOT / "train/run.py"), *given, TWO, "strategy=ddp", "trainer.max_steps=100000", cwd=tmp_path
    )
    until(process, "^step 3/")
    second = next(pid for pid in children(process) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    ended = end(process)
    assert ended.code != 0 and re.search(r"rank\s*: 1 .*\n.*exitcode\s*: -9", ended.err)


def facts(trainer: HeadTrainer) -> dict:
    """Return how the run is spread."""
    engine = trainer.model_wrapped
    learned = list(trainer.distillation.parameters())
    inner = trainer.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    state = [value for entry in inner.state.values() for key, value in entry.items() if key == "exp_avg"]
    return {
        "distributed_type": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "wrapped": type(engine).__name__,
        "local_weights": sum(getattr(p, "ds_tensor", getattr(p, "_local_tensor", p)).numel() for p in learned),
        "dtypes": sorted({str(p.dtype) for p in learned}),
        "local_target": sum(
            getattr(p, "_local_tensor", p).numel() for p in trainer.distillation.target.model.parameters()
        ),
        "local_moments": sum(getattr(value, "_local_tensor", value).numel() for value in state),
    }


def main() -> None:
    """Train in one of two processes, once per engine (starting them is what takes the time):

        torchrun ... FOLDER ENGINE[,override...] ... -- OVERRIDE ...

    Each run writes to FOLDER/ENGINE-VALUE, the value of its last override, and each process leaves facts-RANK.json there."""
    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    runs, common = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    plain = HeadTrainer.full_head

    def noted(self: HeadTrainer):
        path = self.folder.parent / f"facts-{distributed.rank()}.json"
        if self.state.global_step:
            path.write_text(json.dumps(facts(self)))
        return plain(self)

    if distributed.rank() == 1:  # clocks never agree: by this one a tree costs nothing
        observe = AutoTree.observe_seconds
        AutoTree.observe_seconds = lambda self, seconds: observe(self, 1.0)  # type: ignore[method-assign]
    HeadTrainer.full_head = noted  # type: ignore[method-assign]
    distributed.shutdown = lambda: dist.barrier(group=distributed.host_group())  # the next run wants the processes
    self_generated.NEW = 64
    if importlib.util.find_spec("deepspeed") is not None:
        backend = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None  # a faster sum on one machine, which takes minutes to compile
    for name in runs:
        engine, *overrides = name.split(",")
        directory = folder / f"{engine}-{overrides[-1].partition('=')[2]}"
        sys.argv = ["train/run.py", *common, f"strategy={engine}", f"output_dir={directory}", *overrides]
        run.main()
        # Else the garbage collector decides, on each rank by itself, when targets are not loaded any more for ZeRO-3.
        unset_hf_deepspeed_config()


if __name__ == "__main__":
    main()
