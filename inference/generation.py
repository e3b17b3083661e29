"""`generate`: whole texts in one call, a loop over the engine that takes transformers' settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from foredraft.heads.target import Target
from foredraft.heads.target.sharding import all_equal
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.engine import Engine
from foredraft.inference.request import Request, budget
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.verify import Verifier

PARAMS = {field.name for field in fields(SamplingParams)}
LIMITS = {"max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "stop_strings", "do_sample", "bad_words_ids"}
# Settings of a GenerationConfig that say nothing about the text written here: caches, and drafting by transformers.
IGNORED = {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"}
IGNORED |= {"prefill_chunk_size", "compile_config", "disable_compile", "is_assistant", "num_assistant_tokens"}
IGNORED |= {"num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"}
IGNORED |= {"assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "transformers_version"}
IGNORED |= {"bos_token_id", "decoder_start_token_id", "remove_invalid_values", "renormalize_logits"}
IGNORED |= {"early_stopping"}
# Settings that 1 switches off. The others are off at None, False, 0 and where they are empty.
OFF_AT_ONE = {"num_beams", "num_return_sequences", "num_beam_groups", "typical_p", "length_penalty"}
OFF_AT_ONE |= {"encoder_repetition_penalty", "guidance_scale"}


class Step(NamedTuple):
    """What one step gained."""

    accepted: list[int]  # per sequence that was still writing: drafts accepted (the bonus token not counted)
    emitted: list[int]  # per such sequence: tokens added to its text, the bonus counted, less what the end cut off
    nodes: int  # of the tree, the bonus token counted
    forwards: int = 1  # of the target


@dataclass
class Generation:
    """sequences: (batch, length) int64: the input as it was given, then the new tokens, padded after their end."""

    sequences: Tensor
    new_tokens: list[list[int]]
    steps: list[Step]
    seconds: dict[str, float] = field(default_factory=dict)  # per stage, when timings were asked for
    finish_reasons: list[str] = field(default_factory=list)  # per sequence: "stop" or "length"

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per target forward and sequence, the bonus token counted; the prompt's forward is left out."""
        return tokens_per_forward([self])


