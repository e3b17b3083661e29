"""The files of a release are complete: built, installed into a separate environment and run in another folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft import __version__
from foredraft.__main__ import PROGRAMS
from tests.support import typed

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
CPU = ["target=test_model", "target.device=cpu", "target.dtype=float32"]
THREE_STEPS = typed("""
    head=medusa data.max_files=4 max_length=64 self_generated_tokens=0 output_dir=out
    trainer.max_steps=3 trainer.logging_steps=1 trainer.warmup_steps=1 trainer.per_device_train_batch_size=2
    trainer.bf16=false eval.steps=0 eval.final_num_prompts=2 eval.timed_prompts=1 eval.prompt_tokens=16
    eval.max_new_tokens=8 eval.check_float32=false
""")
Program = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FOREDRAFT_TRACE")}
    environment = inherited | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and the wheel from it: neither has the links of the checkout. They are built from a
    copy, because setuptools leaves a build/ that a later wheel would take files from."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("foredraft", "heads", "inference", "train", "conf", "scripts"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    packed = run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", cwd=copy)
    assert packed.returncode == 0, packed.stderr
    (sdist,) = (copy / "dist").glob("foredraft-*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", sdist]
    built = run(*pip, cwd=copy)
    assert built.returncode == 0, built.stderr
    (found,) = (copy / "dist").glob("foredraft-*.whl")
    return found


@pytest.fixture(scope="module")
def foredraft(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Return foredraft(*arguments), run in an empty folder, installed next to the present libraries but without this
    checkout."""
    environment, folder = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    made = run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    assert made.returncode == 0, made.stderr
    python = environment / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        "--no-compile",
        wheel,
    ]
    installed = run(*install, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    # Python reads no .pth file in a folder that a .pth file names, so the editable install there has no effect here.
    (place,) = environment.glob("lib/python*/site-packages")
    (place / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    for name in ("train", "inference", "heads"):  # files of a user's own, which ours neither hide nor stumble over
        (folder / f"{name}.py").write_text("MINE = True\n")
    code = "import heads, inference, train, foredraft; assert heads.MINE and inference.MINE and train.MINE"
    asked = run(python, "-c", f"{code}; print(foredraft.__file__)", cwd=folder)
    assert asked.returncode == 0 and str(environment) in asked.stdout, asked

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(environment / "bin" / "foredraft", *arguments, cwd=folder)

    return program


@pytest.fixture(scope="module")
def trained(foredraft: Program) -> subprocess.CompletedProcess[str]:
    """Train three steps on the test model; the head is in out/head of the folder in which `foredraft` runs."""
    return foredraft("train", *CPU, *THREE_STEPS)


def in_wheel(path: Path) -> str:
    return f"foredraft/{path.relative_to(ROOT).as_posix()}"


def test_nothing_else_lands_at_the_top(wheel: Path):
    with zipfile.ZipFile(wheel) as opened:
        top = {name.split("/")[0] for name in opened.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"foredraft"}


def test_every_module_config_template_and_target_is_in_it(wheel: Path):
    with zipfile.ZipFile(wheel) as opened:
        there = set(opened.namelist())
    wanted = [path for room in ("heads", "inference", "train") for path in (ROOT / room).rglob("*.py")]
    wanted += [
        *(ROOT / "train").rglob("*.jinja"),
        *(ROOT / "inference").rglob("*.html"),
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "scripts").glob("*.py"),
    ]
    wanted += [*(ROOT / "scripts" / "targets").glob("*.json")]
    embedded = ROOT / "scripts" / "test_model"
    wanted += [*embedded.rglob("*.safetensors"), *embedded.glob("*.json"), *embedded.glob("*.jinja")]
    assert {in_wheel(path) for path in wanted} | {"foredraft/__init__.py", "foredraft/py.typed"} <= there
    assert [name for name in there if name.endswith("/licenses/NOTICE")]
    assert not [name for name in there if "/bench/" in name]


def test_what_needs_no_target(foredraft: Program):
    shown, version, reported = foredraft("--help"), foredraft("--version"), foredraft("env")
    assert (shown.returncode, reported.returncode) == (0, 0), reported
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")] == list(PROGRAMS)
    assert version.stdout == f"foredraft {__version__}\n" and __version__ in reported.stdout


def test_an_unknown_command_is_one_sentence(foredraft: Program):
    ended = foredraft("trian")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: trian is not a command of foredraft; did you mean train?")


def test_a_training(foredraft: Program, trained: subprocess.CompletedProcess[str]):
    assert trained.returncode == 0, trained.stderr
    assert "step 3/3" in trained.stdout


def test_generate(foredraft: Program, trained: subprocess.CompletedProcess[str]):
    streamed = foredraft("generate", *CPU, "drafter=out/head", "prompt=def f(x='a', y=${b}):", "max_new_tokens=12")
    assert streamed.returncode == 0 and streamed.stdout.strip(), streamed
    assert streamed.stderr.rstrip().endswith("with drafter out/head") and "12 tokens in " in streamed.stderr
