"""lm-evaluation-harness over our decoding: the same answers and scores as its `hf` model, in less time.

    pip install lm_eval
    python -m inference.evaluation.lm_eval_model --model foredraft \\
        --model_args pretrained=ORG/NAME,drafter=outputs/mine/head --tasks gsm8k

Other arguments are those of `lm_eval --model hf`. Only tasks that generate get faster: a log-likelihood is one forward.
"""

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from heads.target import Target
from inference.custom_generate import as_custom_generate
from inference.drafters import load_drafter


@register_model("foredraft")
class Foredraft(HFLM):
    def __init__(self, pretrained: str, drafter: str, dtype: str = "auto", device: str | None = None, **settings: Any):
        """pretrained: a target's directory or Hub id. drafter: as `load_drafter` takes it. settings: as HFLM's."""
        self.decoded = Target.from_pretrained(pretrained, dtype=dtype, device=device)
        self.decode = as_custom_generate(self.decoded, load_drafter(drafter, self.decoded))
        tokenizer = self.decoded.text_tokenizer
        super().__init__(pretrained=self.decoded.model, tokenizer=tokenizer, backend="causal", **settings)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """As HFLM's own, but for the loop, which knows stop strings itself."""
        settings = {"temperature": 0.0, **generation_kwargs}
        if not settings["temperature"]:
            settings |= {"do_sample": False, "temperature": None}
        return self.model.generate(
            input_ids=context,
            max_length=max_length,
            stop_strings=[one for one in stop if one] or None,
            tokenizer=self.tokenizer,
            pad_token_id=self.tokenizer.pad_token_id,
            custom_generate=self.decode,
            **settings,
        )


if __name__ == "__main__":
    cli_evaluate()
