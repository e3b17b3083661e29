"""What test modules share and pytest need not know: builders, tiny servers, programs that tests start. Fixtures are in
tests/conftest.py; no test module imports from another one."""

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from foredraft.words import CONF

ROOT = Path(__file__).resolve().parents[2]
typed = shlex.split  # arguments that are typed over several lines


def names(group: str) -> list[str]:
    """Return a user's choices for a config group, in alphabetical order: names("head") gives draft_model, eagle, ...
    without auto, which is not a head."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if (group, path.stem) != ("head", "auto"))


def nightly_but(cases: Collection[Any], *by_day: Any) -> list:
    """Return parameters (a name, or a tuple of several), of which all but the given ones are left to the nightly run."""
    assert {*by_day} <= {*cases}
    single = {case: case if isinstance(case, tuple) else (case,) for case in cases}
    return [pytest.param(*single[case], marks=() if case in by_day else pytest.mark.nightly) for case in cases]
