"""One text of an answer: its content, reasoning, tool calls and log-probabilities, from the outputs of its steps."""

from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.inference.engine import RequestOutput
from foredraft.inference.serve.echo import Echo
from foredraft.inference.serve.openai.logprobs import TokenLogprob
from foredraft.inference.serve.openai.protocol import ChatRequest, CommonRequest, CompletionRequest
from foredraft.inference.serve.openai.reasoning import is_harmony, reasoning_marks, split_harmony, split_reasoning
from foredraft.inference.serve.openai.tools import callable_tools, forced_tools, new_call, new_tool_reader
from foredraft.inference.serve.stop_strings import find_partial_mark, without_stop
from foredraft.inference.serve.worker import Job
from foredraft.inference.text import Detokenizer, answer_context
from foredraft.inference.trace import Trace


@dataclass
class Piece:
    """Hold what one step added to a choice, or all steps so far."""

    choice: int
    is_first: bool = False  # of its choice
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

    def parts(self) -> "list[Piece]":
        """Return the last piece in two parts, as OpenAI streams it: some clients drop what comes with a finish reason."""
        if self.finish_reason is None or not (self.text or self.reasoning or self.calls):
            return [self]
        return [replace(self, finish_reason=None), Piece(self.choice, finish_reason=self.finish_reason)]


class Choice:
    """Build one text of an answer from the outputs of its steps."""

    def __init__(self, index: int, job: Job, request: CommonRequest, tokenizer: PreTrainedTokenizerBase):
        self.index, self.job, self.request = index, job, request
        self.whole, self.has_started = Piece(index, is_first=True), False
        self.accepted, self.drafted = list[int](), list[int]()  # see accepted_log.py
        self.emitted = 0  # number of tokens of these steps
        self.text, self.echoed = "", 0  # what it wrote, including what is held back; characters of the prompt before it
        template, prompt = tokenizer.chat_template, job.request.prompt
        chat = request if isinstance(request, ChatRequest) else None
        self.callable, self.only_one = callable_tools(request), chat is not None and not chat.parallel_tool_calls
        self.must_call = chat is not None and bool(forced_tools(chat))
        is_free = chat is not None and not request.has_grammar
        self.is_harmony = is_free and is_harmony(template)
        marks = ("", "") if chat is None else reasoning_marks(template)
        self.is_open = bool(marks[1]) and job.request.reasoning == ("", marks[1])
        self.marks = marks if is_free or self.is_open else ("", "")  # a grammar allows reasoning that the prompt opens
        self.reasons = self.is_harmony or bool(self.marks[0])
        self.tools = None if self.is_harmony else new_tool_reader(request, template)
        shown = "".join(self.marks) + (self.tools.style.text if self.tools else "")
        # All special tokens are marks of harmony.
        unseen = frozenset[int]() if self.is_harmony else unseen_tokens(tokenizer, shown)
        self.marked = self.is_harmony or bool(unseen)  # special tokens mark parts of the text, so they are not skipped
        context = prompt if chat is None else answer_context(tokenizer, prompt)
        self.detokenizer = Detokenizer(tokenizer, request.skip_special_tokens and not self.marked, context)
        if request.skip_special_tokens and unseen:
            self.detokenizer.hidden = unseen

    def push(self, output: RequestOutput) -> Piece:
        piece = Piece(self.index, ids=output.tokens, finish_reason=output.finish_reason)
        texts, places = self.detokenize(output)
        reasoning, content, piece.calls = self.read("".join(texts[-1:]), output.finish_reason)
        piece.reasoning = reasoning[len(self.whole.reasoning) :]
        piece.text = content[len(self.whole.text) - self.echoed :]
        if piece.calls and piece.finish_reason == "stop":  # after "length", a call may be incomplete
            piece.finish_reason = "tool_calls"
        if self.request.top_tokens is not None and output.trace is not None:
            piece.logprobs = self.token_logprobs(output, places, output.trace, self.request.top_tokens)
        if self.request.trace:
            piece.trace = self.trace_entry(output, texts)
        if output.accepted is not None or (self.whole.ids and output.tokens):  # or prefilled again, for another drafter
            self.accepted.append(output.accepted or 0)
            self.drafted.append(min(output.depth, output.nodes - 1))
            self.emitted += len(output.tokens)
        return self.grow(piece)

    def grow(self, piece: Piece) -> Piece:
        piece.is_first, self.has_started = not self.has_started, True
        self.whole.add(piece)
        return piece

    def read(self, last: str, finish_reason: str | None) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the reasoning and the content that neither a stop string nor a mark can change any more, and at the end the
        tool calls. last: the text of the last token."""
        is_end, stops = finish_reason is not None, self.request.stop_strings
        reasoning, calls = "", list[dict[str, Any]]()
        if is_end:
            text = without_stop(self.text, stops, last, self.request.include_stop_str_in_output)
        else:
            text = self.text[: find_partial_mark(self.text, stops)]
        if self.is_harmony:
            reasoning, text, called = split_harmony(text, self.callable, is_end)
            calls = [new_call(*call) for call in called] if is_end else []
        elif self.reasons:
            reasoning, text = split_reasoning(text, self.is_open, is_end, self.marks)
        if self.tools is not None and finish_reason == "stop" and reasoning and self.marks[1] not in self.text:
            reasoning, calls = self.tools.split(reasoning, is_end)  # some models call before they end their reasoning
        elif self.tools is not None:
            text, calls = self.tools.split(text, is_end, len(self.whole.text))
            if self.must_call and finish_reason == "length":  # what is left is the start of a call
                text, calls = "", calls + self.tools.unfinished(text)
        return reasoning, text, calls[:1] if self.only_one else calls

    def detokenize(self, output: RequestOutput) -> tuple[list[str], list[tuple[int, bool]]]:
        """Return the text that each token completes, and where the token's text starts: character offset, whether first."""
        pieces, places = [], []
        for number, token in enumerate(output.tokens, start=1):
            places.append((self.echoed + len(self.text), not self.detokenizer.tokens))
            is_last = number == len(output.tokens)
            piece = "" if is_last and self.hides_eos(output) else self.detokenizer.push(token)
            piece += self.detokenizer.end() if is_last and output.finish_reason is not None else ""
            pieces.append(piece)
            self.text += piece
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
        """Return the prompt as if it were the text of the first step (of a completion)."""
        self.echoed = len(echoed.text)
        return self.grow(Piece(self.index, text=echoed.text, logprobs=echoed.logprobs))

    def trace_entry(self, output: RequestOutput, pieces: list[str]) -> dict[str, Any]:
        """Return each token's text and whether it was drafted, and the tree of the step, if it drafted one."""
        accepted = output.accepted or 0
        tokens = [{"text": text, "drafted": number < accepted} for number, text in enumerate(pieces)]
        entry: dict[str, Any] = {"tokens": tokens}
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
