"""What a step costs here, measured once per device, dtype, target and batch size, and kept in a file.

    read[N]    seconds of a whole step that reads N nodes and drafts nothing, in the loop that users run
    draft[D]   seconds of drafting D levels

A step of N nodes and D levels takes their sum. The files lie in `FOREDRAFT_CACHE`, or in ~/.cache/foredraft as those of
other libraries do. One that cannot be read or written is measured again: it saves time, nothing else depends on it.
"""

import copy
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.heads.target.device import device_name, synchronise
from foredraft.inference.drafters.base import Accepted, Drafter, bonus_only
from foredraft.inference.drafters.block import BlockTree
from foredraft.inference.drafters.dynamic import DynamicTree
from foredraft.inference.drafters.static import StaticTree
from foredraft.inference.sampling import Sampling, SamplingParams
from foredraft.inference.tree import TokenTree, chain

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
Tree = DynamicTree | BlockTree | StaticTree  # of a head: its best nodes are a smaller tree

TEXT = 256  # tokens of a text after which costs are measured, unless it is said; and those it may grow by
# Rows that are drafted for are not of one length, and all are padded to the longest: so much of a text lies between the
# longest and the shortest. (Four rows that were 0.22 of it apart took 4 to 9 % longer to read than four of one length.)
SPREAD = 1 / 8
REPEATS = 6  # of which the median counts, as it does of steps; the first is left out


class Costs(NamedTuple):
    read: dict[int, float]  # seconds by number of nodes, ascending
    draft: list[float]  # seconds by number of levels, 0 first

    def seconds(self, nodes: int, levels: int) -> float:
        """Of a step; of a size that was not measured, the next one's."""
        size = next((size for size in self.read if size >= nodes), max(self.read))
        return self.read[size] + self.draft[levels]


class PaddedRoot(Drafter):
    """Plain decoding whose forwards have `nodes` rows: all but the root are padding, which is never accepted."""

    branches = False

    def __init__(self, nodes: int, layers: Any = ()):
        self.layers = layers
        self.nodes = nodes
        self.resize(nodes)

    def resize(self, nodes: int) -> None:
        """So many rows from now on, at most as many as at first."""
        self.depth = nodes - 1

    def begin(self, batch: int, capacity: int, sampling: Sampling) -> None:
        pass

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tokens = bonus_only(accepted).tokens
        return chain(torch.cat([tokens, tokens.new_full((len(tokens), self.depth), -1)], dim=1))


