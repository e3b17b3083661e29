"""Training tokens/s of packed rows against one document per row:

    python scripts/bench/bench_data.py data=conversations data.path=FILE

Both see the same documents, the same head and optimiser steps, in turn, step by step, so that a change of the machine's speed
meets both alike. Only tokens of documents are counted, no padding.
"""

import time
from itertools import islice

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from train.cli import entry
from train.data.corpus import Document, Packed, count_tokens


@entry("bench_data")
def main(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    data = instantiate(cfg.data, tokenizer=target.text_tokenizer)
    counts = count_tokens(data.train, target.vocab_size)
    head = instantiate(cfg.head, target=target, **({"counts": counts} if "draft_vocab_size" in cfg.head else {}))
    if head.pruned:
        head.init_projections(target, counts)
    distillation = instantiate(cfg.objective, head=head, target=target, loss=instantiate(cfg.loss))
    supervised = (document for document in data.train if any(document.loss_mask[8 : cfg.length]))
    documents = list(islice(supervised, 4 * cfg.steps * cfg.rows))
    if not documents:
        raise ValueError(f"no document has anything supervised within length={cfg.length}")
    batches = {
        "packed": packed_batches(documents, cfg.length, cfg.rows),
        "one per row": padded_batches(documents, cfg.length, cfg.rows),
    }
    rates = train(distillation, batches, cfg.steps, target.device)
    for name, rows in batches.items():
        slots = torch.cat([batch["documents"].flatten() for batch in rows])
        print(f"{name:12} {rates[name]:10,.0f} tokens/s   {(slots < 0).float().mean().item():.1%} padding")
    gain = rates["packed"] / rates["one per row"]
    print(
        f"packed is {gain:.2f} times as fast ({head.kind}, {cfg.rows} rows of {cfg.length} tokens, {cfg.steps} steps each)"
    )


def train(
    distillation: torch.nn.Module, batches: dict[str, list[dict[str, Tensor]]], steps: int, device: torch.device
) -> dict[str, float]:
    """Tokens per second of each kind of batch, after one step that warms up."""
    optimizer = torch.optim.AdamW((p for p in distillation.parameters() if p.requires_grad), lr=1e-4)
    seconds, tokens = dict.fromkeys(batches, 0.0), dict.fromkeys(batches, 0)
    for step in range(steps + 1):
        for name, rows in batches.items():
            batch = {key: value.to(device) for key, value in rows[step % len(rows)].items()}
            start = time.perf_counter()
            distillation(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if step > 0:
                seconds[name] += time.perf_counter() - start
                tokens[name] += int((batch["documents"] >= 0).sum())
    return {name: tokens[name] / seconds[name] for name in batches}


def stack(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def packed_batches(documents: list[Document], length: int, rows: int) -> list[dict[str, Tensor]]:
    packed = Packed(documents, length, seed=0)
    starts = range(0, max(1, len(packed) - rows + 1), rows)
    return [stack([packed[row] for row in range(start, min(start + rows, len(packed)))]) for start in starts]


def padded_batches(documents: list[Document], length: int, rows: int) -> list[dict[str, Tensor]]:
    """One document per row, cut at `length`, each batch as wide as its longest, as most trainers do."""
    found = []
    for start in range(0, max(1, len(documents) - rows + 1), rows):
        batch = documents[start : start + rows]
        items = [Packed([document], max(8, len(document.tokens)), seed=0)[0] for document in batch]
        width = min(length, max(len(item["tokens"]) for item in items))
        padding = {"tokens": 0, "loss_mask": False, "documents": -1, "positions": 0}
        padded = [
            {
                name: torch.cat([value[:width], value.new_full((max(0, width - len(value)),), padding[name])])
                for name, value in item.items()
            }
            for item in items
        ]
        found.append(stack(padded))
    return found


if __name__ == "__main__":
    main()
