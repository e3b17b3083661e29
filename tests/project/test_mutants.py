"""Changes of the product that no test notices (tests/mutate.py)."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.nightly
@pytest.mark.linux
def test_few_mutants_survive() -> None:
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutate"], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
