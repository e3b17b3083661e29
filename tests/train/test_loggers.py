"""trainer.report_to: where the loggers write, and under which name a run goes on."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from foredraft.train.runtime import loggers
from tests.support.processes import SMALL_EAGLE3, end, program


@pytest.mark.nightly
def test_without_a_key_wandb_stays_offline(tiny_path, folder: Path, tmp_path: Path):
    given = [*SMALL_EAGLE3, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out"]
    nobody = {"HOME": str(tmp_path), "WANDB_API_KEY": ""}
    ended = end(
        program(*given, "trainer.report_to=wandb", "trainer.max_steps=2", "eval.steps=0", cwd=tmp_path, **nobody)
    )
    assert ended.code == 0, ended.err
    (run,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    name = (tmp_path / "out" / "wandb_id").read_text()
    assert run.name.endswith(name) and (run / f"run-{name}.wandb").stat().st_size > 0


def test_each_run_of_a_process_has_its_own_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The runs of a search or a sweep follow each other in one process."""
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")  # as it was, after the test
        monkeypatch.delenv(name)
    runs = [tmp_path / "first", tmp_path / "second"]
    for run in [*runs, *runs]:
        run.mkdir(exist_ok=True)
        loggers.prepare(["wandb"], run)
        assert os.environ["WANDB_DIR"] == str(run)
        assert os.environ["WANDB_RUN_ID"] == (run / "wandb_id").read_text()
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    loggers.prepare(["wandb"], runs[0])
    assert os.environ["WANDB_RUN_ID"] == "chosen"


@pytest.mark.parametrize(
    "environment, line, known",
    [
        ({}, "", False),
        ({"WANDB_API_KEY": "key"}, "", True),
        ({}, "machine api.wandb.ai login user password key", True),
        ({"WANDB_BASE_URL": "https://wandb.example"}, "machine api.wandb.ai login user password key", False),
        ({"WANDB_BASE_URL": "https://wandb.example"}, "machine wandb.example login user password key", True),
        ({}, "nonsense", False),
    ],
)
def test_where_a_key_of_wandb_is_found(environment, line, known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text(line)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert loggers.has_wandb_key() is known


@pytest.mark.parametrize("given", ["all", "none", "mlflow", ["none"], ["all"], [], ["wandb", "flyte", "kubeflow"]])
def test_known_loggers(given, monkeypatch: pytest.MonkeyPatch):
    """Import none of them: wandb takes seconds, and may be broken."""
    names = {"wandb", "mlflow", "flytekit", "os"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in names else None)
    monkeypatch.setitem(sys.modules, "wandb", None)  # its import raises ImportError
    loggers.check(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tensorboard"], "=tensorboard: tensorboard is not installed"),
        ("flyte", "=flyte: flytekit is not installed"),
        (["tensorbord"], "=tensorbord: give a list of .*tensorboard, .*wandb"),
        ("wandb,tensorboard", "=wandb,tensorboard: give a list of"),
        (["wandb", "none"], "=none: give a list of"),
    ],
)
def test_a_logger_that_is_not_there(given, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "wandb" else None)
    with pytest.raises(ValueError, match=f"^trainer.report_to{message}"):
        loggers.check(given)
