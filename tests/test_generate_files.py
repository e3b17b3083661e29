"""`foredraft generate` for a file of prompts, and `foredraft chat`, as programs of their own."""

import json
import sys
from pathlib import Path

import torch

from foredraft.heads import Target
from foredraft.inference import generate
from tests.support import ROOT
from tests.support.processes import Ended, end, start

PROMPTS = ["def add(self", "class Pair:\n", "return", "other.value + é", "self"]


def program(name: str, *arguments: str, cwd: Path, typed: str = "") -> Ended:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "target.dtype=float32", "target.device=cpu"]
    return end(start(*command, *arguments, cwd=cwd), typed)


def test_a_stopped_run_is_continued(target: Target, tiny_path: Path, tmp_path: Path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = [f"target={tiny_path}", "prompts=in.jsonl", "temperature=1.0", "max_new_tokens=9", "seed=3"]
    expected = []
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([target.text_tokenizer(prompt).input_ids])
        out = generate(target, None, ids, temperature=1.0, seed=3 + number, max_new_tokens=9)
        text = target.text_tokenizer.decode(out.new_tokens[0], skip_special_tokens=True)
        expected.append({"prompt": prompt, "text": text})
    printed = program("generate", *given, "batch=3", cwd=tmp_path)
    assert [json.loads(line) for line in printed.out.splitlines()] == expected, printed.err
    output = tmp_path / "out.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in expected]
    output.write_text("".join(lines[:2]) + lines[2][:9])  # a kill came within the third line
    continued = program("generate", *given, "output=out.jsonl", "batch=2", cwd=tmp_path)
    assert continued.code == 0 and continued.out == "" and output.read_text() == "".join(lines)
    assert "tokens in" in continued.err
    output.write_text(lines[1])
    other = program("generate", *given, "output=out.jsonl", cwd=tmp_path)
    assert other.code == 2 and "output=out.jsonl, line 1: no answer to prompt 1" in other.err


def test_a_chat_answers_line_by_line(tmp_path: Path):
    """The embedded target, whose chat template it is; stdin is no terminal here."""
    typed = "def add(a, b):\n\n/new\ndef add(a, b):\n" + "word " * 3000 + "\nmore\n/quit\nnever read\n"
    ended = program("chat", "max_new_tokens=6", "colour=true", cwd=tmp_path, typed=typed)
    assert ended.code == 0, ended.err
    figures = [line for line in ended.out.splitlines() if "tokens/s, acceptance length" in line]
    assert len(figures) == 3 and "\n" in ended.out
    first, second = ended.out.split(figures[0])[0], ended.out.split(figures[0])[1].split("6 tokens")[0]
    assert first.strip() == second.strip()  # /new: the same question in the same place
    assert "takes 2048" in " ".join(ended.out.split()) and "/new starts over" in " ".join(ended.out.split())
