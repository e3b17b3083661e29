"""Tokens to text, as `decode(prompt + new)[len(decode(prompt)):]` has it: tokenizers of SentencePiece's kind drop the space
before the first word that they decode, so new tokens are never decoded alone."""

import re
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import islice

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT = "\ufffd"  # what bytes that are not a character decode to
CONTEXT = 6  # tokens at least before new ones that decide how these are spelled (a space before a word, say)
PROMPT = 16  # tokens of a prompt that are context at first
HELD = 32  # tokens at most that are held back: no character has so many, so their bytes are not text
BYTE_OF = {sign: byte for byte, sign in bytes_to_unicode().items()}  # in the names of byte-level tokens


class Spelling:
    """What single tokens of a tokenizer spell. Use `spelling_of`, which remembers it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.special = frozenset(tokenizer.all_special_ids) | {number for number, token in added if token.special}
        self.known: dict[tuple[int, bool], tuple[str, bytes | None]] = {}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    @cached_property
    def anchor(self) -> list[int]:
        """A token of text, after which another is spelled as it is within a text. Not a byte: bytes merge."""
        for token in range(len(self.tokenizer)):
            text = "" if token in self.special or is_byte(self.name(token)) else self.decode([token])
            if text.strip() and REPLACEMENT not in text:
                return [token]
        return []

    def name(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def spelled(self, token: int, first: bool = False) -> tuple[str, bytes | None]:
        """The text of a token and its bytes, which are more than the text says where it has only a part of a character; None
        where nothing tells them. first: where a text starts with it."""
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
        """Does the text of these tokens end with a whole character, which may be U+FFFD itself?"""
        if not text.endswith(REPLACEMENT):
            return True
        return b"".join(self.spelled(token)[1] or b"" for token in tokens[-3:]).endswith(REPLACEMENT.encode())


def is_byte(name: str) -> bool:
    """Is this the name of a single byte, to which a tokenizer falls back?"""
    return re.fullmatch("<0x[0-9A-F]{2}>", name) is not None


def spelling_of(tokenizer: PreTrainedTokenizerBase) -> Spelling:
    return remembered(tokenizer, len(tokenizer))


@lru_cache(8)
def remembered(tokenizer: PreTrainedTokenizerBase, size: int) -> Spelling:
    """size: of its vocabulary, to which tokens may be added."""
    return Spelling(tokenizer)


class Detokenizer:
    """`push` returns the text that tokens complete, never a part of a character. All that it returns, and `end`, is what
    decoding at once gives, less half a character at the end."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] | None = None,
    ):
        """prompt: the tokens before the text, half a character at whose end is completed here. An empty one: the text starts
        with its first token. None: it continues some text."""
        self.spelling, self.skip_special_tokens = spelling_of(tokenizer), skip_special_tokens
        self.hidden = self.spelling.special if skip_special_tokens else frozenset[int]()
        self.tokens = self.spelling.anchor[:] if prompt is None else self.context(prompt)
        whole = (
            end
            for end in range(len(self.tokens), max(-1, len(self.tokens) - 4), -1)
            if self.spelling.is_whole(self.tokens[:end], self.decode(self.tokens[:end]))
        )
        # tokens[first:given] has been given, and is decoded again as context for what follows
        self.first, self.given = 0, next(whole, len(self.tokens))
        self.ends: deque[int] = deque()  # of whole characters, after `first`: context must not start within one
        self.held = ""  # text of tokens[given:]

    def context(self, prompt: Sequence[int]) -> list[int]:
        """The last shown tokens of a prompt, which do not start within a character if its text is long."""
        shown = (token for token in reversed(prompt) if token not in self.hidden)
        tail = list(islice(shown, PROMPT))[::-1]
        within = 0
        while len(tail) == PROMPT and within < PROMPT:
            spelled = self.spelling.spelled(tail[within])[1]
            if not spelled or spelled[0] & 0b11000000 != 0b10000000:  # not the mark of a byte within a character
                break
            within += 1
        return tail[within:]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.spelling.decode(tokens, self.skip_special_tokens)

    def push(self, *tokens: int) -> str:
        self.tokens += [token for token in tokens if token not in self.hidden]
        new = self.held = self.pending()
        waits = not new or not self.spelling.is_whole(self.tokens[self.given :], new)
        if waits and len(self.tokens) - self.given < HELD:
            return ""
        self.given, self.held = len(self.tokens), ""
        self.ends.append(self.given)
        while self.ends[0] <= self.given - CONTEXT:
            self.first = self.ends.popleft()
        return new

    def pending(self) -> str:
        before = self.decode(self.tokens[self.first : self.given])
        return self.decode(self.tokens[self.first :])[len(before) :]

    def end(self) -> str:
        """The rest of the text."""
        new, rest = self.pending(), self.tokens[self.given :]
        self.given, self.held = len(self.tokens), ""
        return new if self.spelling.is_whole(rest, new) else new.rstrip(REPLACEMENT)


def continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """The text of the tokens that follow a prompt."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
    return detokenizer.push(*tokens) + detokenizer.held


def answer_context(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> Sequence[int]:
    """The tokens that a chat's answer continues: those after the last mark of its prompt. A text starts after a mark, so an
    answer's first word has no space there."""
    special = spelling_of(tokenizer).special
    return prompt[next((at for at in range(len(prompt), 0, -1) if prompt[at - 1] in special), 0) :]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """With the special tokens that the tokenizer adds, but a bos token that the text starts with is not doubled."""
    tokens = list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
    bos = tokenizer.bos_token_id
    if add_special_tokens and bos is not None and tokens[:2] == [bos, bos]:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = tokens[1:] if own[:1] == [bos] and len(own) < len(tokens) else tokens
    return tokens
