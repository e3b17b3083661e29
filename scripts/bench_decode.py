"""Decoding speed against transformers, in one run on one target:  python scripts/bench_decode.py heads=[outputs/eagle3/head]

Every contender decodes the same prompts, one prompt at a time, all of them in turn on each prompt, so that a change of the
machine's speed meets all alike. Then where a step's time goes, and what `keep` costs at a short and a long context.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from heads import Target
from inference import generate, load_drafter
from inference.drafters import DraftModel, NgramDrafter
from inference.drafters.base import Drafter
from inference.evaluate import REPETITIVE, acceptance, distinct, run
from train.data import prompts
from train.entry import entry


@entry("bench_decode")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    assert target.tokenizer is not None
    rows = prompts(
        target.tokenizer, instantiate(cfg.data, tokenizer=target.tokenizer).test, cfg.prompts, cfg.prompt_tokens
    )
    ours: dict[str, Drafter | None] = {"plain": None, "ngram": NgramDrafter()}
    theirs: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3},
    }
    for path in cfg.heads or []:
        ours[path] = load_drafter(path, target)
        ours[f"{path}, auto"] = load_drafter(path, target, tree="auto")
    if cfg.draft_model:
        small = Target.from_pretrained(cfg.draft_model, dtype=target.dtype, device=target.device)
        ours["draft model"] = DraftModel(small, target)
        theirs["draft model"] = {"assistant_model": small.model}

    def own(drafter: Drafter | None) -> Callable[[torch.Tensor], tuple[int, Any]]:
        def decode(ids: torch.Tensor) -> tuple[int, Any]:
            out = generate(target, drafter, ids, max_new_tokens=cfg.new_tokens, eos_token_id=-1)
            return len(out.new_tokens[0]), out

        return decode

    def rival(settings: dict[str, Any]) -> Callable[[torch.Tensor], tuple[int, Any]]:
        def decode(ids: torch.Tensor) -> tuple[int, Any]:
            out = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=cfg.new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **settings,
            )
            return out.shape[1] - ids.shape[1], None

        return decode

    contenders = {f"foretoken {name}": own(drafter) for name, drafter in ours.items()}
    contenders |= {f"transformers {name}": rival(settings) for name, settings in theirs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, list[int]] = {name: [] for name in contenders}
    outs: dict[str, list[Any]] = {name: [] for name in contenders}
    for number, row in enumerate([rows[0], *rows]):  # the first is a warm-up
        ids = torch.tensor([row], device=target.device)
        for name, decode in contenders.items():
            start = time.perf_counter()
            count, out = decode(ids)
            if number:
                seconds[name].append(time.perf_counter() - start)
                tokens[name].append(count)
                outs[name].append(out)
    loops = [distinct(out.new_tokens[0]) < REPETITIVE for out in outs["foretoken plain"]]
    kept = [i for i, loop in enumerate(loops) if not loop] or list(range(len(rows)))
    print(f"{len(rows)} prompts, {sum(loops)} of them repetitive and left out; {target.dtype}, {target.device}")
    results: dict[str, Any] = {}
    for name in contenders:
        rate = sum(tokens[name][i] for i in kept) / sum(seconds[name][i] for i in kept)
        results[name] = {"tokens_per_second": round(rate, 1)}
        if outs[name][0] is not None:
            results[name]["acceptance_length"] = round(acceptance([outs[name][i] for i in kept]), 3)
    plain = results["foretoken plain"]["tokens_per_second"]
    for name, facts in results.items():
        facts["speedup"] = round(facts["tokens_per_second"] / plain, 3)
        gained = facts.get("acceptance_length")
        efficiency = f"  eta {facts['speedup'] / gained:.2f}" if gained else ""
        length = f"  acceptance length {gained:.2f}" if gained else ""
        print(f"{name:40} {facts['tokens_per_second']:8.1f} tokens/s  {facts['speedup']:.2f}x{length}{efficiency}")
    for name, drafter in ours.items():
        ids = torch.tensor([rows[kept[0]]], device=target.device)
        out = generate(target, drafter, ids, max_new_tokens=cfg.new_tokens, eos_token_id=-1, timings=True)
        whole = sum(out.seconds.values())
        shares = "  ".join(f"{stage} {value / whole:.0%}" for stage, value in out.seconds.items())
        print(f"{name:40} {1e3 * whole / len(out.steps):6.2f} ms a step: {shares}")
    for path in cfg.heads or []:
        results[f"{path}, rules"] = compare_rules(target, ours[path], [rows[i] for i in kept], cfg.new_tokens)
    for context in (100, 1900):
        taken = keep_seconds(target, context)
        results[f"keep at {context}"] = taken
        print(f"keep at {context:5} tokens of context: {1e6 * taken:.0f} us")
    if cfg.output:
        Path(cfg.output).write_text(json.dumps(results, indent=2) + "\n")


def compare_rules(target: Target, drafter: Drafter | None, rows: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Acceptance length at temperature 1 by the coupled rule and by EAGLE-2's, beside greedy."""
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1}
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "coupled": {"temperature": 1.0},
        "eagle-2": {"temperature": 1.0, "rule": "tree_deterministic"},
    }
    found = {name: round(acceptance(run(target, drafter, rows, **settings, **way)), 3) for name, way in ways.items()}
    greedy, coupled, classical = found.values()
    print(f"acceptance length: T=0 {greedy:.2f}, T=1 coupled {coupled:.2f}, by EAGLE-2's rule {classical:.2f}")
    return found


@torch.inference_mode()
def keep_seconds(target: Target, length: int, repeats: int = 200) -> float:
    """Median seconds of keeping a path of four nodes out of sixteen, at this many entries of context."""
    heads = target.config.num_key_value_heads
    dim = target.config.head_dim or target.hidden_size // target.config.num_attention_heads
    cache = target.new_cache(1, length + 64)
    states = torch.zeros(1, heads, 16, dim, dtype=target.dtype, device=target.device)
    times = []
    for _ in range(repeats):
        cache.set_lengths([length])
        for layer in range(target.num_layers):
            cache.update(states, states, layer)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        cache.keep([[0, 2, 5, 11]])
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


if __name__ == "__main__":
    main()