def tokens_per_forward(generations: "Sequence[Generation]") -> float:
    """`Generation.acceptance_length` of several."""
    steps = [step for generation in generations for step in generation.steps]
    forwards = sum(step.forwards * len(step.emitted) for step in steps)
    return sum(sum(step.emitted) for step in steps) / max(1, forwards)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    seed: int | Sequence[int] | None = None,
    streamer: Any = None,
    verifier: Verifier | None = None,
    timings: bool = False,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> Generation:
    """Continue each row of `input_ids` (batch, length) exactly as the target alone would.

    drafter: None is plain decoding through the same loop. attention_mask: (batch, length), 0 where a row is padded, on
    either side. generation_config and settings: as transformers has them, by keyword: max_new_tokens (128), max_length,
    do_sample, temperature, top_k, top_p, min_p, repetition_penalty, bad_words_ids, eos_token_id (the target's; -1
    switches it off), pad_token_id, stop_strings; presence_penalty, frequency_penalty, logit_bias ({token: bias}) as
    OpenAI has them; and grammar (inference/grammar.py). Greedy unless do_sample is true or a temperature above 0 is given;
    what is not set is off (also top_k, which transformers sets to 50). seed: row r uses seed + r, or give one per row; a
    row's text depends on its own prompt and seed alone; None draws one from torch's generator, as transformers samples,
    so that calls differ unless `torch.manual_seed` comes before each. streamer: transformers' kind. verifier, timings: as
    in `Engine`. progress: told after each step how many tokens it added to all sequences.

    Raises ValueError for an empty or too long prompt, for a setting that is not known or not done here, and for logits
    that are not numbers.
    """
    prompts = unpad(input_ids, attention_mask)
    shared = read_settings(generation_config, settings, target, input_ids.shape[1])
    pad_token_id = shared.pop("pad_token_id")
    if seed is None:
        seed = target.broadcast(int(torch.randint(1 << 62, ()))) if shared["params"].temperature > 0 else 0
    seeds = [seed + row for row in range(len(prompts))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds were given for {len(prompts)} rows")
    requests = [Request(prompt, seed=seed, **shared) for prompt, seed in zip(prompts, seeds, strict=True)]
    same = shared | {"params": replace(shared["params"], grammar=None)}  # which is no value
    if target.is_collective and not all_equal([prompts, seeds, same, type(drafter).__name__]):
        raise ValueError(
            f"sharding={target.sharding}: its processes were given different prompts or settings, and all take part in "
            "every forward: give them the same"
        )
    longest, context = max(map(len, prompts)), target.context
    if context is not None and longest > context:
        raise ValueError(f"the prompt has {longest} tokens, the target {target.name} takes {context} at most")
    engine = Engine(target, drafter, verifier, timings=timings)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    for request in requests:
        if budget(request, target) > 0:
            engine.add(request)
    texts: dict[Request, list[int]] = {request: [] for request in requests}
    reasons = dict.fromkeys(requests, "length")
    steps: list[Step] = []
    while engine.has_work:
        outputs = engine.step()
        if outputs[0].accepted is not None:
            accepted = [output.accepted for output in outputs if output.accepted is not None]
            emitted = [len(output.tokens) for output in outputs]
            steps.append(Step(accepted, emitted, outputs[0].nodes, outputs[0].forwards))
        for output in outputs:
            if output.finish_reason == "error":
                raise ValueError(
                    f"{output.request.failure}: {target.name} may need another dtype (bfloat16 or float32)"
                )
            texts[output.request] += output.tokens
            reasons[output.request] = output.finish_reason or "length"
            if streamer is not None and output.request is requests[0] and output.tokens:
                streamer.put(torch.tensor(output.tokens))
        if progress is not None:
            progress(sum(len(output.tokens) for output in outputs))
    engine.close()
    if streamer is not None:
        streamer.end()
    new_tokens = [texts[request] for request in requests]
    longest = max(map(len, new_tokens))
    rows = [new + [pad_token_id] * (longest - len(new)) for new in new_tokens]
    sequences = torch.cat([input_ids, input_ids.new_tensor(rows).view(len(rows), longest)], dim=1)
    return Generation(sequences, new_tokens, steps, engine.clock.seconds, list(reasons.values()))


def read_settings(
    config: GenerationConfig | None, keywords: dict[str, Any], target: Target, length: int
) -> dict[str, Any]:
    """The arguments of all requests, and pad_token_id. length: of the rows of input_ids, which max_length counts. Raises
    ValueError that names what is not known, or not done here."""
    given = {} if config is None else {k: v for k, v in config.to_diff_dict().items() if not k.startswith("_")}
    given |= keywords
    known = set(GenerationConfig().to_dict()) | PARAMS | LIMITS
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ValueError(
                f"{name}={value} is not known to generate" + (f"; did you mean {near[0]}?" if near else "")
            )
        off = value == 1 and value is not True if name in OFF_AT_ONE else not value
        if value is not None and not off and name not in PARAMS | LIMITS | IGNORED:
            raise ValueError(f"speculative decoding does not do {name}={value}: leave it out, or generate without")
    params = {name: given[name] for name in PARAMS & given.keys() if given[name] is not None}
    sampled = given.get("do_sample")
    sampled = (config is None and params.get("temperature", 0) != 0) if sampled is None else sampled
    if sampled and params.get("temperature") == 0:
        raise ValueError(
            "do_sample=true with temperature=0: sampling needs a temperature above 0, or leave do_sample out"
        )
    params["temperature"] = params.get("temperature", 1.0) if sampled else min(0.0, params.get("temperature", 0.0))
    params["top_k"] = params.get("top_k") or None
    params["logit_bias"] = logit_bias(params.get("logit_bias", {}), given.get("bad_words_ids"), target.vocab_size)
    eos = given.get("eos_token_id")
    eos = target.eos_token_ids if eos is None else [eos] if isinstance(eos, int) else list(eos)
    stops = given.get("stop_strings") or ()
    pad = given.get("pad_token_id")
    most, max_length = given.get("max_new_tokens"), given.get("max_length")
    if most is None:
        most = 128 if max_length is None else max_length - length
    if most < 0:
        raise ValueError(
            f"max_new_tokens={given.get('max_new_tokens')} and max_length={max_length} leave no room after a prompt of "
            f"{length} tokens: give more"
        )
    return {
        "params": SamplingParams(**params),
        "max_new_tokens": most,
        "eos_token_ids": frozenset(eos),
        "pad_token_id": max(0, min(eos, default=0)) if pad is None else pad,
        "stop_strings": (stops,) if isinstance(stops, str) else tuple(stops),
    }


def logit_bias(bias: Any, bad_words: list[list[int]] | None, vocab: int) -> tuple[tuple[int, float], ...]:
    """Banned words of one token are a bias of minus infinity."""
    pairs = [(int(token), float(value)) for token, value in dict(bias).items()]
    for word in bad_words or []:
        if len(word) != 1:
            raise ValueError(f"bad_words_ids={word}: only words of one token are banned here, this one has {len(word)}")
        pairs.append((word[0], float("-inf")))
    for token, _ in pairs:
        if not 0 <= token < vocab:
            raise ValueError(f"logit_bias or bad_words_ids names token {token}; the target knows 0 to {vocab - 1}")
    return tuple(pairs)


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's prompt without its padding, which may stand on either side."""
    if not isinstance(input_ids, Tensor):
        kind = type(input_ids).__name__
        raise ValueError(f"input_ids is {kind}, not a tensor: tokenizer(text, return_tensors='pt').input_ids makes one")
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
