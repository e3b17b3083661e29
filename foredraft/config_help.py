"""Write `--help` from the comments of the yaml: those next to the keys, and the first line of each file.

The first comment line of a program's yaml is an example of its use; `# help: KEY KEY ...` below it names the keys that most
users need (without it, all keys of the program's own). `--help all` shows every key. Nothing here imports torch.
"""

import ast
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from foredraft.config import flat, opened
from foredraft.words import CONF, overrides_of

COLUMN, OPTION = 44, 24  # where meanings of keys start, and width of an option
HIDDEN = {"_target_", "_partial_", "_convert_"}
# Keys whose words are the names of a table: its file in the package, and its name.
TABLES = {
    "data": ("train/data/known_sets.py", "DATA_SETS"),
    "drafter": ("words.py", "DRAFTERS"),
    "format": ("heads/formats/engines.py", "FORMATS"),
    "loss": ("train/losses.py", "LOSSES"),
    "strategy": ("train/runtime/strategy.py", "STRATEGIES"),
    "target": ("words.py", "TARGETS"),
}


class Explained(NamedTuple):
    """Hold a config with what its yaml files say about it."""

    cfg: DictConfig
    meanings: dict[str, str]  # of each key
    choices: dict[str, str]  # of each group and of each key with a table
    options: dict[str, list[tuple[str, str]]]  # of these: names with descriptions
    header: list[str]  # comment lines that the program's yaml starts with


def explain(program: str, words: list[str], folder: Path = CONF, more: str | None = None) -> Explained:
    """Read a program's config and the comments of its files."""
    with opened(folder, more) as loader:
        overrides = overrides_of(program, words)
        cfg = loader.load_configuration(program, overrides, RunMode.RUN)
        parts = loader.compute_defaults_list(program, overrides, RunMode.RUN).defaults
        paths = [entry.path for entry in loader.get_search_path().get_path() if entry.path]
        groups = {name: option for name, option in cfg.hydra.runtime.choices.items() if not name.startswith("hydra/")}
        names = {group: sorted(loader.get_group_options(group)) for group in groups}
    places = [Path(path.removeprefix("file://")) for path in paths]

    def text(name: str | None) -> str:
        return next((file.read_text() for place in places if (file := place / f"{name}.yaml").is_file()), "")

    meanings: dict[str, str] = {}
    for part in parts:
        meanings |= comments(text(part.config_path), part.package or "")
    tables = {key: described(*table) for key, table in TABLES.items() if key in [*cfg, *groups]}
    choices: dict[str, str] = {}
    options: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(groups.keys() | tables.keys()):
        choices[key] = str(groups.get(key) or "null") if key in groups else chosen(cfg, key)
        of_files = [(name, [*header(text(f"{key}/{name}")), ""][0]) for name in names.get(key, [])]
        options[key] = [*tables.get(key, []), *of_files]
    return Explained(cfg, meanings, choices, options, header(text(program)))


def describe(about: str, program: str, words: list[str], folder: Path = CONF, more: str | None = None) -> str:
    """Return the help of a program with the choices and values that were typed: its usage, the keys that a user needs, or
    all of them if `all` was typed, and one line for every option of every group. about: the docstring of the program."""
    everything = "all" in words
    words = [word for word in words if word != "all"]
    cfg, meanings, choices, options, above = explain(program, words, folder, more)
    first, _, rest = about.partition("\n")
    text = f"{first.partition(':  ')[0].rstrip('.:')}."
    end = "--help all lists every key, --help GROUP=OPTION the keys of that option too."
    if everything:
        keys, text, end = list(lines(cfg, meanings)), f"{text}\n{rest}".rstrip(), "--cfg job prints only the config."
    else:
        wanted = listed(above) or [key for key in map(str, cfg) if not isinstance(cfg._get_node(key), DictConfig)]
        typed = {word.partition("=")[0] for word in words} - {"target"}
        found = [f"{key}.{name}" for key in choices if key in typed for name in cfg.get(key) or {}]
        keys = list(short_lines(cfg, meanings, dict.fromkeys([*wanted, *found])))
    shown_options = [
        line
        for key, named in options.items()
        for line in (f"{key}={choices[key]}", *(f"  {name:{OPTION}}{what}".rstrip() for name, what in named))
    ]
    return "\n".join(
        [
            f"usage: {above[0] if above else program}",
            f"\n{text}\n",
            "Keys, KEY=VALUE (+KEY=VALUE adds one, -m runs each of KEY=VALUE,VALUE; ??? has no default):",
            *keys,
            *(["", "Choices, GROUP=OPTION:", *shown_options] if options else []),
            f"\n{end}",
        ]
    )


