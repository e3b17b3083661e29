"""scripts/bench/gpu.py without a GPU: it reports that, and on a small target all of it runs."""

import itertools
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from foredraft.scripts.bench import gpu as gpu_bench
from tests.support import typed
from tests.support.processes import script, succeeded
from tests.support.tiny import tiny_config


def gpu(*arguments: str, cwd: Path, **environment: str) -> str:
    ended = succeeded(script("scripts/bench/gpu.py", *arguments, cwd=cwd, **environment))
    return ended.out


@pytest.mark.nightly
def test_without_a_gpu_it_says_so(tmp_path: Path):
    assert gpu(cwd=tmp_path, CUDA_VISIBLE_DEVICES="").startswith("no GPU here")


def test_the_first_token_which_the_prefill_writes_is_not_in_the_speed(target, monkeypatch):
    timed = gpu_bench.timed
    monkeypatch.setattr(gpu_bench, "timed", lambda *given: (timed(*given)[0], 2.0))
    cfg = {"heads": [], "requests": [3], "temperatures": [0], "prompt_tokens": 5, "max_new_tokens": 9, "seed": 0}
    gpu_bench.decoding(OmegaConf.create(cfg), target, found := gpu_bench.Facts())
    assert found["3 x T=0, plain, tokens/s"] == 3 * 8 / 2.0


@pytest.mark.nightly
def test_every_figure_on_a_small_target(tmp_path: Path):
    tiny_config(architectures=["LlamaForCausalLM"]).to_json_file(tmp_path / "tiny.json")
    small = typed("""targets=[tiny.json] requests=[1,3] trained=[eagle3] accepted=2 device=cpu dtype=float32
        prompt_tokens=20 max_new_tokens=12 max_length=64 steps=2 warmup=1""")
    gpu(*small, "output=found.json", cwd=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["tiny"]
    for temperature, name in itertools.product((0, 1), ("eagle3", "eagle3 chain", "medusa", "medusa chain")):
        kind = f"1 x T={temperature}, {name}"
        assert found[f"{kind}, the same text by graphs"] is True
        assert found[f"{kind}, texts equal to plain's"] == "1 of 1"
        assert found[f"3 x T={temperature}, {name}, texts equal to plain's"] == "3 of 3"
        assert 1.5 < found[f"{kind}, acceptance length"] <= 3
    assert found["training eagle3, tokens/s"] > 0 and found["training eagle3, planned GiB"] > 0
