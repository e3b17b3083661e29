"""Convert tokens to text like `decode(prompt + new)[len(decode(prompt)):]`. SentencePiece tokenizers drop the space before
the first word that they decode, so new tokens are always decoded with context."""

import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import islice, takewhile

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"  # the decoded form of bytes that are not a whole character
CONTEXT = 6  # minimum number of tokens that are decoded before new ones (they decide about spaces, for example)
PROMPT_CONTEXT = 16  # maximum number of prompt tokens that serve as context
MAX_HELD_TOKENS = 32  # maximum number of tokens that are held back: more of them are not a valid character
BYTE_OF = {sign: byte for byte, sign in bytes_to_unicode().items()}  # sign in a byte-level token's name -> byte


class TokenTexts:
    """Map single tokens of a tokenizer to text. Use `token_texts_of`, which caches instances."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids) | {number for number, token in added if token.special}
        self.known: dict[tuple[int, bool], tuple[str, bytes | None]] = {}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    @cached_property
    def anchor(self) -> list[int]:
        """Return a text token to put before another one to decode that as within a text. Not a byte, because bytes merge."""
        for token in range(len(self.tokenizer)):
            text = "" if token in self.special or is_byte(self.name(token)) else self.decode([token])
            if text.strip() and REPLACEMENT not in text:
                return [token]
        return []

    def name(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def token_text(self, token: int, first: bool = False) -> tuple[str, bytes | None]:
        """Return the text of a token and its bytes. They differ for a part of a character; the bytes are None if unknown.
        first: whether the text starts with this token."""
        if (token, first) not in self.known:
            before = [] if first else self.anchor
            text, name = self.decode([*before, token])[len(self.decode(before)) :], self.name(token)
            spelled: bytes | None = text.encode()
            if REPLACEMENT in text and is_byte(name):
                spelled = bytes([int(name[3:5], 16)])
            elif REPLACEMENT in text and REPLACEMENT not in name:
                spelled = bytes(BYTE_OF[sign] for sign in name) if all(sign in BYTE_OF for sign in name) else None
            self.known[token, first] = text, spelled
        return self.known[token, first]

    def is_whole(self, tokens: Sequence[int], text: str) -> bool:
        """Return whether the text of these tokens ends with a whole character (which may be U+FFFD itself)."""
        if not text.endswith(REPLACEMENT):
            return True
        return b"".join(self.token_text(token)[1] or b"" for token in tokens[-3:]).endswith(REPLACEMENT.encode())


def is_byte(name: str) -> bool:
    """Return whether this is the name of a byte-fallback token."""
    return re.fullmatch("<0x[0-9A-F]{2}>", name) is not None


def token_texts_of(tokenizer: PreTrainedTokenizerBase) -> TokenTexts:
    return cached_token_texts(tokenizer, len(tokenizer))


@lru_cache(8)
def cached_token_texts(tokenizer: PreTrainedTokenizerBase, size: int) -> TokenTexts:
    """Create the object for this tokenizer. size: of its vocabulary, so that added tokens invalidate the cache."""
    return TokenTexts(tokenizer)


class Detokenizer:
    """Convert a stream of tokens to text. `push` returns the text that is complete, never a part of a character. Together
    with `end`, the result equals decoding all tokens at once, without an incomplete character at the end."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] | None = None,
    ):
        """Start after the tokens of `prompt`; an incomplete character at its end is completed here. An empty prompt means
        that the text starts with the first token, None that it continues some text."""
        self.token_texts, self.skip_special_tokens = token_texts_of(tokenizer), skip_special_tokens
        self.hidden = self.token_texts.special if skip_special_tokens else frozenset[int]()
        self.tokens = self.token_texts.anchor[:] if prompt is None else self.context(prompt)
        whole = (
            end
            for end in range(len(self.tokens), max(-1, len(self.tokens) - 4), -1)
            if self.token_texts.is_whole(self.tokens[:end], self.decode(self.tokens[:end]))
        )
        # tokens[first:returned] were returned, and are decoded again as context of the following ones.
        self.first, self.returned = 0, next(whole, len(self.tokens))
        self.ends: deque[int] = deque()  # ends of whole characters after `first`, where context may start
        self.pending_text = ""  # text of tokens[returned:]

    def context(self, prompt: Sequence[int]) -> list[int]:
        """Return the last visible tokens of a prompt, which do not start within a character if its text is long."""
        shown = (token for token in reversed(prompt) if token not in self.hidden)
        tail = list(islice(shown, PROMPT_CONTEXT))[::-1]
        within = 0
        while len(tail) == PROMPT_CONTEXT and within < PROMPT_CONTEXT:
            spelled = self.token_texts.token_text(tail[within])[1]
            if not spelled or spelled[0] & 0b11000000 != 0b10000000:  # not a continuation byte of UTF-8
                break
            within += 1
        return tail[within:]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.token_texts.decode(tokens, self.skip_special_tokens)

    def push(self, *tokens: int) -> str:
        self.tokens += [token for token in tokens if token not in self.hidden]
        new = self.pending_text = self.pending()
        waits = not new or not self.token_texts.is_whole(self.tokens[self.returned :], new)
        if waits and len(self.tokens) - self.returned < MAX_HELD_TOKENS:
            return ""
        self.returned, self.pending_text = len(self.tokens), ""
        self.ends.append(self.returned)
        while self.ends[0] <= self.returned - CONTEXT:
            self.first = self.ends.popleft()
        return new

    def pending(self) -> str:
        before = self.decode(self.tokens[self.first : self.returned])
        return self.decode(self.tokens[self.first :])[len(before) :]

    def end(self) -> str:
        new, rest = self.pending(), self.tokens[self.returned :]
        self.returned, self.pending_text = len(self.tokens), ""
        return new if self.token_texts.is_whole(rest, new) else new.rstrip(REPLACEMENT)


def continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """Return the text of the tokens that follow a prompt."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
    return detokenizer.push(*tokens) + detokenizer.pending_text


def answer_context(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Sequence[int]:
    """Return the tokens of the prompt that precede a chat answer's text: those after the last special token. A text starts
    after a special token, so the first word of the answer has no space before it."""
    special = token_texts_of(tokenizer).special
    return prompt[next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in special), 0) :]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """Tokenize, with the special tokens that the tokenizer puts before a text. Those that the text starts with are not
    doubled. An end token that it puts behind a text (`add_eos_token`) is left out: after it a model writes nothing."""
    tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return with_start(tokenizer, tokens) if add_special_tokens else tokens


def with_start(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[int]:
    """Return a text's tokens after those that every text starts with, unless the text has them itself."""
    start = [*start_tokens(tokenizer)]
    return tokens if tokens[: len(start)] == start else [*start, *tokens]


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return what the tokenizer puts before every text by default: its bos token, GLM's [gMASK]<sop>, or nothing. A model
    that was trained with them drafts and writes badly without them."""
    whole, bare = (tokenizer("a", add_special_tokens=adds, verbose=False)["input_ids"] for adds in (True, False))
    return tuple(takewhile(lambda token: token not in bare, whole))
