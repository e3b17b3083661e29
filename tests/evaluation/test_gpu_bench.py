"""scripts/bench/gpu.py without a GPU: it reports that, and on a small target all of it runs."""

import json
from pathlib import Path

import pytest

from tests.support.processes import script
from tests.support.tiny import tiny_config


def gpu(*arguments: str, cwd: Path, **environment: str) -> str:
    ended = script("scripts/bench/gpu.py", *arguments, cwd=cwd, **environment)
    assert ended.code == 0, ended.err
    return ended.out


def test_without_a_gpu_it_says_so(tmp_path: Path):
    assert gpu(cwd=tmp_path, CUDA_VISIBLE_DEVICES="").startswith("no GPU here")


@pytest.mark.nightly
def test_every_figure_on_a_small_target(tmp_path: Path):
    tiny_config(architectures=["LlamaForCausalLM"]).to_json_file(tmp_path / "tiny.json")
    small = [
        "device=cpu",
        "dtype=float32",
        "prompt_tokens=20",
        "max_new_tokens=12",
        "max_length=64",
        "steps=2",
        "warmup=1",
    ]
    gpu("targets=[tiny.json]", "heads=[eagle3,medusa]", "accepted=2", *small, "output=found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["tiny"]
    assert all(found[f"{name}, the same text by graphs"] is True for name in ("plain", "eagle3", "medusa"))
    assert all(1.5 < found[f"{name}, acceptance length"] <= 3 for name in ("eagle3", "medusa"))
    assert found["training, tokens/s"] > 0 and found["training, planned GiB"] > 0
