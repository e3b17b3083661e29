"""The checked configs of a command line, one for each job of a sweep: choices, keys and types.

Hydra composes the yaml files in struct mode, so it finds what is not known; here that becomes one sentence with the nearest
known name. A value must have the type of the default it replaces, or be null where a constructor takes None, and what a yaml
passes to its `_target_` must fit the signature there. (`+key=value` adds a key, `++key=value` sets one whatever its default.)
Whatever is wrong is a HydraException.
"""

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
from typing import Any, get_args

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from foredraft.renamed_keys import new_choice, new_key
from foredraft.words import BENCH_CONF, CONF, WORDS, overrides_of

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a group of keys",
    type(None): "null",
}


@contextlib.contextmanager
def opened(folder: str | Path = CONF, more: str | None = None) -> Iterator[Any]:
    """Let Hydra find yaml in `folder`, then in the bench's and in `more`, as long as this lasts. Gives its loader."""
    hydra.version.setbase(None)
    path = create_config_search_path(str(folder))
    for other in (BENCH_CONF, more):
        if other is not None and os.path.isdir(other):
            path.append("foredraft", f"file://{os.path.abspath(other)}", anchor=SearchPathQuery("main", None))
    before = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2("foredraft", path).config_loader
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = before


def read(program: str, *words: str) -> DictConfig:
    """Return conf/<program>.yaml, unchecked, with these arguments of a command line."""
    with opened():
        return without_hydra(compose(program, overrides_of(program, words)))


def compose(program: str, overrides: list[str], number: int = 0, sweep: bool = False) -> DictConfig:
    """Return the config of job `number`, in which `${hydra:...}` resolves too; raise HydraException for an unknown choice."""
    try:
        cfg = hydra.compose(program, overrides, return_hydra_config=True)
    except MissingConfigException as error:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        known = options_of(group) if group else []
        if not known:
            raise
        near = nearest(option, known)
        hint = f"; did you mean {group}={near}?" if near else "."
        raise HydraException(f"{group}={option} is not known{hint} Known: {', '.join(sorted(known))}.") from None
    with open_dict(cfg):
        cfg.hydra.job.num, cfg.hydra.mode = number, RunMode.MULTIRUN if sweep else RunMode.RUN
    HydraConfig.instance().set_config(cfg)
    return cfg


def options_of(group: str) -> list[str]:
    return GlobalHydra.instance().config_loader().get_group_options(group)


def without_hydra(cfg: DictConfig) -> DictConfig:
    """Return the config of a program without Hydra's own settings."""
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def checked_jobs(program: str, overrides: list[str], sweep: bool) -> list[DictConfig]:
    """Return the checked config of the run, or of every job of a sweep. Jobs that would share one `output_dir` get folders
    in it with the names of the swept values."""
    if not sweep:
        return [check(program, overrides)]
    parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(overrides)
    swept = {override.get_key_element() for override in parsed if override.is_sweep_override()}
    jobs = product(parsed)
    found: list[DictConfig] = []
    folders: list[str] = []
    for number, job in enumerate(jobs):
        found.append(check(program, job, number, sweep))
        folders.append(str(OmegaConf.select(found[-1], "output_dir")))  # which may name a choice of this job
    if "output_dir" in found[0] and max(Counter(folders).values()) > 1:
        for cfg, folder, job in zip(found, folders, jobs, strict=True):
            # No sign that would need quotes when the path is typed again in an override.
            names = [re.sub(r"[^\w.+]", "-", override) for override in job if override.partition("=")[0] in swept]
            cfg.output_dir = str(Path(folder) / "_".join(names))
    return found


def product(parsed: list[Override]) -> list[list[str]]:
    """Return the overrides of each job of a sweep."""
    values: dict[str, list[str]] = {}
    for override in parsed:
        key = override.get_key_element()
        found = override.sweep_string_iterator() if override.is_sweep_override() else None
        values[key] = [str(override.input_line)] if found is None else [f"{key}={value}" for value in found]
    return [list(job) for job in itertools.product(*values.values())]


# Checking


