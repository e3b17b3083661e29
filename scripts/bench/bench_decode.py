"""Decoding speed against transformers, in one run on one target:

    python scripts/bench/bench_decode.py heads=[outputs/eagle3/head]

Every decoder continues the same prompts (inference/evaluation/speed.py). Then where a step's time goes, and what the cache's
commit costs at a short and a long context. `untrained=true` adds heads that never help, which `auto` must stop using;
`target=random` is a model of 57M parameters, for costs.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads import Target
from foredraft.heads.base import RecurrentHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.target.cache import KVCache
from foredraft.inference import drafter_for, generate, load_drafter
from foredraft.inference.drafters import DraftModel, NgramDrafter
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.evaluation.measure import REPETITIVE, acceptance, distinct, run
from foredraft.inference.evaluation.speed import Timing, foredraft_decoder, time_decoders, transformers_decoder
from foredraft.train.cli import entry
from foredraft.train.data.corpus import prompts


@entry("bench_decode")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    rows = prompts(
        target.text_tokenizer,
        instantiate(cfg.data, tokenizer=target.text_tokenizer).test,
        cfg.prompts,
        cfg.prompt_tokens,
    )
    drafters, baselines = choices(cfg, target)
    decoders = {f"foredraft {name}": foredraft_decoder(target, one, cfg.new_tokens) for name, one in drafters.items()}
    for name, how in baselines.items():
        decoders[f"transformers {name}"] = transformers_decoder(target, how, cfg.new_tokens)
    timings = time_decoders(decoders, rows, target.device)
    loops = [distinct(out.new_tokens[0]) < REPETITIVE for out in timings["foredraft plain"].generations]
    kept = [i for i, loop in enumerate(loops) if not loop] or list(range(len(rows)))
    print(f"{len(rows)} prompts, {sum(loops)} of them repetitive and left out; {target.dtype}, {target.device}")
    found: dict[str, Any] = rates(timings, kept)
    for name, drafter in drafters.items():
        print_stages(target, name, drafter, rows[kept[0]], cfg.new_tokens)
    for path in cfg.heads:
        found[f"{path}, rules"] = compare_rules(target, drafters[path], [rows[i] for i in kept], cfg.new_tokens)
    for context in (100, 1900):
        seconds = commit_seconds(target, context)
        found[f"commit at {context}"] = seconds
        print(f"commit at {context:5} tokens of context: {1e6 * seconds:.0f} us")
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(found, indent=2) + "\n")


def choices(cfg: DictConfig, target: Target) -> tuple[dict[str, Drafter | None], dict[str, dict[str, Any]]]:
    """What is timed: our drafters, and the settings of transformers' own assisted generation."""
    drafters: dict[str, Drafter | None] = {"plain": None, "ngram": NgramDrafter()}
    baselines: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
    }
    for path in cfg.heads:
        drafters[path] = load_drafter(path, target, tree="fixed")
        drafters[f"{path}, auto"] = load_drafter(path, target, tree="auto")
    if cfg.untrained:
        for head in (Eagle3Head.for_target(target), MedusaHead.for_target(target)):
            head.to(target.dtype).eval()
            whole_tree: dict[str, Any] = {"min_probability": 0.0, **cfg.untrained_tree}
            fixed = whole_tree if isinstance(head, RecurrentHead) else {}
            drafters[f"untrained {head.kind}"] = drafter_for(head, target, **fixed)
            drafters[f"untrained {head.kind}, auto"] = drafter_for(head, target, tree="auto")
    if cfg.draft_model:
        small = Target.from_pretrained(cfg.draft_model, dtype=target.dtype, device=target.device)
        drafters["draft model"] = DraftModel(small, target)
        drafters["draft model, chain"] = DraftModel(small, target, nodes=6, depth=5, width=1)
        baselines["draft model"] = {"assistant_model": small.model}
    return drafters, baselines


def rates(timings: dict[str, Timing], kept: list[int]) -> dict[str, dict[str, float]]:
    """Tokens per second, speedup and acceptance length of every decoder over the prompts `kept`, also printed."""
    plain = timings["foredraft plain"].rate(kept)
    found = {}
    for name, timing in timings.items():
        rate = timing.rate(kept)
        found[name] = {"tokens_per_second": round(rate, 1), "speedup": round(rate / plain, 3)}
        line = f"{name:40} {rate:8.1f} tokens/s  {rate / plain:.2f}x"
        if timing.generations:
            gained = acceptance([timing.generations[i] for i in kept])
            found[name]["acceptance_length"] = round(gained, 3)
            line += f"  acceptance length {gained:.2f}  eta {rate / plain / gained:.2f}"
        print(line)
    return found


def print_stages(target: Target, name: str, drafter: Drafter | None, row: list[int], new_tokens: int) -> None:
    """Where a step's time goes."""
    ids = torch.tensor([row], device=target.device)
    out = generate(target, drafter, ids, max_new_tokens=new_tokens, eos_token_id=-1, timings=True)
    total = sum(out.seconds.values())
    shares = "  ".join(f"{stage} {value / total:.0%}" for stage, value in out.seconds.items())
    print(f"{name:40} {1e3 * total / len(out.steps):6.2f} ms a step: {shares}")


def compare_rules(target: Target, drafter: Drafter | None, rows: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Acceptance length at temperature 1 by the coupled rule and by EAGLE-2's, and greedy."""
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1}
    rules: dict[str, dict[str, Any]] = {
        "greedy": {},
        "coupled": {"temperature": 1.0},
        "eagle-2": {"temperature": 1.0, "rule": "tree_deterministic"},
    }
    found = {name: round(acceptance(run(target, drafter, rows, **settings, **rule)), 3) for name, rule in rules.items()}
    greedy, coupled, classical = found.values()
    print(f"acceptance length: T=0 {greedy:.2f}, T=1 coupled {coupled:.2f}, by EAGLE-2's rule {classical:.2f}")
    return found


@torch.inference_mode()
def commit_seconds(target: Target, length: int, repeats: int = 200) -> float:
    """Median seconds of committing a path of four of sixteen nodes, at this many entries of context."""
    heads = target.config.num_key_value_heads
    dim = target.config.head_dim or target.hidden_size // target.config.num_attention_heads
    cache = KVCache(target.num_layers, 1, length + 64, target.device)
    states = torch.zeros(1, heads, 16, dim, dtype=target.dtype, device=target.device)
    times = []
    for _ in range(repeats):
        cache.set_lengths([length])
        for layer in range(target.num_layers):
            cache.update(states, states, layer)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        cache.commit([[0, 2, 5, 11]])
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


if __name__ == "__main__":
    main()
