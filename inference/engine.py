"""Speculative decoding: propose, read, verify, keep. Lossless by construction (inference/sampling.py)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from heads.target import Reading, Target
from heads.target.cache import KVCache
from inference.drafters.base import Accepted, Drafter, NoDrafter
from inference.sampling import Noise, Sampling
from inference.target_sampler import RuleSampler, TargetSampler
from inference.tree import TokenTree, padded
from inference.verify import Verification


class Step(NamedTuple):
    """What one target forward gained."""

    accepted: list[int]  # per row that was still writing: drafts accepted (the bonus not counted)
    emitted: list[int]  # per such row: tokens added to its text, the bonus counted, less what the end cut off
    nodes: int  # of the tree, the root counted


@dataclass
class Generation:
    """sequences: (batch, length) int64: the input as it was given, then the new tokens, padded behind their end."""

    sequences: Tensor
    new_tokens: list[list[int]]
    steps: list[Step]
    seconds: dict[str, float] = field(default_factory=dict)  # per stage, when timings were asked for

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per target forward and row, the bonus counted; the prompt's forward is left out."""
        forwards = sum(len(step.emitted) for step in self.steps)
        return sum(sum(step.emitted) for step in self.steps) / forwards if forwards else 0.0

    def accepted_per_depth(self, depth: int) -> list[float]:
        """Share of steps that accepted at least d drafts, for d = 1 .. depth."""
        counts = [count for step in self.steps for count in step.accepted]
        return [sum(count >= d for count in counts) / max(1, len(counts)) for d in range(1, depth + 1)]


