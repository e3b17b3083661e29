"""The scripts that publish heads, as a user types them."""

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foredraft.heads import load_head, save_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from tests.support.head_factory import edit, same
from tests.support.processes import Ended, succeeded


@pytest.fixture
def script(call: Callable[..., Ended]) -> Callable[..., Ended]:
    """Return script("export", "key=value", ...), which runs in a separate folder."""
    return lambda name, *arguments: call(importlib.import_module(f"foredraft.scripts.{name}").main, *arguments)


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory) -> Path:
    """Save heads as training leaves them: <kind>/head."""
    place = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    save_head(
        Eagle3Head.for_target(target, 3, None, 200, torch.arange(target.vocab_size)), place / "eagle3/head", target
    )
    save_head(MedusaHead.for_target(target, 3), place / "medusa/head", target, accuracies=[[0.5, 0.25]] * 3)
    return place


def test_export_writes_what_has_passed_the_gate_and_removes_nothing_else(script, trained, target, tmp_path):
    (tmp_path / "exported.part").mkdir()
    (tmp_path / "exported.part" / "thesis.txt").write_text("ours")
    given = (f"checkpoint={trained}/medusa/head", "format=medusa", "output_dir=exported", "target.device=cpu")
    ended = succeeded(script("export", *given))
    assert "parity gate passed" in ended.out and "text-generation-launcher" in ended.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "exported.part"]
    assert (tmp_path / "exported.part" / "thesis.txt").read_text() == "ours"
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["medusa_num_heads"] == 3 and config["foredraft"]["accuracies"] == [[0.5, 0.25]] * 3
    assert same(load_head("exported", target), load_head(trained / "medusa/head", target))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["format=hydra", "output_dir=x"], "does not support eagle3 heads"),
        (["format=tensorrt", "output_dir=x"], "format=tensorrt is not one of vllm, sglang"),
        (["format=vllm", "dtype=q8_0", "output_dir=x"], "dtype=q8_0 is only for format=gguf"),
        (["format=vllm", "output_dir=x", "head=y"], "head is checkpoint now"),
        (["format=gguf", "output_dir=x", "format.dtype=q8_0"], "format.dtype is dtype now"),
        (["format=gguf", "output_dir=x", "dtype=f16"], "dtype=f16 is dtype=float16 now"),
        (["format=vllm", "output_dir=taken"], "already exists"),
        (["format=vllm", "output_dir=x", "checkpoint=nowhere"], "neither a directory nor a Hub id"),
        (["format=vllm", "output_dir=x", "checkpont=y"], "did you mean checkpoint?"),
        (["output_dir=x"], "format"),
    ],
)
def test_export_says_what_is_wrong(script, trained, tmp_path, arguments, complaint):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "something").write_text("")
    ended = script("export", f"checkpoint={trained}/eagle3/head", *arguments)
    assert ended.code == 2 and complaint in ended.err and "Traceback" not in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_gate_is_a_command(script, trained, tmp_path):
    head = trained / "eagle3/head"
    ended = script("parity", f"checkpoint={head}")
    assert ended.code == 0 and "parity gate passed" in ended.out
    shutil.copytree(head, tmp_path / "other")
    edit(tmp_path / "other", lambda config: config.update(norm_before_residual=True))
    ended = script("parity", f"checkpoint={head}", "exported=other")
    assert ended.code == 2 and "parity gate: at depth 1" in ended.err


def test_a_target_that_has_moved_is_asked_for(script, trained, tmp_path):
    shutil.copytree(trained / "eagle3/head", tmp_path / "head")
    edit(tmp_path / "head", lambda config: config["foredraft"]["target"].update(name="./gone"))
    ended = script("parity", "checkpoint=head")
    assert ended.code == 2 and "target ./gone is not a directory" in ended.err
    assert ended.err.endswith("(the config of head names it: set target=PATH)\n")


@pytest.mark.nightly  # three new interpreters; by day test_hub.py pushes in this one
def test_push_as_it_is_typed(script, trained, server, monkeypatch):
    given = ("push", f"checkpoint={trained}/eagle3/head", "repo=org/name", "license=mit")
    ended = script(*given, "dry_run=true")
    assert ended.code == 0 and "would send to a new private repository org/name" in ended.out and not server.repos
    ended = script(*given)
    assert ended.code == 0 and "parity gate passed" in ended.out and "sent to" in ended.out
    assert server.repos["org/name"].private and "README.md" in server.repos["org/name"].files
    monkeypatch.setenv("HF_TOKEN", "hf_wrong-but-secret")
    ended = script(*given)
    assert ended.code == 2 and "hf auth login" in ended.err and "secret" not in ended.out + ended.err
