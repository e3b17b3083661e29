"""head=auto: the arithmetic of its rounds, a search on a tiny target, one that is stopped twice, and what it refuses."""

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from foredraft.train.search import judge
from foredraft.train.search.plan import (
    Budget,
    Goal,
    Judged,
    check_enough,
    goal,
    parse_budget,
    prompts_within,
    round_sizes,
    shares,
    verdicts,
)
from foredraft.train.search.search import StopAt
from tests.support import typed
from tests.support.processes import Ended, complaint, end, program, until

SMALL = typed("""
    head=auto heads=[eagle3,broken,medusa,hass] "+candidates.broken=['head=eagle3','head.target_layer_ids=[70]']"
    budget=32steps judge={num_prompts:2,max_new_tokens:8,repeats:1} output_dir=out
    data=text target=hf preset=test_model trainer.optim=adamw target.device=cpu max_length=64 self_generated_tokens=600
    trainer.per_device_train_batch_size=4 trainer.warmup_steps=2 trainer.logging_steps=1 trainer.learning_rate=0.001
    eval={final_num_prompts:2,timed_prompts:1,prompt_tokens:16,max_new_tokens:8,num_prompts:1,steps:0,check_float32:false}
""")
# Of a text, in tests that must not depend on the machine.
SECONDS = {"baseline": 4.0, "eagle3": 2.0, "medusa": 1.0, "hass": 3.0}


@pytest.fixture
def given(tiny_path: Path, folder: Path) -> list[str]:
    return [*SMALL, f"target.path={tiny_path}", f"data.path={folder}"]


@pytest.mark.parametrize(
    "text, found",
    [
        ("2h", Budget(7200, False)),
        ("1.5m", Budget(90, False)),
        ("90s", Budget(90, False)),
        ("40steps", Budget(40, True)),
    ],
)
def test_a_budget(text: str, found: Budget):
    assert parse_budget(text) == found


@pytest.mark.parametrize("text", ["2x", "", "h", "0m", "-3h", "2 h 5 m", "2"])
def test_what_is_no_budget(text: str):
    with pytest.raises(ValueError, match="such as 2h, 30m or 90s"):
        parse_budget(text)


def test_half_of_the_candidates_go_on():
    assert round_sizes(10) == [10, 5, 3, 2] and round_sizes(2) == [2] and round_sizes(1) == []


def test_rounds_and_winner_spend_the_budget_and_no_more():
    """Sum the steps of all candidates of all rounds, and of the winner after them, for 1000 steps."""
    sizes, left, trained, goals = [5, 3, 2], 1000.0, 0.0, []
    for number, size in enumerate(sizes):
        share, after = shares(sizes, number, search_share=0.5)
        trained += share * left  # by each that is still in the search
        goals.append(trained + after * left)
        assert size * share * left == pytest.approx(500 / 3)  # every round has the same part
        left -= size * share * left
    assert left == pytest.approx(500)
    assert goals == pytest.approx([goals[0]] * 3)  # no round changes what a candidate would train in all


def test_a_goal_is_in_whole_steps_and_at_least_one():
    assert goal(10, step_cost=0.5, train=3.2, afterwards=10.0) == Goal(16, 36)
    assert goal(10, step_cost=5.0, train=-1.0, afterwards=0.0) == Goal(11, 11)


@pytest.mark.parametrize("seconds, prompts", [(400, 8), (200, 5), (100, 3), (20, 3)])
def test_a_short_round_measures_on_fewer_prompts(seconds: float, prompts: int):
    assert prompts_within(seconds, fixed=10.0, each=10.0, most=8) == prompts
    assert prompts_within(seconds, fixed=10.0, each=10.0, most=1) == 1


def test_a_budget_that_has_no_step_for_everybody_is_refused_with_what_is_needed():
    costs = {"quick": 0.1, "slow": 2.0}
    check_enough(Budget(60, False), 0.1, 10.0, 3.0, costs, 2)
    with pytest.raises(
        ValueError, match=r"budget=59s is too small .*\(slow is the slowest\): give at least 60s"
    ) as caught:
        check_enough(Budget(59, False), 0.1, 10.0, 3.0, costs, 2)
    assert "heads=[...]" in str(caught.value)


