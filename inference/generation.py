"""`generate`: decode whole texts in one call, with the settings of transformers. It loops over the engine."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from operator import index
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from foredraft.heads.caches.device import host_by_default
from foredraft.heads.checkpoint import check_is_target
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.sharding import all_equal, broadcast
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.engine import Engine
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams, check_kind
from foredraft.inference.slots import RequestOutput

PARAMS = {field.name for field in fields(SamplingParams)}
LIMITS = {"max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "stop_strings", "do_sample", "bad_words_ids"}
# Settings of a GenerationConfig that do not affect the text: caches, and transformers' own assisted generation.
IGNORED = {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"}
IGNORED |= {"prefill_chunk_size", "compile_config", "disable_compile", "is_assistant", "num_assistant_tokens"}
IGNORED |= {"num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"}
IGNORED |= {"assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "transformers_version"}
IGNORED |= {"bos_token_id", "decoder_start_token_id", "remove_invalid_values", "renormalize_logits"}
IGNORED |= {"early_stopping"}
# Settings whose neutral value is 1. The others are off at None, False, 0 or empty.
OFF_AT_ONE = {"num_beams", "num_return_sequences", "num_beam_groups", "typical_p", "length_penalty"}
OFF_AT_ONE |= {"encoder_repetition_penalty", "guidance_scale"}


@runtime_checkable
class Streamer(Protocol):
    """Receive the tokens of a text as they come, like a streamer of transformers."""

    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


class Step(NamedTuple):
    accepted: list[int]  # accepted drafts of each unfinished sequence, without the bonus token
    emitted: list[int]  # tokens added to each of these texts, with the bonus token, up to the end of the text
    nodes: int  # number of nodes of the tree, including the bonus token
    sequences: list[int]  # number of each of these sequences in the batch


@dataclass
class Generation:
    """Hold the results of `generate`. sequences: (batch, length) int64, the input ids and the new tokens, right-padded."""

    sequences: Tensor
    new_tokens: list[list[int]]
    steps: list[Step]
    seconds: dict[str, float] = field(default_factory=dict)  # seconds per stage, if timings=True
    finish_reasons: list[str] = field(default_factory=list)  # per sequence: "stop" or "length"

    @property
    def acceptance_length(self) -> float:
        """Return tau: new tokens per target forward and sequence, including the bonus token, without the prompt's forward."""
        return tokens_per_forward([self])


def tokens_per_forward(generations: "Sequence[Generation]") -> float:
    """Return the acceptance length over several generations."""
    steps = [step for generation in generations for step in generation.steps]
    forwards = sum(len(step.emitted) for step in steps)
    return sum(sum(step.emitted) for step in steps) / max(1, forwards)


@host_by_default()
@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    seed: int | Sequence[int] | None = None,
    streamer: Streamer | None = None,
    timings: bool = False,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> Generation:
    """Extend each sequence of `input_ids` (batch, length) exactly as the target alone would.

    drafter: None is autoregressive decoding (the baseline) in the same loop. attention_mask: (batch, length), 0 for padding
    on either side. generation_config and settings follow transformers: max_new_tokens (128), max_length, do_sample,
    temperature, top_k, top_p, min_p, repetition_penalty, bad_words_ids, eos_token_id (the target's; -1 disables it),
    pad_token_id, stop_strings; presence_penalty, frequency_penalty and logit_bias ({token: bias}) follow OpenAI; and grammar
    (inference/grammar.py). Decoding is greedy unless do_sample is true or temperature is above 0. Settings without a value
    are off (also top_k, which is 50 in transformers). seed: sequence i uses seed + i, or give one per sequence. A text
    depends only on its prompt and seed. None draws a seed from torch's generator, as transformers does, so that calls differ
    unless `torch.manual_seed` precedes each. streamer: as in transformers. timings: as in `Engine`. progress: called after
    each step with the number of tokens that it added to all sequences. Raises ValueError for an empty or too long prompt,
    for an unknown or unsupported setting, and for logits that are not numbers.
    """
    check_is_target(target)
    check_kind("streamer", streamer, Streamer | None, "a streamer of transformers, which has put and end")
    if not (progress is None or callable(progress)):
        raise ValueError(f"progress={progress!r} is not a function, which is called with the number of new tokens")
    prompts = unpad(input_ids, attention_mask)
    shared = read_settings(generation_config, settings, target, input_ids.shape[1])
    pad_token_id = shared.pop("pad_token_id")
    requests = build_requests(target, drafter, prompts, shared, seed)
    engine = Engine(target, drafter, timings=timings)
    for request in requests:
        engine.add(request)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    texts: dict[Request, list[int]] = {request: [] for request in requests}
    reasons = dict.fromkeys(requests, "length")
    steps: list[Step] = []
    while engine.has_work:
        outputs = engine.step()
        if outputs and outputs[0].accepted is not None:  # not a prefill
            steps.append(step_of(outputs, requests))
        for output in outputs:
            if output.finish_reason == "error":
                raise ValueError(f"{output.request.failure}: {target.name} may need dtype bfloat16 or float32")
            texts[output.request] += output.tokens
            reasons[output.request] = output.finish_reason or "length"
            if streamer is not None and output.request is requests[0] and output.tokens:
                streamer.put(torch.tensor(output.tokens))
        if progress is not None:
            progress(sum(len(output.tokens) for output in outputs))
    engine.close()
    if streamer is not None:
        streamer.end()
    new_tokens = list(texts.values())
    padded = pad_sequence([torch.tensor(new, dtype=torch.int64) for new in new_tokens], True, pad_token_id)
    sequences = torch.cat([input_ids, padded.to(input_ids)], dim=1)
    return Generation(sequences, new_tokens, steps, engine.clock.seconds, list(reasons.values()))


