"""Count the texts and the rows of logits that drafts, batches, chunks, shared prefixes and preemption change:

    python scripts/bench/texts.py target=smollm2 prompts=spec_bench eagle3_head=scripts/smollm2/eagle3

The baseline decodes prompts one by one. Each drafter decodes them one by one, and in batches that others join and leave. The
same is counted for the baseline in batches. `foredraft lossless` compares one drafter in the same way.
"""

import time

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft import Request, SamplingParams, Target
from foredraft.cli import entry
from foredraft.inference.drafters import Drafter
from foredraft.inference.evaluation.lossless import CHUNK, PREEMPT_EVERY, BitComparison, BitRecorder
from foredraft.scripts.bench import systems
from foredraft.scripts.bench.matched import first_turns


def decode(target: Target, drafter: Drafter | None, requests: list[Request], batch: int) -> BitRecorder:
    """Decode one by one, or in batches."""
    if batch == 1:
        return BitRecorder(target, drafter, max_num_seqs=1).decode(requests)
    engine = BitRecorder(target, drafter, max_num_seqs=batch, prefill_chunk=CHUNK, reuse_prefixes=True)
    return engine.decode(requests, PREEMPT_EVERY)


@entry("texts")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    prompts = [one.tokens[-cfg.prompt_tokens :] for one in first_turns(target, cfg.prompts, cfg.limit, 0)]
    drafters: dict[str, Drafter | None] = {"no drafts": None}
    drafters |= {given.name: systems.load(given, target) for given in cfg.drafters}
    print(f"{len(prompts)} prompts of {target.name}, {cfg.max_new_tokens} new tokens each, {target.dtype}\n")
    titles = [
        "drafter",
        "T",
        "texts",
        "identical",
        "rows of logits",
        "that differ in any bit",
        "drafts accepted",
        "seconds",
    ]
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for temperature in cfg.temperatures:
        requests = [
            Request(tokens, SamplingParams(temperature), cfg.max_new_tokens, seed)
            for seed, tokens in enumerate(prompts)
        ]
        start = time.perf_counter()
        baseline = decode(target, None, requests, batch=1)
        print(f"| baseline | {temperature:g} | alone | | | | | {time.perf_counter() - start:.0f} |", flush=True)
        for batch in cfg.batches:
            for name, drafter in drafters.items():
                if drafter is None and batch == 1:
                    continue
                start = time.perf_counter()
                drafted = decode(target, drafter, requests, batch)
                same = BitComparison.of(baseline, drafted)
                print(
                    f"| {name} | {temperature:g} | {'alone' if batch == 1 else f'in batches of {batch}'} | "
                    f"{same.identical} of {same.texts} | {same.rows} | {same.unequal} | {drafted.accepted} | "
                    f"{time.perf_counter() - start:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