def test_the_error_of_a_speed_is_that_of_a_mean_where_all_texts_are_as_long():
    seconds = [1.0, 2.0, 3.0, 2.0]
    same = Judged([10.0] * 4, seconds)
    assert same.rate == pytest.approx(5.0)
    # By the delta method, at a mean of 2 seconds: the relative error of the mean time is that of the speed.
    deviation = torch.tensor(seconds, dtype=torch.float64).std().item()
    assert same.error == pytest.approx(5.0 * deviation / math.sqrt(4) / 2.0)
    assert Judged([10.0], [2.0]).error is None


def test_what_is_hard_for_both_is_no_doubt_about_which_is_faster():
    one, other = Judged([10.0] * 3, [1.0, 5.0, 3.0]), Judged([10.0] * 3, [1.1, 5.5, 3.3])
    gap, error = other.behind(one)
    assert gap == pytest.approx(one.rate - other.rate) and error < 0.1 * one.error


def test_why_the_slower_ones_are_dropped():
    found = {
        "slow": Judged([10.0, 10.0], [4.0, 4.1]),
        "best": Judged([10.0, 10.0], [1.0, 1.1]),
        "near": Judged([10.0, 10.0], [1.4, 1.0]),
        "second": Judged([10.0, 10.0], [1.0, 1.2]),
    }
    reasons = verdicts(found, keep=2)
    assert set(reasons) == {"slow", "near"}
    assert "fewer than second, the slowest that went on" in reasons["slow"] and "may be as good" not in reasons["slow"]
    assert "may be as good" in reasons["near"]
    assert "fewer than best, which won" in verdicts(found, keep=1)["second"]
    alone = {"best": Judged([10.0], [1.0]), "slow": Judged([10.0], [4.0])}
    reason = verdicts(alone, keep=1)["slow"]
    assert reason.startswith("2.5 ± ? tokens/s, 7.5 ± ? fewer") and "on one text alone, so it may be as good" in reason


def test_a_search_drops_the_slower_ones_and_finishes_the_winner(given: list[str], here, tmp_path: Path, monkeypatch):
    """Let one candidate fail, which the others survive."""
    monkeypatch.setattr(judge, "judged", lambda table, name, texts: pretended(name, len(texts)))
    ended = here(*given, "output_dir=whole")
    assert ended.code == 0, ended.err
    check_results(tmp_path / "whole")


