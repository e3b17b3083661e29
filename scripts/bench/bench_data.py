"""Training tokens/s of packed rows against one document per row, what it takes to prepare conversations, or to read
aux hidden states from disk:

    python scripts/bench/bench_data.py data=conversations data.path=FILE
    python scripts/bench/bench_data.py tokens=10000000
    python scripts/bench/bench_data.py shards=200 length=2048

Two ways of training see the same documents, the same head and optimiser steps, in turn, step by step, so that a change of
the machine's speed meets both alike. Only tokens of documents are counted, no padding.
"""

import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset

from foredraft.heads import Target
from foredraft.train.cli import entry
from foredraft.train.data import data_card
from foredraft.train.data.conversations import corpus
from foredraft.train.data.corpus import Packed, count_tokens
from foredraft.train.data.documents import Document, Documents
from foredraft.train.features.disk import disk
from foredraft.train.module import DistillationModel


@entry("bench_data")
def main(cfg: DictConfig) -> None:
    if cfg.tokens:
        prepare(cfg.target.path, cfg.tokens, cfg.length)
    elif cfg.shards:
        with tempfile.TemporaryDirectory() as folder:
            train_from_disk(cfg, folder)
    else:
        train_both_ways(cfg)


def prepare(tokenizer: str, tokens: int, length: int) -> None:
    """Three processes, one after the other: the first prepares, the others start from what it has left."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "conversations.jsonl"
        rows = synthetic(file, tokens)
        print(f"{rows:,} synthetic conversations, {file.stat().st_size / 1e6:,.0f} MB")
        for name in ("first start", "second start", "third start"):
            command = [sys.executable, __file__, "start", tokenizer, str(file), folder, str(length)]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            sizes = {key: f"{found[key] / 2**20:,.0f} MiB" for key in ("own", "mapped", "peak", "worker")}
            print(
                f"{name:12} {found['seconds']:7.2f} s  {found['tokens'] / found['seconds']:12,.0f} tokens/s   own memory "
                f"grows by {sizes['own']}, mapped files by {sizes['mapped']}, both by {sizes['peak']} at most; a worker "
                f"takes {sizes['worker']} at most   ({found['tokens']:,} tokens, {found['rows']:,} rows)",
                flush=True,
            )


def synthetic(file: Path, tokens: int) -> int:
    """Write conversations of some `tokens` tokens; how many. Turns have log-normal lengths, as those of ShareGPT: half of the
    questions are above 20 words, half of the answers above 150; one to five pairs of turns."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(5000)]
    written = rows = 0
    with file.open("w") as out:
        while written < tokens:
            turns = []
            for _ in range(generator.randint(1, 5)):
                for role, typical in (("user", 20), ("assistant", 150)):
                    count = max(1, min(2000, round(generator.lognormvariate(math.log(typical), 1.0))))
                    turns.append({"role": role, "content": " ".join(generator.choices(words, k=count))})
                    written += round(2.6 * count)  # tokens of such words
            out.write(json.dumps({"messages": turns}) + "\n")
            rows += 1
    return rows


