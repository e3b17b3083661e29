"""Changes of the product that no test notices (tests/mutate.py)."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.nightly
@pytest.mark.linux
def test_few_mutants_survive() -> None:
    """Change what decides about the text. All files take four minutes."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.mutate",
        "inference/verify.py",
        "inference/tree.py",
        "heads/attention/masks.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
