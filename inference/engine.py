"""The decoding engine: propose, read, verify, commit. Lossless by construction (inference/sampling.py).

    engine = Engine(target, drafter)
    engine.add(Request(prompt, ...))        # requests join, and finished ones leave, between steps
    while engine.has_work:
        for output in engine.step(): ...

A step reads the target once: either prompts of requests that are to join (inference/prefill.py), or a tree of drafts after
every row's text. Where there is both to do, they take turns. On a GPU the stages of a decoding step are captured as CUDA
graphs (heads/target/cuda_graphs.py); the step does not know.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache, TargetOutput
from foredraft.inference.batch import Batch, Output
from foredraft.inference.clock import Clock
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter
from foredraft.inference.drafters.chain import readable
from foredraft.inference.prefill import Prompts
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import Request, SequenceState, StoppingCriteria
from foredraft.inference.trace import trace_rows
from foredraft.inference.tree import TokenTree, padded
from foredraft.inference.verify import Verification, to_host


class Engine:
    """Target, drafter, the requests that wait and the batch of those that are decoded."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rule: str = "coupled",
        lossless: bool = True,
        max_num_seqs: int | None = None,
        timings: bool = False,
        max_cache_tokens: int | None = None,
        prefill_chunk: int | None = None,
        prefixes: PrefixCache | None = None,
    ):
        """drafter: None is plain decoding. rule: "coupled", or a published one to compare with
        (inference/acceptance_rules.py); "typical" needs lossless=False, because it changes the text. max_num_seqs: requests
        decoded at a time, others wait; None for no limit. timings: measure where the time goes. max_cache_tokens:
        entries of the target's cache, rows times capacity, beyond which requests wait as well. prefill_chunk: most prompt
        tokens that are read in one step, so that a long prompt does not stall the others; None reads all that there are (as
        does a target that reads no trees). prefixes: where texts are kept that later ones may begin with; None keeps none."""
        self.target, self.drafter = target, readable(drafter or NoDrafter(), target)
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[SequenceState] = deque()
        self.reading: deque[Prompts] = deque()
        self.prefilled = False  # did the last step read prompts?
        self.prefill_chunk = prefill_chunk if target.supports_trees else None
        self.prefixes = prefixes if target.supports_trees else None
        self.root = 0 if prefixes is None else prefixes.new_namespace()
        self.batch = Batch(target, self.drafter, rule, lossless, max_cache_tokens)
        self.clock = Clock(target.device, timings)

    def add(self, request: Request) -> None:
        """Let a request join before a coming step. Raises ValueError as `check` does."""
        self.waiting.append(self.check(request))

    def check(self, request: Request) -> SequenceState:
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
        row = SequenceState(request, list(request.prompt), StoppingCriteria(self.target, request))
        if self.batch.max_cache_tokens is not None and self.batch.capacity([row]) > self.batch.max_cache_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} need more than the "
                f"{self.batch.max_cache_tokens} tokens that the cache has room for: ask for fewer"
            )
        return row

    def cancel(self, request: Request) -> None:
        """Nothing more comes of it: it waits no longer, or its row is free from the next step on."""
        self.waiting = deque(row for row in self.waiting if row.request is not request)
        for row in self.started():
            if row.request is request and row.finish_reason is None:
                row.finish_reason = "cancelled"
        self.reading = deque(prompts for prompts in self.reading if prompts.unfinished())

    def preempt(self) -> None:
        """All rows wait again, first in line, to be read again with their text so far: after an error in a step (out of
        memory, say), what it left behind is forgotten. Texts do not change by it."""
        self.waiting.extendleft(row for row in reversed(self.started()) if row.finish_reason is None)
        self.batch.rows, self.batch.cache = [], None
        self.reading.clear()

    def started(self) -> list[SequenceState]:
        """Rows that wait no longer: those that are decoded, the finished ones that have not left, and those that are read."""
        rows = [*self.batch.rows, *(row for prompts in self.reading for row in prompts.rows)]
        return list({id(row): row for row in rows}.values())  # a step that raised may have left a row in both

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.batch.unfinished())

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One read of the target, and what it gave to each request; nothing where it read a part of a prompt."""
        self.prefilled = self.prompts_are_next()
        if self.prefilled:
            return self.prefill()
        self.clock.start()
        tree, gumbel = self.propose()
        reading = self.forward(tree)
        verification, broken = self.verify(tree, reading.logits, gumbel)
        traces = trace_rows(self.batch.rows, tree, verification, reading.logits)
        outputs = self.commit(tree, verification, broken, reading.aux_hidden_states)
        return [output._replace(trace=traces.get(output.request)) for output in outputs] if traces else outputs

    def propose(self) -> tuple[TokenTree, Tensor | None]:
        """A tree for every row, and the noise of the positions that it may reach."""
        self.batch.make_room()
        cache = self.batch.open_cache()
        self.depth = self.drafter.depth
        gumbel = self.batch.sampler.gumbel(cache.seq_lens + 1, self.depth + 1)
        tree = self.drafter.propose(self.batch.accepted, gumbel)
        if cache.graphs.active:  # few sizes, so few graphs
            tree = padded(tree, 1 << (tree.tokens.shape[1] - 1).bit_length())
            cache.set_bucket(tree.tokens.shape[1])
        self.clock.lap("draft")
        return tree, gumbel

    def forward(self, tree: TokenTree) -> TargetOutput:
        """The target's logits and features of every node."""
        cache, layers = self.batch.open_cache(), self.drafter.layers
        read = partial(forward_nodes, self.target, cache, layers)
        reading = cache.graphs(("read", cache.kv_bucket, *layers), read, tree.tokens, tree.depths, tree.ancestors)
        self.clock.lap("forward")
        return reading

    def verify(self, tree: TokenTree, logits: Tensor, gumbel: Tensor | None) -> tuple[Verification, Tensor]:
        """What the target writes itself, and in which rows (batch,) a logit was not a number."""
        return self.batch.sampler.verify(logits, tree, gumbel, self.depth, self.batch.open_cache().graphs)

    def commit(
        self, tree: TokenTree, verification: Verification, broken: Tensor, aux_hidden_states: Tensor
    ) -> list[Output]:
        """Keep the accepted path of every row in the cache and in its text."""
        bad, counts, paths, tokens = to_host(verification, broken)
        self.clock.lap("verify")
        nodes = tree.tokens.shape[1]
        outputs = self.batch.fail(bad, nodes)
        counts = [0 if row.finish_reason else count for row, count in zip(self.batch.rows, counts, strict=True)]
        paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
        self.drafter.observe(paths, verification.choices)
        cache = self.batch.open_cache()
        captured = cache.kv_bucket is not None
        device_counts = self.batch.of_unfinished(verification.counts)
        cache.commit(paths, verification.path, device_counts)
        width = self.depth + 1 if captured else max(counts)
        kept = verification.path[:, :width, None].expand(-1, -1, aux_hidden_states.shape[-1])
        aux_hidden_states = aux_hidden_states.gather(1, kept)
        self.batch.sampler.append(verification.tokens[:, :width], verification.counts)
        self.clock.lap("commit")
        for row, count, new in zip(self.batch.rows, counts, tokens, strict=True):
            if count:
                facts = row.request, row.extend(new[:count]), count - 1, nodes, row.finish_reason
                outputs.append(Output(*facts, depth=self.depth))
        if self.prefixes is not None:
            self.batch.keep(self.prefixes, self.root, [count > 0 for count in counts])
        texts = [row.text for row in self.batch.rows]
        kept_tokens = verification.tokens[:, :width]
        self.batch.accepted = Accepted(
            kept_tokens, aux_hidden_states, counts, texts, device_counts, cache.needs_catch_up
        )
        self.clock.lap("host")
        return outputs

    def prompts_are_next(self) -> bool:
        """Not twice in a row where texts are written."""
        if self.prefilled and self.batch.unfinished():
            return False
        self.admit()
        return bool(self.reading)

    def admit(self) -> None:
        """Waiting requests for which there is room are to be read together: as many as fit into one chunk, or one."""
        rows: list[SequenceState] = []
        free, longest = self.free_rows(), 0
        while len(rows) < free:
            longest = max(longest, len(self.waiting[0].text))
            if rows and self.prefill_chunk is not None and (len(rows) + 1) * longest > self.prefill_chunk:
                break
            rows.append(self.waiting.popleft())
        if rows:
            self.reading.append(Prompts(rows, self.target, self.drafter, self.batch.cache_for_prompts(rows)))

    def prefill(self) -> list[Output]:
        """Read prompts, or a chunk of one, in turn; those that have been read join the batch."""
        prompts = self.reading[0]
        if self.prefixes is not None and not any(prompts.cache.lengths):
            prompts.find(self.prefixes, self.root)
        last = prompts.read(self.prefill_chunk)
        if last is None:
            self.reading.rotate(-1)
            return []
        outputs = self.batch.join(prompts, last)
        self.reading.popleft()
        if self.prefixes is not None:
            prompts.keep(self.prefixes, self.root)
        return outputs

    def free_rows(self) -> int:
        """How many of the waiting requests may join now, in the order in which they came."""
        busy = [row for row in self.started() if row.finish_reason is None]
        free = len(self.waiting) if self.max_num_seqs is None else min(len(self.waiting), self.max_num_seqs - len(busy))
        if self.batch.max_cache_tokens is not None:
            rows = [*busy, *islice(self.waiting, max(0, free))]
            while len(rows) > len(busy) and len(rows) * self.batch.capacity(rows) > self.batch.max_cache_tokens:
                rows.pop()
            free = len(rows) - len(busy)
        return free

    def close(self) -> None:
        """The target keeps the cache, and what was captured over it, for the next engine."""
        if self.batch.cache is not None:
            self.target.release(self.batch.cache)


def forward_nodes(
    target: Target, cache: TargetCache, layers: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor
) -> TargetOutput:
    return target.forward_tree(tokens, cache.seq_lens + depths, cache.mask(ancestors), cache, layers)
