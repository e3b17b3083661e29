"""An engine under load for long:  python scripts/bench/soak.py minutes=30 spec=outputs/eagle3/head

Requests join, end and are cancelled at random, of random prompts and budgets, greedy and sampled beside each other. A row per
minute tells what was written, the bytes of all tensors and what was captured so far (heads/target/cuda_graphs.py). Where
there are no CUDA graphs, captured=true counts what a GPU would capture: it is run again where that would replay it.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads import Target
from foredraft.heads.target.cuda_graphs import CAPTURES, CudaGraphs
from foredraft.inference import Engine, Request, SamplingParams, load_drafter
from foredraft.train.cli import entry

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.6, top_k=20),
)


class Repeated:
    """What takes the place of a CUDA graph where there are none."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...]):
        self.function, self.inputs, self.outputs = function, inputs, None

    def replay(self) -> None:
        self.outputs = self.function(*self.inputs)


def load(
    engine: Engine, requests: int, longest: int, luck: random.Random, kinds: Sequence[SamplingParams] = KINDS
) -> int:
    """So many requests, of at most `longest` tokens and as many new ones, until all have ended. Returns how many tokens they
    got."""
    coming, tokens = [], 0
    for _ in range(requests):
        prompt = [luck.randrange(engine.target.vocab_size) for _ in range(luck.randint(1, longest))]
        coming.append(Request(prompt, luck.choice(kinds), luck.randint(1, longest), luck.randrange(100)))
    while coming or engine.has_work:
        if coming and luck.random() < 0.3:
            engine.add(coming.pop())
        if engine.has_work:
            tokens += sum(len(output.tokens) for output in engine.step())
        if engine.running() and luck.random() < 0.02:
            engine.cancel(luck.choice(engine.running()).request)
    return tokens


def tensor_bytes() -> int:
    """Of all tensors that are alive."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.layout == torch.strided]
    storages = [one.untyped_storage() for one in tensors if not one.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@entry("soak")
def main(cfg: DictConfig) -> None:
    target: Target = instantiate(cfg.target)
    if cfg.captured:
        CAPTURES.setdefault(target.device.type, Repeated)
    engine = Engine(target, load_drafter(cfg.spec, target), max_num_seqs=cfg.max_num_seqs)
    luck, began, told, answered, tokens = random.Random(cfg.seed), time.monotonic(), 0.0, 0, 0
    print("minutes  requests   tokens  tensors, MB  captured", flush=True)
    while (minutes := (time.monotonic() - began) / 60) < cfg.minutes:
        tokens += load(engine, cfg.requests, cfg.longest, luck)
        answered += cfg.requests
        if minutes >= told:
            told, size = minutes + cfg.minutes / 30, tensor_bytes() / 1e6
            print(f"{minutes:7.1f}  {answered:8}  {tokens:7}  {size:11.1f}  {CudaGraphs.num_captured:8}", flush=True)


if __name__ == "__main__":
    main()
