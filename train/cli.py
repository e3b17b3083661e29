"""What every Hydra entry point is wrapped in: bad input gets one clear sentence and a non-zero exit code.

    @entry("train")
    def main(cfg: DictConfig) -> None: ...

Everything typed is checked before anything runs (train/config_check.py).
Exit codes: 0 done, 1 a bug (with its traceback), 2 bad input, 130 interrupted. FOREDRAFT_TRACE=1 shows the traceback
of bad input too.
"""

import errno
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue

from train.config_check import Plan, first_line, make_plan

CONF = Path(__file__).resolve().parent.parent / "conf"


class JobFailed(Exception):
    """A job of a sweep failed and said why; Hydra runs the other jobs and raises this at the end."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def entry(config_name: str, config_dir: Path = CONF) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make `main(cfg)` the command line program of `<config_dir>/<config_name>.yaml`."""

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def run() -> None:
            args = get_args_parser().parse_args()
            # As Hydra reads --config-path: beside the file of `main`, unless it is absolute.
            folder = Path(inspect.getfile(main)).resolve().parent / (args.config_path or config_dir)
            try:
                plan = make_plan(args, args.config_name or config_name, folder)
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


def run_job(main: Callable[[DictConfig], None], plan: Plan, cfg: DictConfig) -> None:
    """One job: the only one of a run, or one of a sweep."""
    if plan.sweep:
        job = HydraConfig.get().job.num
        overrides = HydraConfig.get().overrides.task
        print(f"job {job + 1} of {plan.jobs}: {' '.join(overrides)}", flush=True)
        if plan.apart:
            swept = [override for override in overrides if override.partition("=")[0] in plan.apart]
            # No sign that would need quotes when the path is typed again in an override.
            name = "_".join(re.sub(r"[^\w.+]", "-", override) for override in swept)
            cfg.output_dir = str(Path(cfg.output_dir) / name)
    try:
        main(cfg)
    except Exception as error:
        code = explain(error, str(cfg.get("output_dir") or os.getcwd()))
        raise (JobFailed(code) if plan.sweep else SystemExit(code)) from None


def explain(error: Exception, folder: str) -> int:
    """Print what a user needs to know of `error`; the exit code. `folder` is where the job writes."""
    message = sentence(error, folder)
    if message is None or os.environ.get("FOREDRAFT_TRACE") == "1":
        traceback.print_exception(error)
    if message is not None:
        print(f"error: {message}", file=sys.stderr)
    return 1 if message is None else 2


def sentence(error: BaseException, folder: str) -> str | None:
    """`error` in a user's words, or None for a bug."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # hydra.utils.instantiate wraps what a constructor raised
    if no_space(error):
        return f"no space left in {folder}"
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: write key=value, with quotes around signs such as = and ,"
    if isinstance(error, HydraException):
        return " ".join(f"{error} {error.__cause__ or ''}".split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    if isinstance(error, InterpolationResolutionError | MissingMandatoryValue):
        return first_line(error)
    if isinstance(error, ValueError | OSError):
        return str(error)
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return str(error)  # a key that no constructor knows, from a yaml or `+key=value`
    return None


def no_space(error: BaseException | None) -> bool:
    """Is a full disk behind `error`? Only Python's own writers say so by number."""
    while error is not None:
        # "unexpected pos": torch.save's zip writer wrote less than it was given
        if "No space left on device" in str(error) or "unexpected pos" in str(error):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False