class CostModel:
    def __init__(self, inner: Tree, target: Target, text: int = TEXT):
        """inner: with the largest tree that may be used. text: tokens before those that a step reads or drafts."""
        self.inner, self.target, self.nodes, self.levels = inner, target, inner.nodes, inner.depth
        self.text = max(1, min(text, (target.context or text + TEXT) - TEXT))
        self.known: dict[int, Costs] = {}

    def __call__(self, batch: int) -> Costs:
        """The costs for a batch of this size, measured now if they never were: of the next power of two, since a server meets
        every size."""
        batch = 1 << (batch - 1).bit_length()
        if batch not in self.known:
            read = self.kept("read", batch, self.read_facts(), lambda: self.measure_read(batch))
            draft = self.kept("draft", batch, self.draft_facts(), lambda: self.measure_draft(batch))
            sizes = map(int, read)
            self.known[batch] = Costs(
                dict(zip(sizes, non_decreasing(read.values()), strict=True)), non_decreasing(draft)
            )
        return self.known[batch]

    def read_facts(self) -> dict[str, Any]:
        """What decides what a read costs."""
        target, libraries = self.target, ("torch", "transformers")
        return {
            "device": device_name(target.device),
            "dtype": str(target.dtype),
            "quantization": target.quantization,
            "target": [target.name, hashlib.sha256(repr(target.config).encode()).hexdigest()[:16]],
            "layers": list(self.inner.layers),
            "nodes": self.nodes,
            "text": [self.text, SPREAD],
            "versions": {name: importlib.metadata.version(name) for name in libraries},
        }

    def draft_facts(self) -> dict[str, Any]:
        """What decides what a level costs."""
        inner = self.inner
        shapes = {name: list(weight.shape) for name, weight in inner.head.named_parameters()}
        width = None if isinstance(inner, StaticTree) else inner.width
        tree = [type(inner).__name__, type(inner.head).__name__, width, self.levels]
        return self.read_facts() | {"tree": tree, "weights": shapes}

    def kept(self, what: str, batch: int, facts: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """What the file for these facts says, or what `measure` gives, which is written there."""
        about = json.dumps({"what": what, "batch": batch, **facts}, sort_keys=True)
        file = cache_directory() / "costs" / f"{hashlib.sha256(about.encode()).hexdigest()[:24]}.json"
        try:
            found = json.loads(file.read_text())["seconds"]
        except (OSError, ValueError, KeyError):
            found = None
        found = self.target.broadcast(found)
        if found is None:
            found = self.target.broadcast(measure())
            write(file, json.dumps({"seconds": found, "about": json.loads(about)}, indent=1))
        return found

    def lengths(self, batch: int) -> list[int]:
        """Tokens of the texts of rows that are drafted for."""
        if batch == 1:
            return [self.text]
        return [round(self.text * (1 + SPREAD * (row / (batch - 1) - 0.5))) for row in range(batch)]

    def measure_read(self, batch: int) -> dict[str, float]:
        from foredraft.inference.engine import Engine  # it imports drafters, this file among them
        from foredraft.inference.request import Request

        sizes = sorted({1, self.nodes, *(size for size in SIZES if size < self.nodes)})
        # Rows that are decoded plainly stay of one length, and those with trees do not.
        drafters = [PaddedRoot(self.nodes, self.inner.layers) for _ in range(2)]
        engines = [Engine(self.target, drafter) for drafter in drafters]
        drafts = MadeUpDrafts(self, batch)

        def begin(ragged: bool) -> None:
            if not engines[ragged].has_work:  # at first, and where the context is short
                steps = 2 * REPEATS * (len(sizes) - 1 if ragged else 1)  # each adds a token
                for number, length in enumerate(self.lengths(batch) if ragged else [self.text] * batch):
                    text = [0] * max(1, length - steps // 2)
                    engines[ragged].add(Request(text, max_new_tokens=TEXT, seed=number))
                engines[ragged].step()

        def prepare(size: int) -> None:
            drafters[size > 1].resize(size)
            begin(size > 1)
            engines[size > 1].step()  # decoding goes on with one size: the step after another one is slower
            begin(size > 1)
            if size > 1:  # as before every tree: a draft takes the target's place in a CPU's caches
                drafts.prepare(self.levels)
                drafts.propose(self.levels)

        found = median_seconds(sizes, prepare, lambda size: engines[size > 1].step(), self.target.device)
        for engine in engines:
            engine.close()
        return dict(zip(map(str, sizes), found, strict=True))

    def measure_draft(self, batch: int) -> list[float]:
        target, drafts, levels = self.target, MadeUpDrafts(self, batch), range(1, self.levels + 1)
        root = torch.zeros(batch, 1, dtype=torch.int64, device=target.device)

        @torch.inference_mode()
        def prepare(levels: int) -> None:
            drafts.prepare(levels)
            target.forward(root, keep_logits=1)  # as before every draft: it takes the head's place in a CPU's caches

        return [0.0, *median_seconds(levels, prepare, drafts.propose, target.device)]


class MadeUpDrafts:
    """Drafts after texts of zeros, by a copy of the drafter, since its own rows may be in the middle of theirs."""

    @torch.inference_mode()
    def __init__(self, model: CostModel, batch: int):
        self.drafter, self.nodes, self.lengths = copy.copy(model.inner), model.nodes, model.lengths(batch)
        self.given = {levels: self.accepted(model, batch, levels) for levels in range(1, model.levels + 1)}
        # Nothing is likely after made-up features, and every level is to be timed.
        if not isinstance(self.drafter, StaticTree):
            self.drafter.cache = self.drafter.should_stop = None
        sampling = Sampling.of([SamplingParams()] * batch, model.target.vocab_size)
        self.drafter.begin(batch, max(self.lengths) + TEXT, sampling)

    @staticmethod
    def accepted(model: CostModel, batch: int, levels: int) -> Accepted:
        """What a draft begins with: of many rows one nearly always accepted all, and the others are padded to that; of a lone
        row half is a guess."""
        target, count = model.target, 1 + (levels if batch > 1 else levels // 2)
        tokens = torch.zeros(batch, count, dtype=torch.int64, device=target.device)
        width = len(model.inner.layers) * target.hidden_size
        aux_hidden_states = torch.zeros(batch, count, width, dtype=target.dtype, device=target.device)
        return Accepted(tokens, aux_hidden_states, [count] * batch, [[0] * count] * batch)

    def prepare(self, levels: int) -> None:
        self.drafter.resize(self.nodes, levels)
        if not isinstance(self.drafter, StaticTree):
            assert self.drafter.cache is not None, "begin makes one"
            self.drafter.cache.set_lengths(self.lengths)

    @torch.inference_mode()
    def propose(self, levels: int) -> None:
        self.drafter.propose(self.given[levels], None)


def median_seconds(
    sizes: Sequence[int], prepare: Callable[[int], None], work: Callable[[int], Any], device: torch.device
) -> list[float]:
    """Seconds of the work at each size, after prepare(size). The sizes take turns, so that what disturbs the machine for a
    while does not fall on one of them alone."""
    times: list[list[float]] = [[] for _ in sizes]
    for _ in range(REPEATS):
        for size, seen in zip(sizes, times, strict=True):
            prepare(size)
            synchronise(device)
            start = time.perf_counter()
            work(size)
            synchronise(device)
            seen.append(time.perf_counter() - start)
    return [median(seen[1:]) for seen in times]


def non_decreasing(seconds: Iterable[float]) -> list[float]:
    """By ascending size; one that was measured slower than a larger one was disturbed, or had better be padded to that."""
    return list(accumulate(reversed(list(seconds)), min))[::-1]


def write(file: Path, text: str) -> None:
    part = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(file)  # whole or not at all, whoever else writes it
    except OSError:
        pass  # a home that cannot be written to


def cache_directory() -> Path:
    return Path(os.environ.get("FOREDRAFT_CACHE") or Path.home() / ".cache" / "foredraft")
