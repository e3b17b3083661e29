"""One text of an answer: its content, reasoning, tool calls and log-probabilities, from the outputs of its steps."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.inference.engine import RequestOutput
from foredraft.inference.serve.echo import Echo
from foredraft.inference.serve.openai.logprobs import TokenLogprob
from foredraft.inference.serve.openai.protocol import ChatRequest, CommonRequest, CompletionRequest
from foredraft.inference.serve.openai.reasoning import (
    CLOSING,
    OPENING,
    HarmonyReader,
    ReasoningReader,
    new_reasoning_reader,
)
from foredraft.inference.serve.openai.tools import ToolReader, callable_tools, new_call, new_tool_reader
from foredraft.inference.serve.stop_strings import StopStrings
from foredraft.inference.serve.worker import Job
from foredraft.inference.text import Detokenizer, answer_context
from foredraft.inference.trace import Trace


@dataclass
class Piece:
    """Hold what one step added to a choice, or all steps so far."""

    choice: int
    ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)  # tool calls, all at once at the end
    finish_reason: str | None = None
    trace: dict[str, Any] | None = None  # of one step

    def add(self, piece: "Piece") -> None:
        self.ids += piece.ids
        self.reasoning += piece.reasoning
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.calls += piece.calls
        self.finish_reason = piece.finish_reason


class Choice:
    """Build one text of an answer from the outputs of its steps."""

    def __init__(self, index: int, job: Job, request: CommonRequest, tokenizer: PreTrainedTokenizerBase):
        self.index, self.job, self.request, self.whole = index, job, request, Piece(index)
        self.accepted, self.drafted = list[int](), list[int]()  # see accepted_log.py
        self.emitted = 0  # number of tokens of these steps
        self.length = 0  # length of its text in characters, including what is held back
        template, prompt = tokenizer.chat_template, job.request.prompt
        self.reasoning_reader: ReasoningReader | None = None  # text of a grammar contains no reasoning
        if isinstance(request, ChatRequest) and not request.has_grammar:
            tools = callable_tools(request)
            self.reasoning_reader = new_reasoning_reader(template, prompt, tokenizer.decode, tools)
        # Harmony's reader finds calls, too, and all special tokens are its marks.
        harmony = isinstance(self.reasoning_reader, HarmonyReader)
        self.tools: ToolReader | None = None if harmony else new_tool_reader(request, template)
        marks = (OPENING + CLOSING if self.reasoning_reader else "") + (self.tools.style.text if self.tools else "")
        unseen = frozenset[int]() if harmony else unseen_tokens(tokenizer, marks)
        self.marked = harmony or bool(unseen)  # special tokens mark parts of the text, so they are not skipped
        context = answer_context(tokenizer, prompt) if isinstance(request, ChatRequest) else prompt
        self.detokenizer = Detokenizer(tokenizer, request.skip_special_tokens and not self.marked, context)
        if request.skip_special_tokens and unseen:
            self.detokenizer.hidden = unseen
        self.stops = StopStrings(request.stop_strings, request.include_stop_str_in_output)

    def push(self, output: RequestOutput) -> Piece:
        piece = Piece(self.index, output.tokens, finish_reason=output.finish_reason)
        texts, places = self.detokenize(output)
        if output.finish_reason is None:
            text = self.stops.push("".join(texts))
        else:
            text = self.stops.end("".join(texts[:-1]), "".join(texts[-1:]))
        piece.reasoning, piece.text, piece.calls = self.read(text, output.finish_reason is not None)
        if piece.calls and piece.finish_reason == "stop":  # after "length", a call may be incomplete
            piece.finish_reason = "tool_calls"
        if self.request.top_tokens is not None and output.trace is not None:
            piece.logprobs = self.token_logprobs(output, places, output.trace, self.request.top_tokens)
        if self.request.trace:
            piece.trace = self.trace_entry(output, texts)
        if output.accepted is not None:
            self.accepted.append(output.accepted)
            self.drafted.append(min(output.depth, output.nodes - 1))
            self.emitted += len(output.tokens)
        self.whole.add(piece)
        return piece

    def read(self, text: str, is_end: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """Split a text into reasoning and content, without what may still be a mark; at the end also into tool calls."""
        reasoning, calls = "", list[dict[str, Any]]()
        if self.reasoning_reader is not None:
            reasoning, text = self.reasoning_reader.push(text)
            if is_end:
                more, rest = self.reasoning_reader.end()
                reasoning, text = reasoning + more, text + rest
                calls = [new_call(*call) for call in self.reasoning_reader.calls]
        if self.tools is not None:
            text = self.tools.push(text)
            if is_end:
                rest, calls = self.tools.end()
                text += rest
        if isinstance(self.request, ChatRequest) and not self.request.parallel_tool_calls:
            calls = calls[:1]
        return reasoning, text, calls

    def detokenize(self, output: RequestOutput) -> tuple[list[str], list[tuple[int, bool]]]:
        """Return the text that each token completes, and where the token's text starts: character offset, whether first."""
        pieces, places = [], []
        for number, token in enumerate(output.tokens, start=1):
            places.append((self.length, not self.detokenizer.tokens))
            hidden = number == len(output.tokens) and self.hides_eos(output)
            pieces.append("" if hidden else self.detokenizer.push(token))
            self.length += len(pieces[-1])
        if output.finish_reason is not None and pieces:
            pieces[-1] += self.detokenizer.end()
        return pieces, places

    def hides_eos(self, output: RequestOutput) -> bool:
        """Return whether the last token is an end token outside the text. A special end token may also mark a call's end."""
        if output.finish_reason != "stop" or self.request.include_stop_str_in_output:
            return False
        special = self.detokenizer.token_texts.special if self.marked else frozenset[int]()
        return any(token in self.job.request.eos_token_ids - special for token in output.tokens[-1:])

    def token_logprobs(
        self, output: RequestOutput, places: list[tuple[int, bool]], trace: Trace, top: int
    ) -> list[TokenLogprob]:
        """Return the log-probabilities of the new tokens, without an end token that is not part of the text. It is included
        for clients that count tokens: evaluation harnesses (echo) and trainers (return_token_ids)."""
        request, count = self.request, len(output.tokens)
        counted = request.return_token_ids or (isinstance(request, CompletionRequest) and request.echo)
        if not counted and output.finish_reason == "stop" and not request.include_stop_str_in_output:
            count -= output.tokens[-1] in self.job.request.eos_token_ids
        rows = zip(output.tokens[:count], trace.logprobs, trace.top, places, strict=False)
        return [TokenLogprob(token, logprob, best[:top], *place) for token, logprob, best, place in rows]

    def echo(self, echoed: Echo) -> Piece:
        """Return the prompt as if it were the text of the first step."""
        piece = Piece(self.index, text=echoed.text, logprobs=echoed.logprobs)
        self.whole.add(piece)
        self.length = len(echoed.text)
        return piece

    def trace_entry(self, output: RequestOutput, pieces: list[str]) -> dict[str, Any]:
        """Return each token's text and whether it was drafted, and the tree of the step, if it drafted one."""
        accepted = output.accepted or 0
        entry: dict[str, Any] = {
            "tokens": [{"text": text, "drafted": number < accepted} for number, text in enumerate(pieces)],
        }
        if output.trace is not None and output.accepted is not None:
            entry["tree"] = {
                "tokens": [self.detokenizer.token_texts.token_text(token)[0] for token in output.trace.tokens],
                "parents": output.trace.parents,
                "probabilities": [round(value, 4) for value in output.trace.probabilities],
                "accepted": output.trace.path,
                "hidden": output.trace.hidden,
            }
        return entry


def unseen_tokens(tokenizer: PreTrainedTokenizerBase, marks: str) -> frozenset[int]:
    """Return special tokens outside an answer's text if others are its marks; otherwise the empty set."""
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    unseen = frozenset(number for number, text in special.items() if text not in marks)
    return unseen if len(unseen) < len(special) else frozenset()
