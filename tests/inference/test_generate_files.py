"""`foredraft generate` for a file of prompts, and `foredraft chat`, as separate programs."""

import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from foredraft.heads import Target
from foredraft.heads.checkpoint import fingerprint
from foredraft.inference import generate
from foredraft.inference.drafters import NgramDrafter
from foredraft.scripts import generate as program_of_files
from foredraft.train.data.sources import Row
from tests.support import ROOT
from tests.support.processes import Ended, end, start, succeeded

SETTINGS = ("chat", "max_new_tokens", "temperature", "top_p", "seed")
PROMPTS = ["def add(self", "class Pair:\n", "return", "other.value + é", "self"]


def program(name: str, *arguments: str, cwd: Path, typed: str = "") -> Ended:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "target.dtype=float32", "target.device=cpu"]
    return end(start(*command, *arguments, cwd=cwd), typed)


def test_a_stopped_run_is_continued(target: Target, tiny_path: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = [f"target={tiny_path}", "prompts=in.jsonl", "temperature=1.0", "max_new_tokens=9", "seed=3"]
    expected = []
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([target.text_tokenizer(prompt).input_ids])
        out = generate(target, None, ids, temperature=1.0, seed=3 + number, max_new_tokens=9)
        text = target.text_tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)
        expected.append({"prompt": prompt, "text": text})
    printed = program("generate", *given, "batch_size=3", cwd=tmp_path)
    assert [json.loads(line) for line in printed.out.splitlines()] == expected, printed.err
    output = tmp_path / "out.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in expected]
    output.write_text("".join(lines[:2]) + lines[2][:9])  # a kill came within the third line
    continued = program("generate", *given, "output=out.jsonl", "batch_size=2", cwd=tmp_path)
    assert continued.code == 0 and continued.out == "" and output.read_text() == "".join(lines)
    assert "tokens in" in continued.err and "\r" not in printed.err + continued.err  # nor bars of transformers
    longer = program("generate", *given, "output=out.jsonl", "max_new_tokens=10", cwd=tmp_path)
    assert longer.code == 2 and "was written with other settings (max_new_tokens 9): give the same" in longer.err
    for name in ("t.5", "t.10"):  # which differ in what Path takes for their endings
        (tmp_path / name).touch()
        program_of_files.check_same_settings(
            tmp_path / name, SimpleNamespace(target=target, cfg=dict.fromkeys(SETTINGS, name))
        )
        (tmp_path / name).write_text(lines[0])
    program_of_files.check_same_settings(
        tmp_path / "t.5", SimpleNamespace(target=target, cfg=dict.fromkeys(SETTINGS, "t.5"))
    )
    tuned = fingerprint(target) | {"weights_digest": "of a fine-tune in the same place, with the same embedding"}
    monkeypatch.setattr(program_of_files, "fingerprint", lambda target: tuned)
    with pytest.raises(ValueError, match=r"written with other settings \(weights_digest "):
        program_of_files.check_same_settings(
            tmp_path / "t.5", SimpleNamespace(target=target, cfg=dict.fromkeys(SETTINGS, "t.5"))
        )
    output.write_text(lines[1])
    other = program("generate", *given, "output=out.jsonl", cwd=tmp_path)
    assert other.code == 2 and "output=out.jsonl, line 1 is not an answer to prompt 1" in other.err


def test_a_chat_answers_line_by_line(tmp_path: Path):
    """Use the test model by its chat template; stdin is not a terminal here."""
    typed = "def add(a, b):\n\n/new\ndef add(a, b):\n" + "word " * 3000 + "\nmore\n/quit\nnever read\n"
    ended = succeeded(program("chat", "target=test_model", "max_new_tokens=6", "color=true", cwd=tmp_path, typed=typed))
    figures = [line for line in ended.out.splitlines() if "tokens/s, acceptance length" in line]
    assert len(figures) == 3 and "\n" in ended.out
    legend, answers = ended.out.split("\n", 1)
    assert legend.startswith("[in brackets]: a draft that the target accepted.")
    first, second = answers.split(figures[0])[0], answers.split(figures[0])[1].split("6 tokens")[0]
    assert first.strip() == second.strip()  # /new: the same question in the same place
    assert "supports 2048" in " ".join(ended.out.split()) and "/new starts over" in " ".join(ended.out.split())


BAD = [("word " * 3000).strip(), "", 5, None, ["a", "b"]]


