"""Fill in what the code knows about itself while mkdocs builds the pages (`hooks:` in mkdocs.yml).

    <!-- generated: keys head=eagle3 -->             a comment in a page of docs/ calls the function of that name below
    python scripts/docs.py docs/heads/eagle3.md      prints a page in its built form

Nothing generated is committed. What is measured, and which engine loads which head, comes from scripts/docs_heads.py.
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs runs this file as a hook

from foredraft import __main__ as foredraft
from foredraft.config_help import describe, explain, header, leaves
from foredraft.scripts.docs_heads import engines, measured, seconds, speedup, support, table
from foredraft.words import CONF

DIRECTIVE = re.compile(r"<!-- generated: (\w+) ?([^>]*?) ?-->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace every directive of a page; mkdocs calls this."""
    return DIRECTIVE.sub(lambda match: GENERATORS[match[1]](*match[2].split()), markdown)


def rows(cfg: DictConfig, meanings: dict[str, str], *sections: str) -> str:
    """Return a table of every key with default and meaning, or of those in some sections."""
    shown = {key: value for key, value in leaves(cfg).items() if not sections or key.partition(".")[0] in sections}
    lines = [[f"`{key}`", f"`{value}`", meanings.get(key, "")] for key, value in shown.items()]
    return table(["key", "default", "meaning"], lines)


def keys(choice: str) -> str:
    """Return the keys of a choice of a group of `train`; for a head, those of its objective too."""
    cfg, meanings, *_ = explain("train", [choice])
    group = choice.partition("=")[0]
    shown = rows(cfg, meanings, group, *["objective"] * (group == "head"))
    return f"{shown}\n\n`foredraft train --help {choice}` prints the same."


def options(program: str) -> str:
    """Return every group of a program, and every key with a table of choices, with each of its options."""
    sections = []
    for group, named in explain(program, []).options.items():
        lines = [[f"`{group}={name}`", meaning] for name, meaning in named]
        sections.append(f"### {group}\n\n" + table(["choice", "what it is"], lines))
    return "\n\n".join(sections)


def config(program: str) -> str:
    """Return every key of a program with the default choices of its groups."""
    cfg, meanings, *_ = explain(program, ["preset=gpu"])  # not the defaults of the machine that builds
    return rows(cfg, meanings)


def recipes() -> str:
    """Return the recipes with what they say about themselves."""
    lines = []
    for file in sorted((CONF / "recipe").glob("*.yaml")):
        text = file.read_text()
        planned = re.search(r"tokens: (.+?), ([\d.]+ hours)", text)
        lines.append(
            [f"`recipe={file.stem}`", header(text)[0].rstrip(":"), *(planned.groups() if planned else ("", ""))]
        )
    return table(["recipe", "what it is", "memory per GPU", "time"], lines)


def programs() -> str:
    """Return a section per command with the text of its `--help all`."""
    parts = []
    for name, (_, summary) in foredraft.PROGRAMS.items():
        parts.append(f"## foredraft {name}\n\n{summary[0].upper()}{summary[1:]}.")
        typed = ["preset=gpu"] * (name == "train")
        if (CONF / f"{name}.yaml").is_file():
            shown_help = describe(summary, name, [*typed, "all"])
            parts.append(f"```text\n{shown_help}\n```")
    return "\n\n".join(parts)


def fields(model: str, base: str = "") -> str:
    """Return the fields of a request of the server, without those of another."""
    protocol = importlib.import_module("foredraft.inference.serve.openai.protocol")
    inherited = getattr(protocol, base).model_fields if base else {}
    found = {name: field for name, field in getattr(protocol, model).model_fields.items() if name not in inherited}
    lines = [
        [f"`{name}`", "required" if field.is_required() else f"`{field.get_default()}`", field.description or ""]
        for name, field in found.items()
    ]
    return table(["field", "default", "meaning"], lines)


FUNCTIONS: tuple[Callable[..., str], ...] = (keys, options, config, recipes, programs, fields)
FUNCTIONS += (support, engines, measured, seconds, speedup)
GENERATORS = {one.__name__: one for one in FUNCTIONS}

if __name__ == "__main__":
    print(on_page_markdown(Path(sys.argv[1]).read_text()))
