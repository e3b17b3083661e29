"""Write `--help` from the comments of the yaml: those next to the keys, and the first line of each file.

The first comment line of a program's yaml is an example of its use; `# help: KEY KEY ...` below it names the keys that most
users need (without it, all keys of the program's own). `--help all` shows every key. Nothing here imports torch.
"""

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from foredraft.config import flat, opened
from foredraft.words import overrides_of

COLUMN, OPTION = 44, 24  # where meanings of keys start, and width of an option
HIDDEN = {"_target_", "_partial_", "_convert_"}
# Keys whose words are the names of a table: its file in the package, and its name.
TABLES = {
    "data": ("words.py", "DATA_SETS"),
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


def explain(program: str, words: list[str], more: str | None = None) -> Explained:
    """Read a program's config and the comments of its files."""
    with opened(more) as loader:
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
        if key in groups:
            choices[key] = str(groups[key] or "null")
        else:
            node = cfg._get_node(key)  # a key, or a group with the path that a word for it sets
            choices[key] = shown(node._get_node("path") if isinstance(node, DictConfig) else node)
        of_files = [(name, [*header(text(f"{key}/{name}")), ""][0]) for name in names.get(key, [])]
        options[key] = [*tables.get(key, []), *of_files]
    return Explained(cfg, meanings, choices, options, header(text(program)))


def describe(about: str, program: str, words: list[str], more: str | None = None) -> str:
    """Return the help of a program with the choices and values that were typed: its usage, the keys that a user needs, or
    all of them if `all` was typed, and one line for every option of every group. about: the docstring of the program."""
    everything = "all" in words
    words = [word for word in words if word != "all"]
    cfg, meanings, choices, options, above = explain(program, words, more)
    first, _, rest = about.partition("\n")
    text = f"{first.partition(':  ')[0].rstrip('.:')}."
    values = leaves(cfg)
    wanted = listed(above) or [key for key in values if "." not in key]
    typed = {word.partition("=")[0] for word in words} - {"target"}
    wanted += [key for group in choices if group in typed for key in values if key.startswith(f"{group}.")]
    end = "--help all lists every key, --help GROUP=OPTION the keys of that option too."
    if everything:
        text, wanted, end = f"{text}\n{rest}".rstrip(), [*values], "--cfg job prints only the config."
    lines = []
    for key in dict.fromkeys(key for key in wanted if key in values):
        left, meaning = f"  {key}={values[key]}", meanings.get(key) or meanings.get(key.rpartition(".")[0])
        lines.append(f"{left:{COLUMN - 1}} # {meaning}" if meaning else left)
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
            *lines,
            *(["", "Choices, GROUP=OPTION:", *shown_options] if options else []),
            f"\n{end}",
        ]
    )


def leaves(cfg: DictConfig) -> dict[str, str]:
    """Return every key with its value as text; interpolations stay unresolved."""
    nodes = {key: node for key, node in flat(cfg) if key.rpartition(".")[2] not in HIDDEN}
    return {key: shown(node) for key, node in nodes.items() if not isinstance(node, DictConfig) or not len(node)}


def docstring(file: Path) -> str:
    """Return the docstring of a program without importing it."""
    return ast.get_docstring(ast.parse(file.read_text())) or file.stem


def listed(above: list[str]) -> list[str]:
    """Return the keys that the lines `# help: KEY KEY ...` of a program's yaml name."""
    return [key for line in above if line.startswith("help:") for key in line.split()[1:]]


def header(text: str) -> list[str]:
    """Return the comment lines that a yaml starts with."""
    above = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return [line for line in (line.strip(" #") for line in above) if not line.startswith("@package")]


def described(file: str, table: str) -> list[tuple[str, str]]:
    """Return each name of a table and its description, the first text of its entry, without importing the file."""
    for node in ast.parse((Path(__file__).parent / file).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
            assert isinstance(node.value, ast.Dict)
            texts = [next(n.value for n in ast.walk(v) if isinstance(n, ast.Constant)) for v in node.value.values]
            return [(ast.literal_eval(k), str(text)) for k, text in zip(node.value.keys, texts) if k is not None]
    raise ValueError(f"{file} has no table {table}")


def comments(text: str, package: str) -> dict[str, str]:
    """Map each dotted key to the comment next to it. The comment that a file starts with is its package's."""
    found = {package: " ".join(header(text))}
    above = [(-1, package)]  # the key of a line after those around it, with their indents
    for row in text.splitlines():
        if key := re.match(r"( *)(\w+):(?= |$)", row):
            above = [(indent, name) for indent, name in above if indent < len(key[1])] + [(len(key[1]), key[2])]
            dotted = ".".join(name for _, name in above).removeprefix(".")
            found[dotted] = row.rpartition(" # ")[2] if " # " in row else ""
    return {key: meaning.strip() for key, meaning in found.items() if meaning and key}


def shown(node: Any) -> str:
    value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
    return value if isinstance(value, str) else json.dumps(value, default=str)
