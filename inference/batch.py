"""The rows that are decoded together, and what goes with them: the target's cache, the sampler, and what the drafter reads
next. Rows join with their prompts read, and leave when they have ended."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from heads.target import Target, TargetCache
from heads.target.cache import to_device
from inference.drafters.base import Accepted, Drafter, root_only, select
from inference.request import Request, Row
from inference.target_sampler import RuleSampler, TargetSampler
from inference.trace import Trace, trace_rows
from inference.verify import to_host


class Output(NamedTuple):
    """What one step gave a request."""

    request: Request
    tokens: list[int]  # added to its text: accepted drafts and the bonus, less what the end cut off
    accepted: int | None  # drafts accepted; None where the step read its prompt
    nodes: int  # of the tree, the root counted
    finish_reason: str | None  # as a Row has it
    trace: Trace | None = None  # where the request asks for one
    depth: int = 0  # most levels that the step's tree may have


class Batch:
    def __init__(self, target: Target, drafter: Drafter, rule: str, lossless: bool, max_cache_tokens: int | None):
        """As `Engine` has them."""
        self.target, self.drafter = target, drafter
        self.rule, self.lossless, self.max_cache_tokens = rule, lossless, max_cache_tokens
        self.rows: list[Row] = []
        self.cache: TargetCache | None = None
        self.ended: tuple[list[bool], Tensor] | None = None  # which rows had, and the same on the device (batch, 1)

    def unfinished(self) -> list[int]:
        return [number for number, row in enumerate(self.rows) if row.finish_reason is None]

    def of_unfinished(self, counts: Tensor) -> Tensor:
        """counts (batch,) as (batch, 1), 0 in rows that have ended. The device is told of those when one more has."""
        ended = [row.finish_reason is not None for row in self.rows]
        if not any(ended):
            return counts[:, None]
        if self.ended is None or self.ended[0] != ended:
            self.ended = ended, to_device(ended, counts.device)[:, None].bool()
        return counts[:, None].masked_fill(self.ended[1], 0)

    def capacity(self, rows: Sequence[Row]) -> int:
        """Entries that each row of a batch of these needs."""
        longest = max(len(row.request.prompt) + row.stopping.budget for row in rows)
        return longest + 2 * self.drafter.nodes  # the last tree, after what the last path kept

    def open_cache(self) -> TargetCache:
        assert self.cache is not None, "a step without a row"
        return self.cache

    def prefill(self, new: Sequence[Row]) -> list[Output]:
        """Finished rows leave, new ones join; their prompts are read and their first tokens chosen."""
        staying = self.unfinished()
        self.rows = [self.rows[number] for number in staying] + [*new]
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

    def fail(self, bad: Sequence[bool], nodes: int) -> list[Output]:
        """Rows whose logits are not numbers end here. Nothing of them stays in the cache: no mask hides a NaN."""
        failed = []
        for number, (row, is_bad) in enumerate(zip(self.rows, bad, strict=True)):
            if is_bad and row.finish_reason is None:
                row.finish_reason = "error"
                self.open_cache().erase(number)
                failed.append(Output(row.request, [], None, nodes, "error"))
        return failed

    def new_sampler(self, rows: Sequence[Row]) -> TargetSampler:
        facts = rows, self.target.vocab_size, self.target.device
        return TargetSampler(*facts) if self.rule == "coupled" else RuleSampler(self.rule, self.lossless, *facts)