def test_prompts_that_cannot_be_answered_leave_the_others(target: Target, tiny_path: Path, tmp_path: Path):
    good = {0: PROMPTS[0], 4: PROMPTS[1], 7: "\ud800", 8: PROMPTS[2]}
    bad = iter(BAD)
    prompts = [good[number] if number in good else next(bad) for number in range(9)]
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts] + ["{no JSON", "[]"]
    (tmp_path / "in.jsonl").write_text("".join(f"{row}\n" for row in rows))
    given = [f"target={tiny_path}", "prompts=in.jsonl", "max_new_tokens=9", "seed=3", "temperature=1.0", "batch_size=4"]
    given.append("output=out.jsonl")
    first = succeeded(program("generate", *given, cwd=tmp_path))
    output = tmp_path / "out.jsonl"
    written = output.read_text()
    answers = [json.loads(line) for line in written.splitlines()]
    assert [answer["prompt"] for answer in answers] == [*prompts, None, None]
    assert [number for number, answer in enumerate(answers) if "text" in answer] == [0, 4, 8]
    for number in (0, 4, 8):
        ids = torch.tensor([target.text_tokenizer(prompts[number]).input_ids])
        out = generate(target, None, ids, temperature=1.0, seed=3 + number, max_new_tokens=9)
        assert answers[number]["text"] == target.text_tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)
    assert "supports" in answers[1]["error"] and "is empty" in answers[2]["error"]
    assert answers[3]["error"] == "a turn that is not text" and "it needs `turns`" in answers[5]["error"]
    assert "2 turns without answers" in answers[6]["error"] and answers[9]["error"] == "not JSON"
    assert answers[7]["error"] == "half a character (a lone surrogate)"
    assert "in.jsonl:2: " in first.err
    again = program("generate", *given, cwd=tmp_path)
    assert again.code == 0 and output.read_text() == written and "in.jsonl:2: " in again.err  # errors are tried again
    output.write_text(written.replace(json.dumps(answers[0]["text"])[1:-1], "kept", 1).replace('"text"', '"error"', 2))
    mended = program("generate", *given, cwd=tmp_path)
    assert mended.code == 0 and output.read_text() == written


def test_conversations_are_answered_as_chats(tiny_path: Path, tmp_path: Path):
    path = shutil.copytree(tiny_path, tmp_path / "chat")
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
    )
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a color."}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"turns": ["Hi"], "category": "roleplay"},
        {"prompt": "Hi"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"target={path}", "prompts=in.jsonl", "max_new_tokens=9", "output=out.jsonl"]
    succeeded(program("generate", *given, cwd=tmp_path))
    written = (tmp_path / "out.jsonl").read_text()
    target = Target.from_pretrained(path, dtype="float32")
    said = [rows[0]["messages"], *[[{"role": "user", "content": "Hi"}]] * 2]
    prompts = [target.text_tokenizer.apply_chat_template(one, add_generation_prompt=True).input_ids for one in said]
    texts = []
    for ids in [*prompts, target.text_tokenizer("Hi").input_ids]:
        out = generate(target, None, torch.tensor([ids]), max_new_tokens=9)
        texts.append(target.text_tokenizer.decode(out.new_tokens[0], skip_special_tokens=True).strip())
    answers = [json.loads(line) for line in written.splitlines()]
    assert [answer.pop("text").strip() for answer in answers] == texts
    assert answers == [*rows[:2], {"turns": ["Hi"]}, rows[3]]
    succeeded(program("generate", *given, cwd=tmp_path))
    assert (tmp_path / "out.jsonl").read_text() == written


@pytest.fixture
def writer(target: Target) -> program_of_files.Writer:
    settings = {"max_new_tokens": 5, "temperature": 0.0, "top_p": None, "seed": 0, "chat": False}
    return program_of_files.Writer(target, NgramDrafter(), OmegaConf.create(settings))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError("no room"), RuntimeError("no room")])
def test_a_batch_that_memory_has_no_room_for_is_halved(writer, error, monkeypatch):
    sizes = []

    def limited(target, drafter, ids, *args, **settings):
        sizes.append(len(ids))
        if len(ids) > 1 or writer.tokenizer.decode(ids[0]).endswith("poison"):
            raise error
        return generate(target, drafter, ids, *args, **settings)

    monkeypatch.setattr(program_of_files, "generate", limited)
    rows = [Row(f"row {number}", {"prompt": prompt}) for number, prompt in enumerate(["a", "poison", "b"])]
    answers = writer.answer(rows, range(3))
    assert sizes == [3, 1, 2, 1, 1] and ["text" in answer for answer in answers] == [True, False, True]
    assert answers[1]["error"] == f"{type(error).__name__}: no room"


def test_settings_that_no_prompt_can_have_are_refused_once(tiny_path: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    given = [f"target={tiny_path}", "prompts=in.jsonl", "temperature=-1"]
    ended = program("generate", *given, cwd=tmp_path)
    assert ended.code == 2 and "temperature=-1" in ended.err and ended.out == ""


@pytest.mark.nightly
def test_two_runs_do_not_write_one_file(tiny_path: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    given = [f"target={tiny_path}", "prompts=in.jsonl", "output=out.jsonl", "max_new_tokens=3"]
    with (tmp_path / "out.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        ended = program("generate", *given, cwd=tmp_path)
        assert ended.code == 2 and re.search(
            rf"output=out.jsonl is being written by process {os.getpid()}\b", ended.err
        )
    assert program("generate", *given, cwd=tmp_path).code == 0 and len((tmp_path / "out.jsonl").read_bytes()) > 1
