"""Fill in what the code knows about itself while mkdocs builds the pages (`hooks:` in mkdocs.yml).

    <!-- generated: keys head=eagle3 -->             a comment in a page of docs/ calls the function of that name below
    python scripts/docs.py docs/heads/eagle3.md      prints a page in its built form

Nothing generated is committed. What is measured, and which engine loads which head, comes from scripts/docs_heads.py.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs runs this file as a hook

from foredraft import __main__ as foredraft
from foredraft.config_help import HIDDEN, describe, explain, header, shown
from foredraft.scripts.docs_heads import engines, measured, seconds, speedup, support, table
from foredraft.words import CONF

DIRECTIVE = re.compile(r"<!-- generated: (\w+) ?([^>]*?) ?-->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace every directive of a page; mkdocs calls this."""
    return DIRECTIVE.sub(lambda match: GENERATORS[match[1]](*match[2].split()), markdown)


def rows(node: DictConfig, meanings: dict[str, str], prefix: str = "") -> Iterator[list[str]]:
    """Yield key, default and meaning of every key below `node`."""
    for name in map(str, node):
        child = node._get_node(name)
        if name in HIDDEN or name == "hydra":
            continue
        if isinstance(child, DictConfig) and len(child) and not child._is_interpolation():
            yield from rows(child, meanings, f"{prefix}{name}.")
        else:
            yield [f"`{prefix}{name}`", f"`{shown(child)}`", meanings.get(f"{prefix}{name}", "")]


def keys(choice: str) -> str:
    """Return the keys of a choice of a group of `train`; for a head, those of its objective too."""
    cfg, meanings, *_ = explain("train", [choice])
    group = choice.partition("=")[0]
    sections = [group, "objective"] if group == "head" else [group]
    lines = [row for section in sections for row in rows(cfg[section], meanings, f"{section}.")]
    return table(["key", "default", "meaning"], lines) + f"\n\n`foredraft train --help {choice}` prints the same."


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
    return table(["key", "default", "meaning"], list(rows(cfg, meanings)))


def recipes() -> str:
    """Return the recipes with what they say about themselves."""
    found = []
    for file in sorted((CONF / "recipe").glob("*.yaml")):
        planned = re.search(r"tokens: (.+?), ([\d.]+ hours)", file.read_text())
        found.append(
            [
                f"`recipe={file.stem}`",
                header(file.read_text())[0].rstrip(":"),
                *(planned.groups() if planned else ("", "")),
            ]
        )
    return table(["recipe", "what it is", "memory per GPU", "time"], found)


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