class Clock:
    """Seconds per stage of a step. Waits for the device at every lap, so it costs time and is off by default."""

    def __init__(self, device: torch.device):
        self.seconds = dict.fromkeys(("draft", "read", "verify", "keep", "host"), 0.0)
        self.device, self.last = device, time.perf_counter()

    def lap(self, stage: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[stage] += now - self.last
        self.last = now


class NoClock:
    seconds: ClassVar[dict[str, float]] = {}

    def lap(self, stage: str) -> None:
        pass


class StoppingCriteria:
    """When a row is finished: its budget, an end token, or a stop string, cut at the very token that completes it."""

    def __init__(self, target: Target, budgets: list[int], eos: set[int], stop_strings: list[str]):
        self.target, self.budgets, self.eos, self.stop_strings = target, budgets, eos, stop_strings
        if stop_strings and target.tokenizer is None:
            raise ValueError(f"stop_strings={stop_strings} need a tokenizer, and {target.name} has none")
        # No token is shorter than a byte and no character longer than four, so this tail holds any stop string.
        self.tail = 8 + 4 * max(map(len, stop_strings), default=0)

    def cut(self, row: int, written: list[int], tokens: list[int]) -> tuple[list[int], bool]:
        """Of `tokens`, which follow `written`, those that belong to the text, and whether the row is finished."""
        for number, token in enumerate(tokens, start=1):
            full = len(written) + number >= self.budgets[row]
            if token in self.eos or full or self._stops(written + tokens[:number]):
                return tokens[:number], True
        return tokens, False

    def _stops(self, text: list[int]) -> bool:
        if not self.stop_strings:
            return False
        assert self.target.tokenizer is not None
        tail = self.target.tokenizer.decode(text[-self.tail :])
        return any(stop in tail for stop in self.stop_strings)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | Sequence[int] = 0,
    stop_strings: str | list[str] | None = None,
    eos_token_id: int | list[int] | None = None,
    streamer: Any = None,
    rule: str = "coupled",
    lossless: bool = True,
    timings: bool = False,
) -> Generation:
    """Continue each row of `input_ids` (batch, length) exactly as the target alone would.

    drafter: None is plain decoding through the same loop. attention_mask: (batch, length), 0 where a row is padded, on
    either side. temperature: 0 is greedy. seed: row r uses seed + r, or give one per row; a row's text depends on its
    own prompt and seed alone. eos_token_id: None is the target's, -1 switches it off. streamer: transformers' kind.
    rule: "coupled", or a published one to compare with (inference/acceptance_rules.py); "typical" needs lossless=False, because it
    changes the text. timings: also measure where the time goes.

    Raises ValueError for an empty or too long prompt and for logits that are not numbers.
    """
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
    drafter = drafter or NoDrafter()
    prompts = unpad(input_ids, attention_mask)
    batch, longest = len(prompts), max(map(len, prompts))
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    budgets = [max_new_tokens] * batch
    if target.context is not None:
        if longest > target.context:
            raise ValueError(
                f"the prompt has {longest} tokens, the target {target.name} reads {target.context} at most"
            )
        budgets = [min(max_new_tokens, target.context - len(prompt)) for prompt in prompts]
    if streamer is not None:
        streamer.put(input_ids.cpu())
    if max(budgets) == 0:
        return Generation(input_ids, [[] for _ in prompts], [])

    seeds = [seed + row for row in range(batch)] if isinstance(seed, int) else list(seed)
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds were given for {batch} rows")
    eos = set(
        target.eos_token_ids
        if eos_token_id is None
        else [eos_token_id]
        if isinstance(eos_token_id, int)
        else eos_token_id
    )
    stops = [stop_strings] if isinstance(stop_strings, str) else stop_strings or []
    ending = StoppingCriteria(target, budgets, eos, stops)
    noise = Noise(seeds, target.vocab_size, target.device) if temperature > 0 and rule == "coupled" else None
    facts = sampling, noise, prompts, target.vocab_size, target.device
    chooser = TargetSampler(*facts) if rule == "coupled" else RuleSampler(rule, seeds, lossless, *facts)
    capacity = longest + max_new_tokens + 2 * drafter.nodes  # the last tree, behind what the last path kept

    drafter.begin(batch, capacity, sampling)
    cache, accepted = prefill(target, drafter, prompts, chooser, capacity)
    written = [[text[-1]] for text in accepted.text]
    done = [ending.cut(row, [], tokens)[1] for row, tokens in enumerate(written)]
    emit(streamer, written)
    steps: list[Step] = []
    clock = Clock(target.device) if timings else NoClock()  # of the steps; the prompt is read by now
    while not all(done):
        depth = drafter.depth
        gumbel = chooser.gumbel(cache.starts + 1, depth + 1)
        tree = drafter.propose(accepted, gumbel)
        nodes = tree.tokens.shape[1]
        if cache.graphs.active:
            tree = padded(tree, 1 << (nodes - 1).bit_length())  # few sizes, so few recordings
            cache.set_bucket(tree.tokens.shape[1])
        clock.lap("draft")
        read = partial(read_nodes, target, cache, drafter.layers)
        reading = cache.graphs(
            ("read", cache.kv_bucket, *drafter.layers), read, tree.tokens, tree.depths, tree.ancestors
        )
        clock.lap("read")
        verdict, broken = chooser.verdict(reading.logits, tree, gumbel, depth, cache.graphs)
        counts, paths, tokens = to_host(verdict, broken, target.name)
        clock.lap("verify")
        counts = [0 if finished else count for finished, count in zip(done, counts, strict=True)]
        paths = [path[:count] for path, count in zip(paths, counts, strict=True)]
        drafter.observe(paths, verdict.choices)
        cache.commit(paths, verdict.path)
        width = max(counts) if cache.kv_bucket is None else depth + 1
        kept = verdict.path[:, :width, None].expand(-1, -1, reading.features.shape[-1])
        features = reading.features.gather(1, kept)
        chooser.note(verdict.tokens[:, :width], verdict.counts)
        clock.lap("keep")
        emitted: list[list[int]] = []
        for row in range(batch):
            if done[row]:
                emitted.append([])
                continue
            new, done[row] = ending.cut(row, written[row], tokens[row][: counts[row]])
            written[row] += new
            accepted.text[row].extend(new)
            emitted.append(new)
        steps.append(Step([c - 1 for c in counts if c], [len(new) for new in emitted if new], nodes))
        accepted = Accepted(verdict.tokens[:, :width], features, counts, accepted.text)
        emit(streamer, emitted)
        clock.lap("host")
    target.release(cache)
    if streamer is not None:
        streamer.end()
    pad = min(eos, default=0) if eos and min(eos) >= 0 else 0
    return Generation(finish(input_ids, written, pad), written, steps, clock.seconds)


