"""Text out of tokens as they come: never half a character, and nothing of what a stop string may still take away."""

from collections import deque
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "�"  # what bytes that are no character yet decode to
CONTEXT = 6  # tokens at least before new ones that decide how these are spelled (a space before a word, say)
HELD = 32  # tokens at most that are held back: no character is so many, so their bytes are no text


class Detokenizer:
    """`push` gives the text that a token has completed. All that it gives, and `flush`, is what decoding at once gives, less
    half a character at the end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.tokens: list[int] = []
        self.first, self.given = 0, 0  # tokens[first:given] has been given, and is decoded again as context
        self.ends: deque[int] = (
            deque()
        )  # of whole characters, after `first`: context that began within one would be another

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)

    def push(self, token: int) -> str:
        self.tokens.append(token)
        new = self.pending()
        if (not new or new.endswith(REPLACEMENT)) and len(self.tokens) - self.given < HELD:
            return ""
        self.given = len(self.tokens)
        self.ends.append(self.given)
        while self.ends[0] <= self.given - CONTEXT:
            self.first = self.ends.popleft()
        return new

    def pending(self) -> str:
        before = self.decode(self.tokens[self.first : self.given])
        return self.decode(self.tokens[self.first :])[len(before) :]

    def flush(self) -> str:
        new, self.given = self.pending(), len(self.tokens)
        return new.rstrip(REPLACEMENT)


class StopStrings:
    """Holds back the end of a text while it may be the beginning of a stop string; cuts the text before one."""

    def __init__(self, stops: Sequence[str]):
        self.stops, self.held, self.stopped = tuple(stops), "", False

    def push(self, text: str) -> str:
        """What may be shown now."""
        if self.stopped:
            return ""
        text = self.held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        longest = max(map(len, self.stops), default=1) - 1
        starts = range(max(0, len(text) - longest), len(text))
        cut = next((at for at in starts if any(stop.startswith(text[at:]) for stop in self.stops)), len(text))
        self.held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text
