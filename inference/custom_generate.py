"""Our decoding loop inside `model.generate`, so that pipelines and evaluation harnesses draft without changes.

model.generate(**inputs, custom_generate=as_custom_generate(target, drafter))
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from foredraft.heads.target_model import Target
from foredraft.inference.drafters.base import Drafter
from foredraft.inference.generation import generate

# Processors that transformers creates from settings of a GenerationConfig, which `generate` reads itself.
FROM_CONFIG = {"MinPLogitsWarper", "NoBadWordsLogitsProcessor", "RepetitionPenaltyLogitsProcessor"}
FROM_CONFIG |= {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}
FROM_CONFIG |= {"EosTokenCriteria", "MaxLengthCriteria", "StopStringCriteria"}


def as_custom_generate(target: Target, drafter: Drafter | None) -> Callable[..., Tensor]:
    """Return a function for `model.generate(custom_generate=...)`, where model is `target.model`.

    The sampling seed comes from torch's global generator, so `set_seed` works. Raises ValueError for settings that our loop
    does not support (beams, other logits processors), because ignoring them would change the text silently. transformers
    passes neither `streamer` nor `tokenizer` to such a function: stream, and stop at strings, with our own `generate`.
    """

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,  # transformers passes parameters with other names twice
    ) -> Tensor:
        if model is not target.model:
            raise ValueError(f"the drafter was loaded for {target.name}, not for the model whose generate was called")
        parts = {type(part).__name__ for part in (*logits_processor, *stopping_criteria)}
        unknown = sorted(parts - FROM_CONFIG)
        if unknown:
            raise ValueError(f"speculative decoding does not support {', '.join(unknown)}: remove it, or do not draft")
        end = generation_config.eos_token_id
        # transformers has already combined max_new_tokens with max_length, and set its defaults.
        return generate(
            target,
            drafter,
            input_ids,
            kwargs.get("attention_mask"),
            generation_config,
            max_new_tokens=None,
            eos_token_id=-1 if end is None else end,
        ).sequences

    return decode