def start(tokenizer: str, file: str, cache: str, length: str) -> None:
    """What a rank does of its data before the first step; prints figures."""
    from transformers import AutoTokenizer

    form = AutoTokenizer.from_pretrained(tokenizer)
    before, begun = memory(), time.perf_counter()
    data = corpus(form, path=file, cache_dir=cache)
    count_tokens(data.train, len(form))
    card = data_card.describe(data.train)
    packed = Packed(data.train, int(length), seed=0)
    for row in range(0, len(packed), max(1, len(packed) // 256)):
        packed[row]
    seconds, after = time.perf_counter() - begun, memory()
    found: dict[str, Any] = {"seconds": seconds, "tokens": card["tokens"], "rows": len(packed)}
    found |= {name: after[name] - before[name] for name in after}
    found["worker"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(json.dumps(found))


def memory() -> dict[str, int]:
    """Bytes in memory: of this process alone, of mapped files, which processes share, and the most of both so far."""
    facts = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    names = {"own": "RssAnon", "mapped": "RssFile", "peak": "VmHWM"}
    return {name: int(facts[key].split()[0]) * 1024 for name, key in names.items()}


def train_from_disk(cfg: DictConfig, folder: str) -> None:
    """Shards of one batch each, of random tokens: the start with all of them, bytes that the disk gives, and training."""
    target = instantiate(cfg.target)
    drawn = np.random.default_rng(0).integers(target.vocab_size, size=(cfg.shards * cfg.rows, cfg.length))
    documents = Documents.of([Document(row, [1] * cfg.length) for row in drawn])
    packed, distillation = Packed(documents, cfg.length, seed=0), criterion(cfg, target, documents)
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        rows = disk(packed, target, distillation.head.layers, cfg.rows, folder, shard_rows=cfg.rows)
        seconds.append(time.perf_counter() - begun)
    order = torch.randperm(len(rows)).tolist()[: cfg.shards]
    rows[order[0]]  # what the first row alone reads
    for file in rows.files:
        with file.open() as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # no file is in memory now
    before, needed = read_bytes(), 0
    for row in order:
        stored = rows[row]
        needed += sum(stored[name].clone().nbytes for name in stored if name not in packed[0])
    print(
        f"{cfg.shards} shards of {rows.files[0].stat().st_size / 2**20:.1f} MiB written in {seconds[0]:.1f} s, opened in "
        f"{seconds[1]:.2f} s; {len(order)} rows in any order: {needed / 2**20:,.0f} MiB needed, "
        f"{(read_bytes() - before) / needed:.3f} times as many read from disk",
        flush=True,
    )
    some = [range(start, start + cfg.rows) for start in range(0, cfg.rows * (cfg.steps + 1), cfg.rows)]
    ways = {"memory": [stack([rows[row] for row in numbers]) for numbers in some]}
    batches = Batches(rows, some)
    rates = train(distillation, {**ways, "disk": batches}, cfg.steps, target.device)
    begun = time.perf_counter()
    for batch in batches:
        assert batch
    reading = (time.perf_counter() - begun) / len(batches)
    print(
        f"from disk (in the page cache, where reading a batch takes {1000 * reading:.1f} ms) {rates['disk']:,.0f} tokens/s, "
        f"{rates['disk'] / rates['memory']:.3f} times as many as from memory"
    )


class Batches(Sequence[dict[str, Tensor]]):
    """Rows that are put together when they are asked for."""

    def __init__(self, rows: Dataset, numbers: list[range]):
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, step: int) -> dict[str, Tensor]:  # type: ignore[override]  # no slices
        return stack([self.rows[row] for row in self.numbers[step]])


def read_bytes() -> int:
    """That this process has had from a disk, by reading or by touching what is mapped."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def criterion(cfg: DictConfig, target: Target, documents: Documents) -> DistillationModel:
    counts = count_tokens(documents, target.vocab_size)
    head = instantiate(cfg.head, target=target, **({"counts": counts} if "draft_vocab_size" in cfg.head else {}))
    if head.pruned:
        head.init_projections(target, counts)
    return instantiate(cfg.criterion, head=head, target=target, loss=instantiate(cfg.loss))


def train_both_ways(cfg: DictConfig) -> None:
    target = instantiate(cfg.target)
    data = instantiate(cfg.data, tokenizer=target.text_tokenizer)
    distillation = criterion(cfg, target, data.train)
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
        documents_of = torch.cat([batch["documents"].flatten() for batch in rows])
        print(f"{name:12} {rates[name]:10,.0f} tokens/s   {(documents_of < 0).float().mean().item():.1%} padding")
    gain = rates["packed"] / rates["one per row"]
    print(
        f"packed is {gain:.2f} times as fast ({distillation.head.kind}, {cfg.rows} rows of {cfg.length} tokens, "
        f"{cfg.steps} steps each)"
    )


def train(
    distillation: DistillationModel,
    batches: Mapping[str, Sequence[dict[str, Tensor]]],
    steps: int,
    device: torch.device,
) -> dict[str, float]:
    """Tokens per second of each kind of batch, after one step that warms up."""
    optimizer = torch.optim.AdamW((p for p in distillation.parameters() if p.requires_grad), lr=1e-4)
    seconds, tokens = dict.fromkeys(batches, 0.0), dict.fromkeys(batches, 0)
    for step in range(steps + 1):
        for name, rows in batches.items():
            start = time.perf_counter()
            batch = {key: value.to(device) for key, value in rows[step % len(rows)].items()}
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
    if sys.argv[1:2] == ["start"]:
        start(*sys.argv[2:])
    else:
        main()
