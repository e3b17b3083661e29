"""The command line of every program: bad input gives one clear sentence and a non-zero exit code.

    @entry("train")
    def main(cfg: DictConfig) -> None: ...

The whole command line is checked before anything runs (train/config_check.py); --help is written by train/config_help.py.
Exit codes: 0 done, 1 a bug (with its traceback), 2 bad input or a lost process, 130 interrupted. FOREDRAFT_TRACE=1
shows the traceback of bad input too.
"""

import argparse
import ast
import errno
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
from hydra import conf as hydra_conf
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import env_override
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from foredraft.train.config_check import Plan, first_line, make_plan, search_path
from foredraft.train.config_help import describe
from foredraft.train.data.known_sets import DATA_SETS

WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")
NEEDS_TARGET = (
    "foredraft {} needs a target: add target=ORG/NAME or a directory; `foredraft demo` trains for the test model"
)
TEXTS = ("prompt", "system")  # keys whose values are not paths
NAMED_DRAFTERS = ("evaluate", "matched")  # programs whose key `drafter` is not the group of that name
ROOT = Path(__file__).resolve().parents[1]  # of a checkout, or the folder of the installed package
CONF, SCRIPTS = ROOT / "conf", ROOT / "scripts"


def shipped(name: str) -> str:
    """Return where scripts/<name> is: relative in the root of a checkout, as metrics and cards write it, else absolute."""
    path, relative = SCRIPTS / name, Path("scripts") / name
    return str(relative if relative.exists() and relative.samefile(path) else path)


def has_gpu() -> bool:
    """Return whether PyTorch can use a GPU. Programs have imported it; `--help`, which has not, looks for a driver."""
    if "torch" not in sys.modules:
        return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return sys.modules["torch"].cuda.is_available()


def bfloat16_products() -> bool:
    """Return, for `${bfloat16_products:}`, whether the device of a run may compute in bfloat16."""
    if "torch" not in sys.modules:
        return has_gpu()  # a config that overrides the key resolves it, too, when `--help` composes it
    from foredraft.heads.target.loading import has_bfloat16_products

    return has_bfloat16_products("cuda" if has_gpu() else "cpu")


def default_for_target(target: str, test_model: str, other: str) -> str:
    """Return the default for the test model, or for all other targets."""
    return test_model if target == "test_model" else other


def preset_for(target: str, data: str, recipe: str | None) -> str:
    """Return the choice of conf/preset if none is typed. Without a GPU a head learns for hours, not for days as in a
    published recipe."""
    if target == "test_model":
        return "test_model_log" if data == "accepted" else "test_model"
    small = target == "hf" and data != "accepted" and recipe is None and not has_gpu()
    return "cpu" if small or target == "smollm2" else "gpu"


def unless_overridden(key: str, value: float) -> float:
    """Return `value`, or 0 if the command line sets `key`."""
    typed = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return 0.0 if key in [override.lstrip("+").partition("=")[0] for override in typed] else value


def data_for(target: str) -> str:
    """Return the choice of conf/data if none is typed."""
    return "self" if target == "smollm2" else default_for_target(target, "stdlib", "conversations")


def muon_for(strategy: str) -> str:
    """Return the optimizer of a head that learns for minutes or hours: Muon, which the ZeRO strategies do not support."""
    return "adamw" if strategy.startswith("zero") else "muon"


for resolver in (shipped, bfloat16_products, default_for_target, preset_for, data_for, muon_for, unless_overridden):
    OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
# What every program wants of Hydra: no separate folder and no log. In a sweep it writes outputs/multirun.yaml.
BASE = hydra_conf.HydraConf(run=hydra_conf.RunDir("."), sweep=hydra_conf.SweepDir("outputs", "."), output_subdir=None)
BASE.defaults = [{**entry, **{name: "none" for name in entry if name.endswith("_logging")}} for entry in BASE.defaults]
ConfigStore.instance().store(group="hydra", name="config", node=BASE, provider="foredraft")


