"""`--help`: every key of a program with its value and its meaning, which is the comment beside it in the yaml."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

KEY = re.compile(r"^( *)([\w.\"' ,-]+):(?: |$)(.*)$")
COMMENT = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#]|(?<=\S)#)*(?<!\S)# *(.*)$""")  # a sign in quotes begins none
COLUMN = 44  # where meanings begin
HIDDEN = {"_target_", "_partial_", "_convert_"}


def describe(module: ModuleType | None, config_name: str, overrides: list[str], folder: Path) -> str:
    """What the program is for, its groups of choices, and its config with the choices and values that were typed."""
    with hydra.initialize_config_dir(str(folder), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        cfg = loader.load_configuration(config_name, overrides, RunMode.RUN)
        parts = loader.compute_defaults_list(config_name, overrides, RunMode.RUN).defaults
        searched = [entry.path for entry in loader.get_search_path().get_path() if entry.path]
        places = [Path(path.removeprefix("file://")) for path in searched]
        meanings: dict[str, str] = {}
        for part in parts:
            for place in places:
                if part.config_path and (file := place / f"{part.config_path}.yaml").is_file():
                    meanings |= comments(file.read_text(), part.package or "")
        groups = sorted({name.partition("@")[0] for name in cfg.hydra.runtime.choices if not name.startswith("hydra/")})
        options = [f"{group}: {', '.join(sorted(loader.get_group_options(group)))}" for group in groups]
    about = inspect.getdoc(module) if module is not None else None
    choices = ["Choices, GROUP=OPTION:", *options, ""] if options else []
    keys = ["Keys, KEY=VALUE (+KEY=VALUE adds one, -m runs every one of KEY=VALUE,VALUE):", *lines(cfg, meanings)]
    flags = "--cfg job prints the config alone, --hydra-help lists Hydra's own flags."
    return "\n".join([about or config_name, "", *choices, *keys, "", flags])


def comments(text: str, package: str) -> dict[str, str]:
    """Dotted key -> the comment beside it or above it. The comment that a file begins with is its package's."""
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
    """One line per key, indented as in yaml; what interpolations refer to is left as it is written."""
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
        yield f"{left:{COLUMN - 1}} # {meaning}" if meaning else left.rstrip()
        if deeper:
            yield from lines(node, meanings, f"{prefix}{name}.")


def shown(node: Any) -> str:
    value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
    return value if isinstance(value, str) else json.dumps(value, default=str)
