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

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs runs this file as a hook

from foredraft import __main__ as foredraft
from foredraft.scripts.docs_heads import engines, measured, seconds, speedup, support, table
from foredraft.train import cli, config_help

DIRECTIVE = re.compile(r"<!-- generated: (\w+) ?([^>]*?) ?-->")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Replace every directive of a page; mkdocs calls this."""
    return DIRECTIVE.sub(lambda match: GENERATORS[match[1]](*match[2].split()), markdown)


def composed(program: str, *typed: str) -> tuple[DictConfig, dict[str, str], dict[str, list[str]]]:
    """Return a program's config, the meaning of each key, and the options of each group."""
    with hydra.initialize_config_dir(str(cli.CONF), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        overrides = [*typed, *config_help.missing_groups(cli.CONF / f"{program}.yaml", list(typed))]
        cfg = loader.load_configuration(program, overrides, RunMode.RUN)
        defaults = loader.compute_defaults_list(program, overrides, RunMode.RUN).defaults
        groups = [name for name in cfg.hydra.runtime.choices if not name.startswith("hydra/")]
        options = {group: sorted(loader.get_group_options(group)) for group in sorted(groups)}
        return cfg, config_help.meanings_of(defaults, [cli.CONF]), options


def about(group: str, option: str) -> str:
    """Return the first comment line of an option's yaml."""
    return next(iter(config_help.comment_lines(cli.CONF / group / f"{option}.yaml")), "").rstrip(":")


def rows(node: DictConfig, meanings: dict[str, str], prefix: str = "") -> Iterator[list[str]]:
    """Yield key, default and meaning of every key below `node`."""
    for name in map(str, node):
        child = node._get_node(name)
        if name in config_help.HIDDEN or name == "hydra":
            continue
        if isinstance(child, DictConfig) and len(child) and not child._is_interpolation():
            yield from rows(child, meanings, f"{prefix}{name}.")
        else:
            yield [f"`{prefix}{name}`", f"`{config_help.shown(child)}`", meanings.get(f"{prefix}{name}", "")]


def keys(choice: str) -> str:
    """Return the keys of a choice of a group of `train`; for a head, those of its objective too."""
    cfg, meanings, _ = composed("train", choice, "target=hf")
    group = choice.partition("=")[0]
    sections = [group, "objective"] if group == "head" else [group]
    lines = [row for section in sections for row in rows(cfg[section], meanings, f"{section}.")]
    return table(["key", "default", "meaning"], lines) + f"\n\n`foredraft train --help {choice}` prints the same."


def options(program: str) -> str:
    """Return every group of a program, and every key with a table of choices, with each of its options."""
    cfg, _, groups = composed(program, "target=hf")
    found = {group: [(name, about(group, name)) for name in names] for group, names in groups.items()}
    for group, place in config_help.TABLES.items():
        if group in cfg or group in found:
            found[group] = [*config_help.described(*place), *found.get(group, [])]
    sections = []
    for group, named in sorted(found.items()):
        lines = [[f"`{group}={name}`", meaning] for name, meaning in named]
        sections.append(f"### {group}\n\n" + table(["choice", "what it is"], lines))
    return "\n\n".join(sections)


def config(program: str) -> str:
    """Return every key of a program with the default choices of its groups."""
    cfg, meanings, _ = composed(program, "target=hf", "preset=gpu")  # not the defaults of the machine that builds
    return table(["key", "default", "meaning"], list(rows(cfg, meanings)))


def recipes() -> str:
    """Return the recipes with what they say about themselves."""
    found = []
    for file in sorted((cli.CONF / "recipe").glob("*.yaml")):
        planned = re.search(r"tokens: (.+?), ([\d.]+ hours)", file.read_text())
        found.append(
            [f"`recipe={file.stem}`", about("recipe", file.stem), *(planned.groups() if planned else ("", ""))]
        )
    return table(["recipe", "what it is", "memory per GPU", "time"], found)


def programs() -> str:
    """Return a section per command with the text of its `--help all`."""
    parts = []
    for name, (_, summary) in foredraft.PROGRAMS.items():
        parts.append(f"## foredraft {name}\n\n{summary[0].upper()}{summary[1:]}.")
        typed = ["preset=gpu"] if name == "train" else []
        if (cli.CONF / f"{name}.yaml").is_file():
            parts.append(f"```text\n{config_help.describe(summary, name, typed, cli.CONF, everything=True)}\n```")
    return "\n\n".join(parts)


def fields(model: str, base: str = "") -> str:
    """Return the fields of a request of the server, without those of another."""
    protocol = importlib.import_module("foredraft.inference.serve.protocol")
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
