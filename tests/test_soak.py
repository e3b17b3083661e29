"""Requests that join and leave for long: memory is flat, and nothing is captured after a while."""

import gc
import random

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.target import cuda_graphs
from foredraft.inference import Engine, Request, SamplingParams
from foredraft.inference.drafters import Drafter
from tests.support.drafters import drafters
from tests.support.tape import Tape

PARAMS = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_p=0.9)]


def tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu" and not one.is_mkldnn:
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def soak(target: Target, drafter: Drafter | None, rounds: int, requests: int = 12) -> list[tuple[int, int]]:
    """After each round of requests at random times: bytes of all tensors, and what was captured so far."""
    engine, luck, seen = Engine(target, drafter, max_num_seqs=4, prefill_chunk=64), random.Random(3), []
    for _ in range(rounds):
        coming = [
            Request(
                [luck.randrange(1, target.vocab_size) for _ in range(luck.randrange(3, 200))],
                luck.choice(PARAMS),
                max_new_tokens=luck.randrange(1, 50),
                seed=luck.randrange(100),
            )
            for _ in range(requests)
        ]
        while coming or engine.has_work:
            if coming and luck.random() < 0.3:
                engine.add(coming.pop())
            if engine.has_work:
                engine.step()
                if engine.running() and luck.random() < 0.02:
                    engine.cancel(luck.choice(engine.running()).request)
        seen.append((tensor_bytes(), cuda_graphs.CudaGraphs.num_captured))
    engine.close()
    return seen


@pytest.mark.nightly
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["plain", "ngram", "eagle3"])
def test_a_long_run_stays_as_it_is(target, name, captured, monkeypatch):
    if captured:
        monkeypatch.setitem(cuda_graphs.CAPTURES, "cpu", Tape)
    target = Target(target.model, target.tokenizer, target.name)  # without the cache that another engine gave back
    memory, captures = zip(*soak(target, drafters(target).get(name), rounds=8), strict=True)
    assert max(memory[4:]) <= 1.2 * max(memory[:4])
    assert (captures[-1] > captures[0]) == captured and captures[-1] == captures[4]
