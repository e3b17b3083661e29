"""Each extra brings what its programs need: they run where nothing else can be imported, as after `pip install`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from transformers import AutoTokenizer, LlamaForCausalLM

from foredraft.heads import save_head
from tests.support import ROOT, typed
from tests.support.gguf_targets import write_gguf
from tests.support.head_factory import make_head

pytestmark = pytest.mark.nightly

STARTED = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; from foredraft.__main__ import main; main()"


def needed(text: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """Return the distribution that a requirement names, and all that it needs."""
    requirement = Requirement(text)
    if str(requirement) in seen:
        return
    seen.add(str(requirement))
    found = metadata.distribution(requirement.name)
    yield found
    for line in found.requires or []:
        marker = Requirement(line).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
            yield from needed(line, seen)


def start(extras: str, command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `foredraft command`, with a line of input, where only what `pip install foredraft[extras]` installs can be
    imported."""
    libraries = cwd / "libraries"
    libraries.mkdir()
    for found in needed(f"foredraft[{extras}]", set()):
        for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not os.path.lexists(libraries / name):
                (libraries / name).symlink_to(str(found.locate_file(name)))
    program = [sys.executable, "-S", "-c", STARTED, str(libraries), str(ROOT), *typed(command)]
    return subprocess.run(program, cwd=cwd, input="one\n", capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def gguf(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model, tokenizer = LlamaForCausalLM.from_pretrained(tiny_path), AutoTokenizer.from_pretrained(tiny_path)
    write_gguf(file, model, tokenizer, metadata={"tokenizer.chat_template": "{{ messages[0].content }}"})
    return file


COMMANDS = [
    ("chat,gguf", "chat target=GGUF drafter=ngram max_new_tokens=4"),
    ("cli", "generate target=TINY drafter=HEAD+suffix prompt=one max_new_tokens=4"),
    ("cli", "evaluate target=TINY drafter=[ngram] prompts=PROMPTS limit=1 repeats=1 max_new_tokens=8 output_dir=out"),
    ("cli", "plan target=TINY head=eagle3 strategy=single tokens=1000"),
    (
        "cli",
        "lossless target=TINY drafter=HEAD data=text data.path=TEXTS num_prompts=1 prompt_tokens=8 max_new_tokens=8",
    ),
    ("cli", "export target=TINY checkpoint=HEAD format=vllm output_dir=out"),
]


@pytest.mark.parametrize(("extras", "command"), COMMANDS)
def test_an_extra_is_enough_for_its_programs(extras, command, tiny_path, target, folder, gguf, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    paths = {"TINY": tiny_path, "GGUF": gguf, "TEXTS": folder}
    paths |= {"PROMPTS": tmp_path / "prompts.jsonl", "HEAD": tmp_path / "head"}
    paths["PROMPTS"].write_text('{"prompt": "one two three"}\n')
    save_head(make_head("eagle3", target), paths["HEAD"], target)
    for name, path in paths.items():
        command = command.replace(name, str(path))
    ended = start(extras, f"{command} target.device=cpu", tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_missing_extra_is_named(gguf: Path, tmp_path: Path):
    ended = start("chat", f"generate target={gguf} prompt=one", tmp_path)
    assert ended.returncode == 2 and "needs the package gguf: pip install 'foredraft[gguf]'" in ended.stderr


def test_a_bug_report_needs_no_extra(tiny_path: Path, tmp_path: Path):
    ended = start("", f"env target={tiny_path}", tmp_path)
    assert ended.returncode == 0 and "failed" not in ended.stdout, ended
    assert f"bits of {tiny_path}: " in ended.stdout and "extra cli: " in ended.stdout
    refused = subprocess.run(
        [sys.executable, "-m", "foredraft", "env", "a=1"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2 and refused.stderr.endswith("takes target=ORG/NAME, or nothing, not a=1\n")
