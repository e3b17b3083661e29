"""Measure what it costs that no bit of a text depends on what is computed next to it (on a CPU):

    python scripts/bench/bits_cost.py target=smollm2 prompts=spec_bench eagle3_head=scripts/smollm2/eagle3

Each group of prompts is decoded twice in turn, with the shapes that keep bits (docs/concepts/lossless.md) and without: single
rows, and as many columns as the text needs, in multiples of 16. Both draft chains of the same length. The ratio is that of
CPU time on one thread, else of the wall clock's, prefill included, with a jackknife standard error over the groups.
"""

import contextlib
import time
from collections.abc import Iterator
from unittest.mock import patch

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft import Target, generate
from foredraft.cli import entry
from foredraft.heads.attention import masked
from foredraft.heads.caches import kv_cache
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.inference.evaluation.measure import left_pad
from foredraft.scripts.bench import systems
from foredraft.scripts.bench.matched import first_turns
from foredraft.scripts.bench.spec_bench import Line, jackknife


@contextlib.contextmanager
def other_shapes() -> Iterator[None]:
    """Decode in the smallest shapes. Texts may then differ at near-ties."""
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (masked, "FEWEST_ROWS", 1),
            (Capabilities, "fastest_rows", property(lambda able: 1)),
            (kv_cache, "KEY_BLOCK", 16),
            (Capabilities, "short_widths", property(lambda able: [])),
            (Capabilities, "keeps_bits", property(lambda able: False)),
            (Capabilities, "prefers_chains", property(lambda able: True)),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield


def speed(pairs: list[tuple[Line, Line]]) -> float:
    return sum(without["seconds"] for _, without in pairs) / sum(kept["seconds"] for kept, _ in pairs)


@entry("bits_cost")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    prompts = [one.tokens[-cfg.prompt_tokens :] for one in first_turns(target, cfg.prompts, cfg.limit, 0)]
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def seconds(given: DictConfig, group: list[list[int]]) -> float:
        """Decode with a new drafter, since suffix matching would know its answers."""
        drafter, (ids, mask) = systems.load(given, target), left_pad(group)
        start = clock()
        generate(target, drafter, ids, mask, max_new_tokens=cfg.max_new_tokens, eos_token_id=-1)
        return clock() - start

    print("| drafter | texts at a time | speed with over without |\n|---|---|---|")
    for batch in cfg.batches:
        groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
        for given in cfg.drafters:
            seconds(given, groups[0])  # what is measured at a first use is not part of decoding
            pairs: list[tuple[Line, Line]] = []
            for number, group in enumerate(groups):
                early = seconds(given, group) if number % 2 else None
                with other_shapes():
                    without = seconds(given, group)
                pairs.append(({"seconds": early or seconds(given, group)}, {"seconds": without}))
            ratio = jackknife([[pair] for pair in pairs], speed)
            value, error = ratio if isinstance(ratio, list) else (ratio, 0.0)
            print(f"| {given.name} | {batch} | {value:.3f} ({error:.3f}) |", flush=True)


if __name__ == "__main__":
    main()
