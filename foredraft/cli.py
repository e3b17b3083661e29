"""The command line of every program: bad input gives one clear sentence and a non-zero exit code.

    @entry("train")
    def main(cfg: DictConfig) -> None: ...

The whole command line is checked before anything runs (foredraft/config.py); --help is written by foredraft/config_help.py.
Exit codes: 0 done, 1 a bug (with its traceback), 2 bad input or a lost process, 130 interrupted, 141 nobody reads the output
any more. FOREDRAFT_TRACE=1 shows the traceback of bad input too.
"""

import argparse
import contextlib
import errno
import functools
import inspect
import linecache
import os
import re
import select
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue
from yaml import YAMLError

from foredraft.config import checked_jobs, first_line, opened, without_hydra
from foredraft.config_help import describe, docstring
from foredraft.words import WORDS, overrides_of

Main = Callable[[DictConfig], None]
WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+\.\n")
# A key that no constructor has, from a yaml or `+key=value`, or a new class without one of its methods.
NEW_CODE = re.compile("unexpected keyword argument|^Can't instantiate abstract")
# Packages of the extra `train` that some data and settings of other programs need.
OF_TRAIN = ("accelerate", "datasets", "pyarrow")
FLAGS = "flags: -h, -m, --cfg job, --config-name, --config-dir"
NO_TARGET = "Error loading "  # Hydra's words for the _target_ of a yaml
NEEDS_TARGET = (
    "foredraft {} needs a target: add target=ORG/NAME or a directory; `foredraft demo` trains for the test model"
)


def entry(config_name: str) -> Callable[[Main], Callable[[], None]]:
    """Make `main(cfg)` the command line program of conf/<config_name>.yaml."""

    def decorate(main: Main) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            reach_this_machine()
            args = parse()
            program = args.config_name or config_name
            with sentences(), opened(args.config_dir):
                if args.help:
                    return show_help(program, Path(inspect.getfile(main)))
                jobs = checked_jobs(program, overrides_of(program, args.words), args.multirun)
                if args.cfg:
                    print("\n".join(OmegaConf.to_yaml(without_hydra(cfg)) for cfg in jobs), end="")
                    return
                failed = max(run_job(main, program, cfg, len(jobs)) for cfg in jobs)
            if failed:
                raise SystemExit(failed)

        return run

    return decorate


def reach_this_machine() -> None:
    """Let no proxy of the environment come between this program and servers on this machine. Without one nothing is set, so
    that Python looks for the system's proxies. "*" excludes all hosts, but only if it is alone."""
    proxies = [name for name, value in os.environ.items() if value and name.lower().endswith("_proxy")]
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if proxies and others != "*":
        os.environ["no_proxy"] = ",".join(filter(None, (others, "localhost,127.0.0.1,::1")))


