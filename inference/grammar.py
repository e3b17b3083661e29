"""Grammars that constrain a text: which tokens are allowed after each node of a tree.

    grammars = Grammars(target)                                  # pip install 'foredraft[grammar]'
    generate(target, drafter, ids, grammar=grammars.json_schema({"type": "object", ...}))

The allowed tokens depend only on the text before them, so a text is the same with and without drafts: the target never
chooses a draft that the grammar forbids, so the draft is rejected like any other. Grammars are compiled by llguidance.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from foredraft.heads.caches.device import HostCopy, upload
from foredraft.heads.target_model import Target

MAX_SIZE = 2**16  # characters of a schema or grammar
COMPILE_SECONDS = 5  # of CPU time
COMPILE_BYTES = 2**31  # of address space; Python with llguidance uses 30 MiB
# llguidance bounds the cost of every step, but not of checking whether patterns exclude each other: a dozen patterns
# take seconds, two dozen take hours. So a process that can be killed compiles the grammar first.
LIMITED = f"""import os, resource, sys
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark
resource.setrlimit(resource.RLIMIT_CPU, ({COMPILE_SECONDS}, {COMPILE_SECONDS}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.platform == "linux":  # other systems do not support this limit
    resource.setrlimit(resource.RLIMIT_AS, ({COMPILE_BYTES}, {COMPILE_BYTES}))
os.nice(10)
"""
TRIAL = "LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())"
# The search for Lark takes half a minute in 60,000 empty lines.
CONVERSION = """try:
    sys.stdout.buffer.write(any_to_lark(sys.stdin.buffer.read().decode()).encode())
except Exception as error:  # llguidance has no class for all of its parser's errors
    sys.exit(str(error))
"""
# A model may write its JSON over several lines. Without this bound it could also write white space forever.
JSON_OPTIONS: Any = {"whitespace_pattern": "[ \\n\\r\\t]{0,32}"}

# Formats of texts that llguidance checks. JSON Schema lets a program ignore any, such as pydantic's "path".
FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
# What its regular expressions lack: looking around, boundaries of words, and references to groups.
LACKING = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB1-9]|\\k<)")
# What llguidance refuses by name, although these values allow anything. zod writes the first for every record.
NEUTRAL: dict[str, tuple[Any, ...]] = {"propertyNames": ({"type": "string"}, {}, True), "uniqueItems": (False,)}
NEUTRAL["unevaluatedProperties"] = {}, True
# Lookaheads in zod's patterns that demand no more than the format next to them.
IMPLIED = {"email": (r"(?!\.)(?!.*\.\.)",), "duration": (r"(?!.*W)(?=\d|T\d)", r"(?=\d)")}
OPENAPI = "discriminator", "nullable", "example"  # llguidance ignores them, but refuses them next to a recursion
# Drafts that llguidance supports, the old ones by names with http. Another name means the newest draft.
DRAFT = re.compile(
    r"https?://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
LIMITS = "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"
LARGEST = 2**63 - 1024  # llguidance refuses ranges with larger limits, such as that of int64; this is exact as a float
# The conversion does not find `start` behind a mark of Lark.
LARK = re.compile(r"^[ \t]*[?!]?start[ \t]*:(?!:=)", re.MULTILINE)
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # contain schemas by any name
TYPES = "array", "boolean", "integer", "null", "number", "object", "string"


def as_supported(schema: Any, lenient: bool = False) -> Any:
    """Return a schema without what `is_dropped` names, with limits, references and tagged unions as llguidance reads them."""
    if isinstance(schema, list):
        return [as_supported(part, lenient) for part in schema if part is not None]
    if not isinstance(schema, dict):
        return schema
    tagged = "discriminator" in schema and "anyOf" not in schema
    schema = {("anyOf" if name == "oneOf" and tagged else name): schema[name] for name in schema}
    if "pattern" in schema and schema.get("format") == "time":
        del schema["format"]  # zod's patterns of times have no offset from UTC, which the format demands
    if tags := find_tags(schema.get("properties")):
        required = schema.get("required")
        schema["required"] = list(dict.fromkeys([*(required if isinstance(required, list) else ()), *tags]))

    def inside(name: str, value: Any) -> Any:
        if name in NAMED and isinstance(value, dict):
            return {key: {} if part in (None, []) else as_supported(part, lenient) for key, part in value.items()}
        if name in LIMITS and type(value) in (int, float):
            return max(value, -LARGEST) if name in LIMITS[:2] else min(value, LARGEST)
        if name == "$ref" and isinstance(value, str):  # names of generic types, such as List<string>
            return quote(value, safe="%#/:?=&~!$'()*+,;@")
        if name == "pattern" and isinstance(value, str):
            for part in IMPLIED.get(str(schema.get("format")), ()):
                value = value.replace(part, "")
        if name == "$schema":
            return re.sub("^https(?=.*/draft-0)", "http", value)
        return value if name in ("const", "default", "enum", "examples") else as_supported(value, lenient)

    return {name: inside(name, value) for name, value in schema.items() if not is_dropped(name, value, lenient)}


def find_tags(properties: Any) -> list[str]:
    """Return the properties whose only value is their default: pydantic does not require them, but finds out by them which
    part of a union an object is."""
    named = properties.items() if isinstance(properties, dict) else ()
    parts = ((name, part) for name, part in named if isinstance(part, dict) and "const" in part)
    return [name for name, part in parts if part.get("default", part) == part["const"]]


def is_dropped(name: str, value: Any, lenient: bool) -> bool:
    """Return whether a grammar leaves out a key of a schema: a null where nothing is given, an empty list in place of an
    object (PHP writes both alike), a format that is not one of FORMATS, keys of OPENAPI, values of NEUTRAL, an unknown draft.
    lenient: also types of other languages, and patterns that llguidance lacks."""
    if name in OPENAPI or value in NEUTRAL.get(name, ()):
        return True
    if value is None or (name in (*NAMED, "additionalProperties") and value == []):
        return name != "const"
    if name == "format" and isinstance(value, str):
        return value not in FORMATS
    if name == "$schema":
        return DRAFT.fullmatch(str(value)) is None
    if name == "type":
        return lenient and any(name not in TYPES for name in (value if isinstance(value, list) else [value]))
    return lenient and name == "pattern" and LACKING.search(str(value)) is not None


def run_limited(code: str, grammar: str) -> subprocess.CompletedProcess[bytes]:
    """Run code in a process that gets this grammar. Raises ValueError if it exceeds the limits."""
    try:
        text = grammar.encode()
    except UnicodeEncodeError:
        raise ValueError("the grammar contains half a character (a lone surrogate)") from None
    ended = subprocess.run([sys.executable, "-c", LIMITED + code], input=text, capture_output=True)
    if ended.returncode < 0:  # killed by a signal
        raise ValueError(
            f"the grammar needs more than {COMPILE_SECONDS} seconds or {COMPILE_BYTES >> 30} GiB to compile: make it simpler"
        )
    return ended


def convert(grammar: str) -> str:
    """Return the grammar in Lark. Raises ValueError if it is neither Lark nor GBNF, or needs too much time."""
    ended = run_limited(CONVERSION, grammar)
    if ended.returncode:
        raise ValueError(f"the grammar is neither Lark nor GBNF: {' '.join(ended.stderr.decode().split())[:300]}")
    return ended.stdout.decode()


class Grammar:
    """Hold a compiled grammar for one target. Any number of requests may share it."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], num_tokens: int):
        """Initialize with num_tokens, the size of the tokenizer's vocabulary, which may be larger than the target's."""
        self.matcher, self.eos_token_ids, self.num_tokens = matcher, eos_token_ids, num_tokens


class Grammars:
    """Compile grammars for a target's tokenizer, which is loaded once (about a second for 150k tokens)."""

    def __init__(self, target: Target):
        """Load the tokenizer. Raises ValueError if llguidance is not installed or does not support the tokenizer."""
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise ValueError("a grammar needs llguidance: pip install 'foredraft[grammar]'") from None
        self.eos_token_ids = sorted(target.eos_token_ids)
        if not self.eos_token_ids:
            raise ValueError(f"a grammar needs an end token (eos_token_id), and {target.name} has none")
        tokenizer = target.text_tokenizer  # it may have more tokens than the target's lm_head
        count = max(target.vocab_size, 1 + max(tokenizer.get_vocab().values()))
        self.tokenizer = from_tokenizer(tokenizer, count, self.eos_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        # Special tokens as Lark rules write them (<[5]>); None for end tokens, which follow after all rules.
        self.special = {
            token.content: None if number in target.eos_token_ids else number
            for number, token in added
            if token.special
        }
        self.compiled, self.converted = lru_cache(64)(self.compile), lru_cache(64)(convert)

    def json_schema(self, schema: dict[str, Any]) -> Grammar:
        """Compile a JSON schema. Raises ValueError if it is invalid, unsupported or too large."""
        from llguidance import LLMatcher

        try:
            text = json.dumps(as_supported(schema), allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError):
            raise ValueError("the schema is not JSON, or nested too deeply") from None
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {text[:40]}, not an object: give one such as {{'type': 'object'}}")
        self.check_size(text)
        return self.compiled(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))

    def lark(self, text: str) -> Grammar:
        """Compile a grammar in llguidance's variant of Lark. Raises ValueError like `json_schema`."""
        from llguidance import LLMatcher

        self.check_size(text)
        return self.compiled(LLMatcher.grammar_from_lark(text))

    def as_lark(self, text: str) -> str:
        """Return the grammar in Lark; one in llama.cpp's GBNF is converted. Raises ValueError if it is neither."""
        self.check_size(text)
        return text if LARK.search(text) else self.converted(text)

    def check_size(self, text: str) -> None:
        if len(text) > MAX_SIZE:
            raise ValueError(f"the grammar has {len(text)} characters, but at most {MAX_SIZE} are allowed: shorten it")

    def compile(self, grammar: str) -> Grammar:
        from llguidance import LLMatcher

        run_limited(TRIAL, grammar)  # the code below reports its errors
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # detects grammars that no text matches
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split("<state>")[0].split())
            reason = "no text matches it" if reason == "NoExtensionBias" else reason
            reason = reason.split(" Enable 'coerce_one_of'")[0] + " Use anyOf." if "coerce_one_of" in reason else reason
            raise ValueError(f"the grammar cannot be compiled: {reason[:300]}")
        return Grammar(matcher, self.eos_token_ids, self.tokenizer.vocab_size)


class GrammarState:
    """Follow the position of one text in its grammar."""

    def __init__(self, grammar: Grammar):
        self.grammar, self.matcher = grammar, grammar.matcher.deep_copy()
        self.num_consumed = 0  # number of tokens of the text that the matcher has seen

    @property
    def failed(self) -> bool:
        """Return whether a step exceeded llguidance's limits. The state is unusable then."""
        return self.matcher.is_error()

    def fill(self, bits: Tensor, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Write into bits (nodes, words) int32 which tokens are allowed after each node, 32 tokens per word. text: the new
        text, including the bonus token. The bits of nodes that the grammar forbids are unchanged."""
        from llguidance.torch import fill_next_token_bitmask

        for token in text[self.num_consumed :]:
            if not self.matcher.is_stopped():  # after the end only end tokens follow, which are always allowed
                self.matcher.consume_token(token)
        self.num_consumed = len(text)
        below: list[list[int]] = [[] for _ in tokens]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if node and token >= 0:
                below[parent].append(node)

        def visit(node: int) -> None:
            fill_next_token_bitmask(self.matcher, bits, node)
            for child in below[node]:
                if self.matcher.is_stopped():
                    if tokens[child] in self.grammar.eos_token_ids:
                        visit(child)
                elif self.matcher.try_consume_tokens([tokens[child]]):
                    visit(child)
                    self.matcher.rollback(1)

        visit(0)


def allowed_tokens(
    states: Sequence[GrammarState | None],
    texts: Sequence[Sequence[int]],
    tree: HostCopy,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """Return bits (batch, nodes, bytes) uint8 for `mask_forbidden`, all set for sequences without a state, and whether each
    grammar failed (batch,) bool. tree: tokens and parents, (2, batch, nodes)."""
    host_tokens, host_parents = tree.wait().tolist()
    count = max([vocab, *(state.grammar.num_tokens for state in states if state is not None)])
    bits = torch.full((len(texts), len(host_tokens[0]), (count + 31) // 32), -1, dtype=torch.int32)
    for row, state in enumerate(states):
        if state is not None and not state.failed:
            state.fill(bits[row], texts[row], host_tokens[row], host_parents[row])
            if state.failed:
                bits[row] = -1
    failed = torch.tensor([state is not None and state.failed for state in states])
    return upload(bits.view(torch.uint8), tree.device), upload(failed, tree.device)


def mask_forbidden(logits: Tensor, bits: Tensor) -> Tensor:
    """Return logits (batch, nodes, vocab) with minus infinity for tokens whose bit in `allowed_tokens` is not set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    allowed = ((bits[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, float("-inf"))
