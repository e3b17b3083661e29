"""What is checked of a command line before anything runs, in a sweep for every job: choices, keys and types.

A choice and a key must be known, and a value must have the type of the default it replaces (`+key=value` adds a key,
`++key=value` sets one unchecked). Whatever is wrong is a HydraException with one sentence.
"""

import argparse
import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a group of keys",
    type(None): "null",
}


class Plan(NamedTuple):
    """What the command line asks for, checked."""

    sweep: bool
    jobs: int
    apart: set[str]  # swept keys that must name a job's folder, because jobs would share one `output_dir`


def make_plan(args: argparse.Namespace, config_name: str, folder: Path) -> Plan:
    """Check the command line; HydraException, with one sentence, for the first thing that is not right."""
    if args.hydra_help or args.shell_completion or args.info or args.experimental_rerun:
        return Plan(sweep=False, jobs=1, apart=set())  # Hydra's own affairs
    common = [f"hydra.searchpath=['file://{os.path.abspath(args.config_dir)}']"] if args.config_dir else []
    with hydra.initialize_config_dir(str(folder), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        typed, sweep = args.overrides, args.multirun
        with contextlib.suppress(HydraException):  # what is wrong is found again, job by job
            whole = loader.load_configuration(config_name, common + typed, RunMode.MULTIRUN, True, False)
            sweep = sweep or whole.hydra.mode == RunMode.MULTIRUN
            named = whole.hydra.sweeper.get("params") or {}  # a sweep in a yaml; what is typed comes after it and wins
            typed = ([f"{key}={value}" for key, value in named.items()] if sweep else []) + typed
        overrides = OverridesParser.create(loader).parse_overrides(typed)
        jobs = expand(overrides) if sweep else [typed]
        folders = Counter(check(config_name, common + job, number) for number, job in enumerate(jobs))
    HydraConfig.instance().cfg = None  # set by compose
    shared = any(count > 1 for output_dir, count in folders.items() if output_dir is not None)
    swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    return Plan(sweep, len(jobs), swept if shared else set())


def expand(overrides: list[Override]) -> list[list[str]]:
    """The overrides of each job of a sweep, as Hydra's own sweeper combines them."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        elif not override.is_sweep_override():  # else an interval: other sweepers draw from it, nothing to check yet
            values[key] = [str(override.input_line)]
    return [list(job) for job in itertools.product(*values.values())]


def check(config_name: str, overrides: list[str], number: int) -> str | None:
    """Are the choices, keys and types of job `number` right? Returns the job's `output_dir`, if it has one."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            line = str(override.input_line)
            key, _, value = line.partition("=")
            raise HydraException(f"{line} is a sweep, which needs -m; a list is written {key}=[{value}]")
    values = [override for override in parsed if is_value(override)]
    base = compose(config_name, [str(override.input_line) for override in parsed if override not in values], number)
    known = set(names(OmegaConf.to_container(base)))
    keys = [key for override in values for key in leaves(override.key_or_group, override.value(), base)]
    for key in keys:
        if key not in known:
            raise HydraException(unknown_key(key, known))
    final = compose(config_name, overrides, number) if values else base
    for key in keys:
        check_type(key, base, final)
    return OmegaConf.select(final, "output_dir")


def is_value(override: Override) -> bool:
    """`key=value` for an existing key; not a choice of yaml, not Hydra's own settings, no `+`, `++` or `~`."""
    loader = GlobalHydra.instance().config_loader()
    change = override.type == OverrideType.CHANGE and not override.is_hydra_override()
    choice = not isinstance(override.value(), dict) and loader.get_group_options(override.key_or_group, None)
    return change and not choice


def compose(config_name: str, overrides: list[str], number: int) -> DictConfig:
    """The config of job `number`, where `${hydra:...}` resolves too; HydraException for an unknown choice."""
    try:
        cfg = hydra.compose(config_name, overrides, return_hydra_config=True)
    except MissingConfigException as error:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        known = GlobalHydra.instance().config_loader().get_group_options(group) if group else []
        if not known:
            raise
        near = nearest(option, known)
        hint = f"; did you mean {group}={near}?" if near else "."
        raise HydraException(f"{group}={option} is not known{hint} Known: {', '.join(sorted(known))}.") from None
    with open_dict(cfg):
        cfg.hydra.job.num = number
    HydraConfig.instance().set_config(cfg)
    return cfg


def names(tree: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a config but Hydra's own."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, child in items:
        if prefix or name != "hydra":
            yield f"{prefix}{name}"
            yield from names(child, f"{prefix}{name}.")


def leaves(key: str, value: Any, base: DictConfig) -> Iterator[str]:
    """The keys that an override sets: `a={b: 1, c: 2}` sets a.b and a.c."""
    if isinstance(value, dict) and OmegaConf.is_dict(OmegaConf.select(base, key)):
        for name, child in value.items():
            yield from leaves(f"{key}.{name}", child, base)
    else:
        yield key


def unknown_key(key: str, known: Iterable[str]) -> str:
    near = nearest(key, known)
    if near:
        return f"{key} is not known; did you mean {near}?"
    parent = key.rpartition(".")[0]
    beside = [name for name in known if name.rpartition(".")[0] == parent] or [n for n in known if "." not in n]
    return f"{key} is not known. Known: {', '.join(sorted(beside))}. (+{key}=... adds a key.)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to `word`. The last part counts most: max_steps is for trainer.max_steps."""

    def alike(one: str, other: str) -> float:
        return SequenceMatcher(None, one, other).ratio()

    def score(name: str) -> tuple[float, bool]:
        (parent, _, last), (known_parent, _, known_last) = word.rpartition("."), name.rpartition(".")
        parts = 0.7 * alike(last, known_last) + 0.3 * alike(parent, known_parent)
        whole = 0.0 if parent else alike(word, name)  # trainer_lr
        return max(parts, whole), name[:1] == word[:1]  # a first letter is seldom mistyped

    best = max((name for name in known if not word.startswith(f"{name}.")), key=score, default=None)
    return best if best is not None and score(best)[0] > 0.6 else None


def check_type(key: str, base: DictConfig, final: DictConfig) -> None:
    """HydraException if `key` has a value in `final` whose type is not that of its default in `base`."""
    try:
        default = plain(base, key)
    except OmegaConfBaseException:
        return  # a default that waits for another value says nothing about types
    try:
        value = plain(final, key)
    except OmegaConfBaseException as error:
        raise HydraException(f"{key}: {first_line(error)}") from None
    wrong = misfit(value, default)
    if wrong is not None:
        got, wanted = KINDS[type(wrong[0])], KINDS[type(wrong[1])]
        shown = json.dumps(value) if value is None or isinstance(value, bool) else value
        hint = f"; ++{key}=null sets it all the same" if value is None else ""
        if isinstance(default, str) and value is not None:
            hint = f"; as text it is written {key}=\"'{shown}'\""
        raise HydraException(f"{key}={shown}: {wanted} is wanted, not {got} (the default is {default}){hint}")


def plain(cfg: DictConfig, key: str) -> Any:
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def misfit(value: Any, default: Any) -> tuple[Any, Any] | None:
    """A value and the default whose type it lacks. A whole number is a number; a null default takes anything."""
    if default is None or (isinstance(default, float) and type(value) is int):
        return None
    if isinstance(default, list):
        value = value if isinstance(value, list) else [value]  # a list of one may go without brackets
        alike = len({type(item) for item in default}) == 1
        return next((wrong for item in value if alike and (wrong := misfit(item, default[0]))), None)
    return None if type(value) is type(default) else (value, default)


def first_line(error: Exception) -> str:
    """OmegaConf adds lines about its own affairs."""
    return str(error).partition("\n")[0]
