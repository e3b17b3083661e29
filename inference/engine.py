"""The decoding engine: propose, forward, verify, commit. It is lossless by construction (inference/sampling.py).

    engine = Engine(target, drafter)
    engine.add(Request(prompt, ...))        # requests join and leave between steps
    while engine.has_work:
        for output in engine.step(): ...

A step is one forward of the target: either over the prompts of new requests, or over a tree of drafts after the text of every
sequence. If both are due, they alternate. The texts are in slots (inference/slots.py). The stages of a decoding step are
captured on a GPU (heads/caches/cuda_graphs.py), small forwards on a CPU (cpu_graphs.py): this module need not know.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, islice
from numbers import Integral

import torch
from torch import Tensor

from foredraft.heads.caches.cuda_graphs import CudaGraphs, power_of_two
from foredraft.heads.caches.device import host_by_default
from foredraft.heads.caches.kv_cache import KEY_BLOCK, bucket, to_device
from foredraft.heads.target_model import Target, TargetCache, TargetOutput
from foredraft.inference.clock import Clock
from foredraft.inference.drafters.base import Accepted, Drafter, NoDrafter
from foredraft.inference.drafters.chain import as_supported
from foredraft.inference.request import Request, SequenceState
from foredraft.inference.sampling import check_counts
from foredraft.inference.slots import Prompts, RequestOutput, Slots
from foredraft.inference.trace import trace_sequences
from foredraft.inference.tree import TokenTree, pad_nodes
from foredraft.inference.verify import Outcome, Validity, Verification

# Prompts are prefilled together if padding multiplies their tokens by at most this ratio, or if they are short.
MAX_PADDING_RATIO, SMALL_PREFILL_TOKENS = 1.15, 128


class Engine:
    """Serve requests with a target and a drafter, step by step."""

    @host_by_default()
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        max_num_seqs: int | None = None,
        timings: bool = False,
        slot_tokens: int | None = None,
        prefill_chunk: int | None = None,
        reuse_prefixes: bool = False,
    ):
        """Initialize the engine. drafter: None is the baseline, autoregressive decoding. max_num_seqs: maximum number of
        requests that are decoded at a time; None is unlimited. timings: measure the seconds of each stage. slot_tokens: cache
        entries of each sequence, for its text and twice the largest tree; None means as many as the waiting requests need.
        Then a request that needs more, or another slot, replaces all slots by larger ones, and running sequences are
        prefilled again. prefill_chunk: maximum number of prompt tokens per step, so that long prompts do not delay other
        requests; None prefills prompts whole (always the case for targets without chains). reuse_prefixes: do not prefill
        what is in the cache already, because another text began alike."""
        check_counts(max_num_seqs=max_num_seqs, slot_tokens=slot_tokens, prefill_chunk=prefill_chunk)
        self.target, self.drafter = target, as_supported(NoDrafter() if drafter is None else drafter, target)
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[SequenceState] = deque()
        self.prefilling: deque[Prompts] = deque()
        self.empty: list[Request] = []  # requests with max_new_tokens=0
        self.last_was_prefill = False
        self.prefill_chunk = prefill_chunk if prefill_chunk is not None and target.capabilities.chunks else None
        if target.capabilities.keeps_bits:  # masks of longer prompts would be large
            self.prefill_chunk = min(self.prefill_chunk or KEY_BLOCK, KEY_BLOCK)
        self.slot_tokens, self.reuse_prefixes = slot_tokens, reuse_prefixes
        self.slots = Slots(target, self.drafter)
        on_cpu = target.device.type == "cpu" and target.capabilities.trees
        self.fewest_rows = target.capabilities.fastest_rows if on_cpu else 1
        self.clock = Clock(target.device, timings)

    def add(self, request: Request) -> None:
        """Add a request, which joins before one of the next steps. Raises ValueError like `check`."""
        sequence = self.check(request)
        if request.max_new_tokens > 0:
            self.waiting.append(sequence)
        else:
            self.empty.append(request)

    def check(self, request: Request) -> SequenceState:
        """Return the initial sequence of a request. Raises ValueError if the prompt is empty, too long or has invalid tokens,
        or if the text would not fit into the cache."""
        context = self.target.context
        if not request.prompt:
            raise ValueError("the prompt is empty: give at least one token (such as bos)")
        if context is not None and len(request.prompt) + min(1, request.max_new_tokens) > context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, but the target {self.target.name} supports {context}, "
                "including the answer: shorten the prompt"
            )
        check_ids("the prompt", request.prompt, self.target.model.get_input_embeddings().num_embeddings)
        check_ids(
            "logit_bias or bad_words_ids", (token for token, _ in request.params.logit_bias), self.target.vocab_size
        )
        sequence = SequenceState(request, self.target)
        if self.slot_tokens is not None and self.num_entries(sequence) > self.slot_tokens:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with max_new_tokens={request.max_new_tokens} exceeds the cache of "
                f"{self.slot_tokens} tokens per text: reduce max_new_tokens or the prompt"
            )
        return sequence

    def num_entries(self, sequence: SequenceState) -> int:
        """Return the number of cache entries that a sequence may need: also for the accepted path of its last step, and then
        its tree."""
        return len(sequence.request.prompt) + sequence.budget + 2 * self.drafter.nodes

    def max_text_tokens(self) -> int | None:
        """Return the maximum length of a text that fits into the cache, in tokens; None without a limit."""
        return None if self.slot_tokens is None else self.slot_tokens - 2 * self.drafter.nodes

    def cancel(self, request: Request) -> None:
        """Cancel a request: remove it from the queue, or free its slot before the next step."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request is not request)
        self.empty = [other for other in self.empty if other is not request]
        for sequence in self.running():
            if sequence.request is request and sequence.finish_reason is None:
                sequence.finish_reason = "cancelled"
        for prompts in self.prefilling:
            if not prompts.unfinished():
                self.slots.release(prompts)
        self.prefilling = deque(prompts for prompts in self.prefilling if prompts.unfinished())

    def preempt(self) -> None:
        """Move all sequences back to the front of the queue, to be prefilled with their text so far. This resets the state
        after an error in a step (such as out of memory). Texts do not change."""
        self.waiting.extendleft(sequence for sequence in reversed(self.running()) if sequence.finish_reason is None)
        self.slots.reset()
        self.prefilling.clear()

    def swap(self, drafter: Drafter | None) -> None:
        """Replace the drafter between steps. No request is lost and texts do not change. Running sequences are prefilled
        again, because each drafter has its own state. Raises ValueError if the cache is too small for a running text with
        the new drafter's trees."""
        before, self.drafter = self.drafter, as_supported(NoDrafter() if drafter is None else drafter, self.target)
        sequences = [sequence for sequence in self.running() if sequence.finish_reason is None] + list(self.waiting)
        if self.slot_tokens is not None and max(map(self.num_entries, sequences), default=0) > self.slot_tokens:
            nodes, self.drafter = self.drafter.nodes, before
            raise ValueError(f"trees of {nodes} nodes do not fit into the cache next to a text that is being decoded")
        self.close()
        self.preempt()
        self.slots.drafter = self.drafter

    def running(self) -> list[SequenceState]:
        """Return the sequences that do not wait: in the batch (including finished ones) or being prefilled."""
        sequences = [*self.slots.sequences, *chain.from_iterable(prompts.sequences for prompts in self.prefilling)]
        # A step that raised may leave a sequence in both.
        return list({id(sequence): sequence for sequence in sequences}.values())

    @property
    def has_work(self) -> bool:
        return bool(self.empty or self.waiting or self.prefilling or self.slots.unfinished())

    @host_by_default()
    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Run one forward of the target, and return its outputs: an empty list after a chunk of a prompt."""
        if self.empty:
            ended, self.empty = self.empty, []
            return [RequestOutput(request, [], None, 1, "length") for request in ended]
        if not self.last_was_prefill or not self.slots.unfinished():  # prefill steps alternate with decoding steps
            self.admit()
            if self.prefilling:
                self.last_was_prefill = True
                return self.prefill()
        self.last_was_prefill = False
        self.clock.start()
        started, captured = time.perf_counter(), CudaGraphs.num_captured
        tree, gumbel = self.propose()
        output = self.forward(tree)
        verification, outcome = self.verify(tree, output.logits, gumbel)
        hidden = self.drafter.remembers_others
        traces = trace_sequences(self.slots.sequences, tree, verification, output.logits, hidden)
        outputs = self.commit(tree, verification, outcome, output.aux_hidden_states)
        # A step that captured a graph is not representative.
        seconds = time.perf_counter() - started if captured == CudaGraphs.num_captured else None
        self.drafter.observe_seconds(seconds)
        return [output._replace(trace=traces.get(output.request)) for output in outputs] if traces else outputs

    def propose(self) -> tuple[TokenTree, Tensor | None]:
        """Return a tree for every sequence, and the noise of the positions that it may cover (None if it covers none, or all
        sequences are greedy)."""
        self.slots.drop_finished()
        self.slots.use()
        cache, accepted = self.slots.open_cache(), self.slots.accepted
        assert accepted is not None
        self.drafter.prepare(accepted)
        self.depth = self.padded_depth = self.drafter.depth
        if cache.graphs.active:  # few different sizes require few graphs
            self.padded_depth = power_of_two(self.depth + 1) - 1
        gumbel = self.slots.sampler.gumbel(cache.seq_lens + 1, self.padded_depth + 1) if self.depth else None
        tree = self.drafter.propose(accepted, gumbel)
        if cache.graphs.active:
            tree = pad_nodes(tree, power_of_two(tree.tokens.shape[1]))
            cache.set_bucket(tree.tokens.shape[1])
        self.clock.lap("draft")
        return tree, gumbel

    def forward(self, tree: TokenTree) -> TargetOutput:
        """Return the target's logits and aux hidden states of all nodes."""
        cache, layers = self.slots.open_cache(), self.drafter.layers
        self.slots.sampler.start_host_copy(tree)
        batch, nodes = tree.tokens.shape
        tree = pad_nodes(tree, max(nodes, -(-self.fewest_rows // batch)))
        function = partial(forward_nodes, self.target, cache, layers)
        output = cache.graphs(("forward", cache.kv_bucket, *layers), function, tree.tokens, tree.depths, tree.ancestors)
        self.clock.lap("forward")
        return TargetOutput(*(part[:, :nodes] for part in output))

    def verify(self, tree: TokenTree, logits: Tensor, gumbel: Tensor | None) -> tuple[Verification, Outcome]:
        """Return what the target chooses after each node, and which nodes are accepted."""
        cache, sampler = self.slots.open_cache(), self.slots.sampler
        found = sampler.verify(logits, tree, gumbel, self.padded_depth, cache.seq_lens + 1, cache.graphs)
        self.clock.lap("verify")
        return found

    def commit(
        self, tree: TokenTree, verification: Verification, outcome: Outcome, aux_hidden_states: Tensor
    ) -> list[RequestOutput]:
        """Add the accepted path of every sequence to the cache and to its text, and return the outputs."""
        valid, counts, paths, tokens = outcome
        nodes = tree.tokens.shape[1]
        outputs = self.slots.end_invalid(valid, nodes)
        sequences = self.slots.sequences
        counts = [0 if sequence.finish_reason else count for sequence, count in zip(sequences, counts, strict=True)]
        paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
        self.drafter.observe(paths, verification.choices)
        cache = self.slots.open_cache()
        captured = cache.kv_bucket is not None
        # Finished sequences get nothing. The counts of the others are on the device already.
        device_counts = verification.counts if all(counts) else to_device(counts, verification.counts.device)
        device_counts = device_counts[:, None]
        cache.commit(paths, verification.path, device_counts)
        for slot, is_valid in enumerate(valid):
            if is_valid == Validity.REJECTED_NAN:
                cache.erase_uncommitted(slot)
        width = self.depth + 1 if captured else max(counts)
        kept = verification.path[:, :width, None].expand(-1, -1, aux_hidden_states.shape[-1])
        aux_hidden_states = aux_hidden_states.gather(1, kept)
        new_tokens = verification.tokens[:, :width]
        self.slots.sampler.append(new_tokens, verification.counts)
        self.clock.lap("commit")
        for sequence, count, new in zip(sequences, counts, tokens, strict=True):
            if count:
                added = sequence.extend(new[:count])
                output = RequestOutput(sequence.request, added, count - 1, nodes, sequence.finish_reason)
                outputs.append(output._replace(depth=self.depth))
        texts = [sequence.text for sequence in sequences]
        self.slots.accepted = Accepted(new_tokens, aux_hidden_states, counts, texts, device_counts)
        self.clock.lap("host")
        return outputs

    def admit(self) -> None:
        """Start to prefill waiting requests: together those that fit into one chunk without much padding, or one. A request
        that shares its prefix with a request of this batch waits until that is prefilled, so `n` texts of one prompt
        prefill it once."""
        self.reserve_slots()
        free = min(self.num_admissible(), len(self.slots.free()))
        prefilling = chain.from_iterable(prompts.sequences for prompts in self.prefilling)
        busy = [sequence for sequence in prefilling if sequence.finish_reason is None]
        sequences: list[SequenceState] = []
        longest = tokens = 0
        for sequence in islice(self.waiting, free):
            if self.reuse_prefixes and self.slots.will_share(sequence, [*busy, *sequences]):
                continue
            able = self.target.capabilities
            if able.prefers_chains and not able.keeps_bits and sequences and len(sequence.text) != longest:
                continue  # attention over padding would change bits
            size = (len(sequences) + 1) * max(longest, len(sequence.text))
            if sequences and self.prefill_chunk is not None and size > self.prefill_chunk:
                break
            if size > max(SMALL_PREFILL_TOKENS, MAX_PADDING_RATIO * (tokens + len(sequence.text))):
                continue
            longest, tokens = max(longest, len(sequence.text)), tokens + len(sequence.text)
            sequences.append(sequence)
        if sequences:
            slots = [self.slots.choose(sequence, self.reuse_prefixes) for sequence in sequences]
            self.prefilling.append(Prompts(slots))
            admitted = {*sequences}  # a request may have been added twice
            self.waiting = deque(sequence for sequence in self.waiting if sequence not in admitted)

    def reserve_slots(self) -> None:
        """Allocate slots for the requests that may join now, if those of before are too few or too small."""
        joining = list(islice(self.waiting, self.num_admissible()))
        if not joining:
            return
        count, entries, before = self.num_busy() + len(joining), max(map(self.num_entries, joining)), self.slots
        if count <= len(before.slots) and entries <= before.capacity:
            return
        count = grown(len(before.slots), count) if self.max_num_seqs is None else self.max_num_seqs
        if self.slot_tokens is not None:
            entries = self.slot_tokens
        else:
            entries = grown(before.capacity, max(map(self.num_entries, self.waiting)))
            entries = bucket(entries) if self.target.capabilities.captures else entries
        self.preempt()
        self.slots.allocate(count, entries)  # may run out of memory: until then all stay in the queue

    def prefill(self) -> list[RequestOutput]:
        """Prefill the next prompts, or a chunk of them. Completed prompts join the batch."""
        prompts = self.prefilling[0]
        last = self.slots.prefill(prompts, self.prefill_chunk)
        if last is None:
            self.prefilling.rotate(-1)
            return []
        outputs = self.slots.join(prompts, last)
        self.prefilling.popleft()
        return outputs

    def num_busy(self) -> int:
        """Return the number of sequences that occupy a slot."""
        return sum(sequence.finish_reason is None for sequence in self.running())

    def num_admissible(self) -> int:
        """Return how many of the waiting requests may join now, in the order of arrival."""
        waiting = len(self.waiting)
        return waiting if self.max_num_seqs is None else max(0, min(waiting, self.max_num_seqs - self.num_busy()))

    def close(self) -> None:
        """Release the cache and its captured graphs, for the next engine of the target."""
        if self.slots.cache is not None:
            self.target.release(self.slots.cache)


def grown(size: int, needed: int) -> int:
    """Return the next size if `needed` does not fit into the one of before: twice that, so that it rarely changes."""
    return size if needed <= size else max(needed, 2 * size)


def check_ids(name: str, ids: Iterable[int], count: int) -> None:
    """Raise ValueError for a token that is not in range(count): a device would fail for all sequences at once."""
    for token in ids:
        if (
            not (type(token) is int or isinstance(token, Integral)) or not 0 <= token < count
        ):  # the first is 10 times faster
            raise ValueError(
                f"{name} contains token {token!r}, but the target has 0 to {count - 1}: check the tokenizer"
            )


def forward_nodes(
    target: Target, cache: TargetCache, layers: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor
) -> TargetOutput:
    return target.forward_tree(tokens, cache.seq_lens + depths, cache.mask(ancestors), cache, layers)