class BenchConf(SearchPathPlugin):
    """Find the yaml of the programs in scripts/bench, which the installed package does not have."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folder := SCRIPTS / "bench" / "conf").is_dir():
            search_path.append("foredraft", f"file://{folder}")


Plugins.instance().register(BenchConf)


class JobFailed(Exception):
    """Signal that a job of a sweep failed and printed why; Hydra runs the other jobs and raises this at the end."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def entry(config_name: str, config_dir: Path = CONF) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make `main(cfg)` the command line program of `<config_dir>/<config_name>.yaml`."""

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            args = parse(config_name)
            # As Hydra reads --config-path: next to the file of `main`, unless it is absolute.
            folder = Path(inspect.getfile(main)).resolve().parent / (args.config_path or config_dir)
            try:
                name = args.config_name or config_name
                if args.help:
                    print(help_of(args, name, folder, inspect.getfile(main)))
                    return
                plan = make_plan(args, name, folder)
                job = functools.wraps(main)(functools.partial(run_job, main, plan))
                # Hydra would format errors itself and end the process: with this variable it passes them on.
                with env_override({"HYDRA_FULL_ERROR": "1"}):
                    hydra.main(version_base=None, config_path=str(config_dir), config_name=config_name)(job)()
            except KeyboardInterrupt as stop:
                print(f"interrupted{f': {stop}' if str(stop) else ''}", file=sys.stderr)
                raise SystemExit(130) from None
            except JobFailed as failed:
                raise SystemExit(failed.code) from None
            except Exception as error:
                raise SystemExit(explain(error, os.getcwd())) from None

        return run

    return decorate


def parse(config_name: str) -> argparse.Namespace:
    """Return Hydra's view of the command line, after `sys.argv` was rewritten in Hydra's language."""
    typed = [
        part
        for argument in map(expand_home, sys.argv[1:])
        for part in expand_shorthand(argument, named=config_name in NAMED_DRAFTERS)
    ]
    sys.argv[1:] = [*named_target(typed), *typed]
    return get_args_parser().parse_intermixed_args()  # head=medusa --help all


def help_of(args: argparse.Namespace, config_name: str, folder: Path, file: str | Path) -> str:
    """Return the text of `--help` and `--help all`; file: the program, whose docstring says what it does."""
    first, _, rest = docstring(file).partition("\n")
    sentence = f"{first.partition(':  ')[0].rstrip('.:')}."
    everything = "all" in args.overrides
    overrides = search_path(args) + [override for override in args.overrides if override != "all"]
    return describe(
        f"{sentence}\n{rest}".rstrip() if everything else sentence, config_name, overrides, folder, everything
    )


def docstring(file: str | Path) -> str:
    """Return the docstring of a program without importing it."""
    return ast.get_docstring(ast.parse(Path(file).read_text())) or Path(file).stem


def show_help(command: str, module: str) -> None:
    """Print the help of a command of `foredraft` without its program, which would import torch."""
    file = ROOT / f"{module.partition('.')[2].replace('.', '/')}.py"
    name = {"demo": "train"}.get(command, command)
    if not (CONF / f"{name}.yaml").is_file():
        print(f"usage: foredraft {command}\n\n{docstring(file)}")
        return
    args = parse(name)
    try:
        text = help_of(args, args.config_name or name, CONF, file)
        print(re.sub("^usage: .*", "usage: foredraft demo", text) if command == "demo" else text)
    except Exception as error:
        raise SystemExit(explain(error, os.getcwd())) from None


def run_job(main: Callable[[DictConfig], None], plan: Plan, cfg: DictConfig) -> None:
    """Run one job: the only one of a run, or one of a sweep."""
    if plan.sweep:
        job = HydraConfig.get().job.num
        overrides = HydraConfig.get().overrides.task
        print(f"job {job + 1} of {plan.jobs}: {' '.join(overrides)}", file=sys.stderr, flush=True)
        if plan.apart:
            swept = [override for override in overrides if override.partition("=")[0] in plan.apart]
            # No sign that would need quotes when the path is typed again in an override.
            name = "_".join(re.sub(r"[^\w.+]", "-", override) for override in swept)
            cfg.output_dir = str(Path(cfg.output_dir) / name)
    for key in plan.lists:
        OmegaConf.update(cfg, key, [OmegaConf.select(cfg, key)])
    if (named := OmegaConf.select(cfg, "drafter.value")) is not None:
        cfg.drafter = named
    if "transformers" in sys.modules and not sys.stderr.isatty():
        sys.modules["transformers"].utils.logging.disable_progress_bar()  # a file would get carriage returns
    try:
        if (
            "target" in cfg
            and HydraConfig.get().runtime.choices.get("target") == "hf"
            and OmegaConf.is_missing(cfg.target, "path")
            and cfg.get("endpoint") is None  # of `regenerate`: a server answers
        ):
            raise ValueError(NEEDS_TARGET.format(HydraConfig.get().job.config_name))
        main(cfg)
    except Exception as error:
        code = explain(error, str(cfg.get("output_dir") or os.getcwd()))
        raise (JobFailed(code) if plan.sweep else SystemExit(code)) from None


def explain(error: Exception, folder: str) -> int:
    """Print what a user needs to know of `error`; the exit code. `folder` is where the job writes."""
    message = user_message(error, folder)
    if message is None or os.environ.get("FOREDRAFT_TRACE") == "1":
        traceback.print_exception(error)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
    return 1 if message is None else 2


