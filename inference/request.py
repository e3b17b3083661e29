"""What is asked of the engine, how far each request has come, and when its text ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.heads.target import Target
from foredraft.inference.grammar import GrammarState
from foredraft.inference.sampling import SamplingParams


@dataclass(eq=False)  # two requests of one prompt are two
class Request:
    """One text to write. A request's text depends on its own prompt, settings and seed alone, whatever is beside it."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    trace: int | None = None  # tell how its tokens came about, with so many alternatives to each (inference/trace.py)

    @property
    def failure(self) -> str:
        """What happened where its text ends with "error"."""
        grammar = "" if self.params.grammar is None else ", or a step of its grammar cost more than is allowed"
        return f"the target gave logits that are not numbers{grammar}"


def budget(request: Request, target: Target) -> int:
    """How many tokens its text may grow by: what it asks for, as far as the target's context reaches."""
    if target.context is None:
        return request.max_new_tokens
    return min(request.max_new_tokens, target.context - len(request.prompt))


class StoppingCriteria:
    """When a text ends: its budget, an end token, or a stop string, cut at the very token that completes it."""

    def __init__(self, target: Target, request: Request):
        self.target, self.request = target, request
        if request.stop_strings and target.tokenizer is None:
            raise ValueError(f"stop_strings={list(request.stop_strings)} need a tokenizer, and {target.name} has none")
        self.budget = budget(request, target)
        # No token is shorter than a byte and no character longer than four, so this tail holds any stop string.
        self.tail = 8 + 4 * max(map(len, request.stop_strings), default=0)

    def cut(self, written: list[int], tokens: list[int]) -> tuple[list[int], str | None]:
        """Of `tokens`, which follow `written`, those that belong to the text, and why it ends with them, if it does."""
        for number, token in enumerate(tokens, start=1):
            if token in self.request.eos_token_ids or self.completes_stop_string(written, tokens[:number]):
                return tokens[:number], "stop"
            if len(written) + number >= self.budget:
                return tokens[:number], "length"
        return tokens, None

    def completes_stop_string(self, written: list[int], new: list[int]) -> bool:
        if not self.request.stop_strings:
            return False
        tail = self.target.text_tokenizer.decode((written[-self.tail :] + new)[-self.tail :])
        return any(stop in tail for stop in self.request.stop_strings)


@dataclass
class SequenceState:
    """A request that is being decoded."""

    request: Request
    text: list[int]  # the prompt and what was written, the bonus token included
    stopping: StoppingCriteria
    new_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" (an end token or a stop string), "length", "cancelled", "error"
    grammar: GrammarState | None = None  # how far its text has come in the request's grammar; the sampler moves it on

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Add what the target chose, up to the text's end; what was added."""
        added, self.finish_reason = self.stopping.cut(self.new_tokens, list(tokens))
        self.new_tokens += added
        self.text += added
        return added
