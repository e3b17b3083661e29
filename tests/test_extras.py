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
from tests.support import nightly_but, typed
from tests.support.gguf_targets import write_gguf
from tests.support.head_factory import make_head

ROOT = Path(__file__).resolve().parent.parent
STARTED = "import sys; sys.path[:0] = sys.argv[1:3]; del sys.argv[1:3]; from foredraft.__main__ import main; main()"


def needed(text: str, seen: set[str]) -> Iterator[metadata.Distribution]:
    """The distribution that a requirement names, and all that it needs."""
    requirement = Requirement(text)
    key = f"{requirement.name}{sorted(requirement.extras)}"
    if key in seen:
        return
    seen.add(key)
    found = metadata.distribution(requirement.name)
    yield found
    for line in found.requires or []:
        marker = Requirement(line).marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
            yield from needed(line, seen)


def linked(extras: str, folder: Path) -> Path:
    """A folder of nothing but what `pip install foredraft[extras]` installs."""
    for found in needed(f"foredraft[{extras}]", set()):
        for name in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not os.path.lexists(folder / name):
                (folder / name).symlink_to(str(found.locate_file(name)))
    return folder


@pytest.fixture(scope="module")
def gguf(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model, tokenizer = LlamaForCausalLM.from_pretrained(tiny_path), AutoTokenizer.from_pretrained(tiny_path)
    write_gguf(file, model, tokenizer, metadata={"tokenizer.chat_template": "{{ messages[0].content }}"})
    return file


BY_DAY = [
    ("cli", "directory", "generate drafter=HEAD+suffix prompt=one max_new_tokens=4"),
    ("cli", "directory", "evaluate drafter=[ngram] prompts=PROMPTS limit=1 repeats=1 new_tokens=8 output_dir=out"),
    ("chat,gguf", "file", "chat drafter=ngram max_new_tokens=4"),
    ("chat", "file", "generate prompt=one"),
]
BY_NIGHT = [
    ("cli", "directory", "generate drafter=ngram+suffix prompt=one max_new_tokens=4"),
    ("cli", "directory", "plan head=eagle3 strategy=single tokens=1000"),
    ("cli", "directory", "lossless drafter=HEAD data=text data.path=TEXTS prompts=1 prompt_tokens=8 new_tokens=8"),
    ("cli", "directory", "export head=HEAD format=vllm output_dir=out"),
    ("cli", "directory", "parity head=HEAD"),
]


@pytest.mark.parametrize(("extras", "kind", "given"), nightly_but([*BY_DAY, *BY_NIGHT], *BY_DAY))
def test_an_extra_is_enough_for_its_programs(
    extras, kind, given, tiny_path, target, folder, gguf, tmp_path, monkeypatch
):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two three"}\n')
    (tmp_path / "libraries").mkdir()
    libraries = linked(extras, tmp_path / "libraries")
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    for name, path in (("PROMPTS", tmp_path / "prompts.jsonl"), ("HEAD", tmp_path / "head"), ("TEXTS", folder)):
        given = given.replace(name, str(path))
    command, *arguments = typed(given)
    target = [f"target={tiny_path if kind == 'directory' else gguf}", "target.device=cpu"]
    program = [sys.executable, "-S", "-c", STARTED, str(libraries), str(ROOT), command, *target, *arguments]
    ended = subprocess.run(program, cwd=tmp_path, input="one\n", capture_output=True, text=True, timeout=300)
    if extras == "chat" and kind == "file":
        assert ended.returncode == 2 and "needs the package gguf: pip install 'foredraft[gguf]'" in ended.stderr
    else:
        assert ended.returncode == 0, ended.stderr
