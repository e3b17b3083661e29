"""llama.cpp plain and with an exported head, beside foredraft, prompt by prompt in turn; and what its forwards cost:

    python scripts/bench/laptop.py 'files=[TARGET.gguf]' spec=scripts/smollm2/eagle3 prompts=FILE.jsonl

Greedy, with as many threads as OMP_NUM_THREADS says. foredraft decodes the same file's dequantised weights, in the dtype
that is faster here. Needs `pip install xllamacpp`, or llama-server on the PATH.
"""

import json
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from foredraft import Target, load_drafter
from foredraft.inference.drafters import Drafter, chain_of, tree_of
from foredraft.inference.evaluation.speed import FirstTokens, foredraft_decoder
from foredraft.scripts.bench.matched import first_turns
from foredraft.train.cli import entry
from foredraft.train.gguf_gate import ask, serving

LENGTHS, DEPTHS = (1, 2, 4, 8), (1, 2, 3)
PLAIN = "plain"


def forward_seconds(address: str, row: list[int]) -> list[float]:
    """Of prompts of `LENGTHS` tokens, the least of five."""
    found = []
    for length in LENGTHS:
        body = {"prompt": row[:length], "n_predict": 1, "cache_prompt": False}
        found.append(
            min(json.loads(ask(f"{address}/completion", body))["timings"]["prompt_ms"] for _ in range(5)) / 1e3
        )
    return found


def decode_there(address: str, row: list[int], new_tokens: int) -> tuple[float, int]:
    """Seconds without the prompt's, and tokens."""
    body: dict[str, Any] = {"prompt": row, "n_predict": new_tokens, "temperature": 0, "top_k": 1, "ignore_eos": True}
    timings = json.loads(ask(f"{address}/completion", body | {"cache_prompt": False}))["timings"]
    return timings["predicted_ms"] / 1e3, timings["predicted_n"]


def decode_here(target: Target, drafter: Drafter | None, row: list[int], new_tokens: int) -> tuple[float, int]:
    streamer, ids = FirstTokens(), torch.tensor([row], device=target.device)
    count, _ = foredraft_decoder(target, drafter, new_tokens, streamer=streamer)(ids, 0)
    return time.perf_counter() - streamer.at, count


def measure(head: str, prompts: str, file: Path, limit: int, new_tokens: int) -> None:
    target = Target.from_pretrained(str(file))
    rows = [prompt.tokens for prompt in first_turns(target, prompts, limit, new_tokens)]
    tree = tree_of(load_drafter(head, target, tree="fixed"))
    if tree is None:
        raise ValueError(f"spec={head} is no head")
    ours = {
        PLAIN: None,
        "chain of 3": chain_of(tree, target, 3),
        "suffix and head": load_drafter(f"{head}+suffix", target),
    }
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {f"llama.cpp, {PLAIN}": stack.enter_context(serving("none", target, file, 0, exact=False))}
        for depth in DEPTHS:
            servers[f"llama.cpp, chain of {depth}"] = stack.enter_context(
                serving(head, target, file, depth, exact=False)
            )
        costs = forward_seconds(servers[f"llama.cpp, {PLAIN}"], rows[0])
        for number, row in enumerate(rows):
            for name, drafter in ours.items():
                if number == 0:  # what is captured or measured at a first use is no part of decoding
                    decode_here(target, drafter, row, new_tokens)
                found[f"foredraft, {name}"].append(decode_here(target, drafter, row, new_tokens))
            for name, address in servers.items():
                found[name].append(decode_there(address, row, new_tokens))
    print(f"\n{file.name}, foredraft in {target.dtype}; {len(rows)} prompts, {new_tokens} tokens each\n")
    print("| engine | tokens/s | over its plain decoding |\n|---|---|---|")
    rates = {name: sum(n for _, n in runs) / sum(seconds for seconds, _ in runs) for name, runs in found.items()}
    for name, rate in rates.items():
        plain = rates[f"{name.split(',')[0]}, {PLAIN}"]
        print(f"| {name} | {rate:.1f} | {rate / plain:.2f} |")
    shown = ", ".join(f"{n} {seconds / costs[0]:.2f}" for n, seconds in zip(LENGTHS, costs, strict=True))
    print(
        f"\nA forward of llama.cpp over n tokens, in units of one over a single token ({1e3 * costs[0]:.1f} ms): {shown}"
    )


@entry("laptop")
def main(cfg: DictConfig) -> None:
    for file in cfg.files:
        measure(cfg.spec, cfg.prompts, Path(file), cfg.limit, cfg.new_tokens)


if __name__ == "__main__":
    main()
