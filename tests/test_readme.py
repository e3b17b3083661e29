"""The README's commands are those of the programs, and its Python runs: a renamed key, choice, extra or file fails here."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from foredraft import __main__ as foredraft
from foredraft.heads import Target, save_head
from tests.support import ROOT
from tests.support.head_factory import make_head

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.S)
TRAINING = ("torchrun", "accelerate", "deepspeed", "sbatch")  # what follows the script is train/run.py's
# Programs of others, whose command lines are theirs.
FOREIGN = ("hf auth login", "git ", "vllm serve ", "llama-server ", "guidellm ", "lm_eval ")


def blocks(document: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(document.read_text()) if kind == language]


def commands() -> Iterator[str]:
    """Return each line of a shell block, and each `foredraft ...`, `python ...` and `bash ...` in a sentence."""
    for document in DOCUMENTS:
        for text in blocks(document, "bash"):
            yield from (line for line in text.replace("\\\n", " ").splitlines() if line.split("#")[0].strip())
        prose = BLOCK.sub("", document.read_text())
        typed = re.findall(r"`((?:foredraft|python|bash) [^`]*)`", prose)
        yield from (line for line in typed if not re.search(r"(?<!ORG/)\bNAME\b", line))  # a pattern of commands


@pytest.mark.parametrize("command", list(dict.fromkeys(commands())))
def test_a_command_is_one_that_the_program_takes(command: str, call) -> None:
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command)
    assert not re.search(r"[\[\]*?{}]", bare), f"a shell would expand this: {bare}"
    words = shlex.split(command, comments=True)
    if command.startswith(FOREIGN):
        return
    if words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        (asked,) = (re.fullmatch(r"\.\[(.+)\]", word) for word in words if word.startswith("."))
        assert asked is not None and set(asked[1].split(",")) <= extras.keys()
        return
    files = [word for word in words if re.match(r"(scripts|train|tests|\.ci)(/|$)", word)]
    assert all((ROOT / file).exists() for file in files)
    module, arguments = program(words)
    if module is None:
        assert files, f"{command}: no program of ours, and no file"
        return
    typed = [word for word in arguments if word != "..."]
    ended = call(importlib.import_module(module).main, "--cfg", "job", *typed)  # its own check, which runs nothing
    assert ended.code == 0, ended.err
    missing = [line.strip() for line in ended.out.splitlines() if line.endswith(": ???")]
    assert not missing or "..." in arguments or not arguments, f"{command}: leaves out {missing}"


def program(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the module that a command line runs, and its arguments; None if its options are not keys."""
    first = words[0]
    if first == "foredraft":
        assert words[1:2] and words[1] in foredraft.PROGRAMS, f"foredraft {words[1:]} is not a program"
        told = not words[2:] or "..." in words or "--help" in words or not foredraft.needs_target(words[1], words[2:])
        assert told, f"{' '.join(words)} has to name a target"
        return foredraft.PROGRAMS[words[1]][0], words[2:]
    if first in TRAINING:
        script = next(i for i, word in enumerate(words) if word in ("train/run.py", "scripts/slurm.sh"))
        return "foredraft.train.run", words[script + 1 :]
    if first == "bash" and words[1] == "scripts/demo.sh":
        return "foredraft.train.run", words[2:]
    if first == "python" and words[1].endswith(".py") and not words[1].startswith(("scripts/test_model", "tests/")):
        return f"foredraft.{words[1].removesuffix('.py').replace('/', '.')}", words[2:]
    return None, []


def test_the_python_of_the_readme_runs(tiny_path: Path, target: Target, tmp_path: Path, capfd) -> None:
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    names = {"ORG/NAME": str(tiny_path), "outputs/mine/head": str(tmp_path / "head")}
    scope: dict[str, object] = {}
    for text in blocks(ROOT / "README.md", "python"):
        for name, real in names.items():
            text = text.replace(f'"{name}"', f'"{real}"')
        exec(compile(text, "README.md", "exec"), scope)
    printed = capfd.readouterr().out
    assert "def main():" in printed and printed.rstrip().endswith(("length", "stop"))


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_links_and_pictures_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "README.md").read_text()
    assert not [name for name in extras if name not in ("dev", "serve-test", "docs") and f".[{name}]" not in text]
