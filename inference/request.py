"""What is asked of the engine, how far each request has come, and when its text ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.heads.target import Target
from foredraft.inference.grammar import GrammarState
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.text import Detokenizer


@dataclass(eq=False)  # two requests of one prompt are two
class Request:
    """One text to write. A request's text depends on its own prompt, settings and seed alone, whatever is beside it."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128  # 0 writes nothing
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    trace: int | None = None  # tell how its tokens came about, with so many alternatives to each (inference/trace.py)
    min_new_tokens: int = 0  # before so many, no end token is chosen, and no stop string ends the text

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
        self.text = ""  # the end of what was written, as long as a stop string
        self.longest = max(map(len, request.stop_strings), default=0)
        self.detokenizer: Detokenizer | None = None
        if request.stop_strings:
            self.detokenizer = Detokenizer(target.text_tokenizer, skip_special_tokens=False, prompt=request.prompt)

    def cut(self, num_written: int, tokens: list[int]) -> tuple[list[int], str | None]:
        """Of `tokens`, the next of a text of so many, those that belong to it, and why it ends with them, if it does. Called
        once for each token, in their order."""
        for number, token in enumerate(tokens, start=1):
            completed = self.completes_stop_string(token) and num_written + number > self.request.min_new_tokens
            if token in self.request.eos_token_ids or completed:
                return tokens[:number], "stop"
            if num_written + number >= self.budget:
                return tokens[:number], "length"
        return tokens, None

    def completes_stop_string(self, token: int) -> bool:
        """Also one that stands before the half of a character."""
        if self.detokenizer is None:
            return False
        before = self.text
        self.text += self.detokenizer.push(token)
        text = self.text + self.detokenizer.held
        starts = ((stop, max(0, len(before) + 1 - len(stop))) for stop in self.request.stop_strings)
        self.text = self.text[-self.longest :]
        return any(text.find(stop, start) >= 0 for stop, start in starts)


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
        added, self.finish_reason = self.stopping.cut(len(self.new_tokens), list(tokens))
        self.new_tokens += added
        self.text += added
        return added
