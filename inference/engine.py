"""The decoding engine: propose, read, verify, commit. Lossless by construction (inference/sampling.py).

    engine = Engine(target, drafter)
    engine.add(Request(prompt, ...))        # requests join, and finished ones leave, between steps
    while engine.has_work:
        for output in engine.step(): ...

A step reads the target once: either the prompts of the requests that have joined, or a tree of drafts after every row's
text. On a GPU its stages are captured as CUDA graphs (heads/target/cuda_graphs.py); the step does not know.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.target import Reading, Target, TargetCache
from inference.drafters.base import Accepted, Drafter, NoDrafter, root_only, select
from inference.drafters.chain import readable
from inference.request import Request, Row, StoppingCriteria
from inference.target_sampler import RuleSampler, TargetSampler
from inference.trace import Trace, trace_rows
from inference.tree import TokenTree, padded
from inference.verify import Verification


class Output(NamedTuple):
    """What one step gave a request."""

    request: Request
    tokens: list[int]  # added to its text: accepted drafts and the bonus, less what the end cut off
    accepted: int | None  # drafts accepted; None where the step read its prompt
    nodes: int  # of the tree, the root counted
    finish_reason: str | None  # as a Row has it
    trace: Trace | None = None  # where the request asks for one


class Clock:
    """Seconds per stage of a step. Waits for the device at every lap, so it costs time and is off by default."""

    def __init__(self, device: torch.device, enabled: bool):
        self.device, self.enabled, self.last = device, enabled, time.perf_counter()
        self.seconds = dict.fromkeys(("draft", "read", "verify", "commit", "host"), 0.0) if enabled else {}

    def start(self) -> None:
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self.enabled:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            now = time.perf_counter()
            self.seconds[stage] += now - self.last
            self.last = now


class Engine:
    """Target, drafter, cache and rows. `rows` are the requests in the batch, in its order."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rule: str = "coupled",
        lossless: bool = True,
        max_rows: int | None = None,
        timings: bool = False,
        max_cache_tokens: int | None = None,
    ):
        """drafter: None is plain decoding. rule: "coupled", or a published one to compare with
        (inference/acceptance_rules.py); "typical" needs lossless=False, because it changes the text. max_rows: requests
        decoded at a time, others wait; None for no limit. timings: measure where the time goes. max_cache_tokens:
        entries of the target's cache, rows times capacity, beyond which requests wait as well."""
        self.target, self.drafter = target, readable(drafter or NoDrafter(), target)
        self.rule, self.lossless, self.max_rows, self.max_cache_tokens = rule, lossless, max_rows, max_cache_tokens
        self.waiting: deque[Row] = deque()
        self.rows: list[Row] = []
        self.cache: TargetCache | None = None
        self.clock = Clock(target.device, timings)

    def add(self, request: Request) -> None:
        """Let a request join before a coming step. Raises ValueError as `check` does."""
        self.waiting.append(self.check(request))

    def check(self, request: Request) -> Row:
        """The request's row, before it is decoded. Raises ValueError for a prompt that the target cannot read, or a text that
        the cache has no room for."""
        context = self.target.context
        if not request.prompt:
            raise ValueError("the prompt is empty: give at least one token (the bos token, say)")
        if context is not None and len(request.prompt) >= context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, the target {self.target.name} reads {context}, its answer "
                "included"
            )
        row = Row(request, list(request.prompt), StoppingCriteria(self.target, request))
        if self.max_cache_tokens is not None and self.capacity([row]) > self.max_cache_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} need more than the "
                f"{self.max_cache_tokens} tokens that the cache has room for: ask for fewer"
            )
        return row

    def cancel(self, request: Request) -> None:
        """Nothing more comes of it: it waits no longer, or its row is free from the next step on."""
        self.waiting = deque(row for row in self.waiting if row.request is not request)
        for row in self.rows:
            if row.request is request and row.finish_reason is None:
                row.finish_reason = "cancelled"

    def preempt(self) -> None:
        """All rows wait again, first in line, to be read anew with their text so far: after an error in a step (out of
        memory, say), what it left behind is forgotten. Texts do not change by it."""
        self.waiting.extendleft(row for row in reversed(self.rows) if row.finish_reason is None)
        self.rows, self.cache = [], None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(row.finish_reason is None for row in self.rows)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One read of the target, and what it gave to each request."""
        if self.waiting and self.free_rows() > 0:
            return self.prefill()
        self.clock.start()
        tree, gumbel = self.propose()
        reading = self.read(tree)
        verification, broken = self.verify(tree, reading.logits, gumbel)
        traces = trace_rows(self.rows, tree, verification, reading.logits)
        outputs = self.commit(tree, verification, broken, reading.features)
        return [output._replace(trace=traces.get(output.request)) for output in outputs] if traces else outputs

    def propose(self) -> tuple[TokenTree, Tensor | None]:
        """A tree for every row, and the noise of the positions that it may reach."""
        cache = self.open_cache()
        self.depth = self.drafter.depth
        gumbel = self.sampler.gumbel(cache.starts + 1, self.depth + 1)
        tree = self.drafter.propose(self.accepted, gumbel)
        if cache.graphs.active:  # few sizes, so few graphs
            tree = padded(tree, 1 << (tree.tokens.shape[1] - 1).bit_length())
            cache.set_bucket(tree.tokens.shape[1])
        self.clock.lap("draft")
        return tree, gumbel

    def read(self, tree: TokenTree) -> Reading:
        """The target's logits and features of every node."""
        cache, layers = self.open_cache(), self.drafter.layers
        read = partial(read_nodes, self.target, cache, layers)
        reading = cache.graphs(("read", cache.kv_bucket, *layers), read, tree.tokens, tree.depths, tree.ancestors)
        self.clock.lap("read")
        return reading

    def verify(self, tree: TokenTree, logits: Tensor, gumbel: Tensor | None) -> tuple[Verification, Tensor]:
        """What the target writes itself, and in which rows (batch,) a logit was not a number."""
        return self.sampler.verify(logits, tree, gumbel, self.depth, self.open_cache().graphs)

    def commit(self, tree: TokenTree, verification: Verification, broken: Tensor, features: Tensor) -> list[Output]:
        """Keep the accepted path of every row in the cache and in its text."""
        bad, counts, paths, tokens = to_host(verification, broken)
        self.clock.lap("verify")
        nodes = tree.tokens.shape[1]
        outputs = self.fail(bad, nodes)
        counts = [0 if row.finish_reason else count for row, count in zip(self.rows, counts, strict=True)]
        paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
        self.drafter.observe(paths, verification.choices)
        cache = self.open_cache()
        captured = cache.kv_bucket is not None
        cache.commit(paths, verification.path)
        width = self.depth + 1 if captured else max(counts)
        kept = verification.path[:, :width, None].expand(-1, -1, features.shape[-1])
        features = features.gather(1, kept)
        self.sampler.append(verification.tokens[:, :width], verification.counts)
        self.clock.lap("commit")
        for row, count, new in zip(self.rows, counts, tokens, strict=True):
            if count:
                outputs.append(Output(row.request, row.extend(new[:count]), count - 1, nodes, row.finish_reason))
        texts = [row.text for row in self.rows]
        self.accepted = Accepted(verification.tokens[:, :width], features, counts, texts)
        self.clock.lap("host")
        return outputs

    def fail(self, bad: Sequence[bool], nodes: int) -> list[Output]:
        """Rows whose logits are not numbers end here. Nothing of them stays in the cache: no mask hides a NaN."""
        failed = []
        for number, (row, is_bad) in enumerate(zip(self.rows, bad, strict=True)):
            if is_bad and row.finish_reason is None:
                row.finish_reason = "error"
                self.open_cache().erase(number)
                failed.append(Output(row.request, [], None, nodes, "error"))
        return failed

    def unfinished(self) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row.finish_reason is None]

    def free_rows(self) -> int:
        """How many of the waiting requests may join now, in the order in which they came."""
        busy = [self.rows[number] for number in self.unfinished()]
        free = len(self.waiting) if self.max_rows is None else min(len(self.waiting), self.max_rows - len(busy))
        if self.max_cache_tokens is not None:
            rows = [*busy, *islice(self.waiting, max(0, free))]
            while len(rows) > len(busy) and len(rows) * self.capacity(rows) > self.max_cache_tokens:
                rows.pop()
            free = len(rows) - len(busy)
        return free

    def capacity(self, rows: Sequence[Row]) -> int:
        """Entries that each row of a batch of these needs."""
        longest = max(len(row.request.prompt) + row.stopping.budget for row in rows)
        return longest + 2 * self.drafter.nodes  # the last tree, after what the last path kept

    def prefill(self) -> list[Output]:
        """Finished rows leave, waiting requests join; their prompts are read and their first tokens chosen."""
        new = [self.waiting.popleft() for _ in range(self.free_rows())]
        staying = self.unfinished()
        self.rows = [self.rows[number] for number in staying] + new
        rows = [*staying, *[None] * len(new)]
        drafter_keeps_rows = self.cache is not None
        cache = self.rearrange(rows)
        chosen, traces, features, lengths = self.read_prompts(cache.narrow(len(staying), len(new)), new)
        cache.set_lengths(cache.lengths[: len(staying)] + lengths)
        outputs = self.fail([*[False] * len(staying), *(token is None for token in chosen)], 1)
        for row, token in zip(new, chosen, strict=True):
            if token is not None:
                added = row.extend([token])
                outputs.append(Output(row.request, added, None, 1, row.finish_reason, traces.get(row.request)))
        self.sampler = self.new_sampler(self.rows)
        if drafter_keeps_rows:
            self.drafter.select_rows(rows, cache.capacity, self.sampler.sampling)
        else:
            self.drafter.begin(len(rows), cache.capacity, self.sampler.sampling)
        self.accepted = self.join(staying, new, features, lengths)
        return outputs

    @torch.inference_mode()
    def drop_finished(self) -> None:
        """Between steps: finished rows leave even if nobody joins, where they are half of the batch or more. Not on a device
        that replays recordings, which know this batch and cost more than the rows do."""
        staying = self.unfinished()
        if not staying or 2 * len(staying) > len(self.rows) or self.open_cache().graphs.active:
            return
        self.rows = [self.rows[number] for number in staying]
        cache = self.rearrange([*staying])
        self.sampler = self.new_sampler(self.rows)
        self.drafter.select_rows([*staying], cache.capacity, self.sampler.sampling)
        self.accepted = select(self.accepted, [*staying])

    def rearrange(self, rows: list[int | None]) -> TargetCache:
        """The cache for a batch of these of its rows, None being a new one."""
        capacity = self.capacity(self.rows)
        if self.cache is None:
            self.cache = self.target.acquire_cache(len(rows), capacity)
        else:
            kept = max(capacity, self.cache.capacity)
            if self.max_cache_tokens is not None and len(rows) * kept > self.max_cache_tokens:
                kept = capacity
            self.cache.rearrange(rows, kept)
        return self.cache

    def read_prompts(
        self, cache: TargetCache, rows: Sequence[Row]
    ) -> tuple[list[int | None], dict[Request, Trace], Tensor, list[int]]:
        """Each row's first token (None where a logit was not a number) and traces, the features (rows, longest, width), and
        the prompts' lengths."""
        lengths, device = [len(row.text) for row in rows], self.target.device
        longest = max(lengths)
        tokens = torch.tensor([row.text + [0] * (longest - len(row.text)) for row in rows], device=device)
        last = tokens.new_tensor(lengths)[:, None] - 1
        reading = self.target.read_prompts(tokens, lengths, cache, self.drafter.layers)
        cache.set_lengths(lengths)
        sampler = self.new_sampler(rows)
        roots = root_only(Accepted(tokens.gather(1, last), reading.features, [1] * len(rows), []))
        verification, broken = sampler.verify(reading.logits, roots, sampler.gumbel(cache.starts, 1), 0, cache.graphs)
        bad, _, _, written = to_host(verification, broken)
        chosen = [None if is_bad else first[0] for is_bad, first in zip(bad, written, strict=True)]
        return chosen, trace_rows(rows, roots, verification, reading.logits), reading.features, lengths

    def join(self, staying: list[int], new: Sequence[Row], features: Tensor, lengths: list[int]) -> Accepted:
        """What drafters read next: of rows that stay what they were to read, of new ones their whole prompts. A position's
        features go with the token after it, so the tokens are those of a prompt from the second up to the root."""
        rows = [row.text[1 : length + 1] for row, length in zip(new, lengths, strict=True)]
        rows = [row + [0] * (max(lengths) - len(row)) for row in rows]  # one that failed has no root
        tokens = torch.tensor(rows, device=features.device)
        fresh = Accepted(tokens, features, lengths, [row.text for row in new])
        parts = (
            [(self.accepted, staying), (fresh, list(range(len(new))))] if staying else [(fresh, list(range(len(new))))]
        )
        width = max(part.tokens.shape[1] for part, _ in parts)
        return Accepted(
            torch.cat([pad(part.tokens[chosen], (0, width - part.tokens.shape[1])) for part, chosen in parts]),
            torch.cat([pad(part.features[chosen], (0, 0, 0, width - part.tokens.shape[1])) for part, chosen in parts]),
            [part.counts[number] for part, chosen in parts for number in chosen],
            [part.text[number] for part, chosen in parts for number in chosen],
        )

    def new_sampler(self, rows: Sequence[Row]) -> TargetSampler:
        facts = rows, self.target.vocab_size, self.target.device
        return TargetSampler(*facts) if self.rule == "coupled" else RuleSampler(self.rule, self.lossless, *facts)

    def open_cache(self) -> TargetCache:
        assert self.cache is not None, "a step without a row"
        return self.cache

    def close(self) -> None:
        """The target keeps the cache, and what was captured over it, for the next engine."""
        if self.cache is not None:
            self.target.release(self.cache)


def read_nodes(
    target: Target, cache: TargetCache, layers: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor
) -> Reading:
    return target.read_tree(tokens, cache.starts + depths, cache.mask(ancestors), cache, layers)


def to_host(
    verification: Verification, broken: Tensor
) -> tuple[list[bool], list[int], list[list[int]], list[list[int]]]:
    """Which rows are broken, counts, paths and tokens as Python's: the one time in a step that the host waits for the
    device."""
    width = verification.path.shape[1]
    parts = broken.long()[:, None], verification.counts[:, None], verification.path, verification.tokens
    rows = torch.cat(parts, dim=1).tolist()
    return (
        [bool(row[0]) for row in rows],
        [row[1] for row in rows],
        [row[2 : 2 + width] for row in rows],
        [row[2 + width :] for row in rows],
    )
