"""scripts/evaluate.py as it is typed."""

import json
import random

import pytest

from scripts import evaluate


@pytest.fixture
def typed(tiny_path, tmp_path, monkeypatch):
    """Sets the command line: a tiny target, raw text, and what is given."""
    words = ["def", "self", "return", "other", "value", "class", "Pair", "pass", "add", "import"]
    draw = random.Random(0)
    for number in range(12):  # each a document of its own
        (tmp_path / f"{number}.py").write_text(" ".join(draw.choices(words, k=400)))
    given = ["target=hf", f"target.path={tiny_path}", "target.device=cpu", "data=text", f"data.path={tmp_path}"]
    given += ["prompts=2", "timed_prompts=1", "prompt_tokens=24", "new_tokens=16", "hydra/job_logging=disabled"]

    def type_in(*more: str) -> None:
        monkeypatch.setattr("sys.argv", ["scripts/evaluate.py", *given, *more])

    return type_in


def test_a_drafter_is_measured(typed, tmp_path, capfd):
    typed("drafter=ngram", f"output={tmp_path / 'figures.json'}")
    evaluate.main()
    metrics = json.loads((tmp_path / "figures.json").read_text())
    assert metrics["identical_greedy"] == metrics["identical_sampled"] == 1.0
    assert metrics["acceptance_length"] >= 1.0 and metrics["prompts"] == 2 and metrics["drafter"] == "ngram"
    assert f"{metrics['acceptance_length']:.2f}" in capfd.readouterr().out


def test_nothing_to_measure_on_is_named(typed, capfd):
    typed("prompts=0")
    with pytest.raises(SystemExit) as end:
        evaluate.main()
    assert end.value.code == 2 and "prompts=0 must be at least 1" in capfd.readouterr().err
