"""A prompt in front of its answer (`echo`), with the log-probabilities of its tokens, for evaluation harnesses."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from foredraft.heads.target_model import Target
from foredraft.inference.serve.openai.logprobs import TokenLogprob
from foredraft.inference.text import Detokenizer

CHUNK = 256  # number of positions whose logits are in memory at a time
Scored = tuple[float | None, list[tuple[int, float]]]  # log-probability of a token; the likeliest tokens with theirs


@torch.inference_mode()
def score(target: Target, tokens: Sequence[int], top: int) -> Iterator[list[Scored]]:
    """Score a text's tokens in chunks, so that requests are decoded in between. The first token has no log-probability."""
    state, found = None, list[Scored]([(None, [])])
    chunk = CHUNK if target.capabilities.chains else len(tokens)
    for start in range(0, len(tokens) - 1, chunk):
        part = torch.tensor([tokens[start : start + chunk + 1]], device=target.device)
        output, state = target.forward_from(part[:, :-1], start, state)
        logprobs = output.logits[0].float().log_softmax(-1)
        own = logprobs.gather(-1, part[0, 1:, None].to(logprobs.device))[:, 0].tolist()
        best = logprobs.topk(top)
        ids, values = best.indices.tolist(), best.values.tolist()
        found += [(one, list(zip(*pair, strict=True))) for one, *pair in zip(own, ids, values, strict=True)]
        yield found
        found = []
    if found:
        yield found


class Echo(NamedTuple):
    """Hold a prompt that precedes its texts, without an incomplete character at its end, which a text may complete."""

    text: str
    logprobs: list[TokenLogprob]  # empty if not requested

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        tokens: Sequence[int],
        scored: Sequence[Scored],
        skip_special_tokens: bool = True,
    ) -> "Echo":
        detokenizer, text, places = Detokenizer(tokenizer, skip_special_tokens, prompt=()), "", []
        for number, token in enumerate(tokens):
            if scored:
                places.append(TokenLogprob(token, *scored[number], len(text), not detokenizer.tokens))
            text += detokenizer.push(token)
        return cls(text, places)
