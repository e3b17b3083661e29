"""Tokens per second by how many texts are written at once, plain and drafted, beside transformers and vLLM:

    bash scripts/vllm_env.sh
    python scripts/bench/rivals/rows.py target=smollm2 head_path=scripts/smollm2/eagle3 prompts=spec_bench vllm=.venv-vllm

All engines are loaded first, vLLM in processes of its own, and then asked in turn, prefill included, so that a change of the
machine's speed meets all alike. Greedy, past end tokens; of each engine's times the shortest counts.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft import Target, generate, load_drafter
from foredraft.heads.target.device import device_name
from foredraft.heads.target.locating import locate
from foredraft.inference.drafters import Drafter, chain_of, tree_of
from foredraft.inference.evaluation.measure import left_pad
from foredraft.scripts.bench.matched import first_turns
from foredraft.scripts.bench.rivals.table import HERE, export
from foredraft.train.cli import entry

Texts = list[list[int]]
Writer = Callable[[Texts], Texts]  # prompts -> what they are continued by


def ours(target: Target, drafter: Drafter | None, new_tokens: int) -> Writer:
    def write(prompts: Texts) -> Texts:
        ids, mask = left_pad(prompts)
        return generate(target, drafter, ids, mask, max_new_tokens=new_tokens, eos_token_id=-1).new_tokens

    return write


def transformers(target: Target, new_tokens: int) -> Writer:
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def write(prompts: Texts) -> Texts:
        ids, mask = left_pad(prompts)
        out = target.model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, **settings)
        return out[:, ids.shape[1] :].tolist()

    return write


class InVllm:
    """vllm_rows.py, which answers a line with a line."""

    def __init__(self, python: Path, folder: Path, name: str, job: dict[str, Any]):
        file, self.log = folder / f"{name}.json", folder / f"{name}.log"
        file.write_text(json.dumps(job))
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | threads
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), str(HERE / "vllm_rows.py"), str(file)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self([[1, 2, 3]])  # once it has loaded

    def __call__(self, prompts: Texts) -> Texts:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(prompts), file=self.process.stdin, flush=True)
        for line in self.process.stdout:  # vLLM prints there, too
            if line.startswith("texts "):
                return json.loads(line.removeprefix("texts "))
        raise ValueError(f"vLLM ended; its last words: {self.log.read_text()[-600:]}")


@entry("rows")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    prompts = [one.tokens for one in first_turns(target, cfg.prompts, max(cfg.rows), cfg.new_tokens)]
    if len(prompts) < max(cfg.rows):
        raise ValueError(
            f"prompts={cfg.prompts} has {len(prompts)} prompts, rows={list(cfg.rows)} needs {max(cfg.rows)}"
        )
    drafter = load_drafter(cfg.head_path, target)
    tree = tree_of(drafter)
    assert tree is not None
    engines: dict[str, Writer] = {
        "plain": ours(target, None, cfg.new_tokens),
        "tree, auto": ours(target, drafter, cfg.new_tokens),
        f"chain of {cfg.chain}": ours(target, chain_of(tree, target, cfg.chain), cfg.new_tokens),
        "transformers": transformers(target, cfg.new_tokens),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if cfg.vllm is not None:
            head = export(cfg.head_path, "vllm", target, folder / "exported")
            speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": cfg.chain}
            job = {
                "target": locate(target.name, cfg.target.dtype),
                "dtype": str(target.dtype).removeprefix("torch."),
                "new_tokens": cfg.new_tokens,
                "max_num_seqs": max(cfg.rows),
                "cache_bytes": 1 << 30,
                "max_model_len": max(map(len, prompts)) + cfg.new_tokens + 2 * cfg.chain,
                "eager": cfg.eager,
            }
            for title, how in (("vLLM", None), (f"vLLM, chain of {cfg.chain}", speculative)):
                python = Path(cfg.vllm) / "bin" / "python"
                engines[title] = InVllm(python, folder, f"vllm{len(engines)}", job | {"speculative": how})
        rates = measured(engines, prompts, cfg)
    print("| engine | " + " | ".join(f"{count} rows, tokens/s" for count in cfg.rows) + " | over our plain |")
    print("|---" * (len(cfg.rows) + 2) + "|")
    for name, found in rates.items():
        over = ", ".join(f"{rate / plain:.2f}" for rate, plain in zip(found, rates["plain"], strict=True))
        print(f"| {name} | " + " | ".join(f"{rate:.1f}" for rate in found) + f" | {over} |")
    print(f"\n{target.name}, {target.dtype}, {torch.get_num_threads()} threads; {device_name(target.device)}")


def measured(engines: dict[str, Writer], prompts: Texts, cfg: DictConfig) -> dict[str, list[float]]:
    """Tokens per second of each engine, for each number of rows."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for count in cfg.rows:
        seconds: dict[str, float] = dict.fromkeys(engines, float("inf"))
        texts = {}
        for _ in range(cfg.repeats + 1):  # the first is to warm up
            for name, write in engines.items():
                start = time.perf_counter()
                texts[name] = write(prompts[:count])
                assert all(len(text) == cfg.new_tokens for text in texts[name]), name
                seconds[name] = min(seconds[name], time.perf_counter() - start)
        for name, least in seconds.items():
            rates[name].append(count * cfg.new_tokens / least)
        same = {name: sum(a == b for a, b in zip(text, texts["plain"], strict=True)) for name, text in texts.items()}
        print(f"{count} rows: texts equal to our plain ones: {same}", flush=True)
    return rates


if __name__ == "__main__":
    main()