@pytest.mark.nightly
def test_a_search_that_is_stopped_twice_is_the_one_that_was_not(given: list[str], here, tmp_path: Path, monkeypatch):
    """Stop it by Ctrl-C in the first candidate, and kill it in the second: the same weights, round by round, and the same
    winner."""
    monkeypatch.setattr(judge, "judged", lambda table, name, texts: pretended(name, len(texts)))
    ended = here(*given, "output_dir=whole")
    assert ended.code == 0, ended.err
    with monkeypatch.context() as patch:
        patch.setattr(StopAt, "on_step_end", interrupt)
        stopped = here(*given)
    assert stopped.code == 130 and "stopped at step 2; the same command" in stopped.out, stopped
    assert json.loads((tmp_path / "out/search.json").read_text())["candidates"]["eagle3"]["steps"] == 0
    killed = end_at(r"^round 1 of 2: medusa", signal.SIGKILL, tmp_path, *given)
    assert killed.code == -signal.SIGKILL and "checkpoint-2\n" in killed.out
    assert not re.search("^round 1 of 2: hass", killed.out, re.M)
    ended = here(*given)
    assert ended.code == 0, ended.err
    assert "round 1 of 2: medusa" in ended.out and "round 1 of 2: eagle3" not in ended.out  # that was done
    searches = [json.loads((tmp_path / name / "search.json").read_text()) for name in ("whole", "out")]
    for key in ("candidates", "final"):
        assert searches[0][key] == searches[1][key]
    assert [r["goals"] for r in searches[0]["rounds"]] == [r["goals"] for r in searches[1]["rounds"]]
    for head in ("candidates/eagle3/head", "candidates/hass/head", "head"):
        weights = [load_file(tmp_path / name / head / "model.safetensors") for name in ("whole", "out")]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def interrupt(callback: StopAt, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
    """Send Ctrl-C after the first step."""
    if state.global_step == 1:
        signal.raise_signal(signal.SIGINT)


def pretended(name: str, texts: int) -> Judged:
    return Judged([8.0] * texts, [SECONDS[name] + 0.01 * number for number in range(texts)])


def check_results(directory: Path) -> None:
    """Check what a search leaves: hass is dropped first, eagle3 then, and medusa is finished as any run is."""
    found = json.loads((directory / "search.json").read_text())
    assert [sorted(r["found"]) for r in found["rounds"]] == [
        ["baseline", "eagle3", "hass", "medusa"],
        ["baseline", "eagle3", "medusa"],
    ]
    candidates = found["candidates"]
    assert candidates["hass"]["dropped"].startswith("round 1: 2.7 ± ") and candidates["medusa"]["dropped"] is None
    assert "round 2: " in candidates["eagle3"]["dropped"] and "medusa, which won" in candidates["eagle3"]["dropped"]
    assert candidates["broken"]["dropped"].startswith("failed: head.target_layer_ids=[70] must ascend within")
    assert sum(one["steps"] for one in candidates.values()) == 32 and candidates["medusa"]["steps"] > 16
    first = found["rounds"][0]["found"]["medusa"]
    assert first["acceptance_length"] >= 1 and first["speedup"] > 3.9
    metrics = json.loads((directory / "metrics.json").read_text())
    assert metrics["head"] == "medusa" and metrics["step"] <= candidates["medusa"]["steps"]
    assert (directory / "report.html").exists()
    assert {path.name for path in (directory / "head").iterdir()} >= {"model.safetensors", "README.md"}
    assert not list(directory.rglob("checkpoint-*"))


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
        (["budget=3steps"], r"budget=3steps is too small for a round of 2 candidates .* at least 4steps"),
        (["heads=[medusa,eagel]"], r"heads=\['eagel'\] are not among candidates, which has eagle3"),
        (["trainer.max_steps=9"], "head=auto trains as long as budget=32steps says"),
        (["search_share=1.0"], "search_share=1.0 must be between 0 and 1"),
        (["judge.repeats=0"], "judge.repeats=0 must be at least 1"),
        (["judge.repeat=2"], "did you mean judge.repeats"),
        (["heads=[x]", "+candidates.x=['head=medusa2']"], "candidates.x tunes the target too"),
        (
            ["heads=[x]", "+candidates.x=['head=eagle3','head.ttt_stepz=2']"],
            "candidates.x: head.ttt_stepz is not known; did you mean head.ttt_steps",
        ),
        (
            ["heads=[x]", "+candidates.x=['head=eagle3','max_length=32']"],
            "candidates.x sets max_length, which all candidates",
        ),
        (["heads=[x]", "+candidates.x=['head=auto']"], "candidates.x is given head=auto, which is not a head"),
        (["budget=1s"], r"budget=1s is too small for a round of 2 candidates .* give at least \d+[sm], or name fewer"),
    ],
)
def test_what_is_refused_in_one_sentence(given: list[str], here, change: list[str], words: str):
    ended = here(*given, "heads=[medusa,hass]", *change)
    assert re.search(words, complaint(ended._replace(out="")))


def test_a_budget_without_auto_is_no_key(given: list[str], tmp_path: Path):
    """Run a process, as a user types it."""
    wrong = end(program("head=medusa", "budget=2h", cwd=tmp_path))
    assert "budget is not known" in complaint(wrong)
