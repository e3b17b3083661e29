"""`python train/run.py` as users run it: what a run leaves behind, how a stopped one goes on, what bad input is told.

Runs that several tests look at are separate processes, each started once. The others call `main` in this process,
which spares them ten seconds of imports.
"""

import io
import json
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from omegaconf import OmegaConf
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerControl, TrainerState

from foredraft.heads import Target
from foredraft.inference import generate, load_drafter
from foredraft.train import run as train_run
from foredraft.train.runtime import callbacks, checkpoints, distributed
from foredraft.train.writing import self_generated
from foredraft.train.writing.written_rows import RowFile
from tests.support.processes import (
    HELD,
    SMALL,
    SMALL_EAGLE3,
    Ended,
    complaint,
    end,
    printed,
    program,
    small_disk,
    start,
    succeeded,
    until,
)
from tests.support.tiny import TEXT, VOCAB, tiny_config

KINDS = ["medusa", "eagle3"]
STEPS = 24
PROMISED = {
    "acceptance_length",
    "accepted_per_depth",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "identical_greedy",
    "identical_sampled",
    "train_tokens_per_second",
    "train_seconds",
    "peak_memory_bytes",
    "device",
    "dtype",
    "versions",
}


@pytest.fixture(scope="session")
def eagle(tiny_path: Path, folder: Path) -> list[str]:
    """Return arguments of a run with several epochs, so that one may stop in the middle of a later one."""
    given = [f"target.path={tiny_path}", f"data.path={folder}", f"trainer.max_steps={STEPS}", "eval.steps=8"]
    return [*SMALL, *given, "head=eagle3", "head.draft_vocab_size=128"]


@pytest.fixture(scope="session")
def wide_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a target with a vocabulary larger than its tokenizer's, as many real ones have."""
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(vocab_size=2304)).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(path)
    return path


class Sweep(NamedTuple):
    directory: Path
    arguments: list[str]
    ended: Ended


