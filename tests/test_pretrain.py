"""experiment=train_target: a target that is trained, killed and resumed is the one that was not, and heads train on it."""

import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from foredraft.train.data import pretraining, stdlib
from foredraft.train.data.pretraining import Windows, texts
from foredraft.train.pretrain import prepare, trained_target
from tests.support import typed
from tests.support.processes import complaint, program
from tests.support.tiny import TEXT, VOCAB, tiny_config

STEPS = 30
SIZES = {"steps": STEPS, "rows": 4, "length": 32}
GIVEN = typed(f"""
    experiment=train_target {" ".join(f"target.{name}={value}" for name, value in SIZES.items())} target.rows_at_once=2
    target.save_steps=3 target.config=tiny.json target.device=cpu target.dtype=float32 data.max_files=2
    self_generated_tokens=0 head=medusa length=64 trainer.max_steps=2 output_dir=out
    evaluate={{prompts:2,timed_prompts:1,prompt_tokens:16,new_tokens:8,eval_prompts:1,eval_steps:0,proof:false}}
""")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A training that is about to begin: the standard library itself takes a minute to read."""
    facts = json.loads(tiny_config().to_json_string())
    (tmp_path / "tiny.json").write_text(json.dumps(facts))
    documents = stdlib.documents
    monkeypatch.setattr(stdlib, "documents", lambda part, tests: [(Path("a.py"), TEXT)])
    settings = {"config": facts, "more_text": None, "learning_rate": 0.001, **SIZES}
    prepare(tmp_path / "begun", settings)
    monkeypatch.setattr(stdlib, "documents", documents)
    return tmp_path


def test_a_target_that_is_killed_and_resumed_is_the_one_that_was_not(folder: Path, here, capfd):
    shutil.copytree(folder / "begun", folder / "whole")
    trained_target(
        str(folder / "whole"), str(folder / "tiny.json"), rows_at_once=2, save_steps=3, device="cpu", **SIZES
    )
    said = capfd.readouterr().out
    assert f"{STEPS} steps read {STEPS * 4 * 32:,} tokens" in said
    assert re.search(rf"^step 1/{STEPS}  loss .* left$", said, re.M)  # what it takes is told at once
    killed = program(*GIVEN, "target.path=begun", cwd=folder)
    while not list(folder.glob("begun/checkpoints/checkpoint-*")):
        assert killed.poll() is None and time.sleep(0.05) is None
    killed.kill()
    killed.communicate(timeout=60)
    assert not (folder / "begun/config.json").exists()  # it is not finished
    ended = here(*GIVEN, "target.path=begun")
    assert ended.code == 0, ended.err
    assert "resuming from begun/checkpoints/checkpoint-" in ended.out
    weights = [load_file(folder / name / "model.safetensors") for name in ("whole", "begun")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    histories = [json.loads((folder / name / "history.json").read_text()) for name in ("whole", "begun")]
    losses = [[(entry["step"], entry["loss"]) for entry in history if "loss" in entry] for history in histories]
    assert losses[0] == losses[1] and losses[0][-1][1] < losses[0][0][1] and histories[0][-1] == histories[1][-1]
    assert {path.name for path in (folder / "begun").iterdir()} >= {"config.json", "tokenizer.json", "training.json"}
    assert not (folder / "begun/checkpoints").exists() and not (folder / "begun/tokens.npy").exists()
    assert json.loads((folder / "out/metrics.json").read_text())["head"] == "medusa"  # and a head was trained for it


@pytest.mark.parametrize(
    "change, words",
    [
        ("target.steps=31", "began with other settings (steps is 30 there, 31 here)"),
        ("target.rows=5", "target.rows=5 must be a multiple of target.rows_at_once=2 times 1 processes"),
        ("target.stepz=4", "did you mean target.steps"),
        ("target.config=none.json", "none.json: no such file"),
    ],
)
def test_what_is_refused_in_one_sentence(folder: Path, here, change: str, words: str):
    ended = here(*GIVEN, "target.path=begun", change)
    assert words in complaint(ended)


def test_more_text_is_learned_and_held_out_text_is_not(tmp_path: Path, monkeypatch):
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        stdlib, "documents", lambda part, tests: asked.append((part, tests)) or [(Path("a.py"), "code")]
    )
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "2", "number": 3}\n{"question": "2?", "answer": "4"}\n')
    assert list(texts("train", str(file))) == ["code", "1 + 1?\n2", "2?\n4"]
    assert list(texts("validation", None)) == ["code"] and asked == [("train", True), ("validation", False)]
    with pytest.raises(ValueError, match=r"target\.more_text=nothing is no file"):
        list(texts("train", "nothing"))
    file.write_text("1 + 1\n")
    with pytest.raises(ValueError, match="line 1 is no JSON object"):
        list(texts("train", str(file)))


def test_text_comes_back_from_the_tokenizer_and_rows_are_whole():
    tokenizer = pretraining.train_tokenizer([TEXT], VOCAB)
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and len(tokenizer) <= VOCAB
    ids = pretraining.tokens_of(tokenizer, ["x = 12", "def add(self):"])
    assert tokenizer.decode(ids) == "x = 12<|endoftext|>def add(self):<|endoftext|>"
    rows = Windows(np.arange(10), 4)
    assert len(rows) == 2 and rows[1]["input_ids"].tolist() == rows[1]["labels"].tolist() == [4, 5, 6, 7]
