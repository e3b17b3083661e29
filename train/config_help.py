"""Write `--help` from the comments of the yaml: those next to the keys, and the first line of each file.

The first comment line of a program's yaml is an example of its use; `# help: KEY KEY ...` below it names the keys that most
users need (without it, all keys of the program's own). `--help all` shows every key. Nothing here imports torch.
"""

import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[1]
KEY = re.compile(r"^( *)([\w.\"' ,-]+):(?: |$)(.*)$")
COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#]|(?<=\S)#)*(?<!\S)# *(.*)$""")  # a sign in quotes starts no comment
COLUMN, OPTION = 44, 24  # where meanings of keys start, and width of an option
HIDDEN = {"_target_", "_partial_", "_convert_"}
# Keys whose words are the names of a table: the file that has it, and the table.
TABLES = {
    "data": ("train/data/known_sets.py", "DATA_SETS"),
    "format": ("heads/formats/engines.py", "FORMATS"),
    "loss": ("train/losses.py", "LOSSES"),
    "strategy": ("train/runtime/strategy.py", "STRATEGIES"),
}


def describe(about: str, config_name: str, overrides: list[str], folder: Path, everything: bool = False) -> str:
    """Return the help of a program with the choices and values that were typed: its usage, the keys that a user needs or all
    of them, and one line for every option of every group."""
    with hydra.initialize_config_dir(str(folder), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        searched = [entry.path for entry in loader.get_search_path().get_path() if entry.path]
        places = [Path(path.removeprefix("file://")) for path in searched]
        file = next(file for place in places if (file := place / f"{config_name}.yaml").is_file())
        usage, wanted = header(file)
        typed = {override.partition("=")[0] for override in overrides} - {"target"}
        overrides = [*overrides, *missing_groups(file, overrides)]
        cfg = loader.load_configuration(config_name, overrides, RunMode.RUN)
        meanings = meanings_of(loader.compute_defaults_list(config_name, overrides, RunMode.RUN).defaults, places)
        chosen = {name: option for name, option in cfg.hydra.runtime.choices.items() if not name.startswith("hydra/")}
        named = [key for key in TABLES if key not in chosen and key in list(cfg)]
        words = chosen | {key: "???" if OmegaConf.is_missing(cfg, key) else cfg[key] for key in named}
        options = list(options_of(dict(sorted(words.items())), loader, places))
    if everything:
        keys = list(lines(cfg, meanings))
    else:
        wanted = wanted or own(cfg)
        more = [f"{group}.{name}" for group in chosen if group in typed for name in cfg.get(group) or {}]
        keys = list(short_lines(cfg, meanings, [*wanted, *(key for key in more if key not in wanted)]))
    return "\n".join(
        [
            f"usage: {usage or config_name}",
            "",
            about,
            "",
            "Keys, KEY=VALUE (+KEY=VALUE adds one, -m runs each of KEY=VALUE,VALUE; ??? has no default):",
            *keys,
            *(["", "Choices, GROUP=OPTION:", *options] if options else []),
            "",
            "--cfg job prints only the config, --hydra-help lists the flags of Hydra."
            if everything
            else "--help all lists every key, --help GROUP=OPTION the keys of that option too.",
        ]
    )


def meanings_of(parts: Any, places: list[Path]) -> dict[str, str]:
    """Return the meaning of every key that the yaml files of a config explain."""
    found: dict[str, str] = {}
    for part in parts:
        for place in places:
            if part.config_path and (file := place / f"{part.config_path}.yaml").is_file():
                found |= comments(file.read_text(), part.package or "")
    return found


def header(file: Path) -> tuple[str, list[str]]:
    """Return the first comment line of a program's yaml, which is an example of its use, and the keys that its line
    `# help: KEY KEY ...` names."""
    above = comment_lines(file)
    listed = [line.removeprefix("help:").split() for line in above if line.startswith("help:")]
    return (above or [""])[0], [key for keys in listed for key in keys]


def comment_lines(file: Path) -> list[str]:
    """Return the comment lines that a yaml starts with."""
    above = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    return [line for line in (line.strip(" #") for line in above) if not line.startswith("@package")]


def missing_groups(file: Path, overrides: list[str]) -> list[str]:
    """Return a choice for each group that a user has to choose from: without one nothing can be composed."""
    typed = {override.partition("=")[0] for override in overrides}
    entries = [
        entry for entry in OmegaConf.select(OmegaConf.load(file), "defaults") or [] if OmegaConf.is_config(entry)
    ]
    groups = [str(group) for entry in entries for group in entry if OmegaConf.is_missing(entry, group)]
    loader = GlobalHydra.instance().config_loader()
    return [f"{group}={loader.get_group_options(group)[0]}" for group in groups if group not in typed]


def options_of(chosen: dict[str, str | None], loader: Any, places: list[Path]) -> Iterator[str]:
    """Yield a line for every group with its choice, and one for each of its options: the first comment line of its yaml, or
    its description in a table."""
    for group, choice in chosen.items():
        yield f"{group}={choice or 'null'}"
        for option, meaning in described(*TABLES[group]) if group in TABLES else ():
            yield f"  {option:{OPTION}}{meaning}"
        for option in sorted(loader.get_group_options(group)):
            files = [file for place in places if (file := place / group / f"{option}.yaml").is_file()]
            about = comment_lines(files[0]) if files else []
            yield f"  {option:{OPTION}}{(about or [''])[0]}".rstrip()


def described(file: str, table: str) -> Iterator[tuple[str, str]]:
    """Yield each name of a table and its description, the first text of its entry, without importing the file."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
            assert isinstance(node.value, ast.Dict)
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                texts = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
                yield ast.literal_eval(key), str(texts[0])  # type: ignore[arg-type]


def own(cfg: DictConfig) -> list[str]:
    """Return the keys of a program that are not a group of keys."""
    return [str(key) for key in cfg if not isinstance(cfg._get_node(key), DictConfig)]


def short_lines(cfg: DictConfig, meanings: dict[str, str], wanted: list[str]) -> Iterator[str]:
    """Yield one line per key of `wanted` that this config has, with its whole name."""
    for key in wanted:
        parent, _, name = key.rpartition(".")
        group = OmegaConf.select(cfg, parent) if parent else cfg
        if isinstance(group, DictConfig) and name in list(group) and name not in HIDDEN:
            yield explained(f"  {key}={shown(group._get_node(name))}", meanings.get(key) or meanings.get(parent, ""))


def explained(left: str, meaning: str) -> str:
    return f"{left:{COLUMN - 1}} # {meaning}" if meaning else left.rstrip()


def comments(text: str, package: str) -> dict[str, str]:
    """Map each dotted key to the comment next to it or above it. The comment that a file starts with is its package's."""
    found: dict[str, str] = {}
    above: list[str] = []
    path: list[tuple[int, str]] = [(-1, package)]
    begun = False
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above.append(line.strip(" #"))
            continue
        if match := KEY.match(line):
            indent, name, rest = len(match[1]), match[2].strip("\"'"), match[3]
            if not begun:
                found[package] = " ".join(part for part in above if not part.startswith("@package"))
                above, begun = [], True
            path = [(deep, key) for deep, key in path if deep < indent]
            dotted = f"{path[-1][1]}.{name}".removeprefix(".")
            path.append((indent, dotted))
            beside = COMMENT.match(rest)
            found[dotted] = beside[1] if beside else " ".join(above)
        above = []
    return {key: meaning for key, meaning in found.items() if meaning and key}


def lines(cfg: DictConfig, meanings: dict[str, str], prefix: str = "") -> Iterator[str]:
    """Yield one line per key, indented as in yaml; interpolations stay unresolved."""
    for key in cfg:
        name = str(key)
        if name in HIDDEN or (not prefix and name == "hydra"):
            continue
        node: Any = cfg._get_node(name)
        deeper = (
            isinstance(node, DictConfig) and len(node) > 0 and not node._is_missing() and not node._is_interpolation()
        )
        value = "" if deeper else shown(node)
        left = f"{'  ' * prefix.count('.')}{name}: {value}"
        meaning = meanings.get(f"{prefix}{name}", "")
        yield explained(left, meaning)
        if deeper:
            yield from lines(node, meanings, f"{prefix}{name}.")


def shown(node: Any) -> str:
    value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
    return value if isinstance(value, str) else json.dumps(value, default=str)
