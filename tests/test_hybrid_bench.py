"""scripts/bench/hybrid.py on a tiny hybrid that is trained already, from the head's training to the figures."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from foredraft.heads.target import stacked_cache, state_cache
from foredraft.scripts.bench.hybrid import READS, max_pending, of_pending
from tests.support import ROOT
from tests.support.hybrids import LINEAR, SIZES
from tests.support.tiny import TEXT, VOCAB

LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SMALL = [
    "data=text",
    "data.path=text.py",
    "output_dir=out",
    "train.features=online",
    "train.self_generated_tokens=0",
    "train.trainer.max_steps=2",
    "+train.trainer.warmup_steps=1",
    "train.evaluate.prompts=2",
    "+train.evaluate={prompt_tokens:16,new_tokens:8,eval_prompts:1}",
    "+train.length=64",
    "~drafters.chain_3",
    "~drafters.chain_5",
    "pending=[2,8]",
    "batches=[1,2]",
    "timed=1",
    "repeats=1",
    "prompts=3",
    "proven_prompts=2",
    "prompt_tokens=16",
    "new_tokens=12",
]


def test_from_a_target_to_the_figures(tmp_path: Path, tiny_path: Path):
    config = Qwen3_5TextConfig(**SIZES | {"vocab_size": VOCAB, "num_hidden_layers": 4}, **LINEAR, layer_types=LAYERS)
    Qwen3_5ForCausalLM(config).save_pretrained(tmp_path / "out" / "target")
    for file in tiny_path.glob("token*"):
        shutil.copy(file, tmp_path / "out" / "target")
    (tmp_path / "text.py").write_text(TEXT)
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "hybrid.py"), *SMALL]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "out" / "hybrid.json").read_text())
    assert list(found["reads"]) == [str(count) for count in READS]
    assert all(0 < read["GatedDeltaNet"] < read["all"] for read in found["reads"].values())
    assert list(found["drafters"]) == ["chain_7", "chain_7_early"]
    for drafter in found["drafters"].values():
        assert drafter["identical"] == 1 and 1 <= drafter["T=0"] <= 8
    assert len(found["speeds"]) == 2 * 2 * (1 + 2 * 2)  # temperatures, batches, plain and drafters with each value
    for line in found["speeds"]:
        assert line["tokens/s"] > 0 and line["lowest"] <= line["speedup"] <= line["highest"]
        assert line["speedup"] == 1 or line["drafter"] != "plain"
    together = [line for line in found["speeds"] if line["batch"] == 2 and line["drafter"] == "chain_7"]
    few, many = (line["forwards"] for line in together[:2])
    assert few > many  # with more that may be pending, fewer reads commit
    assert len(found["pending"]) == 2 * 2 * 2


def test_what_a_value_is_worth_is_compared_on_the_same_text_with_the_same_drafter():
    alike = {"temperature": "T=0", "batch": 1}
    rates = {("a", 4): [10.0, 100.0], ("a", 8): [30.0, 300.0], ("b", 4): [5.0, 6.0], ("b", 8): [15.0, 18.0]}
    lines = [{"drafter": name, "pending": most, "rates": some, **alike} for (name, most), some in rates.items()]
    found = of_pending([{"drafter": "plain", "pending": 0, "rates": [1.0, 1.0], **alike}, *lines])
    assert [(line["pending"], line["share"]) for line in found] == [(4, [0.5] * 3), (8, [1.5] * 3)]


def test_a_value_of_max_pending_is_that_of_both_files_and_is_taken_back():
    usual = stacked_cache.MAX_UNCOMMITTED
    with max_pending(5):
        assert stacked_cache.MAX_UNCOMMITTED == state_cache.MAX_UNCOMMITTED == 5
    assert stacked_cache.MAX_UNCOMMITTED == state_cache.MAX_UNCOMMITTED == usual
