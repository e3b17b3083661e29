"""The checked configs of a command line, one for each job of a sweep: choices, keys and types.

Hydra composes the yaml files in struct mode, so it finds what is not known; here that becomes one sentence with the nearest
known name. The signature of what a yaml's `_target_` names is the schema of its keys. Other values must have the type of the
default that they replace. (`+key=value` adds a key, `++key=value` sets one whatever its default.) Whatever is wrong is a
HydraException.
"""

import contextlib
import hashlib
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, IntegerNode, ListConfig, OmegaConf, StringNode, open_dict
from omegaconf.errors import OmegaConfBaseException

from foredraft.renamed_keys import new_choice, new_key
from foredraft.words import BENCH_CONF, CONF, TEXTS, WORDS, overrides_of


def by_preset(preset: str, test_model: str, other: str) -> str:
    """Return the default for the test model, or for all other targets."""
    return test_model if preset.startswith("test_model") else other


OmegaConf.register_new_resolver("by_preset", by_preset, replace=True)


@contextlib.contextmanager
def opened(more: str | None = None) -> Iterator[Any]:
    """Let Hydra find yaml in conf/, then in the bench's and in `more`, as long as this lasts. Gives its loader."""
    if more is not None:
        check_additions(Path(more))
    hydra.version.setbase(None)
    path = create_config_search_path(str(CONF))
    for other in (BENCH_CONF, more):
        if other is not None and os.path.isdir(other):
            path.append("foredraft", f"file://{os.path.abspath(other)}", anchor=SearchPathQuery("main", None))
    before = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2("foredraft", path).config_loader
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = before


def check_additions(more: Path) -> None:
    """Raise ValueError if the user's directory is missing, or has a file that the one of the same name in conf/ hides."""
    if not more.is_dir():
        raise ValueError(f"--config-dir={more} is not a directory")
    for path in (*sorted(more.glob("*.yaml")), *sorted(more.glob("*/*.yaml"))):
        name = path.relative_to(more)
        if (CONF / name).is_file():
            raise ValueError(
                f"--config-dir={more} has {name}, which foredraft has too and would read instead: rename it"
            )


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
        group = group.rstrip("/")  # of head=/nope
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
    jobs = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    found: list[DictConfig] = []
    folders: list[str] = []
    for number, job in enumerate(jobs):
        found.append(check(program, list(job), number, sweep))
        folders.append(str(OmegaConf.select(found[-1], "output_dir")))  # which may name a choice of this job
    if "output_dir" in found[0] and max(Counter(folders).values()) > 1:
        # No sign that would need quotes when the path is typed again in an override.
        values = ["_".join(line for line in job if line.partition("=")[0] in swept) for job in jobs]
        names = [re.sub(r"[^\w.+]", "-", value) for value in values]
        for cfg, folder, value, name in zip(found, folders, values, names, strict=True):
            if names.count(name) > 1 or len(name.encode()) > 255:  # bytes that a name may have
                start, digest = name.encode()[:240].decode(errors="ignore"), hashlib.sha256(value.encode()).hexdigest()
                name = f"{start}_{digest[:8]}"  # whatever its place in the sweep
            cfg.output_dir = str(Path(folder) / name)
    return found


# Checking


def check(program: str, overrides: list[str], number: int = 0, sweep: bool = False) -> DictConfig:
    """Return the config of a job after its choices, keys and types were checked."""
    groups = compose(program, [], number).hydra.runtime.choices
    word_for = {path: word for word, path in WORDS.items()}
    choices: list[str] = []
    values: dict[str, str] = {}  # with what was typed
    for override in OverridesParser.create().parse_overrides(overrides):
        key, value = override.key_or_group, override.value()
        if str(override.input_line).endswith("=") and key not in TEXTS:
            raise HydraException(f"{key}= has no value: is a variable of the shell empty?")
        if override.is_sweep_override():
            line = str(override.input_line)
            raise HydraException(f"{line} is a sweep, which needs -m; a list is written {line.replace('=', '=[', 1)}]")
        if override.is_hydra_override() and key != "hydra.searchpath":
            raise HydraException(f"{key} has no effect: remove it; the directory of results is output_dir=DIR")
        renamed = new_choice(word_for.get(key, key), value)
        if renamed and value not in options_of(key) and not (key in word_for and os.path.exists(str(value))):
            raise HydraException(renamed)
        changes = override.type == OverrideType.CHANGE and not override.is_hydra_override()
        if changes and (key not in groups or isinstance(value, dict)):
            values[key] = str(override.input_line).partition("=")[2].strip()
        else:
            choices.append(str(override.input_line))
    base = compose(program, choices, number)
    known = dict(flat(base))
    for key in values:
        if key not in known:
            key = key if key.partition(".")[0] in known else word_for.get(key, key)  # drafter.path was typed as drafter
            found = new_key(key, {*known, *groups}) or of_other_choices(key, base)
            raise HydraException(found or unknown_key(key, known))
    try:
        final = compose(program, overrides, number, sweep)
    except ConfigCompositionException as error:
        if (unknown := getattr(error.__cause__, "full_key", None)) is None:
            raise
        raise HydraException(of_other_choices(unknown, base) or unknown_key(unknown, known)) from None  # in {...}
    if final.hydra.runtime.choices.get("recipe"):
        check_recipe(program, choices, final)
    for group, node in [("", final), *flat(final)]:
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            check_group(group, node, base, final, values)
    return final


