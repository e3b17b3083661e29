"""What is checked of a command line before anything runs, in a sweep for every job: choices, keys and types.

Hydra composes in struct mode, so it finds what is not known; here that becomes one sentence with the nearest known name.
A value must have the type of the default it replaces, or be null where a constructor takes None, and what a yaml passes to
its `_target_` must fit the signature there.
(`+key=value` adds a key, `++key=value` sets one whatever its default.) Whatever is wrong is a HydraException.
"""

import argparse
import contextlib
import inspect
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import make_dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple, get_args

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from foredraft.train.renamed_keys import new_choice, new_key

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
    """Hold what the command line asks for, checked."""

    sweep: bool
    jobs: int
    apart: set[str]  # swept keys that must name a job's folder, because jobs would share one `output_dir`
    lists: set[str]  # keys of lists that were given one value without brackets


def make_plan(args: argparse.Namespace, config_name: str, folder: Path) -> Plan:
    """Check the command line; HydraException, with one sentence, for the first thing that is not right."""
    if args.hydra_help or args.shell_completion or args.info or args.experimental_rerun:
        return Plan(sweep=False, jobs=1, apart=set(), lists=set())  # Hydra's own affairs
    common = search_path(args)
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
        checked = [check(config_name, common + job, number) for number, job in enumerate(jobs)]
    HydraConfig.instance().cfg = None  # set by compose
    folders = Counter(output_dir for output_dir, _ in checked if output_dir is not None)
    shared = any(count > 1 for count in folders.values())
    swept = {override.get_key_element() for override in overrides if override.is_sweep_override()}
    return Plan(sweep, len(jobs), swept if shared else set(), set().union(*(lists for _, lists in checked)))


def search_path(args: argparse.Namespace) -> list[str]:
    """Return --config-dir as an override."""
    return [f"hydra.searchpath=['file://{os.path.abspath(args.config_dir)}']"] if args.config_dir else []


