"""What decoding by chains gains where a target keeps recurrent state, in one run on one target:

    python scripts/bench/bench_chains.py target=hf target.path=DIRECTORY drafter=head drafter.spec=DIRECTORY

Speed beside plain decoding by how many accepted tokens may be pending (heads/target/state_cache.py), where a step's time
goes, and what it gains to read the rows of a batch together.
"""

import time
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from heads import Target
from heads.target import stacked_cache, state_cache
from inference import generate
from inference.drafters.base import Drafter
from inference.evaluation.measure import REPETITIVE, acceptance, distinct
from inference.evaluation.speed import Decoder, foredraft_decoder, time_decoders
from inference.generation import Generation
from train.cli import entry
from train.data.corpus import prompts


@entry("bench_chains")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    held_out = instantiate(cfg.data, tokenizer=target.text_tokenizer).test
    rows = prompts(target.text_tokenizer, held_out, cfg.prompts, cfg.prompt_tokens)
    drafter: Drafter = instantiate(cfg.drafter, target=target)
    drafted = foredraft_decoder(target, drafter, cfg.new_tokens)
    decoders = {"plain": foredraft_decoder(target, None, cfg.new_tokens)}
    decoders |= {f"chains, {bound} pending": bounded(drafted, bound) for bound in cfg.pending}
    timings = time_decoders(decoders, rows, target.device)
    loops = [distinct(out.new_tokens[0]) < REPETITIVE for out in timings["plain"].generations]
    kept = [i for i, loop in enumerate(loops) if not loop] or list(range(len(rows)))
    print(f"{len(rows)} prompts, {sum(loops)} of them repetitive and left out; {target.dtype}, {target.device}")
    for name, timing in timings.items():
        gained = acceptance([timing.generations[i] for i in kept])
        rate, plain = timing.rate(kept), timings["plain"].rate(kept)
        print(f"{name:20} {rate:7.1f} tokens/s, {rate / plain:.2f} of plain, {gained:.2f} tokens per step")
    stages = generate(
        target, drafter, torch.tensor([rows[kept[0]]]), timings=True, max_new_tokens=cfg.new_tokens, eos_token_id=-1
    )
    whole = sum(stages.seconds.values())
    print("a step: " + ", ".join(f"{stage} {seconds / whole:.0%}" for stage, seconds in stages.seconds.items()))
    for name, one in (("plain", None), ("chains", drafter)):
        print_rows(target, one, name, rows, cfg.new_tokens)


def bounded(decoder: Decoder, bound: int) -> Decoder:
    def decode(ids: Tensor, seed: int) -> tuple[int, Generation | None]:
        stacked_cache.MAX_PENDING = state_cache.MAX_PENDING = bound
        return decoder(ids, seed)

    return decode


def print_rows(target: Target, drafter: Drafter | None, name: str, rows: list[list[int]], new_tokens: int) -> None:
    """Tokens per second of a batch of all prompts of one length, its rows read together and one by one."""
    ids = torch.tensor([row for row in rows if len(row) == max(map(len, rows))])
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1}
    together, rates = target.reads_rows, {}
    for what, stacked in (("together", together), ("one by one", False)):
        vars(target)["reads_rows"] = stacked  # measured once, and kept
        start = time.perf_counter()
        generate(target, drafter, ids, **settings)
        rates[what] = ids.shape[0] * new_tokens / (time.perf_counter() - start)
    vars(target)["reads_rows"] = together
    print(f"{name}, {len(ids)} rows: " + ", ".join(f"{what} {rate:.1f} tokens/s" for what, rate in rates.items()))


if __name__ == "__main__":
    main()
