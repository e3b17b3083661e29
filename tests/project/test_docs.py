"""README and docs say what is so: commands compose, marked ones run, Python runs, and links lead somewhere.

`mkdocs build --strict` (scripts/test.sh) checks the links and anchors inside docs.
"""

import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify

from foredraft.config import flat, read
from foredraft.heads import Target, save_head
from tests.conformance.checks import support
from tests.conformance.families import families
from tests.conformance.targets import small_family
from tests.support import ROOT, nightly_but, typed
from tests.support.documents import BLOCK, Block, blocks, command_lines, program
from tests.support.head_factory import make_head, write_export

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Programs of others, whose command lines are theirs.
FOREIGN = typed("hf git cat echo cd curl kubectl vllm llama-server guidellm lm_eval mkdocs docker")
SUPPORT = {"trees": "Trees", "chains": "Chains", "decoded plainly": "No drafts"}


def typed_commands(document: Path) -> Iterator[str]:
    """Yield each command line of a shell block, and each `foredraft ...`, `python ...` and `bash ...` in a sentence."""
    for block in blocks(document, "bash"):
        yield from command_lines(block.text)
    prose = BLOCK.sub("", document.read_text())
    found = re.findall(r"`((?:foredraft|python|bash) [^`]*)`", prose)
    yield from (line for line in found if not re.search(r"(?<!ORG/)\b(NAME|COMMAND)\b", line))  # a pattern of commands


COMMANDS = list(dict.fromkeys(command for document in DOCUMENTS for command in typed_commands(document)))
PYTHON = [document for document in DOCUMENTS if blocks(document, "python")]
MARKED = [block for document in DOCUMENTS for block in blocks(document) if block.runs]
RUN = [pytest.param(one, marks=[pytest.mark.nightly] * ("target=test_model" in one.text)) for one in MARKED]


def title(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("command", nightly_but(COMMANDS, *typed_commands(ROOT / "README.md")))
def test_a_command_is_one_that_the_program_takes(command: str, call) -> None:
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command)
    assert not re.search(r"[\[\]*?{}]", bare), f"a shell would expand this: {bare}"
    words = shlex.split(command, comments=True)
    if words[0] in FOREIGN or words[:2] == ["python", "-m"]:
        return
    if words[:2] == ["pip", "install"]:
        check_extras(words[2:])
        return
    files = [word for word in words if re.match(r"(scripts|train|tests|\.ci)/", word) and "+" not in word]
    assert all((ROOT / file).exists() for file in files)
    module, arguments = program(words)
    if module is None:
        assert files or words[:2] == ["foredraft", "--version"], f"{command}: no program of ours, and no file"
        return
    if module == "foredraft.scripts.env":  # it has no config
        assert [word.partition("=")[0] for word in arguments] in ([], ["target"])
        return
    typed = [word for word in arguments if word != "..."]
    if "-m" in typed:  # a sweep is checked by its first job, since --cfg excludes it
        typed = [re.sub(r"=([^,\[]+),.*", r"=\1", word) for word in typed if word != "-m"]
    ended = call(importlib.import_module(module).main, "--cfg", "job", *typed)  # its own check, which runs nothing
    assert ended.code == 0, ended.err
    missing = [line.strip() for line in ended.out.splitlines() if line.endswith(": ???")]
    complete = module == "foredraft.scripts.plan" or "..." in arguments or not arguments  # a plan needs no data
    assert complete or not missing, f"{command}: leaves out {missing}"


def check_extras(words: list[str]) -> None:
    """Check that what is installed is foredraft with extras that it has, or a package of another project."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if asked := re.fullmatch(r"(?:\.|foredraft)\[(.+)\]", word):
            assert set(asked[1].split(",")) <= extras.keys(), word


@pytest.mark.parametrize("block", RUN, ids=lambda block: f"{title(block.document)}: {block.text.split(chr(10))[0]}")
def test_a_marked_block_runs(block: Block, call, tmp_path: Path) -> None:
    for folder in ("scripts", "train"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for command in command_lines(block.text):
        words = shlex.split(command, comments=True)
        module, arguments = program(words)
        if module is not None:
            ended = call(importlib.import_module(module).main, *arguments)
            assert ended.code == 0 and ended.out.strip(), f"{command}: {ended.err}"


@pytest.mark.parametrize("document", PYTHON, ids=title)
def test_the_python_of_a_document_runs(
    document: Path, tiny_path: Path, target: Target, tmp_path: Path, monkeypatch
) -> None:
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    write_export("transformers", make_head("dflash", target), target, tmp_path / "exported")
    monkeypatch.chdir(tmp_path)
    names = dict.fromkeys(("ORG/NAME", "smollm2"), str(tiny_path))
    names |= {
        "outputs/mine/head": str(tmp_path / "head"),
        "scripts/smollm2/eagle3+suffix": f"{tmp_path / 'head'}+suffix",
    }
    scope: dict[str, object] = {"__name__": "document"}
    for block in blocks(document, "python"):
        text = block.text
        for name, real in names.items():
            text = text.replace(f'"{name}"', f'"{real}"')
        exec(compile(text, title(document), "exec"), scope)
    assert len(scope) > 2


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if blocks(document)], ids=title)
def test_json_and_yaml_can_be_read(document: Path) -> None:
    for block in blocks(document):
        if block.language == "json":
            assert [json.loads(line) for line in block.text.splitlines() if line.strip()]
        elif block.language == "yaml":
            assert yaml.safe_load(block.text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=title)
def test_links_to_files_of_the_repository_exist(document: Path) -> None:
    text = document.read_text()
    assert not [path for path in re.findall(r"foredraft/blob/main/([^)#\s]+)", text) if not (ROOT / path).exists()]
    if document.parent == ROOT:
        for link, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", text):
            assert (ROOT / link).exists(), link
            headings = re.findall(r"^#+ (.*)$", (ROOT / link).read_text(), re.M) if anchor else []
            assert not anchor or anchor in [slugify(heading, "-") for heading in headings], f"{link}#{anchor}"


def test_keys_that_replace_those_of_other_trainers_are_known() -> None:
    choices = ["head=eagle3", "head=eagle", "head=dspark hidden_states=offline", "head=p_eagle hidden_states=server"]
    configs = [read("train", "target=ORG/NAME", "data.path=FILE", *choice.split()) for choice in choices]
    first, *others = ({key for key, _ in flat(cfg)} for cfg in configs)
    for document in (ROOT / "docs" / "migrate").glob("*.md"):
        rows = re.findall(r"^\| [^|]+ \| ([^|]+)", document.read_text(), re.M)
        typed = re.findall(r"`(\+?)((?:data|eval|head|hidden_states|objective|trainer)\.\w+)", " ".join(rows))
        assert typed and not [key for plus, key in typed if not plus and key not in first.union(*others)]
        assert not [f"+{key}" for plus, key in typed if plus and key in first]


def test_every_extra_is_explained() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "docs" / "get-started" / "installation.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*$", text, re.M)
    assert {name for name in extras if name not in ("chat", "serve-test")} <= set(rows)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.conformance
@pytest.mark.parametrize("name", families())
def test_models_md_lists_every_family_where_it_belongs(name: str) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    lists = re.findall(r"^\*\*([\w ]+)\*\* \(\d+\):\s+((?:`[\w-]+`[,.]?\s+)+)", text, re.M)
    (listed,) = (title for title, names in lists if f"`{name}`" in names)
    try:
        found = SUPPORT[support(small_family(families()[name]))]
    except (ValueError, ImportError):
        found = "An error"
    assert found == listed