def check_recipe(program: str, choices: list[str], final: DictConfig) -> None:
    """Raise HydraException for a group or key that only a recipe has, which may be the user's own file."""
    chosen = final.hydra.runtime.choices
    others = [line for line in choices if line.partition("=")[0] not in ("recipe", "head")]
    known = [str(key) for key in hydra.compose(program, [*others, f"head={chosen.head}"])]
    for key in (str(key) for key in final if key not in {*known, "hydra"}):
        reason = "its first line must be # @package _global_" if key == "recipe" else unknown_key(key, known)
        raise HydraException(f"recipe={chosen.recipe}: {reason}")


def flat(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of a config but Hydra's own, and its unresolved node."""
    for name in map(str, cfg):
        if not prefix and name == "hydra":
            continue
        node = cfg._get_node(name)
        yield f"{prefix}{name}", node
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from flat(node, f"{prefix}{name}.")


def check_group(group: str, node: DictConfig, base: DictConfig, final: DictConfig, typed: dict[str, str]) -> None:
    """Raise HydraException for a key that the constructor of a group does not take, and for a value of another type. A typed
    value is converted if it fits: a number where text is wanted, or a single item of a list."""
    parameters = parameters_of(node)
    takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in (name for name in map(str, node) if not name.startswith("_") and name != "hydra"):
        key = f"{group}.{name}".removeprefix(".")
        is_typed = any(f"{key}.".startswith(f"{other}.") for other in typed)
        if parameters and name not in parameters and not takes_all:
            own = [f"{group}.{other}".removeprefix(".") for other in parameters]
            setter = final.hydra.runtime.choices.get("recipe")
            by = "" if is_typed or setter is None else f"recipe={setter}: "
            raise HydraException(by + (of_other_choices(key, final) or unknown_key(key, own, addable=False)))
        try:
            value = plain(final, key)
        except OmegaConfBaseException as error:
            if is_typed:
                raise HydraException(f"{key}: {first_line(error)}") from None
            continue
        default = None
        with contextlib.suppress(OmegaConfBaseException):  # a default that waits for another value has no type
            default = plain(base, key)
        if (name not in parameters and not is_typed) or (value is None and (default is None or not is_typed)):
            continue
        if "${" in str(value):  # a text of the user's, which the schema would take for an interpolation
            continue
        schema = schema_of(parameters[name].annotation if name in parameters else Any, default)
        try:
            wanted = schema._get_node("value")
            if isinstance(wanted, IntegerNode) and isinstance(value, float) and value.is_integer():  # 1e6
                value = int(value)
                OmegaConf.update(final, key, value)
            text = typed.get(key, "$")  # not the value of another key
            if isinstance(wanted, StringNode) and isinstance(value, int | float) and "$" not in text:  # 1e5, 3.10
                value = text
                OmegaConf.update(final, key, value)
            many = isinstance(wanted, ListConfig) and isinstance(value, str | int | float | bool)
            schema.value = [value] if many else value  # a list of one may go without brackets
        except OmegaConfBaseException as error:
            shown = json.dumps(value) if value is None or isinstance(value, bool) else value
            known = "" if default is None else f" (the default is {default})"
            reason = f"a value is wanted; ++{key}=null sets it all the same" if value is None else first_line(error)
            raise HydraException(f"{key}={shown}: {reason}{known}") from None
        if is_typed and schema.value != value:
            OmegaConf.update(final, key, schema.value)


def schema_of(annotation: Any, default: Any) -> DictConfig:
    """Return a config whose key `value` takes what a parameter takes, or what is of the default's type."""
    first = default[0] if isinstance(default, list) and len({type(item) for item in default}) == 1 else None
    item: Any = Any if first is None else type(first)
    like_default = {type(None): Any, list: list[item], dict: dict[str, Any]}
    for kind in (annotation, like_default.get(type(default), type(default))):
        if kind is not Any:
            with contextlib.suppress(OmegaConfBaseException):  # a tensor, a callable: the constructor's own affair
                return OmegaConf.structured(make_dataclass("Schema", [("value", kind)]))
    return OmegaConf.create({"value": None})


def of_other_choices(key: str, cfg: DictConfig) -> str | None:
    """Return that a key is not one of the chosen option, but of others in its group."""
    group, _, name = key.partition(".")
    chosen, having = cfg.hydra.runtime.choices.get(group), []
    for option in options_of(group) if name and chosen else ():
        with contextlib.suppress(HydraException):  # of another file of the user's
            if key in dict(flat(hydra.compose(cfg.hydra.job.config_name, [f"{group}={option}"]))):
                having.append(f"{group}={option}")
    return f"{key} is not a key of {group}={chosen}, but of {', '.join(having)}" if having else None


def unknown_key(key: str, known: Iterable[str], addable: bool = True) -> str:
    near = nearest(key, known)
    if near:
        return f"{key} is not known; did you mean {near}?"
    parent = key.rpartition(".")[0]
    own = [name for name in known if not name.rpartition(".")[2].startswith("_")]  # without Hydra's _target_
    siblings = [name for name in own if name.rpartition(".")[0] == parent] or [name for name in own if "." not in name]
    more = f" (+{key}=... adds a key.)" if addable else ""
    return f"{key} is not known. Known: {', '.join(sorted(siblings))}.{more}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `word`, of which the last part counts most: lr is for trainer.lr."""
    parent, _, last = word.rpartition(".")
    known = [name for name in known if not word.startswith(f"{name}.")]
    lasts = {name.rpartition(".")[2] for name in known}
    near = [] if parent or last in lasts else get_close_matches(word, known)
    if not near:
        alike = [last] if last in lasts else get_close_matches(last, lasts)
        near = get_close_matches(word, [name for name in known if name.rpartition(".")[2] in alike], cutoff=0)
    return min(near, key=lambda name: name[:1] != word[:1], default=None)  # a first letter is seldom mistyped


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