def step_of(outputs: Sequence[RequestOutput], requests: list[Request]) -> Step:
    """Return the record of a decoding step. requests: of all sequences, in their order."""
    accepted = [output.accepted for output in outputs if output.accepted is not None]
    numbers = [requests.index(output.request) for output in outputs]
    return Step(accepted, [len(output.tokens) for output in outputs], outputs[0].nodes, numbers)


def build_requests(
    target: Target, drafter: Drafter | None, prompts: list[list[int]], shared: dict[str, Any], seed: Any
) -> list[Request]:
    """Return a request per prompt, for as many tokens as the context has room for. shared: the other arguments of all
    requests. Raises ValueError for a number of seeds that does not fit, and if processes of a sharded target have different
    inputs."""
    if seed is None:
        seed = broadcast(target, int(torch.randint(1 << 62, ()))) if shared["params"].temperature > 0 else 0
    try:
        seeds = list(map(index, seed)) if isinstance(seed, Iterable) else [index(seed) + n for n in range(len(prompts))]
    except TypeError:
        raise ValueError(f"seed={seed!r} is not a whole number or a list of them, one per sequence") from None
    if len(seeds) != len(prompts):
        raise ValueError(f"seed has {len(seeds)} entries for {len(prompts)} sequences: give one for each")
    same = shared | {"params": replace(shared["params"], grammar=None)}  # a grammar cannot be compared
    if target.is_collective and not all_equal([prompts, seeds, same, type(drafter).__name__]):
        raise ValueError(
            f"sharding={target.sharding}: the processes got different prompts or settings, but all take part in every "
            "forward: give the same ones to each process"
        )
    room = [shared["max_new_tokens"] if target.context is None else target.context - len(prompt) for prompt in prompts]
    most = [max(0, min(shared["max_new_tokens"], tokens)) for tokens in room]
    facts = zip(prompts, most, seeds, strict=True)
    return [Request(prompt, **shared | {"max_new_tokens": tokens, "seed": seed}) for prompt, tokens, seed in facts]


