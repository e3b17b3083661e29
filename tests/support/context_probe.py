"""Learn rows in the parts of several processes, and whole in each of them; print how far losses and gradients are apart.

    torchrun --nproc-per-node 4 tests/support/context_probe.py LENGTH PROCESSES KIND[:FAMILY] ...

PROCESSES share a row.

KIND is of tests/support/head_factory.py, FAMILY of tests/support/architectures.py; without it the target is the tiny Llama.
"""

import copy
import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from foredraft.heads import Target
from foredraft.heads.attention.row_parts import RowParts
from foredraft.heads.base import PackedBatch, draft_loss_mask
from foredraft.train.module import DistillationModel
from foredraft.train.runtime import distributed
from foredraft.train.runtime.context_parallel import ContextParallel
from tests.support.architectures import pair
from tests.support.head_factory import OVERRIDES, criterion, make_head
from tests.support.tiny import tiny_model


def row(length: int, number: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return a row of four documents, of which one is long and one is padding, with gaps in the loss."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, vocab_size, (1, length), generator=generator)
    sizes = [length // 8 + number, length // 2 + 3, length // 8 - 2]
    sizes.append(length - sum(sizes))
    documents = torch.arange(4).repeat_interleave(torch.tensor(sizes))[None]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    documents[documents == 3] = -1
    loss_mask = (documents >= 0) & (torch.rand(1, length, generator=generator) < 0.8)
    weights = torch.rand(1, length, generator=generator)
    return {
        "tokens": tokens,
        "loss_mask": loss_mask,
        "documents": documents,
        "positions": positions,
        "weights": weights,
    }


def learn(model: DistillationModel, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the loss of batches, the hits and the gradients."""
    model.zero_grad()
    loss, hits = torch.zeros(()), torch.zeros(model.head.depth)
    for batch in batches:
        outcome = model(**batch)
        outcome.loss.backward()
        loss, hits = loss + outcome.loss.detach(), hits + outcome.hits
    return [loss, hits, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def compare(length: int, name: str, context: ContextParallel) -> float:
    """Return the largest difference, relative to the largest number of its tensor."""
    kind, _, family = name.partition(":")
    target = pair(family, "eager" if family == "gpt_oss" else "sdpa").target if family else Target(tiny_model())
    torch.manual_seed(0)
    small = {"draft_vocab_size": 30} if family and "draft_vocab_size" in OVERRIDES.get(kind, {}) else {}
    model = criterion(kind, make_head(kind, target, **small), target).eval()
    model.head.on_train_begin(target)
    rows = [row(length, number, target.vocab_size) for number in range(distributed.world_size())]
    whole = [some | model.prepare(PackedBatch.of(some), step=0) for some in rows]
    depths = range(1, model.head.depth + 1)
    masks = [[draft_loss_mask(PackedBatch.of(some), depth).sum() for depth in depths] for some in whole]
    model.num_items = torch.tensor(masks).sum(0)
    alone = [tensor.clone() for tensor in learn(model, copy.deepcopy(whole))]
    parts = context.exchange(whole[distributed.rank()], model.head.depth)
    together = learn(model, parts)
    assert isinstance(RowParts(**parts[0]["parts"]), RowParts)
    assert len(alone) == len(together) > 2
    found = []
    for ours, theirs in zip(together, alone, strict=True):
        dist.all_reduce(ours)
        found.append(((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)).item())
    return max(found)


def main() -> None:
    dist.init_process_group("gloo")
    context = ContextParallel(int(sys.argv[2]))
    found = {name: compare(int(sys.argv[1]), name, context) for name in sys.argv[3:]}
    if distributed.rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
