"""The parts of pages that scripts/docs.py fills in: each directive in docs names a generator that gives something."""

import pkgutil
import re
from collections import defaultdict

import pytest

import foredraft
from foredraft.scripts import docs, docs_heads
from tests.support import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
DIRECTIVES = sorted({directive for page in PAGES for directive in docs.DIRECTIVE.findall(page.read_text())})
SAID = {
    "tree": True,
    "vllm": ("vllm serve ORG/NAME", "a note"),
    "mtp": ValueError("not this one"),
    "sglang": ValueError("train it with head.bias=false"),
    "gguf": ValueError("no"),
    "speculators": ValueError("no"),
    "transformers": ValueError("no"),
}


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the answers of built heads: `mkdocs build` builds them all."""
    monkeypatch.setattr(docs_heads, "answers", lambda: defaultdict(lambda: SAID, eagle3=SAID))


@pytest.mark.parametrize(("name", "arguments"), DIRECTIVES)
def test_a_generated_part_can_be_made(name: str, arguments: str) -> None:
    made = docs.on_page_markdown(f"<!-- generated: {name} {arguments} -->")
    assert made.strip() and "generated:" not in made
    if name in ("keys", "options", "config", "recipes", "fields", "support", "measured"):
        assert (made.count("\n|") >= 2 and "| --- |" in made) or "---:" in made


def test_what_exporters_say_is_shown() -> None:
    row = docs_heads.support().splitlines()[-1]
    assert row == "| [eagle3](eagle3.md) | yes | yes | yes | [with conditions](eagle3.md#export) | – | – | – |"
    page = docs_heads.engines("eagle3")
    assert "| `format=vllm` | `vllm serve ORG/NAME` | a note |" in page and "- `format=gguf`: no." in page


def test_a_head_has_its_rows_of_every_table() -> None:
    assert docs_heads.measured("xpress").count("**") == 6  # three tables
    assert "| no drafts |" in docs_heads.measured("eagle3") and "hydra" not in docs_heads.measured("eagle3")
    assert float(docs_heads.speedup("eagle3").rstrip("x")) > 1


def test_the_page_of_the_python_api_names_what_exists() -> None:
    page = (ROOT / "docs" / "reference" / "python-api.md").read_text()
    for name, members in re.findall(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\])?", page, re.M):
        shown = pkgutil.resolve_name(name)
        assert not [member for member in filter(None, members.split(", ")) if not hasattr(shown, member)], name
    assert {*re.findall(r"\w+", " ".join(re.findall("^from foredraft import (.*)", page, re.M)))} == {
        *foredraft.__all__
    }


def test_every_head_has_a_page_with_six_sections() -> None:
    kinds = {file.stem for file in (ROOT / "conf" / "head").glob("*.yaml")} - {"auto"} | {"hass"}
    pages = {file.stem: file.read_text() for file in (ROOT / "docs" / "heads").glob("*.md") if file.stem != "index"}
    assert kinds == pages.keys()
    for text in pages.values():
        assert [line for line in text.splitlines() if line.startswith("## ")] == [
            f"## {section}" for section in ("Idea", "Train", "Measured", "Export", "Keys", "Citation")
        ]
