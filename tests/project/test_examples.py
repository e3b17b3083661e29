"""The examples run: loop.py, the notebook, the head of the developer pages; the commands of scripts/examples compose."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from foredraft.heads import Target, load_head, save_head
from foredraft.inference import drafter_for, generate
from foredraft.scripts.examples import loop
from foredraft.train import losses, parity_gate, publish, run
from foredraft.train.losses import Prediction
from foredraft.train.module import DistillationModel
from tests.support import ROOT
from tests.support.batches import batch
from tests.support.documents import blocks, command_lines, program
from tests.support.processes import forking_python, succeeded

EXAMPLES = ROOT / "scripts" / "examples"
TYPED = [
    pytest.param(command, id=f"{file.stem}: {command[:60]}")
    for file in sorted(EXAMPLES.glob("*.sh"))
    for command in command_lines(file.read_text())
    if command.startswith(("foredraft ", "torchrun "))
]


def test_the_loop_trains_and_decodes(tiny_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(self, other):\n    return self.value + other.value\n" * 60)
    arguments = ["--target", str(tiny_path), "--text", str(text), "--rows", "2", "--length", "48", "--tokens", "24"]
    untrained = loop.main([*arguments, "--steps", "1"])
    trained = loop.main([*arguments, "--steps", "60", "--save", str(tmp_path / "head")])
    assert trained.identical and untrained.identical
    assert len(trained.accuracy) == 3 and trained.accuracy[0] > untrained.accuracy[0] + 0.1
    target = Target.from_pretrained(tiny_path, dtype="float32", device="cpu")
    assert load_head(tmp_path / "head", target).depth == 3


@pytest.mark.nightly  # by day loop.py trains
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", forking_python())
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = json.loads((ROOT / "docs" / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for long, short in {
        "max_steps=40": "max_steps=2 data.max_files=8",
        "eval.max_new_tokens=48": "eval.max_new_tokens=8",
    }.items():
        assert source.count(long) == 1
        source = source.replace(long, short)
    source = source.replace("max_new_tokens=96", "max_new_tokens=24")
    exec(compile(source, "quickstart.ipynb", "exec"), {"__name__": "notebook"})
    assert capsys.readouterr().out.count("tokens per forward") >= 3


def cross_entropy(draft: Prediction, teacher: Prediction) -> torch.Tensor:
    return F.cross_entropy(draft.logits, teacher.probabilities, reduction="none")


@pytest.fixture(scope="module", params=["SharedHead", "RnnHead", "BurstHead"])
def documented(request: pytest.FixtureRequest) -> type:
    """Return a head of docs/developer/add-a-head.md."""
    scope: dict = {"__name__": "documented"}
    for block in blocks(ROOT / "docs" / "developer" / "add-a-head.md", "python"):
        exec(compile(block.text, "add-a-head.md", "exec"), scope)
    return scope[request.param]


def test_the_documented_settings_name_the_heads_and_have_a_line_for_help(tmp_path: Path, call: Callable) -> None:
    (tmp_path / "own" / "head").mkdir(parents=True)
    texts = [block.text for block in blocks(ROOT / "docs" / "developer" / "add-a-head.md", "yaml")]
    for kind, text in zip(("shared", "burst"), texts, strict=True):
        (tmp_path / "own" / "head" / f"{kind}.yaml").write_text(text)
        assert f"_target_: foredraft.heads.{kind}.{kind.capitalize()}Head.for_target\n" in text
    shown = call(run.main, "--config-dir", "own", "--help").out
    for line in ("burst +Burst: an MLP", "shared +Shared: one matrix"):
        assert re.search(f"^  {line}", shown, re.M)


def test_the_documented_head_learns(documented: type, target: Target) -> None:
    head = documented.for_target(target)
    model, text = DistillationModel(head, target, cross_entropy), batch(40, 24)
    optimizer, found = torch.optim.Adam(head.parameters(), lr=3e-3), []
    for _ in range(20):
        outcome = model(*text[:4])
        found.append(outcome.loss.item())
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found[-1] < found[0] - 0.05


def test_the_documented_head_is_aligned_lossless_and_loads_again(
    documented: type, target: Target, tmp_path: Path
) -> None:
    head = documented.for_target(target).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_head(head, tmp_path / "head", target)
    prompt = torch.randint(target.vocab_size, (1, 12))
    assert parity_gate.check(head, target, prompt[0].tolist(), saved=tmp_path / "head") < parity_gate.TOLERANCE
    loaded = load_head(tmp_path / "head", target)
    assert publish.head_metadata(loaded, target)["module"] == "documented"
    for settings in ({}, {"temperature": 1.0, "seed": 3}):
        drafted = generate(target, drafter_for(loaded, target), prompt, max_new_tokens=24, eos_token_id=-1, **settings)
        alone = generate(target, None, prompt, max_new_tokens=24, eos_token_id=-1, **settings)
        assert drafted.new_tokens == alone.new_tokens


@pytest.mark.nightly
@pytest.mark.parametrize("command", TYPED)
def test_a_command_of_an_example_composes(command: str, call: Callable) -> None:
    module, arguments = program(shlex.split(command, comments=True))
    assert module is not None
    succeeded(call(importlib.import_module(module).main, "--cfg", "job", *arguments))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.sh")), ids=lambda file: file.stem)
def test_an_example_says_what_it_takes(file: Path) -> None:
    header = file.read_text().partition("set -euo pipefail")[0]
    told = dict(re.findall(r"^# (\w+): +(.+)$", header, re.M))
    assert {"Hardware", "Time", "Acceptance", "Needs"} <= told.keys()
    assert "planned" in told["Time"] or "measured" in told["Hardware"]
    assert f"[{file.name}]({file.name})" in (EXAMPLES / "README.md").read_text()


def test_the_page_of_losses_names_every_loss() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "losses.md").read_text(), re.M)
    assert sorted(rows) == sorted(losses.LOSSES)


def test_the_server_page_names_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "server.md").read_text()
    source = (ROOT / "inference" / "serve" / "metrics.py").read_text()
    found = re.findall(r'(?:Counter|Histogram)\(\s*"(\w+)"|gauge\("(\w+)"', source)
    names = {next(filter(None, name)) for name in found}
    assert len(names) >= 12 and not [name for name in names if f"`foredraft_{name}" not in page]