def read_settings(
    config: GenerationConfig | None, keywords: dict[str, Any], target: Target, length: int
) -> dict[str, Any]:
    """Return the arguments that all requests share, and pad_token_id. length: of the sequences of input_ids, which counts
    toward max_length. Raises ValueError for unknown and unsupported settings."""
    check_kind("generation_config", config, GenerationConfig | None, "a GenerationConfig of transformers")
    given = {} if config is None else {k: v for k, v in config.to_diff_dict().items() if not k.startswith("_")}
    given |= keywords
    kinds = given.get("token_type_ids")
    if kinds is None or (isinstance(kinds, Tensor) and not kinds.any()):  # all zeros, as some tokenizers return them
        given.pop("token_type_ids", None)
    known = set(GenerationConfig().to_dict()) | PARAMS | LIMITS
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ValueError(f"{name}={value} is not a setting" + (f"; did you mean {near[0]}?" if near else ""))
        if value is None or name in PARAMS | LIMITS | IGNORED:
            continue
        if not (value == 1 and value is not True if name in OFF_AT_ONE else not value):
            raise ValueError(f"speculative decoding does not support {name}={value}: remove it, or do not draft")
    for name in ("max_new_tokens", "max_length", "pad_token_id"):
        check_kind(name, given.get(name), Integral | None, "a whole number")
    if given.get("do_sample") not in (None, True, False):
        raise ValueError(f"do_sample={given['do_sample']!r} is not true or false")
    check_kind("temperature", given.get("temperature"), Real | None, "a number")
    params = {name: given[name] for name in PARAMS & given.keys() if given[name] is not None}
    sampled = given.get("do_sample")
    sampled = bool(keywords.get("temperature")) if sampled is None else sampled
    if sampled and params.get("temperature") == 0:
        raise ValueError("do_sample=true with temperature=0: set a temperature above 0, or remove do_sample")
    params["temperature"] = params.get("temperature", 1.0) if sampled else min(0.0, params.get("temperature", 0.0))
    params["top_k"] = params.get("top_k") or None
    params["logit_bias"] = logit_bias(params.get("logit_bias", {}), given.get("bad_words_ids") or [])
    eos = given.get("eos_token_id")
    try:
        eos = target.eos_token_ids if eos is None else [eos] if isinstance(eos, Integral) else list(map(index, eos))
    except TypeError:
        raise ValueError(f"eos_token_id={eos!r} is not a whole number or a list of them") from None
    pad = given.get("pad_token_id")
    most, max_length = given.get("max_new_tokens"), given.get("max_length")
    if most is None:
        most = 128 if max_length is None else max_length - length
    if most < 0:
        raise ValueError(
            f"max_new_tokens={given.get('max_new_tokens')} and max_length={max_length} leave no tokens after a prompt of "
            f"{length} tokens: increase them"
        )
    return {
        "params": SamplingParams(**params),
        "max_new_tokens": most,
        "eos_token_ids": frozenset(eos),
        "pad_token_id": max([0, *eos[:1]]) if pad is None else pad,  # transformers pads by the first end token
        "stop_strings": given.get("stop_strings") or (),
    }


def logit_bias(biases: Any, words: Any) -> tuple[tuple[int, float], ...]:
    """Return the pairs of `SamplingParams.logit_bias` for such a setting and for bad_words_ids."""
    try:
        bias = [(int(token), float(value)) for token, value in dict(biases).items()]
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={biases!r} does not map tokens to numbers, as {{5: -1.0}} does") from None
    try:
        banned = [list(map(index, word)) for word in words]
    except TypeError:
        raise ValueError(f"bad_words_ids={words!r} is not a list of lists of tokens, such as [[5]]") from None
    for word in banned:
        if len(word) != 1:
            raise ValueError(f"bad_words_ids={word} has {len(word)} tokens: only words of one token are supported")
        bias.append((word[0], float("-inf")))
    return tuple(bias)


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the prompt of each sequence without its padding, which may be on either side."""
    if not isinstance(input_ids, Tensor):
        kind = type(input_ids).__name__
        raise ValueError(f"input_ids is {kind}, not a tensor: tokenizer(text, return_tensors='pt').input_ids makes one")
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids is {input_ids.dtype}, not integers: token ids are needed, not embeddings")
    if input_ids.ndim != 2 or input_ids.shape[0] == 0:
        raise ValueError(f"input_ids must be (batch, length) with at least one sequence, not {tuple(input_ids.shape)}")
    if attention_mask is None:
        prompts = input_ids.tolist()
    else:
        try:
            attention_mask = torch.as_tensor(attention_mask)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"attention_mask={attention_mask!r} is not a tensor of 0 and 1") from None
        if attention_mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}")
        pairs = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
        prompts = [[token for token, real in zip(*pair, strict=True) if real] for pair in pairs]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"the prompt of sequence {row} is empty: give at least one token (such as bos)")
    return prompts
