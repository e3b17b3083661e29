"""Whole runs on conversations: train, preview, regenerate, as users call them."""

import json
import re
from pathlib import Path

import pytest

from foredraft.scripts import preview, regenerate
from foredraft.train.run import main as train
from tests.support import ROOT, typed
from tests.support.tiny import TEXT

PLAIN = f"data.template={ROOT / 'train' / 'data' / 'plain_chat.jinja'}"
SMALL = typed("""
    preset=test_model target.device=cpu max_length=64 self_generated_tokens=0
    trainer.max_steps=6 trainer.logging_steps=1 trainer.warmup_steps=2
    eval.final_num_prompts=2 eval.timed_prompts=1 eval.prompt_tokens=32 eval.max_new_tokens=8 eval.steps=0
""")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [json.dumps({"question": f"add {i}?", "answer": TEXT[: 40 + i]}) for i in range(60)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines, "{broken", ""]))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def steps(out: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+)/\d+  loss (\S+)", out, re.M)]


def test_a_run_on_conversations_online_and_from_disk(file: Path, tiny_path: Path, tmp_path: Path, call):
    rows = ["data=conversations", f"data.path={file}", PLAIN, "data.val_split=0.2"]
    given = [*SMALL, "head=medusa", f"target.path={tiny_path}", *rows]
    online = call(train, *given, "output_dir=online").out
    disk = call(
        train,
        *given,
        "output_dir=disk",
        "hidden_states=offline",
        "hidden_states.dtype=float32",
        "hidden_states.shard_rows=8",
    ).out
    assert len(steps(online)) == 6 and steps(online) == steps(disk)
    assert (tmp_path / "disk.hidden_states" / "manifest.json").exists()
    card = json.loads((tmp_path / "online" / "data_card.json").read_text())
    assert card["rows"] == 61 and card["dropped"] == {"not JSON": 1} and card["used"] == 60
    assert 0 < card["supervised_share"] < 1 and card["vocabulary_coverage"] == 1.0
    assert "1 x not JSON (first: rows.jsonl:61)" in online
    model_card = (tmp_path / "online" / "head" / "README.md").read_text()
    assert card["hash"] in model_card and "not JSON" in model_card
    metrics = json.loads((tmp_path / "online" / "metrics.json").read_text())
    assert metrics["prompts"] == 2 and metrics["identical_greedy"] == 1.0


def test_preview_shows_what_is_supervised(file: Path, tiny_path: Path, call):
    rows = ["data=conversations", f"data.path={file}", PLAIN]
    out = call(preview.main, f"target.path={tiny_path}", *rows, "samples=2").out
    assert out.count("--- document") == 2 and "User: add " in out and "?\nAssistant:[[ def add(self" in out
    assert re.search(r"<\|endoftext\|>\]\]", out) and "1 x not JSON" in out


@pytest.mark.nightly
def test_regenerated_in_process_and_trained_on(file: Path, tiny_path: Path, tmp_path: Path, call):
    given = [f"target.path={tiny_path}", "target.device=cpu"]
    given += ["data=conversations", f"data.path={file}", PLAIN, "data.val_split=0.2"]
    out = call(regenerate.main, *given, "max_new_tokens=8", "temperature=0.0", "data.max_samples=30").out
    assert "30 rows in regenerated.jsonl" in out
    rows = [json.loads(line) for line in (tmp_path / "regenerated.jsonl").read_text().splitlines()]
    assert {row["number"]: row["messages"][0]["content"] for row in rows} == {i: f"add {i}?" for i in range(30)}
    facts = {"seed", "where", "digest", "number"}
    assert rows[0].keys() - facts == {"finish_reasons", "messages", "tokens", "starts", "written"}
    again = call(regenerate.main, *given, "max_new_tokens=8", "temperature=0.0", "data.max_samples=30").out
    assert "30 rows in" in again and len((tmp_path / "regenerated.jsonl").read_text().splitlines()) == 30
    shown = call(preview.main, *given[:2], "data=conversations", "data.path=regenerated.jsonl", PLAIN).out
    assert "rows" in shown and "User: add " in shown
    mixed = [*SMALL, *given[:2], "data=conversations", f"data.path=[{file},regenerated.jsonl]", PLAIN, "head=medusa"]
    call(train, *mixed, "data.val_split=0.4", "output_dir=out", "eval.check_float32=false")
    by_set = json.loads((tmp_path / "out" / "metrics.json").read_text())["acceptance_length_by_set"]
    assert by_set.keys() == {str(file), "regenerated.jsonl"} and all(length >= 1 for length in by_set.values())
    assert f"{file} 1." in (tmp_path / "out" / "head" / "README.md").read_text()