def check(program: str, overrides: list[str], number: int = 0, sweep: bool = False) -> DictConfig:
    """Return the config of a job after its choices, keys and types were checked."""
    groups = compose(program, [], number).hydra.runtime.choices
    word_for = {path: word for word, path in WORDS.items()}
    choices: list[str] = []
    values: list[str] = []
    for override in OverridesParser.create().parse_overrides(overrides):
        key, value = override.key_or_group, override.value()
        if override.is_sweep_override():
            line = str(override.input_line)
            raise HydraException(f"{line} is a sweep, which needs -m; a list is written {line.replace('=', '=[', 1)}]")
        exists = value in options_of(key) or (key in word_for and os.path.exists(str(value)))
        if not exists and (renamed := new_choice(word_for.get(key, key), value)):
            raise HydraException(renamed)
        changes = override.type == OverrideType.CHANGE and not override.is_hydra_override()
        if changes and (key not in groups or isinstance(value, dict)):
            values.append(key)
        else:
            choices.append(str(override.input_line))
    base = compose(program, choices, number)
    known = dict(flat(base))
    for key in values:
        if renamed := new_key(key, {*known, *groups}):
            raise HydraException(renamed)
        if key not in known and options_of(key):  # a group that only other programs have
            raise HydraException(unknown_key(key, known))
    try:
        final = compose(program, overrides, number, sweep)
    except ConfigCompositionException as error:
        if not isinstance(error.__cause__, OmegaConfBaseException) or error.__cause__.full_key is None:
            raise
        missing = error.__cause__.full_key  # of OmegaConf's struct mode
        typed = next((key for key in values if key.startswith(f"{missing}.")), missing)  # trainr of trainr.max_steps
        raise HydraException(unknown_key(typed, known)) from None
    for key in known:
        if any(f"{key}.".startswith(f"{typed}.") for typed in values):
            check_type(key, base, final)
            if isinstance(known[key], ListConfig) and isinstance(plain(final, key), str | int | float | bool):
                OmegaConf.update(final, key, [plain(final, key)])  # a list of one may go without brackets
    for key, node in [("", final), *flat(final)]:
        if isinstance(node, DictConfig) and "_target_" in node:
            check_call(key, node)
    return final


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
    taken = {name: parameter for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD}
    for name, child in ((str(name), child) for name, child in node.items_ex(resolve=False)):
        dotted = f"{key}.{name}".removeprefix(".")
        if not parameters or name.startswith("_") or (name not in taken and len(taken) < len(parameters)):
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
    group, _, name = key.rpartition(".")
    parameter = parameters_of(OmegaConf.select(final, group) if group else final).get(name)
    takes_null = parameter is not None and type(None) in get_args(parameter.annotation)
    wrong = type_mismatch(value, default)
    if wrong is not None and not (value is None and takes_null):
        got, wanted = KINDS[type(wrong[0])], KINDS[type(wrong[1])]
        shown = json.dumps(value) if value is None or isinstance(value, bool) else value
        hint = f"; ++{key}=null sets it all the same" if value is None else ""
        if isinstance(default, str) and value is not None:
            hint = f"; as text it is written {key}=\"'{shown}'\""
        raise HydraException(f"{key}={shown}: {wanted} is wanted, not {got} (the default is {default}){hint}")


def type_mismatch(value: Any, default: Any) -> tuple[Any, Any] | None:
    """Return a value and the default whose type it lacks. A whole number is a number; a null default takes anything."""
    if default is None or (isinstance(default, float) and type(value) is int):
        return None
    if isinstance(default, list):
        value = value if isinstance(value, list) else [value]  # a list of one may go without brackets
        alike = len({type(item) for item in default}) == 1
        return next((wrong for item in value if alike and (wrong := type_mismatch(item, default[0]))), None)
    return None if type(value) is type(default) else (value, default)


def parameters_of(node: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the constructor that it names; none if `instantiate` reports what is wrong with it."""
    try:
        return inspect.signature(get_object(node._target_), eval_str=True).parameters
    except (AttributeError, HydraException, ImportError, NameError, TypeError, ValueError, OmegaConfBaseException):
        return {}


def plain(cfg: DictConfig, key: str) -> Any:
    value = OmegaConf.select(cfg, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def first_line(error: Exception) -> str:
    """Return the first line of a message; OmegaConf adds lines about its own affairs."""
    return str(error).partition("\n")[0]