@pytest.fixture(scope="session")
def sweep(wide_path: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    given = [f"target.path={wide_path}", f"data.path={folder}", "trainer.max_steps=4", "eval.steps=2"]
    cwd = tmp_path_factory.mktemp("sweep")
    process = program("-m", f"head={','.join(KINDS)}", *SMALL, *given, cwd=cwd)
    return Sweep(cwd / "outputs", [*SMALL, *given], end(process))


@pytest.fixture(scope="session")
def whole(eagle: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Run without an interruption."""
    cwd = tmp_path_factory.mktemp("whole")
    return cwd / "out", end(program(*eagle, "output_dir=out", cwd=cwd))


class Stopped(NamedTuple):
    directory: Path
    copy: Path  # as it was left; in `directory` the run may have gone on
    ended: Ended


@pytest.fixture(scope="session")
def stopped(eagle: list[str], tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Run the same with a Ctrl-C in its second epoch."""
    cwd = tmp_path_factory.mktemp("stopped")
    process = start(sys.executable, "-c", HELD.format(step=10), *eagle, "output_dir=out", cwd=cwd)
    seen = until(process, "^step 10/")
    process.send_signal(signal.SIGINT)
    rest = end(process)
    shutil.copytree(cwd / "out", cwd / "copy")
    return Stopped(cwd / "out", cwd / "copy", Ended(rest.code, seen + rest.out, rest.err))


@pytest.fixture(scope="session")
def resumed(eagle: list[str], stopped: Stopped) -> tuple[Path, Ended]:
    return stopped.directory, end(program(*eagle, "output_dir=out", cwd=stopped.directory.parent))


def entries(directory: Path) -> list[dict]:
    """Return what the newest checkpoint records of training."""
    newest = checkpoints.newest(directory / "checkpoints")
    assert newest is not None
    return json.loads((Path(newest) / "trainer_state.json").read_text())["log_history"]


def history(directory: Path) -> list[dict]:
    """Return the same without measured times: losses, gradients and accuracy in full precision."""
    clocks = "tokens_per_second", "train_seconds", "memory_gib"
    return [{name: value for name, value in entry.items() if name not in clocks} for entry in entries(directory)]


def clock(directory: Path) -> list[float]:
    return [entry["train_seconds"] for entry in entries(directory) if "train_seconds" in entry]


def metrics(directory: Path) -> dict:
    return json.loads((directory / "metrics.json").read_text())


def weights(directory: Path) -> bytes:
    return (directory / "head" / "model.safetensors").read_bytes()


# What a run leaves behind


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_a_proof(sweep: Sweep, kind: str):
    assert sweep.ended.code == 0, sweep.ended.err
    found = metrics(sweep.directory / kind)
    assert found.keys() >= PROMISED
    assert found["identical_greedy"] == found["identical_sampled"] == 1.0
    assert found["acceptance_length"] >= 1 and found["prompts"] == 4 and found["dtype"] == "float32"
    assert all(found[name] > 0 for name in PROMISED if name.endswith(("_second", "_seconds", "_bytes")))
    assert "<svg" in (sweep.directory / kind / "report.html").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_a_head(sweep: Sweep, kind: str):
    head = sweep.directory / kind / "head"
    files = {"model.safetensors", "config.json", "README.md", "config.yaml", "metrics.json"}
    assert {file.name for file in head.iterdir()} == files
    assert f"{metrics(head.parent)['acceptance_length']:.2f}" in (head / "README.md").read_text()
    config = OmegaConf.load(head / "config.yaml")
    assert f"heads.{kind}." in config.head._target_ and config.trainer.max_steps == 4
    assert config.output_dir == f"outputs/{kind}"  # resolved, like all of it


def test_a_sweep_trains_every_head_in_a_directory_of_its_own(sweep: Sweep):
    assert sorted(path.name for path in sweep.directory.iterdir() if path.is_dir()) == sorted(KINDS)
    for number, kind in enumerate(KINDS, start=1):
        assert re.search(rf"job {number} of 2: .*head={kind}\b", sweep.ended.err)
        assert metrics(sweep.directory / kind)["head"] == kind
        assert [entry["step"] for entry in history(sweep.directory / kind) if "loss" in entry] == [1, 2, 3, 4]
        assert [entry["step"] for entry in history(sweep.directory / kind) if "acceptance_length" in entry] == [2, 4]


@pytest.mark.nightly
def test_a_finished_run_is_kept_under_a_number(sweep: Sweep, here, tmp_path: Path):
    old, kept = tmp_path / "out", tmp_path / "out.2"
    shutil.copytree(sweep.directory / "eagle3", old)
    (tmp_path / "out.1").mkdir()  # an earlier one's
    before = {path.name: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    ended = succeeded(here("head=eagle3", *sweep.arguments, "output_dir=out"))
    assert "kept as out.2" in ended.out and "resuming" not in ended.out
    assert {path.name: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before
    assert not list((tmp_path / "out.1").iterdir())
    # The second job of a sweep, in another process, is what a run alone is.
    assert len(printed(ended.out)) == 4 and weights(old) == weights(kept)
    assert metrics(old)["date"] and metrics(old)["acceptance_length"] == metrics(kept)["acceptance_length"]


# A run that is stopped


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_resume(stopped: Stopped):
    assert stopped.ended.code == 130, stopped.ended.err
    last = int(printed(stopped.ended.out)[-1][0])
    assert last == 11  # a signal is noticed at the end of a step, and step 10 was logged
    assert f"stopped at step {last}; the same command resumes from there" in stopped.ended.out
    assert checkpoints.newest(stopped.copy / "checkpoints") == str(stopped.copy / "checkpoints" / f"checkpoint-{last}")
    assert not (stopped.copy / "metrics.json").exists() and "Traceback" not in stopped.ended.err
    assert f"drafter=out/checkpoints/checkpoint-{last} drafts with what it has learned" in stopped.ended.out


def test_every_checkpoint_is_a_head(stopped: Stopped, whole, target: Target):
    """Check that the best one is what the finished run ships."""
    checkpoint = str(checkpoints.newest(stopped.copy / "checkpoints"))
    prompt = torch.tensor([target.text_tokenizer(TEXT)["input_ids"][:20]])
    drafted = generate(target, load_drafter(checkpoint, target), prompt, max_new_tokens=12)
    assert drafted.new_tokens == generate(target, load_drafter("none", target), prompt, max_new_tokens=12).new_tokens
    (best,), shipped = (whole[0] / "checkpoints").glob("best-*"), whole[0] / "head"
    assert (best / "model.safetensors").read_bytes() == (shipped / "model.safetensors").read_bytes()


def test_a_resumed_run_is_the_run_that_was_not_stopped(stopped: Stopped, resumed, whole):
    for _, ended in (resumed, whole):
        assert ended.code == 0, ended.err
    (directory, second), (reference, uninterrupted) = resumed, whole
    assert "resuming from out/checkpoints/checkpoint-" in second.out
    assert [int(step) for step, _, _ in printed(uninterrupted.out)] == [*range(1, STEPS + 1)]
    assert printed(stopped.ended.out) + printed(second.out) == printed(uninterrupted.out)
    assert history(directory) == history(reference)
    assert weights(directory) == weights(reference)


def test_a_resumed_runs_time_counts_all_its_parts(stopped: Stopped, resumed):
    earlier, both = clock(stopped.copy), clock(resumed[0])
    assert both[: len(earlier)] == earlier and len(both) == STEPS
    assert both == sorted(both)  # it goes on, where a clock of the second part alone would start again
    assert metrics(resumed[0])["train_seconds"] >= round(both[-1], 1)


@pytest.mark.nightly
def test_a_run_that_was_stopped_while_measuring_only_measures(whole, eagle: list[str], here, tmp_path: Path):
    reference = whole[0]
    shutil.copytree(reference / "checkpoints", tmp_path / "out" / "checkpoints")
    shutil.copy(reference / "config.yaml", tmp_path / "out")
    ended = succeeded(here(*eagle, "output_dir=out"))
    assert f"checkpoint-{STEPS}" in ended.out and not printed(ended.out)
    assert weights(tmp_path / "out") == weights(reference)
    again, before = metrics(tmp_path / "out"), metrics(reference)
    for name in ("acceptance_length", "accepted_per_depth", "train_tokens_per_second"):
        assert again[name] == before[name]
    assert again["train_seconds"] == pytest.approx(clock(reference)[-1], abs=0.2)  # no step was trained again


def test_an_unfinished_run_is_not_gone_on_with_under_another_config(stopped: Stopped, eagle, here, tmp_path: Path):
    shutil.copytree(stopped.copy, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    ended = here(*eagle, "output_dir=out", "trainer.learning_rate=0.02")
    assert complaint(ended) == (
        "output_dir=out holds an unfinished run with another config (trainer.learning_rate is 0.01 there, 0.02 here): "
        "give another output_dir, the old settings to resume it, or delete out/checkpoints"
    )
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "out" / "config.yaml").read_bytes() == (stopped.copy / "config.yaml").read_bytes()


def test_a_signal_may_come_in_the_middle_of_a_print(monkeypatch: pytest.MonkeyPatch):
    """Send a signal there: Python's streams are not reentrant, so printing from a handler sometimes raises RuntimeError."""

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: memoryview) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            return len(data)

    stop = callbacks.StopOnSignal()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop.on_train_begin(None, None, None)
    try:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(Terminal())))
        print("a step", flush=True)
    finally:
        monkeypatch.undo()
        stop.restore()
    assert stop.stopped()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("before", "torchrun", "stops"), [("SIG_DFL", False, True), ("SIG_IGN", False, False), ("SIG_IGN", True, True)]
)
def test_a_closed_terminal_stops_a_run(before: str, torchrun: bool, stops: bool, monkeypatch: pytest.MonkeyPatch):
    """Hang up, as a lost SSH connection does, also under nohup, which torchrun ignores (pytorch/pytorch#67538)."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    earlier = signal.signal(signal.SIGHUP, getattr(signal, before))
    stop, (terminal, stream) = callbacks.StopOnSignal(), os.openpty()
    try:
        stop.on_train_begin(None, None, None)
        stop.terminals = [stream]
        os.close(terminal)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
        if stops:
            os.write(stream, b"a step")
        stop.restore()
        assert signal.getsignal(signal.SIGHUP) == getattr(signal, before)
    finally:
        stop.restore()
        signal.signal(signal.SIGHUP, earlier)
        os.close(stream)
    assert stop.stopped() == stops


def test_a_reader_that_ends_with_the_terminal_stops_no_run_before_its_checkpoint():
    """Hang up under `| tee log`, which ends at once."""
    earlier, output = signal.signal(signal.SIGHUP, signal.SIG_DFL), os.dup(1)
    stop, (reader, writer) = callbacks.StopOnSignal(), os.pipe()
    try:
        os.dup2(writer, 1)
        stop.on_train_begin(None, None, None)
        stop.terminals = stop.terminals[:1]
        os.close(reader)
        os.kill(os.getpid(), signal.SIGHUP)
        os.write(1, b"a step")
    finally:
        stop.restore()
        signal.signal(signal.SIGHUP, earlier)
        os.dup2(output, 1)
        os.close(output)
        os.close(writer)
    assert stop.stopped()


def test_what_was_trained_before_a_ctrl_c_in_the_measurement_is_not_trained_again(
    here, eagle: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    typed = [*eagle, f"output_dir={tmp_path}/out", "trainer.max_steps=2", "eval.steps=0", "eval.final_num_prompts=1"]
    with monkeypatch.context() as patch:
        patch.setattr(train_run, "finalize", Mock(side_effect=KeyboardInterrupt))
        first = here(*typed)
    assert first.code == 130 and "step 2/2 " in first.out
    assert first.err.endswith("interrupted: the head is trained, and the same command goes on to measure it\n")
    second = here(*typed)
    assert second.code == 0 and "/2 " not in second.out and (tmp_path / "out/metrics.json").exists()


def test_a_signal_may_come_before_the_other_one_has_its_handler(monkeypatch: pytest.MonkeyPatch):
    stop, install = callbacks.StopOnSignal(), signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        found = install(number, handler)
        if handler == stop.note:
            os.kill(os.getpid(), number)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.signal, "signal", interrupted)
        try:
            stop.on_train_begin(None, None, None)
        finally:
            stop.restore()
    assert stop.stopped()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_may_come_while_a_process_waits_for_the_others(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    stop, state = callbacks.StopOnSignal(), TrainerState()
    sums = distributed.all_reduce

    def waited(x: torch.Tensor) -> torch.Tensor:
        monkeypatch.undo()
        os.kill(os.getpid(), number)
        return sums(x)

    stop.on_train_begin(None, state, None)
    controls = TrainerControl(), TrainerControl()
    try:
        monkeypatch.setattr(distributed, "all_reduce", waited)
        for control in controls:
            stop.on_step_end(None, state, control)
    finally:
        stop.restore()
    assert [control.should_training_stop for control in controls] == [False, True]


@pytest.mark.nightly
def test_a_run_can_end_with_acceptance_by_context(here, tiny_path: Path, folder: Path, tmp_path: Path):
    given = [*SMALL_EAGLE3, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "trainer.max_steps=1"]
    fast = ["eval.steps=0", "eval.check_float32=false", "eval.timed_prompts=1"]
    ended = succeeded(here(*given, *fast, "eval.lengths=[16,48]"))
    found = json.loads((tmp_path / "out/metrics.json").read_text())["acceptance_length_by_context"]
    assert list(found) == ["16 tokens", "48 tokens"] and all(1 <= value <= 9 for value in found.values())
    line = "acceptance length, by context"
    assert line in ended.out and line in (tmp_path / "out/head/README.md").read_text()
    for length, said in ((240, "of at least 240 tokens"), (254, "the target reads 256, its answer included")):
        assert said in complaint(here(*given, f"eval.lengths=[{length}]", "output_dir=other"))


# Self-generated text


@pytest.mark.nightly
def test_no_more_text_is_written_than_the_run_reads(here, tiny_path: Path, folder: Path, tmp_path: Path):
    """Ask for a million tokens; three steps of four sequences of 64 tokens read 768. Resume with more steps."""
    given = [*SMALL, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "head=medusa"]
    fast = ["trainer.max_steps=3", "eval.steps=0", "eval.check_float32=false", "eval.timed_prompts=1"]
    ended = succeeded(here(*given, *fast, "self_generated_tokens=1000000"))
    rows = self_generated.documents(RowFile(tmp_path / "out/self_generated.jsonl"))
    assert len(rows) == -(-768 // 224)  # rows of 224 new tokens at most
    assert re.search(r"^self-generated text: 4 of 4 rows, \d[\d,]* tokens/s$", ended.err, re.M)
    assert [step for step, _, _ in printed(ended.out)] == ["1", "2", "3"]
    (tmp_path / "out/metrics.json").unlink()
    ended = here(*given, *fast[1:], "trainer.max_steps=6", "self_generated_tokens=1000000")
    assert ended.code == 0 and "resuming from out/checkpoints/checkpoint-3\n" in ended.out, ended.err
    assert list(self_generated.documents(RowFile(tmp_path / "out/self_generated.jsonl"))) == list(rows)


# Bad input


def file(path: Path, content: str | bytes = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture(scope="module")
def bad(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of data and targets that are not usable."""
    path = tmp_path_factory.mktemp("bad")
    file(path / "empty.txt")
    file(path / "a.txt", "a")
    file(path / "one.txt", TEXT)
    file(path / "blank" / "x", " ")
    file(path / "latin" / "latin.txt", "Grün".encode("latin-1"))
    file(path / "rows" / "chats.jsonl", "{}")
    shutil.copytree(tiny_path, path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(tiny_path, path / "odd")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_tokens([f"<{number}>" for number in range(VOCAB)])  # more than the target has
    tokenizer.save_pretrained(path / "odd")
    return path


@pytest.mark.parametrize(
    "typed, message",
    [
        ("head=eagel3", r"^head=eagel3 is not known; did you mean head=eagle3\?"),
        ("data.path=not/here", r"^data\.path=not/here does not exist: give a text file"),
        ("data.path=???", r"data\.path"),
        ("data.path=BAD/blank data.glob=*.md", "0 files match"),
        ("data.path=BAD/blank", "blank contains no text: 1 files"),
        ("data.path=BAD/empty.txt", r"empty\.txt contains no text"),
        ("data.path=BAD/a.txt", r"a\.txt\) gives no tokens"),
        ("data.path=BAD/latin", r"latin\.txt is not UTF-8 \(byte 2\): convert it"),
        ("data.path=BAD/rows", r"chats\.jsonl holds rows, not raw text: give data=conversations data\.path="),
        (
            "data.path=BAD/one.txt data.val_split=0",
            "the held-out text is too short for prompts of 16 tokens: hold out more",
        ),
        (
            "data.path=BAD/one.txt eval.prompt_tokens=200",
            r"is too short for prompts of 200 tokens: .*eval\.prompt_tokens",
        ),
        ("eval.prompt_tokens=256", r"^eval\.prompt_tokens=256: the target reads 256 tokens"),
        ("eval.final_num_prompts=0", r"^eval\.final_num_prompts=0 must be at least 1"),
        ("trainer.per_device_train_batch_size=0", r"^trainer\.per_device_train_batch_size=0 must be at least 1"),
        ("trainer.learning_rate=-1", r"^trainer\.learning_rate=-1 must be at least 0"),
        ("init_from=/no/such", "head /no/such is neither a directory nor a Hub id"),
        ("output_dir=BAD/a.txt", r"^output_dir=.*a\.txt is a file: give a directory"),
        ("output_dir=BAD/a.txt/out", r"a\.txt.*not a directory"),
        ("target.path=BAD/mute", "target .*mute has no tokenizer"),
        ("target.path=BAD/odd", r"the tokenizer of .*odd has \d+ tokens, but its model only 320"),
        ("target.path=BAD", r"has no config\.json"),
        ("trainer.max_steps=-1 trainer.num_train_epochs=0", r"^trainer\.num_train_epochs=0 must be above 0"),
        ("+trainer.output_dir=other/place", r"^trainer\.output_dir=other/place has no effect on a head: leave it out"),
        (
            "loss=xpress loss_args={weights:{l1:a}}",
            r"^loss_args=\{'weights': \{'l1': 'a'\}\} of loss=xpress: give numbers",
        ),
        ("loss=top_k loss_args={k:0}", r"^loss_args=\{'k': 0\} of loss=top_k: give numbers, k a whole one above 0"),
        ("loss=xpress loss_args={weights:3}", r"^loss_args=\{'weights': 3\} of loss=xpress: give numbers"),
        ("loss_args=3", r"^loss_args=3 of loss=kl_div: give numbers"),
        ("head=medusa head.num_heads=0", r"^head\.num_heads=0 must be a whole number from 1 to 65,536"),
        ("loss=label", r"^loss=label learns from the tokens of the text, and only heads that draft in blocks"),
        ("loss=dspark", r"^loss=dspark learns from the tokens of the text"),
        ("loss=xpress loss_args={weights:{label:1}}", r"^loss=xpress learns from the tokens of the text"),
        (
            "head=eagle3 loss=regression",
            r"^loss=regression compares hidden states .*, and Eagle3Head drafts from other",
        ),
        ("head=dflash loss=hass", r"^loss=hass compares hidden states .*, and DFlashHead drafts from other"),
        ("objective.depth_decay=-1", r"^objective\.depth_decay=-1 must be at least 0"),
        ("trainer.max_steps=0", "max_steps=0 trains nothing: give a number of steps, or -1"),
    ],
)
def test_bad_input_is_told_in_one_sentence(
    typed: str, message: str, bad: Path, here, tiny_path: Path, folder: Path, tmp_path: Path
):
    given = [f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "trainer.max_steps=2"]
    ended = here("head=medusa", *SMALL, *given, *typed.replace("BAD", str(bad)).split())
    assert re.search(message, complaint(ended))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("target", "offline"), [("/no/such/target", False), ("nobody/no-such-target", True)])