def read_nodes(
    target: Target, cache: KVCache, layers: Sequence[int], tokens: Tensor, depths: Tensor, ancestors: Tensor
) -> Reading:
    return target.read_tree(tokens, cache.starts + depths, cache.mask(ancestors), cache, layers)


def prefill(
    target: Target, drafter: Drafter, prompts: list[list[int]], chooser: TargetSampler, capacity: int
) -> tuple[KVCache, Accepted]:
    """Read the prompts, and choose each row's first root."""
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    longest, device = max(lengths), target.device
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    cache = target.acquire_cache(batch, capacity)
    last = tokens.new_tensor(lengths)[:, None] - 1
    positions = torch.arange(longest, device=device).expand(batch, -1)
    ends = sorted({length - 1 for length in lengths})
    # The padding stands behind the text, where causal attention never looks: no mask is needed, ragged or not.
    reading = target.read(tokens, positions, None, cache, drafter.layers, keep_logits=tokens.new_tensor(ends))
    where = tokens.new_tensor([[ends.index(length - 1)] for length in lengths])
    logits = reading.logits.gather(1, where[:, :, None].expand(-1, -1, reading.logits.shape[-1]))
    cache.set_lengths(lengths)
    root = tokens.gather(1, last)
    tree = TokenTree(
        root, torch.zeros_like(root), torch.ones(batch, 1, 1, dtype=torch.bool, device=device), torch.zeros_like(root)
    )
    verdict, broken = chooser.verdict(logits, tree, chooser.gumbel(cache.starts, 1), 0, cache.graphs)
    _, _, first = to_host(verdict, broken, target.name)
    chooser.note(verdict.tokens, verdict.counts)
    shifted = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).scatter(1, last, verdict.tokens)
    text = [prompt + new for prompt, new in zip(prompts, first, strict=True)]
    return cache, Accepted(shifted, reading.features, lengths, text)


def to_host(verdict: Verification, broken: Tensor, name: str) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Counts, paths and tokens as Python numbers: the one time in a step that the host waits for the device."""
    flags = broken.long().expand(len(verdict.counts), 1)
    width = verdict.path.shape[1]
    rows = torch.cat([flags, verdict.counts[:, None], verdict.path, verdict.tokens], dim=1).tolist()
    if rows[0][0]:
        raise ValueError(f"the target {name} gave logits that are not numbers; try another dtype (bfloat16 or float32)")
    return [row[1] for row in rows], [row[2 : 2 + width] for row in rows], [row[2 + width :] for row in rows]


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's prompt without its padding, which may stand on either side."""
    if input_ids.ndim != 2 or input_ids.shape[0] == 0:
        raise ValueError(f"input_ids must be (batch, length) with at least one row, not {tuple(input_ids.shape)}")
    if attention_mask is None:
        prompts = input_ids.tolist()
    else:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
        pairs = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        prompts = [[token for token, real in zip(*pair, strict=True) if real] for pair in pairs]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"the prompt of row {row} is empty: give at least one token (the bos token, say)")
    return prompts


def emit(streamer: Any, new: list[list[int]]) -> None:
    if streamer is not None and new[0]:
        streamer.put(torch.tensor(new[0]))


def finish(input_ids: Tensor, written: list[list[int]], pad: int) -> Tensor:
    longest = max(map(len, written))
    rows = [new + [pad] * (longest - len(new)) for new in written]
    return torch.cat([input_ids, input_ids.new_tensor(rows)], dim=1)