def docstring(file: Path) -> str:
    """Return the docstring of a program without importing it."""
    return ast.get_docstring(ast.parse(file.read_text())) or file.stem


def listed(above: list[str]) -> list[str]:
    """Return the keys that the lines `# help: KEY KEY ...` of a program's yaml name."""
    return [key for line in above if line.startswith("help:") for key in line.removeprefix("help:").split()]


def header(text: str) -> list[str]:
    """Return the comment lines that a yaml starts with."""
    above = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return [line for line in (line.strip(" #") for line in above) if not line.startswith("@package")]


def chosen(cfg: DictConfig, key: str) -> str:
    """Return the value of a key, or of the path that a word for it sets."""
    node = cfg._get_node(key)
    return shown(node._get_node("path") if isinstance(node, DictConfig) else node)


def described(file: str, table: str) -> list[tuple[str, str]]:
    """Return each name of a table and its description, the first text of its entry, without importing the file."""
    for node in ast.parse((Path(__file__).parent / file).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
            assert isinstance(node.value, ast.Dict)
            texts = [next(n.value for n in ast.walk(v) if isinstance(n, ast.Constant)) for v in node.value.values]
            return [(ast.literal_eval(k), str(text)) for k, text in zip(node.value.keys, texts) if k is not None]
    raise ValueError(f"{file} has no table {table}")


def short_lines(cfg: DictConfig, meanings: dict[str, str], wanted: dict[str, Any]) -> Iterator[str]:
    """Yield one line per key of `wanted` that this config has, with its whole name."""
    nodes = dict(flat(cfg))
    for key in wanted:
        parent, _, name = key.rpartition(".")
        if key in nodes and name not in HIDDEN:
            yield explained(f"  {key}={shown(nodes[key])}", meanings.get(key) or meanings.get(parent, ""))


def explained(left: str, meaning: str) -> str:
    return f"{left:{COLUMN - 1}} # {meaning}" if meaning else left.rstrip()


def comments(text: str, package: str) -> dict[str, str]:
    """Map each dotted key to the comment next to it or above it. The comment that a file starts with is its package's."""
    rows = text.splitlines()
    found = {package: " ".join(header(text))}

    def above(line: int) -> str:
        lines = [*itertools.takewhile(lambda row: row.lstrip().startswith("#"), reversed(rows[:line]))]
        return " ".join(row.strip(" #") for row in reversed(lines)) if len(lines) < line else ""

    def walk(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            dotted = f"{prefix}.{key.value}".removeprefix(".")
            block = isinstance(value, yaml.CollectionNode) and not value.flow_style
            end = (key if block else value).end_mark
            between, sign, comment = rows[end.line][end.column :].partition("#")
            found[dotted] = comment.strip() if sign and not between.strip(" :") else above(key.start_mark.line)
            walk(value, dotted)

    walk(yaml.compose(text), package)
    return {key: meaning for key, meaning in found.items() if meaning and key}


def lines(cfg: DictConfig, meanings: dict[str, str]) -> Iterator[str]:
    """Yield one line per key, indented as in yaml; interpolations stay unresolved."""
    nodes = dict(flat(cfg))
    for key, node in nodes.items():
        *above, name = key.split(".")
        if name not in HIDDEN:
            value = "" if any(other.startswith(f"{key}.") for other in nodes) else shown(node)
            yield explained(f"{'  ' * len(above)}{name}: {value}", meanings.get(key, ""))


def shown(node: Any) -> str:
    value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
    return value if isinstance(value, str) else json.dumps(value, default=str)
