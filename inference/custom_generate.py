"""Our loop inside `model.generate`, so that pipelines and evaluation harnesses draft without knowing it.

model.generate(**inputs, custom_generate=as_custom_generate(target, drafter))
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from heads.target import Target
from inference.drafters.base import Drafter
from inference.engine import generate

KNOWN = (RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
ENDS = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


def as_custom_generate(target: Target, drafter: Drafter | None) -> Callable[..., Tensor]:
    """A function for `model.generate(custom_generate=...)`, where model is `target.model`.

    Sampling takes its seed from torch's global generator, so `set_seed` holds. Raises ValueError for settings that our loop
    does not know (beams, other logits processors): ignoring one would change the text in silence.
    """

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,  # transformers passes a parameter of our own naming twice, so nothing else is named here
    ) -> Tensor:
        if model is not target.model:
            raise ValueError(f"this drafter was loaded for {target.name}, not for the model whose generate was called")
        unknown = [type(part).__name__ for part in logits_processor if type(part) not in KNOWN]
        unknown += [type(part).__name__ for part in stopping_criteria if type(part) not in ENDS]
        for name, plain in (("num_beams", 1), ("num_return_sequences", 1), ("return_dict_in_generate", False)):
            value = getattr(generation_config, name)
            unknown += [f"{name}={value}"] if value not in (plain, None) else []
        if unknown:
            raise ValueError(
                f"speculative decoding does not know {', '.join(unknown)}: leave it out, or generate without"
            )
        config = generation_config
        sampled = bool(config.do_sample)
        end = config.eos_token_id
        return generate(
            target,
            drafter,
            input_ids,
            kwargs.get("attention_mask"),
            max_new_tokens=config.max_length - input_ids.shape[1],
            temperature=(1.0 if config.temperature is None else config.temperature) if sampled else 0.0,
            top_k=(config.top_k or None) if sampled else None,
            top_p=config.top_p if sampled else None,
            repetition_penalty=None if config.repetition_penalty in (None, 1.0) else config.repetition_penalty,
            seed=int(torch.randint(1 << 62, ())) if sampled else 0,
            stop_strings=config.stop_strings,
            eos_token_id=-1 if end is None else end,
            streamer=None if kwargs.get("streamer") is None else Quiet(kwargs["streamer"]),
        ).sequences

    return decode


class Quiet:
    """transformers has handed the prompt to the streamer already: pass on what is new."""

    def __init__(self, streamer: Any):
        self.streamer, self.first = streamer, True

    def put(self, tokens: Tensor) -> None:
        if not self.first:
            self.streamer.put(tokens)
        self.first = False

    def end(self) -> None:
        self.streamer.end()