def parse() -> argparse.Namespace:
    """Read the command line: flags, and words such as head=medusa."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--local_rank", "--local-rank")  # launchers add it, and set the variable LOCAL_RANK too
    args, unknown = parser.parse_known_intermixed_args()  # head=medusa --help all
    if unknown:
        print(f"error: {unknown[0]} is not a flag ({FLAGS}): keys are written key=value", file=sys.stderr)
        raise SystemExit(2)
    return args


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """End the process with a sentence instead of a traceback if what runs inside is interrupted or fails."""
    try:
        yield
    except KeyboardInterrupt as stop:
        print(f"interrupted{f': {stop}' if str(stop) else ''}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        raise SystemExit(explain(error, os.getcwd())) from None


def show_help(command: str, file: Path) -> None:
    """Print the help of a command, or of the program in `file`, which is not imported: that would import torch."""
    args, about = parse(), docstring(file)
    program = args.config_name or {"demo": "train"}.get(command, command)
    if program == "env":  # it has no config
        print(f"usage: foredraft {command}\n\n{about}")
        return
    with sentences():
        text = describe(about, program, args.words, args.config_dir)
        print(re.sub("^usage: .*", "usage: foredraft demo", text) if command == "demo" else text)


def run_job(main: Main, program: str, cfg: DictConfig, jobs: int) -> int:
    """Run one job: the only one of a run, or one of a sweep. Return its exit code."""
    HydraConfig.instance().set_config(cfg)
    overrides = " ".join(cfg.hydra.overrides.task)
    if jobs > 1:
        print(f"job {cfg.hydra.job.num + 1} of {jobs}: {overrides}", file=sys.stderr, flush=True)
    cfg = without_hydra(cfg)
    if "transformers" in sys.modules and not sys.stderr.isatty():
        sys.modules["transformers"].utils.logging.disable_progress_bar()  # a file would get carriage returns
    try:
        # In `regenerate` a server may answer.
        if "target" in cfg and OmegaConf.is_missing(cfg.target, "path") and cfg.get("endpoint") is None:
            raise ValueError(NEEDS_TARGET.format(program))
        main(cfg)
    except Exception as error:
        return explain(error, str(cfg.get("output_dir") or os.getcwd()))
    return 0


def check_at_least(cfg: DictConfig, least: int, *names: str) -> None:
    """Raise ValueError for the first of these keys whose value, or one value of its list, is less than `least`."""
    for name in names:
        value = OmegaConf.select(cfg, name)
        numbers = value if isinstance(value, ListConfig) else [value]
        if any(number is not None and number < least for number in numbers):
            raise ValueError(f"{name}={value} must be at least {least}")


def explain(error: Exception, folder: str) -> int:
    """Print what a user needs to know of `error`; the exit code. `folder` is where the job writes."""
    if isinstance(error, BrokenPipeError) and has_no_reader():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still has to write, at its end
        return 141
    message = user_message(error, folder)
    if message is None or os.environ.get("FOREDRAFT_TRACE") == "1":
        traceback.print_exception(error)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
    return 1 if message is None else 2


def has_no_reader() -> bool:
    """Return whether the program that read stdout (`| head`) has ended."""
    (stdout := select.poll()).register(1, 0)  # events: only errors
    return any(flags & (select.POLLERR | select.POLLHUP) for _, flags in stdout.poll(0))  # not for a closed stdout


def user_message(error: BaseException, folder: str) -> str | None:
    """Return `error` in a user's words, or None for a bug."""
    if any(map(no_space, chain(error))):
        return f"no space left in {folder}"
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # hydra.utils.instantiate wraps what a constructor raised
    if isinstance(error, OverrideParseException):
        quotes = "quotes around a value (in a list, around each) with commas, brackets, quotes, = or é"
        return f"cannot read {error.override!r}: write key=value, with {quotes}"
    if isinstance(error, HydraException | YAMLError):
        return " ".join(f"{error} {error.__cause__ or ''}".split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, MissingMandatoryValue):
        key = next((word for word, path in WORDS.items() if path == error.full_key), str(error.full_key))
        return f"{key} has no value: give {key}=..., as --help explains"
    if isinstance(error, InterpolationResolutionError):
        return first_line(error)
    if isinstance(error, ValueError | OSError):
        if WORKER.match(str(error)):  # of a DataLoader's worker, with the traceback as its message
            return re.split(rf"\n[\w.]*{type(error).__name__}: ", str(error))[-1].strip()
        return None if is_bug(error) else str(error)
    if isinstance(error, TypeError) and NEW_CODE.search(str(error)):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and (package := str(error.name).partition(".")[0]) in OF_TRAIN:
        return f"this needs the package {package}: pip install 'foredraft[train]'"
    if isinstance(error, ImportError) and str(error).startswith(NO_TARGET):
        return " ".join(f"cannot load the _target_ {str(error).removeprefix(NO_TARGET)}".split())
    return None


def is_bug(error: BaseException) -> bool:
    """Return whether a ValueError comes from a line of this package such as `zip(a, b, strict=True)`, and not from a
    statement `raise`, there or in another package."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    ours = frame.f_globals["__name__"].startswith("foredraft.") and not isinstance(error, OSError)
    return ours and not linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise")


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