def expand(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as Hydra's own sweeper combines them."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        elif not override.is_sweep_override():  # else an interval: other sweepers draw from it, nothing to check yet
            values[key] = [str(override.input_line)]
    return [list(job) for job in itertools.product(*values.values())]


def check(config_name: str, overrides: list[str], number: int) -> tuple[str | None, set[str]]:
    """Check the choices, keys and types of job `number`. Return the job's `output_dir`, if it has one, and the keys of lists
    that were given one value without brackets."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        if override.is_sweep_override():
            line = str(override.input_line)
            key, _, value = line.partition("=")
            raise HydraException(f"{line} is a sweep, which needs -m; a list is written {key}=[{value}]")
    values = [override for override in parsed if is_value(override)]
    for override in parsed:
        options = GlobalHydra.instance().config_loader().get_group_options(override.key_or_group, None)
        if override.value() not in options and (renamed := new_choice(override.key_or_group, override.value())):
            raise HydraException(renamed)
    choices = [override for override in parsed if override not in values]
    try:
        base = compose(config_name, [str(override.input_line) for override in choices], number)
    except ConfigCompositionException as error:
        group = re.match(r"Could not override '([\w/]+)'", str(error))  # which other programs choose from
        if group is None:
            raise
        others = [str(override.input_line) for override in choices if override.key_or_group != group[1]]
        known = dict(flat(compose(config_name, others, number)))
        raise HydraException(new_key(group[1], known) or unknown_key(group[1], known)) from None
    known = dict(flat(base))
    for override in values:
        if renamed := new_key(override.key_or_group, {*known, *base.hydra.runtime.choices}):
            raise HydraException(renamed)
    try:
        final = compose(config_name, overrides, number) if values else base
    except ConfigCompositionException as error:
        if not isinstance(error.__cause__, OmegaConfBaseException) or error.__cause__.full_key is None:
            raise
        missing = error.__cause__.full_key  # of OmegaConf's struct mode
        typed = (override.key_or_group for override in values)
        whole = next((name for name in typed if name.startswith(f"{missing}.")), missing)  # trainr of trainr.max_steps
        raise HydraException(unknown_key(whole, known)) from None
    if final.hydra.runtime.choices.get("head") == "auto" and config_name != "train":
        raise HydraException("head=auto is a search, which only train/run.py does: name a head")
    lists = set()
    for key in known:
        if any(key == override.key_or_group or key.startswith(f"{override.key_or_group}.") for override in values):
            check_type(key, base, final)
            if isinstance(known[key], ListConfig) and isinstance(plain(final, key), str | int | float | bool):
                lists.add(key)
    for key, node in [("", final), *flat(final)]:
        if isinstance(node, DictConfig) and "_target_" in node:
            check_call(key, node)
    return OmegaConf.select(final, "output_dir"), lists


def is_value(override: Override) -> bool:
    """Return whether it is `key=value` for an existing key: not a choice of yaml, not Hydra's own settings, no `+`, `++` or
    `~`."""
    loader = GlobalHydra.instance().config_loader()
    change = override.type == OverrideType.CHANGE and not override.is_hydra_override()
    choice = not isinstance(override.value(), dict) and loader.get_group_options(override.key_or_group, None)
    return change and not choice


def compose(config_name: str, overrides: list[str], number: int) -> DictConfig:
    """Return the config of job `number`, in which `${hydra:...}` resolves too; raise HydraException for an unknown choice."""
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


def flat(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a config but Hydra's own, and its unresolved node."""
    for name in map(str, cfg):
        if not prefix and name == "hydra":
            continue
        node = cfg._get_node(name)
        yield f"{prefix}{name}", node
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from flat(node, f"{prefix}{name}.")


def check_call(key: str, node: DictConfig) -> None:
    """Raise HydraException if the constructor that `node` names takes no such argument, or not such a value."""
    parameters = parameters_of(node)
    if parameters is None:
        return
    taken = {name: parameter for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD}
    for name, child in ((str(name), child) for name, child in node.items_ex(resolve=False)):
        dotted = f"{key}.{name}".removeprefix(".")
        if name.startswith("_") or (name not in taken and len(taken) < len(parameters)):
            continue
        if name not in taken:
            raise HydraException(unknown_key(dotted, [f"{key}.{other}".removeprefix(".") for other in taken]))
        if not isinstance(child, str | int | float | bool):
            continue  # null, or a list or group that instantiate converts first
        try:
            schema = OmegaConf.structured(make_dataclass("Schema", [("value", taken[name].annotation)]))
        except OmegaConfBaseException:
            continue  # a tensor, a callable, a union with a class: the constructor's own affair
        try:
            schema.value = child
        except OmegaConfBaseException as error:
            raise HydraException(f"{dotted}={child}: {first_line(error)}") from None


def unknown_key(key: str, known: Iterable[str]) -> str:
    near = nearest(key, known)
    if near:
        return f"{key} is not known; did you mean {near}?"
    parent = key.rpartition(".")[0]
    own = [name for name in known if not name.rpartition(".")[2].startswith("_")]  # without Hydra's _target_
    siblings = [name for name in own if name.rpartition(".")[0] == parent] or [name for name in own if "." not in name]
    return f"{key} is not known. Known: {', '.join(sorted(siblings))}. (+{key}=... adds a key.)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `word`. The last part counts most: max_steps is for trainer.max_steps."""

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
    """Raise HydraException if `key` has a value in `final` whose type is not that of its default in `base`."""
    try:
        default = plain(base, key)
    except OmegaConfBaseException:
        return  # a default that waits for another value says nothing about types
    try:
        value = plain(final, key)
    except OmegaConfBaseException as error:
        raise HydraException(f"{key}: {first_line(error)}") from None
    wrong = type_mismatch(value, default)
    if wrong is not None and not (value is None and takes_null(key, final)):
        got, wanted = KINDS[type(wrong[0])], KINDS[type(wrong[1])]
        shown = json.dumps(value) if value is None or isinstance(value, bool) else value
        hint = f"; ++{key}=null sets it all the same" if value is None else ""
        if isinstance(default, str) and value is not None:
            hint = f"; as text it is written {key}=\"'{shown}'\""
        raise HydraException(f"{key}={shown}: {wanted} is wanted, not {got} (the default is {default}){hint}")


def takes_null(key: str, cfg: DictConfig) -> bool:
    """Return whether it is an argument of a constructor that takes None for it."""
    group, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, group) if group else cfg
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return False
    parameter = (parameters_of(node) or {}).get(name)
    return parameter is not None and type(None) in get_args(parameter.annotation)


def parameters_of(node: DictConfig) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of the constructor that it names; None if `instantiate` reports what is wrong with it."""
    try:
        return inspect.signature(get_object(node._target_), eval_str=True).parameters
    except (HydraException, ImportError, NameError, TypeError, ValueError):
        return None


def plain(cfg: DictConfig, key: str) -> Any:
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def type_mismatch(value: Any, default: Any) -> tuple[Any, Any] | None:
    """Return a value and the default whose type it lacks. A whole number is a number; a null default takes anything."""
    if default is None or (isinstance(default, float) and type(value) is int):
        return None
    if isinstance(default, list):
        value = value if isinstance(value, list) else [value]  # a list of one may go without brackets
        alike = len({type(item) for item in default}) == 1
        return next((wrong for item in value if alike and (wrong := type_mismatch(item, default[0]))), None)
    return None if type(value) is type(default) else (value, default)


def first_line(error: Exception) -> str:
    """Return the first line of a message; OmegaConf adds lines about its own affairs."""
    return str(error).partition("\n")[0]