def user_message(error: BaseException, folder: str) -> str | None:
    """Return `error` in a user's words, or None for a bug."""
    if any(map(no_space, chain(error))):
        return f"no space left in {folder}"
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # hydra.utils.instantiate wraps what a constructor raised
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: write key=value, with quotes around signs such as = and ,"
    if isinstance(error, HydraException):
        return " ".join(f"{error} {error.__cause__ or ''}".split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, InterpolationResolutionError | MissingMandatoryValue):
        return first_line(error)
    if isinstance(error, ValueError | OSError):
        return raised_by_worker(error) or str(error)
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return str(error)  # a key that no constructor knows, from a yaml or `+key=value`
    return None


def raised_by_worker(error: BaseException) -> str:
    """Return what a DataLoader's worker reported: torch raises its error again, with the worker's traceback as the message.
    Empty for an error that is not a worker's."""
    text = str(error)
    return text.rpartition(f"\n{type(error).__name__}: ")[2].strip() if WORKER.match(text) else ""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what led to it. `raise error.__cause__` inside `except` makes a cycle, so each is given once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def no_space(error: BaseException) -> bool:
    """Return whether `error` reports a full disk. Only Python's own writers do so by number."""
    # "unexpected pos": torch.save's zip writer wrote less than it was given
    named = "No space left on device" in str(error) or "unexpected pos" in str(error)
    return named or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))


def expand_home(argument: str) -> str:
    """Expand ~ at the start of a path in an override, which a shell does only at the start of an argument."""
    key, sign, value = argument.partition("=")
    if key.lstrip("+") in TEXTS:
        return argument
    return key + sign + re.sub(r"(^|[\[,:+'\"])~(?=/)", lambda found: found[1] + os.path.expanduser("~"), value)


def expand_shorthand(argument: str, named: bool = False) -> list[str]:
    """Return what `argument` means in Hydra's language: target=ORG/NAME is target=hf target.path=ORG/NAME, drafter=DIRECTORY
    is drafter=head drafter.path=DIRECTORY, drafter=A+B is drafter=union drafter.path=A+B, and a prompt is text whatever
    characters are in it. named: `drafter` is a key of the program, where Hydra would look for a choice of the group of that
    name; it takes a group of keys as a value, which run_job unwraps."""
    key, _, value = argument.partition("=")
    if key == "--local_rank":
        return []  # DeepSpeed's launcher adds it; the variable LOCAL_RANK, which it sets too, says the same
    if key == "drafter" and named:
        if value[:1] not in ("[", "{"):
            value = f"[{value}]" if "," in value else quoted(value)
        return [f"drafter={{value:{value}}}"]
    if key == "data" and value in DATA_SETS:
        chosen = [f"data.{name}={wanted}" for name, wanted in DATA_SETS[value][1].items()]
        return ["data=conversations", *chosen]
    if key == "learn" and value in ("true", "false"):
        return [f"learn.enabled={value}"]
    if key == "prompt" and value != "null" and value[:1] not in ("'", '"'):
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not OmegaConf's interpolation
        text = re.sub(r"(\\*)'", r"\1\1\\'", text)
        return ["prompt='" + re.sub(r"(\\+)\Z", r"\1\1", text) + "'"]
    joined = key == "drafter" and "+" in value and not os.path.exists(value)
    if key not in ("target", "drafter") or not (joined or "/" in value or os.path.exists(value)):
        # A partitioned data set has folders such as date=2026-01-01.
        path = "=" in value and re.fullmatch(r"\+*[.\w]+", key) and re.fullmatch(r"[\w./:@+~=-]+", value)
        return [f"{key}={quoted(value)}" if path else argument]
    if (CONF / key / f"{value}.yaml").is_file() or value.startswith(("{", "[")):
        return [argument]
    if key == "drafter":
        return [f"drafter={'union' if joined else 'head'}", f"drafter.path={quoted(value)}"]
    return ["target=hf", f"target.path={quoted(value)}"]


def named_target(arguments: list[str]) -> list[str]:
    """Return target=hf if target.path is typed and nothing names the kind of target: the test model's preset would not suit
    it."""
    keys = {argument.partition("=")[0] for argument in arguments}
    given = keys & {"target", "recipe", "--config-name", "-cn"}
    return ["target=hf"] if "target.path" in keys and not given else []


def quoted(path: str) -> str:
    """Quote a path for Hydra, which uses = ( ) { } and others itself."""
    return path if re.fullmatch(r"[\w./:@+~-]+", path) else "'" + path.replace("'", "\\'") + "'"
