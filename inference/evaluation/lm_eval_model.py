"""lm-evaluation-harness with our decoding: the same answers and scores as its `hf` model, in less time.

    pip install lm_eval
    python -m foredraft.inference.evaluation.lm_eval_model --model foredraft \\
        --model_args pretrained=ORG/NAME,drafter=outputs/mine/head --tasks gsm8k

Other arguments are those of `lm_eval --model hf`. Only generation tasks are faster: a log-likelihood is one forward.
"""

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.inference.drafters import load_drafter
from foredraft.inference.generation import generate


@register_model("foredraft")
class Foredraft(HFLM):
    def __init__(self, pretrained: str, drafter: str, dtype: str = "auto", device: str | None = None, **settings: Any):
        """Load target and drafter. pretrained: directory or Hub id. drafter: as in `load_drafter`. settings: as in HFLM."""
        self.decoded = Target.from_pretrained(pretrained, dtype=dtype, device=device)
        self.drafter = load_drafter(drafter, self.decoded)
        tokenizer = self.decoded.text_tokenizer
        super().__init__(pretrained=self.decoded.model, tokenizer=tokenizer, backend="causal", **settings)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate like HFLM: greedy unless a task samples, with torch's seed."""
        return generate(
            self.decoded,
            self.drafter,
            context,
            max_length=max_length,
            stop_strings=[stop_string for stop_string in stop if stop_string],
            pad_token_id=self.tokenizer.pad_token_id,
            **generation_kwargs,
        ).sequences


if __name__ == "__main__":
    cli_evaluate()
