"""The decoding engine: propose, forward, verify, commit. Lossless by construction (inference/sampling.py).

    engine = Engine(target, drafter)
    engine.add(Request(prompt, ...))        # requests join, and finished ones leave, between steps
    while engine.has_work:
        for output in engine.step(): ...

A step is one forward of the target: either over prompts of requests that are to join (inference/prefill.py), or over a tree
of drafts after every sequence's text (with UNO's drafter, a second one). Where there is both to do, they take turns. On a GPU
the stages of a decoding step are captured as CUDA graphs (heads/target/cuda_graphs.py); the step does not know.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from foredraft.heads.target import Target, TargetCache, TargetOutput
from foredraft.heads.target.cuda_graphs import CudaGraphs, power_of_two
from foredraft.inference.batch import Batch, RequestOutput
from foredraft.inference.clock import Clock
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter
from foredraft.inference.drafters.chain import as_supported
from foredraft.inference.prefill import Prompts
from foredraft.inference.prefix_cache import PrefixCache
from foredraft.inference.request import Request, SequenceState, StoppingCriteria
from foredraft.inference.trace import trace_sequences
from foredraft.inference.tree import TokenTree, padded
from foredraft.inference.verify import Coupled, Outcome, Validity, Verification, Verifier

# Prompts that are prefilled together may take so many times the tokens that they have, or few in any case; where the target
# packs them the memory that they are given, and what drafters compute, is padded all the same.
PADDED, PACKED, FEW = 1.25, 2.0, 256


class Engine:
    """Target, drafter, the requests that wait and the batch of those that are decoded."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        verifier: Verifier | None = None,
        max_num_seqs: int | None = None,
        timings: bool = False,
        max_cache_tokens: int | None = None,
        prefill_chunk: int | None = None,
        prefixes: PrefixCache | None = None,
        drafter_share: float = 0.0,
    ):
        """drafter: None is plain decoding. verifier: None is the coupled one, which is lossless (inference/verify.py).
        max_num_seqs: requests decoded at a time, others wait; None for no limit. timings: measure where the time goes.
        max_cache_tokens: entries of the caches beyond which requests wait as well; drafter_share: which share of an entry's
        bytes is the drafter's, whose cache is as wide as the longest text.
        prefill_chunk: most prompt tokens in one step, so that a long prompt does not stall the others; None takes all that
        there are (as does a target that takes no chains). prefixes: where texts are kept that later ones may begin with; None
        keeps none."""
        self.target, self.drafter = target, as_supported(drafter or NoDrafter(), target)
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[SequenceState] = deque()
        self.prefilling: deque[Prompts] = deque()
        self.empty: list[Request] = []  # which ask for no token
        self.last_was_prefill = False
        self.prefill_chunk = prefill_chunk if prefill_chunk is not None and target.supports_chunks else None
        self.prefixes = prefixes if target.supports_trees or target.supports_ragged else None
        self.namespace = 0 if prefixes is None else prefixes.new_namespace()
        self.batch = Batch(target, self.drafter, verifier or Coupled(), max_cache_tokens, drafter_share)
        # On a CPU the product of a single row is another kernel than that of several, and rounds otherwise.
        self.pads_single_rows = target.device.type == "cpu" and target.supports_trees
        self.clock = Clock(target.device, timings)

    def add(self, request: Request) -> None:
        """Let a request join before a coming step. Raises ValueError as `check` does."""
        sequence = self.check(request)
        if request.max_new_tokens > 0:
            self.waiting.append(sequence)
        else:
            self.empty.append(request)

    def check(self, request: Request) -> SequenceState:
        """The request's sequence, before it is decoded. Raises ValueError for a prompt that the target cannot take, or a text
        that the cache has no room for."""
        context = self.target.context
        if not request.prompt:
            raise ValueError("the prompt is empty: give at least one token (the bos token, say)")
        if context is not None and len(request.prompt) + min(1, request.max_new_tokens) > context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, the target {self.target.name} takes {context}, its answer "
                "included"
            )
        check_ids("the prompt", request.prompt, self.target.model.get_input_embeddings().num_embeddings)
        check_ids(
            "logit_bias or bad_words_ids", (token for token, _ in request.params.logit_bias), self.target.vocab_size
        )
        sequence = SequenceState(request, list(request.prompt), StoppingCriteria(self.target, request))
        if not self.fits(sequence):
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} need more than the "
                f"{self.batch.max_cache_tokens} tokens that the cache has room for: ask for fewer"
            )
        return sequence

    def fits(self, sequence: SequenceState) -> bool:
        """Does the cache have room for it, by itself?"""
        most = self.batch.max_cache_tokens
        return most is None or self.batch.most_entries([sequence]) <= most

    def cancel(self, request: Request) -> None:
        """Nothing more comes of it: it waits no longer, or its slot is free from the next step on."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request is not request)
        self.empty = [one for one in self.empty if one is not request]
        for sequence in self.running():
            if sequence.request is request and sequence.finish_reason is None:
                sequence.finish_reason = "cancelled"
        self.prefilling = deque(prompts for prompts in self.prefilling if prompts.unfinished())

    def preempt(self) -> None:
        """All sequences wait again, first in line, to be prefilled with their text so far: after an error in a step (out of
        memory, say), what it left behind is forgotten. Texts do not change by it."""
        self.waiting.extendleft(sequence for sequence in reversed(self.running()) if sequence.finish_reason is None)
        self.batch.sequences, self.batch.cache = [], None
        self.prefilling.clear()

    def swap(self, drafter: Drafter | None) -> None:
        """Between steps: draft with another drafter from now on. No request is lost, and texts do not change by it; those
        that are decoded are prefilled again, since what a drafter remembers of them is its own. Raises ValueError if the
        cache has no room for one of their texts with the other's trees."""
        before, self.batch.drafter = self.batch.drafter, as_supported(drafter or NoDrafter(), self.target)
        sequences = [one for one in self.running() if one.finish_reason is None] + list(self.waiting)
        if not all(map(self.fits, sequences)):
            nodes, self.batch.drafter = self.batch.drafter.nodes, before
            raise ValueError(f"trees of {nodes} nodes leave no room in the cache for a text that is being decoded")
        self.close()
        self.preempt()
        self.drafter = self.batch.drafter
        if self.prefixes is not None:
            self.namespace = self.prefixes.new_namespace()

    def running(self) -> list[SequenceState]:
        """Sequences that wait no longer: those decoded, the finished ones that have not left, and those being prefilled."""
        sequences = [*self.batch.sequences, *(one for prompts in self.prefilling for one in prompts.sequences)]
        return list({id(one): one for one in sequences}.values())  # a step that raised may have left one in both

    @property
    def has_work(self) -> bool:
        return bool(self.empty or self.waiting or self.prefilling or self.batch.unfinished())

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """One forward of the target, and what it gave to each request; nothing where it was over a part of a prompt."""
        if self.empty:
            ended, self.empty = self.empty, []
            return [RequestOutput(request, [], None, 1, "length") for request in ended]
        self.last_was_prefill = self.prefill_is_next()
        if self.last_was_prefill:
            return self.prefill()
        self.clock.start()
        started, captured = time.perf_counter(), CudaGraphs.num_captured
        tree, gumbel = self.propose()
        output = self.forward(tree)
        verification, outcome = self.verify(tree, output.logits, gumbel)
        hidden = self.drafter.remembers_others
        traces = trace_sequences(self.batch.sequences, tree, verification, output.logits, hidden)
        outputs = self.commit(tree, verification, outcome, output.aux_hidden_states)
        # A step that captured a graph took longer than the others like it will.
        seconds = time.perf_counter() - started if captured == CudaGraphs.num_captured else None
        self.drafter.observe_seconds(seconds)
        return [one._replace(trace=traces.get(one.request)) for one in outputs] if traces else outputs

    def propose(self) -> tuple[TokenTree, Tensor | None]:
        """A tree for every sequence, and the noise of the positions that it may reach; None where it reaches none, or no
        sequence is sampled."""
        self.batch.drop_finished()
        self.batch.make_room()
        cache = self.batch.open_cache()
        self.depth = self.padded_depth = self.drafter.depth
        if cache.graphs.active:  # few sizes, so few graphs
            self.padded_depth = power_of_two(self.depth + 1) - 1
        gumbel = self.batch.sampler.gumbel(cache.seq_lens + 1, self.padded_depth + 1) if self.depth else None
        tree = self.drafter.propose(self.batch.accepted._replace(cache=cache), gumbel)
        self.forwards = self.drafter.forwards
        if cache.graphs.active:
            tree = padded(tree, power_of_two(tree.tokens.shape[1]))
            cache.set_bucket(tree.tokens.shape[1])
        self.clock.lap("draft")
        return tree, gumbel

    def forward(self, tree: TokenTree) -> TargetOutput:
        """The target's logits and aux hidden states of every node."""
        cache, layers = self.batch.open_cache(), self.drafter.layers
        self.batch.sampler.note_tree(tree)
        is_single = self.pads_single_rows and tree.tokens.numel() == 1
        if is_single:
            tree = padded(tree, 2)
        function = partial(forward_nodes, self.target, cache, layers)
        output = cache.graphs(("forward", cache.kv_bucket, *layers), function, tree.tokens, tree.depths, tree.ancestors)
        self.clock.lap("forward")
        return TargetOutput(*(part[:, :1] for part in output)) if is_single else output

    def verify(self, tree: TokenTree, logits: Tensor, gumbel: Tensor | None) -> tuple[Verification, Outcome]:
        """What the target writes itself."""
        cache, sampler = self.batch.open_cache(), self.batch.sampler
        found = sampler.verify(logits, tree, gumbel, self.padded_depth, cache.seq_lens + 1, cache.graphs)
        self.clock.lap("verify")
        return found

    def commit(
        self, tree: TokenTree, verification: Verification, outcome: Outcome, aux_hidden_states: Tensor
    ) -> list[RequestOutput]:
        """Keep the accepted path of every sequence in the cache and in its text."""
        valid, counts, paths, tokens = outcome
        nodes = tree.tokens.shape[1]
        outputs = self.batch.fail(valid, nodes)
        sequences = self.batch.sequences
        counts = [0 if one.finish_reason else count for one, count in zip(sequences, counts, strict=True)]
        paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
        self.drafter.observe(paths, verification.choices)
        cache = self.batch.open_cache()
        captured = cache.kv_bucket is not None
        device_counts = self.batch.of_unfinished(verification.counts)
        cache.commit(paths, verification.path, device_counts)
        for slot, is_valid in enumerate(valid):
            if is_valid == Validity.REJECTED_NAN:
                cache.erase_uncommitted(slot)
        width = self.depth + 1 if captured else max(counts)
        kept = verification.path[:, :width, None].expand(-1, -1, aux_hidden_states.shape[-1])
        aux_hidden_states = aux_hidden_states.gather(1, kept)
        new_tokens = verification.tokens[:, :width]
        self.batch.sampler.append(new_tokens, verification.counts)
        self.clock.lap("commit")
        for one, count, new in zip(sequences, counts, tokens, strict=True):
            if count:
                added = one.extend(new[:count])
                output = RequestOutput(one.request, added, count - 1, nodes, one.finish_reason)
                outputs.append(output._replace(depth=self.depth, forwards=self.forwards))
        if self.prefixes is not None:
            self.batch.store_prefixes(self.prefixes, self.namespace, [count > 0 for count in counts])
        texts = [one.text for one in sequences]
        self.batch.accepted = Accepted(new_tokens, aux_hidden_states, counts, texts, device_counts)
        self.clock.lap("host")
        return outputs

    def prefill_is_next(self) -> bool:
        """Not twice in a row where texts are written."""
        if self.last_was_prefill and self.batch.unfinished():
            return False
        self.admit()
        return bool(self.prefilling)

    def admit(self) -> None:
        """Waiting requests for which there is room are prefilled together: those like the first, as many as fit into one
        chunk, or one. Padded to the longest, they are little more than they are without. One that begins like another of
        them waits for what that leaves in the prefix cache: `n` texts of one prompt prefill it once."""
        sequences: list[SequenceState] = []
        busy = [one for prompts in self.prefilling for one in prompts.sequences if one.finish_reason is None]
        longest = tokens = 0
        padded = PACKED if self.target.packs_prompts else PADDED
        for one in islice(self.waiting, self.num_admissible()):
            if not self.batch.are_alike(self.waiting[0], one) or self.is_coming(one, [*busy, *sequences]):
                continue
            size = (len(sequences) + 1) * max(longest, len(one.text))
            if sequences and self.prefill_chunk is not None and size > self.prefill_chunk:
                break
            if size > max(FEW, padded * (tokens + len(one.text))):
                continue
            longest, tokens = max(longest, len(one.text)), tokens + len(one.text)
            sequences.append(one)
        if sequences:
            self.batch.prompt_entries = sum(one.cache.entries for one in self.prefilling)
            sequences.sort(key=lambda one: len(one.text))  # neighbours of like length are attended together
            cache = self.batch.new_prompt_cache(sequences)  # may run out of memory: until then they wait
            self.prefilling.append(Prompts(sequences, self.target, self.drafter, cache))
            admitted = {one.request for one in sequences}
            self.waiting = deque(one for one in self.waiting if one.request not in admitted)

    def is_coming(self, sequence: SequenceState, others: Sequence[SequenceState]) -> bool:
        """Will half of what the prefix cache lacks of this text be in it when one of the others is prefilled, most of whose
        rest that is? A long text that has only a system prompt in common is not waited for."""
        if self.prefixes is None:
            return False
        text, block = sequence.text, self.prefixes.block
        alike = [other.text for other in others if other.text[:block] == text[:block]]
        known = self.prefixes.num_known(self.namespace, text) if alike else 0
        return any(
            2 * (common_length(text, other, block) - known) >= max(len(text), len(other)) - known for other in alike
        )

    def prefill(self) -> list[RequestOutput]:
        """Prompts, or a chunk of one, in turn; those that are done join the batch."""
        prompts = self.prefilling[0]
        if self.prefixes is not None and not any(prompts.cache.lengths):
            prompts.load_prefixes(self.prefixes, self.namespace)
        last = prompts.prefill(self.prefill_chunk)
        if last is None:
            # At the end, sliding layers hold less, and states are others.
            if self.prefixes is not None and (self.target.window is not None or prompts.cache.lag):
                prompts.store_prefixes(self.prefixes, self.namespace)
            self.prefilling.rotate(-1)
            return []
        self.batch.prompt_entries = sum(one.cache.entries for one in self.prefilling)
        outputs = self.batch.join(prompts, last)
        self.prefilling.popleft()
        if self.prefixes is not None:
            prompts.store_prefixes(self.prefixes, self.namespace)
        return outputs

    def num_admissible(self) -> int:
        """How many of the waiting requests may join now, in the order in which they came."""
        busy = [one for one in self.running() if one.finish_reason is None]
        free = len(self.waiting) if self.max_num_seqs is None else min(len(self.waiting), self.max_num_seqs - len(busy))
        free = max(0, free)
        if self.batch.max_cache_tokens is not None:
            sequences = [*busy, *islice(self.waiting, free)]
            while len(sequences) > len(busy) and self.batch.most_entries(sequences) > self.batch.max_cache_tokens:
                sequences.pop()
            free = len(sequences) - len(busy)
        return free

    def close(self) -> None:
        """The target keeps the cache, and what was captured over it, for the next engine."""
        if self.batch.cache is not None:
            self.target.release(self.batch.cache)


def common_length(text: Sequence[int], other: Sequence[int], block: int) -> int:
    """Tokens of the whole blocks that both begin with."""
    most = min(len(text), len(other)) // block * block
    return next((end for end in range(0, most, block) if text[end : end + block] != other[end : end + block]), most)


def check_ids(name: str, ids: Iterable[int], count: int) -> None:
    """Raises ValueError for one that is not below `count`: a device would fail for all sequences at once."""
    for token in ids:
        if not 0 <= token < count:
            raise ValueError(f"{name} names token {token}, and the target knows 0 to {count - 1}: check its tokenizer")


def forward_nodes(
    target: Target, cache: TargetCache, layers: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor
) -> TargetOutput:
    return target.forward_tree(tokens, cache.seq_lens + depths, cache.mask(ancestors), cache, layers)
