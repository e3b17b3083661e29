"""head=auto: its arithmetic, a search on a tiny target, one that is stopped twice, and what it refuses."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from foredraft.heads import load_head
from foredraft.train import finalize, search
from foredraft.train.data.documents import Document, Documents
from foredraft.train.trainer import HeadTrainer
from tests.support import typed
from tests.support.processes import Ended, complaint, end, program, succeeded, until

SMALL = typed("""
    head=auto heads=[eagle3,broken,medusa,hass] "+candidates.broken=['head=eagle3','head.target_layer_ids=[70]']"
    budget=24steps output_dir=out
    data=text preset=test_model trainer.optim=adamw target.device=cpu max_length=64 self_generated_tokens=600
    trainer.per_device_train_batch_size=4 trainer.warmup_steps=2 trainer.logging_steps=1 trainer.learning_rate=0.001
    eval={final_num_prompts:2,timed_prompts:1,prompt_tokens:16,max_new_tokens:4,num_prompts:1,steps:0,check_float32:false}
""")
SPEEDS = {"eagle3": 1.5, "medusa": 2.0, "eagle": 1.2}  # by kind, in tests that must not depend on the machine


@pytest.fixture
def given(tiny_path: Path, folder: Path, monkeypatch) -> list[str]:
    measure = finalize.measure

    def with_speed(target, directory, *more):
        metrics, *rest = measure(target, directory, *more)
        return metrics | {"speedup_auto": SPEEDS[load_head(directory, target).kind]}, *rest

    monkeypatch.setattr(finalize, "measure", with_speed)
    return [*SMALL, f"target.path={tiny_path}", f"data.path={folder}"]


@pytest.mark.parametrize(
    "text, found", [("2h", (120, False)), ("90s", (1.5, False)), ("1.5m", (1.5, False)), ("40steps", (40, True))]
)
def test_a_budget(text: str, found: tuple[float, bool]):
    assert search.parse_budget(text) == found


@pytest.mark.parametrize("text", ["2x", "", "h", "0m", "-3h", "2 h 5 m", "2"])
def test_what_is_no_budget(text: str):
    with pytest.raises(ValueError, match="such as 2h, 30m or 90s"):
        search.parse_budget(text)


def test_half_of_the_candidates_stay():
    assert search.round_sizes(10) == [10, 5, 3, 2] and search.round_sizes(2) == [2] and search.round_sizes(1) == []
    speeds = {"a": 1.0, "b": 1.3, "c": 1.2}
    assert list(search.fastest_half({name: [name] for name in "abcde"}, speeds, "")) == ["b", "c", "a"]
    assert search.fastest_half({name: [name] for name in "abc"}, speeds, "") == {"b": ["b"], "c": ["c"]}


@pytest.mark.nightly
def test_a_search_drops_the_slower_ones_and_finishes_the_winner(given: list[str], here, tmp_path: Path):
    """Let one candidate fail, which the others survive."""
    ended = succeeded(here(*given))
    assert "broken is dropped: head.target_layer_ids=[70] must ascend within" in ended.out
    assert re.search(
        r"round 1 of 2:\n +medusa +2.00x  stays\n +eagle3 +1.50x  stays\n +hass +1.20x  is dropped", ended.out
    )
    steps = {}
    for file in tmp_path.glob("out/**/head/metrics.json"):
        steps[str(file.parents[1].relative_to(tmp_path))] = json.loads(file.read_text())["train_steps"]
    rounds = {"out/round-1/eagle3": 1, "out/round-1/hass": 1, "out/round-1/medusa": 1}
    assert steps == rounds | {"out/round-2/eagle3": 3, "out/round-2/medusa": 3, "out": 12}
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert metrics["head"] == "medusa"
    config = (tmp_path / "out/config.yaml").read_text()
    assert "init_from: out/round-2/medusa/head\n" in config  # it goes on from where it was
    assert (tmp_path / "out/report.html").exists() and not list(tmp_path.rglob("checkpoint-*"))
    texts = {file.resolve() for file in tmp_path.glob("out/**/self_generated.jsonl")}
    assert texts == {tmp_path / "out/self_generated.jsonl"}  # all learned from one text


@pytest.mark.nightly
def test_a_search_that_is_stopped_twice_is_the_one_that_was_not(given: list[str], here, tmp_path: Path, monkeypatch):
    """Stop it by Ctrl-C in the first candidate, and kill it in the second one: the same heads, and the same winner."""
    given += ["heads=[eagle3,medusa]", "budget=12steps"]
    succeeded(here(*given, "output_dir=whole"))
    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "log", interrupt(HeadTrainer.log))
        stopped = here(*given)
    assert stopped.code == 130 and "stopped at step 2; the same command" in stopped.out, stopped
    killed = end_at(r"^round 1 of 1: medusa", signal.SIGKILL, tmp_path, *given)
    assert killed.code == -signal.SIGKILL and "checkpoint-2\n" in killed.out
    before = (tmp_path / "out/round-1/eagle3/metrics.json").stat().st_mtime_ns
    succeeded(here(*given))
    assert (tmp_path / "out/round-1/eagle3/metrics.json").stat().st_mtime_ns == before  # that was done
    for head in ("round-1/eagle3/head", "round-1/medusa/head", "head"):
        weights = [load_file(tmp_path / name / head / "model.safetensors") for name in ("whole", "out")]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    again = here(*given, "heads=[medusa]", "budget=2steps")
    assert again.code == 0 and "out holds a finished run; it is kept as out.1" in again.out
    assert (tmp_path / "out.1/round-1/medusa/metrics.json").exists()


def interrupt(log):
    """Return a `log` that sends Ctrl-C in the second step."""

    def logs(trainer: HeadTrainer, *facts: dict, **more: float) -> None:
        state: TrainerState = trainer.state
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)
        log(trainer, *facts, **more)

    return logs


def end_at(line: str, number: int, cwd: Path, *arguments: str) -> Ended:
    """Send the program a signal when it prints a line that matches."""
    process = program(*arguments, cwd=cwd)
    seen = until(process, line)
    process.send_signal(number)
    ended = end(process)
    return ended._replace(out=seen + ended.out)


@pytest.mark.parametrize(
    "change, words",
    [
        (["budget=2x"], "budget=2x is not an amount: give a time such as 2h"),
        (["budget=3steps"], "budget=3steps has no step for each run: give at least 4steps, or fewer heads"),
        (["heads=[medusa,eagel]"], r"heads=\['eagel'\] are not among candidates.*=\['head=eagel'\]\" adds one"),
        (["trainer.max_minutes=0", "trainer.max_steps=9"], "trainer.max_steps=9: head=auto trains as long as budget="),
        (
            ["heads=[x]", "+candidates.x=['head=eagle3','head.ttt_stepz=2']"],
            "candidates.x: head.ttt_stepz is not known; did you mean head.ttt_steps",
        ),
        (
            ["heads=[x]", "+candidates.x=['head=eagle3','max_length=32']"],
            "candidates.x sets max_length, which must be the same",
        ),
        (["heads=[x]", "+candidates.x=['head=auto']"], "candidates.x has head=auto, which is not a head"),
    ],
)
def test_what_is_refused_in_one_sentence(given: list[str], here, change: list[str], words: str):
    ended = here(*given, "heads=[medusa,hass]", *change)
    assert re.search(words, complaint(ended._replace(out="")))


@pytest.mark.parametrize("part", ["validation", "test"])
def test_heads_are_not_compared_where_nothing_can_be_decoded(
    given: list[str], here, tmp_path: Path, monkeypatch, part: str
):
    """Check that a search ends before its first candidate if every held-out sample has an image."""
    load, pictured = search.load, Documents.of([Document([1, 2], [True, True])])
    pictured.images, pictured.rows = pyarrow.array(['["cat.png"]']), np.zeros(1, np.int64)

    def with_images(cfg):
        target, data = load(cfg)
        return target, data._replace(**{part: pictured})

    monkeypatch.setattr(search, "load", with_images)
    assert "no held-out sample is without images: add samples without images, or choose a head" in complaint(
        here(*given)
    )
    assert not list(tmp_path.rglob("round-1"))


def test_a_budget_without_auto_is_no_key(here):
    assert "budget is not known" in complaint(here("head=medusa", "budget=2h"))
