"""Grammars that a text must follow: which tokens may stand after each node of a tree.

    grammars = Grammars(target)                                  # pip install 'foredraft[grammar]'
    generate(target, drafter, ids, grammar=grammars.json_schema({"type": "object", ...}))

What may come next depends on the text before it alone. So a text is the same with drafts and without: a draft that the
grammar forbids is never the target's choice, and is rejected as any other. Grammars are llguidance's.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.target import Target
from foredraft.heads.target.device import HostCopy, upload

MAX_SIZE = 2**16  # characters of a schema
COMPILE_SECONDS = 5  # of a processor
COMPILE_BYTES = 2**31  # of address space; Python with llguidance takes 30 MiB
# llguidance bounds the cost of every step, but not that of finding out whether patterns exclude each other: a dozen of them
# take seconds, two dozen hours. So a process that can be ended tries first.
TRIAL = f"""import os, resource, sys
from llguidance import LLMatcher
resource.setrlimit(resource.RLIMIT_CPU, ({COMPILE_SECONDS}, {COMPILE_SECONDS}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.platform == "linux":  # others know no such limit
    resource.setrlimit(resource.RLIMIT_AS, ({COMPILE_BYTES}, {COMPILE_BYTES}))
os.nice(10)
LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())
"""
# A model may write its JSON over several lines. Without a bound it may also write white space for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": "[ \\n\\r\\t]{0,32}"}


class Grammar:
    """A compiled grammar, of one target. Any number of requests may share it."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], num_tokens: int):
        """num_tokens: of the tokenizer, whose last ones the target may have no row for."""
        self.matcher, self.eos_token_ids, self.num_tokens = matcher, eos_token_ids, num_tokens

    def state(self) -> "GrammarState":
        return GrammarState(self)


class Grammars:
    """Compiles grammars for a target's tokenizer, which it takes in once (about a second for 150k tokens)."""

    def __init__(self, target: Target):
        """Raises ValueError where llguidance is not installed, or the tokenizer is not one that it knows."""
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise ValueError("a grammar needs llguidance: pip install 'foredraft[grammar]'") from None
        self.eos_token_ids = sorted(target.eos_token_ids)
        if not self.eos_token_ids:
            raise ValueError(f"a grammar ends a text by an end token, and {target.name} has none")
        tokenizer = target.text_tokenizer  # which may know tokens that the target has no row for
        count = max(target.vocab_size, 1 + max(tokenizer.get_vocab().values()))
        self.tokenizer = from_tokenizer(tokenizer, count, self.eos_token_ids)
        added = tokenizer.added_tokens_decoder.items()
        # Special tokens, which rules cannot spell: <[5]> in Lark's; None of ends, which come after all rules.
        self.special = {
            token.content: None if number in target.eos_token_ids else number
            for number, token in added
            if token.special
        }
        self.compiled = lru_cache(64)(self.compile)

    def json_schema(self, schema: dict[str, Any]) -> Grammar:
        """JSON of this schema. Raises ValueError for what is no schema, what is not done here, and what is too large."""
        from llguidance import LLMatcher

        try:
            text = json.dumps(schema, allow_nan=False)
            text.encode()
        except (TypeError, ValueError, RecursionError):
            raise ValueError("the schema is not JSON, or nested too deeply") from None
        if not isinstance(schema, dict):
            raise ValueError(f"the schema is {text[:40]}, not an object")
        self.check_size(text)
        return self.compiled(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))

    def json_object(self) -> Grammar:
        return self.json_schema({"type": "object"})

    def lark(self, text: str) -> Grammar:
        """Of llguidance's variant of Lark's rules. Raises ValueError as `json_schema` does."""
        from llguidance import LLMatcher

        self.check_size(text)
        return self.compiled(LLMatcher.grammar_from_lark(text))

    def check_size(self, text: str) -> None:
        if len(text) > MAX_SIZE:
            raise ValueError(f"the grammar has {len(text)} characters, more than the {MAX_SIZE} that are compiled here")

    def compile(self, grammar: str) -> Grammar:
        from llguidance import LLMatcher

        trial = subprocess.run([sys.executable, "-c", TRIAL], input=grammar.encode(), capture_output=True)
        if trial.returncode < 0:  # ended by a signal; what else is wrong the next lines find out
            raise ValueError(
                f"the grammar takes more than {COMPILE_SECONDS} seconds or {COMPILE_BYTES >> 30} GiB to compile: make it "
                "simpler"
            )
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds grammars that no text follows
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split("<state>")[0].split())
            reason = "no text follows it" if reason == "NoExtensionBias" else reason
            raise ValueError(f"the grammar cannot be compiled: {reason[:300]}")
        return Grammar(matcher, self.eos_token_ids, self.tokenizer.vocab_size)


class GrammarState:
    """How far one text has come in its grammar."""

    def __init__(self, grammar: Grammar):
        self.matcher, self.eos_token_ids = grammar.matcher.deep_copy(), grammar.eos_token_ids
        self.num_tokens = grammar.num_tokens
        self.num_consumed = 0  # tokens of the text

    @property
    def failed(self) -> bool:
        """Has a step cost more than llguidance allows? Then nothing more is known of the text."""
        return self.matcher.is_error()

    def fill(self, bits: Tensor, text: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Write into bits (nodes, words) int32 what may stand after each node, 32 tokens a word. text: what has been written,
        the bonus token included. Nodes that the grammar forbids are left as they are."""
        from llguidance.torch import fill_next_token_bitmask

        for token in text[self.num_consumed :]:
            if not self.matcher.is_stopped():  # after the end only ends come, which it knows
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
                    if tokens[child] in self.eos_token_ids:
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
    """Bits (batch, nodes, bytes) uint8 for `forbid`, all set for sequences without a state, and of which sequences the
    grammar failed (batch,) bool; tree: tokens and parents, (2, batch, nodes)."""
    host_tokens, host_parents = tree.wait().tolist()
    count = max([vocab, *(state.num_tokens for state in states if state is not None)])
    bits = torch.full((len(texts), len(host_tokens[0]), (count + 31) // 32), -1, dtype=torch.int32)
    for row, state in enumerate(states):
        if state is not None and not state.failed:
            state.fill(bits[row], texts[row], host_tokens[row], host_parents[row])
            if state.failed:
                bits[row] = -1
    failed = torch.tensor([state is not None and state.failed for state in states])
    return upload(bits.view(torch.uint8), tree.device), upload(failed, tree.device)


def forbid(logits: Tensor, bits: Tensor) -> Tensor:
    """Logits (batch, nodes, vocab) with minus infinity where a bit of `allowed_tokens` is not set."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    allowed = ((bits[..., None] >> shifts) & 1).flatten(-2)[..., : logits.shape[-1]]
    return logits.masked_fill(allowed == 0, float("-inf"))
