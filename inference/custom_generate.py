"""Our loop inside `model.generate`, so that pipelines and evaluation harnesses draft without knowing it.

model.generate(**inputs, custom_generate=as_custom_generate(target, drafter))
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from foredraft.heads.target import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.generation import generate

# What transformers makes of a GenerationConfig's own settings, which `generate` reads from the config itself.
FROM_CONFIG = {"MinPLogitsWarper", "NoBadWordsLogitsProcessor", "RepetitionPenaltyLogitsProcessor"}
FROM_CONFIG |= {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}
FROM_CONFIG |= {"EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria"}


def as_custom_generate(target: Target, drafter: Drafter | None) -> Callable[..., Tensor]:
    """A function for `model.generate(custom_generate=...)`, where model is `target.model`.

    Sampling takes its seed from torch's global generator, so `set_seed` holds. Raises ValueError for settings that our loop
    does not know (beams, other logits processors): ignoring one would change the text without a word.
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
        parts = {type(part).__name__ for part in (*logits_processor, *stopping_criteria)}
        unknown = sorted(parts - FROM_CONFIG)
        if unknown:
            raise ValueError(
                f"speculative decoding does not do {', '.join(unknown)}: leave it out, or generate without"
            )
        end = generation_config.eos_token_id
        streamer = kwargs.get("streamer")
        # transformers has counted max_new_tokens into max_length by now, and filled in its own defaults.
        return generate(
            target,
            drafter,
            input_ids,
            kwargs.get("attention_mask"),
            generation_config,
            streamer=None if streamer is None else WithoutPrompt(streamer),
            max_new_tokens=None,
            eos_token_id=-1 if end is None else end,
        ).sequences

    return decode


class WithoutPrompt:
    """transformers has handed the prompt to the streamer already: pass on what is new."""

    def __init__(self, streamer: Any):
        self.streamer, self.first = streamer, True

    def put(self, tokens: Tensor) -> None:
        if not self.first:
            self.streamer.put(tokens)
        self.first = False

    def end(self) -> None:
        self.streamer.end()