def test_a_target_that_cannot_be_fetched_is_not_looked_for_on_the_network(
    target: str, offline: bool, here, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Try a path without a target, and one that is not in the cache, offline."""
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)  # read from the environment when it is imported
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert target in complaint(here(*SMALL, f"data.path={folder}", f"target.path={target}"))
    assert not asked


def test_a_full_disk_is_told_before_anything_moves(sweep: Sweep, here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(sweep.directory / "medusa", tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    ended = here("head=medusa", *sweep.arguments, "output_dir=out")
    assert re.match(r"output_dir=out has 1 MiB free and this run writes up to \d+ MiB: free some", complaint(ended))
    assert sorted(tmp_path.rglob("*")) == before
    ended = here("head=medusa", *sweep.arguments, "output_dir=new/folder")
    assert complaint(ended).startswith("output_dir=new/folder has 1 MiB free")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_disk(tmp_path / "disk", "512k")


def test_a_disk_that_fills_up_while_training(disk: Path, eagle: list[str], here, monkeypatch: pytest.MonkeyPatch):
    """Let another program fill it, after it was found to be large enough."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    file(disk / "theirs", bytes(380 * 1024))
    before = signal.getsignal(signal.SIGINT)
    ended = here(*eagle, f"output_dir={disk}/out", "trainer.max_steps=2", "eval.steps=0")
    assert ended.code == 2 and len(printed(ended.out)) == 2
    assert ended.err.rstrip().endswith(f"error: no space left in {disk}/out") and "Traceback" not in ended.err
    assert checkpoints.newest(disk / "out" / "checkpoints") is None
    assert signal.getsignal(signal.SIGINT) == before  # the next job of a sweep can be stopped
