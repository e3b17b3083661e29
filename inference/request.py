"""Requests, their sequences while they are decoded, and the criteria that end a text."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral

from foredraft.heads.target_model import Target
from foredraft.inference.grammar import GrammarState
from foredraft.inference.sampling import SamplingParams, check_counts, check_kind
from foredraft.inference.text import Detokenizer


@dataclass(eq=False)  # equal requests are separate
class Request:
    """Describe one text to generate. The text depends only on its prompt, settings and seed, not on other requests."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 128  # 0 generates nothing
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: Sequence[str] = ()  # also a single one
    trace: int | None = None  # return traces with this number of alternatives per token (inference/trace.py)
    # Before this number, no stop string ends the text, and no end token is chosen unless it is all that a grammar allows.
    min_new_tokens: int = 0
    # Marks around a first part in which stop strings do not count; with ("", mark) the prompt opens it.
    reasoning: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Sequence) or isinstance(self.prompt, str):
            raise ValueError(f"prompt={self.prompt!r} is not a list of tokens")
        check_kind("params", self.params, SamplingParams, "SamplingParams")
        for name in ("max_new_tokens", "seed", "min_new_tokens"):
            check_kind(name, getattr(self, name), Integral, "a whole number")
        check_counts(least=0, trace=self.trace)
        check_kind("eos_token_ids", self.eos_token_ids, Collection, "a set of tokens")
        for token in self.eos_token_ids:
            check_kind("eos_token_ids", token, Integral, "a set of tokens")
        stops = self.stop_strings or ()
        stops = stops if isinstance(stops, Iterable) and not isinstance(stops, str) else (stops,)
        self.stop_strings = tuple(filter(None, stops))
        for stop in self.stop_strings:
            check_kind("stop_strings", stop, str, "a text or a list of texts")

    @property
    def failure(self) -> str:
        """Describe the failure of a text with the finish reason "error"."""
        grammar = "" if self.params.grammar is None else ", or a step of its grammar exceeded the limits"
        banned = ", or its settings ban every token" if self.params.grammar or self.params.logit_bias else ""
        return f"the target's logits are not numbers (NaN){banned}{grammar}"


class SequenceState:
    """Hold the text of a request that is being decoded. It ends by its budget, an end token, or a stop string, at the exact
    token that completes it."""

    def __init__(self, request: Request, target: Target):
        self.request = request
        self.text = list(request.prompt)  # prompt and new tokens, including the bonus token
        self.new_tokens: list[int] = []
        self.finish_reason: str | None = None  # "stop" (an end token or a stop string), "length", "cancelled", "error"
        self.grammar: GrammarState | None = None  # position in the request's grammar; the sampler advances it
        # Maximum number of new tokens.
        most = request.max_new_tokens if target.context is None else target.context - len(request.prompt)
        self.budget = min(request.max_new_tokens, most)
        self.detokenizer: Detokenizer | None = None
        if request.stop_strings:
            if target.tokenizer is None:
                raise ValueError(
                    f"stop_strings={list(request.stop_strings)} need a tokenizer, but {target.name} has none"
                )
            self.detokenizer = Detokenizer(target.text_tokenizer, skip_special_tokens=False, prompt=request.prompt)
        self.end_of_text = ""  # of the new text, as long as the longest stop string
        self.reasoning = request.reasoning  # the first mark is "" in the reasoning, both are after it

    def restart(self, target: Target, count: int) -> None:
        """Return to the state after the first `count` new tokens."""
        fresh = SequenceState(self.request, target)
        fresh.extend(self.new_tokens[:count])
        self.__dict__ = fresh.__dict__

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Add the target's choices up to the end of the text, and return the added tokens."""
        added = len(self.new_tokens)
        for token in tokens:
            self.new_tokens.append(token)
            self.text.append(token)
            completed = self.completes_stop_string(token) and len(self.new_tokens) > self.request.min_new_tokens
            if token in self.request.eos_token_ids or completed:
                self.finish_reason = "stop"
            elif len(self.new_tokens) >= self.budget:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return self.new_tokens[added:]

    def is_reasoning(self) -> bool:
        """Return whether the text ends within its reasoning, or may. Retain what follows the reasoning."""
        (opening, closing), start = self.reasoning, self.end_of_text.lstrip()
        if opening and start:
            if len(start) < len(opening) and opening.startswith(start):
                return True
            self.reasoning = opening, closing = ("", closing) if start.startswith(opening) else ("", "")
        if opening or not closing:
            return False
        _, found, rest = self.end_of_text.partition(closing)
        if any(closing in stop for stop in self.request.stop_strings):
            rest = found + rest  # the mark itself may end a text
        self.end_of_text = rest if found else self.end_of_text[-len(closing) :]
        self.reasoning = ("", "" if found else closing)
        return not found

    def completes_stop_string(self, token: int) -> bool:
        """Return whether the token completes a stop string, even if an incomplete character follows. Each new token must be
        passed once, in order."""
        if self.detokenizer is None:
            return False
        new, stops = self.detokenizer.push(token), self.request.stop_strings
        self.end_of_text += new
        if self.is_reasoning():
            return False
        before, text = max(0, len(self.end_of_text) - len(new)), self.end_of_text + self.detokenizer.pending_text
        self.end_of_text = self.end_of_text[-max(map(len, stops)) :]
        return any(text.find(stop, max(0, before + 1 - len(stop))) >= 0 for stop in stops)
