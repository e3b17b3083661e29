"""Requests, their sequences while they are decoded, and the criteria that end a text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.heads.target_model import Target
from foredraft.inference.grammar import GrammarState
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.text import Detokenizer


@dataclass(eq=False)  # equal requests are separate
class Request:
    """Describe one text to generate. The text depends only on its prompt, settings and seed, not on other requests."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128  # 0 generates nothing
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    trace: int | None = None  # return traces with this number of alternatives per token (inference/trace.py)
    min_new_tokens: int = 0  # before this number, no end token is chosen and no stop string ends the text

    @property
    def failure(self) -> str:
        """Describe the failure of a text with the finish reason "error"."""
        grammar = "" if self.params.grammar is None else ", or a step of its grammar exceeded the limits"
        return f"the target's logits are not numbers (NaN){grammar}"


def budget(request: Request, target: Target) -> int:
    """Return the maximum number of new tokens: the request's, limited by the target's context."""
    if target.context is None:
        return request.max_new_tokens
    return min(request.max_new_tokens, target.context - len(request.prompt))


class StoppingCriteria:
    """Decide when a text ends: by its budget, an end token, or a stop string, at the exact token that completes it."""

    def __init__(self, target: Target, request: Request):
        self.target, self.request = target, request
        if request.stop_strings and target.tokenizer is None:
            raise ValueError(f"stop_strings={list(request.stop_strings)} need a tokenizer, but {target.name} has none")
        self.budget = budget(request, target)
        self.text = ""  # the end of the new text, as long as the longest stop string
        self.longest = max(map(len, request.stop_strings), default=0)
        self.detokenizer: Detokenizer | None = None
        if request.stop_strings:
            self.detokenizer = Detokenizer(target.text_tokenizer, skip_special_tokens=False, prompt=request.prompt)

    def cut(self, num_written: int, tokens: list[int]) -> tuple[list[int], str | None]:
        """Return the part of `tokens` that belongs to the text, and the finish reason if it ends there. num_written:
        number of earlier tokens. Each token must be passed once, in order."""
        for number, token in enumerate(tokens, start=1):
            completed = self.completes_stop_string(token) and num_written + number > self.request.min_new_tokens
            if token in self.request.eos_token_ids or completed:
                return tokens[:number], "stop"
            if num_written + number >= self.budget:
                return tokens[:number], "length"
        return tokens, None

    def completes_stop_string(self, token: int) -> bool:
        """Return whether the token completes a stop string, even if an incomplete character follows."""
        if self.detokenizer is None:
            return False
        before = self.text
        self.text += self.detokenizer.push(token)
        text = self.text + self.detokenizer.pending_text
        starts = ((stop, max(0, len(before) + 1 - len(stop))) for stop in self.request.stop_strings)
        self.text = self.text[-self.longest :]
        return any(text.find(stop, start) >= 0 for stop, start in starts)


@dataclass
class SequenceState:
    """Hold the state of a request that is being decoded."""

    request: Request
    text: list[int]  # prompt and new tokens, including the bonus token
    stopping: StoppingCriteria
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" (an end token or a stop string), "length", "cancelled", "error"
    grammar: GrammarState | None = None  # position of its text in the request's grammar; the sampler advances it

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Add the target's choices up to the end of the text, and return the added tokens."""
        added, self.finish_reason = self.stopping.cut(len(self.new_tokens), list(tokens))
        self.new_tokens += added
        self.text += added
        return added
