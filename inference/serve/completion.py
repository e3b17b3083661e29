"""An answer as it grows, one choice per text, in OpenAI's words. `usage` says the acceptance length too."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from foredraft.inference.engine import RequestOutput
from foredraft.inference.serve.detokenizer import Detokenizer, StopStrings
from foredraft.inference.serve.limits import error_body
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest, CompletionRequest
from foredraft.inference.serve.reasoning import CLOSING, OPENING, HarmonyReader, ThoughtReader, thought_reader
from foredraft.inference.serve.scoring import Scored
from foredraft.inference.serve.tools import ToolReader, callable_tools, new_call, reader
from foredraft.inference.serve.worker import Failed, Job, Worker
from foredraft.inference.trace import Trace


class Piece(NamedTuple):
    """What one step added to a choice."""

    choice: int
    ids: list[int]
    reasoning: str
    text: str
    logprobs: list[dict[str, Any]]  # an entry per token, as chat completions have them
    trace: dict[str, Any] | None
    finish_reason: str | None
    calls: list[dict[str, Any]]  # of tools, all at once at the end


class Echo(NamedTuple):
    """A prompt that stands before its texts."""

    text: str
    logprobs: list[dict[str, Any]]  # empty where they were not asked for

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], scored: Sequence[Scored]) -> "Echo":
        entries = [logprob_entry(tokenizer, token, *one) for token, one in zip(tokens, scored, strict=False)]
        return cls(str(tokenizer.decode(tokens, skip_special_tokens=True)), entries)


class Choice:
    """One text of an answer."""

    def __init__(self, index: int, job: Job, asked: CommonRequest, tokenizer: PreTrainedTokenizerBase):
        self.index, self.job, self.asked, self.tokenizer = index, job, asked, tokenizer
        template = tokenizer.chat_template
        self.thoughts: ThoughtReader | None = None  # a grammar's text has none
        if isinstance(asked, ChatRequest) and not asked.has_grammar:
            self.thoughts = thought_reader(template, job.request.prompt, tokenizer.decode, callable_tools(asked))
        harmony = isinstance(self.thoughts, HarmonyReader)  # which finds calls, too, and every special token is a mark
        self.tools: ToolReader | None = None if harmony else reader(asked, template)
        marks = (OPENING + CLOSING if self.thoughts else "") + (self.tools.style.text if self.tools else "")
        self.unseen = frozenset[int]() if harmony else unseen_tokens(tokenizer, marks)
        self.detokenizer = Detokenizer(tokenizer, not (harmony or self.unseen))
        self.stops = StopStrings(asked.stop_strings)
        self.calls: list[dict[str, Any]] = []
        self.reasoning, self.text, self.logprobs = "", "", list[dict[str, Any]]()
        self.ids, self.accepted, self.drafted = list[int](), list[int](), list[int]()  # see accepted_log.py
        self.gained = self.forwards = 0  # in the steps after the prompt's
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> Piece:
        pieces = ["" if token in self.unseen else self.detokenizer.push(token) for token in output.tokens]
        if output.finish_reason is not None and pieces:
            pieces[-1] += self.detokenizer.flush()
        text = self.stops.push("".join(pieces))
        if output.finish_reason is not None:
            text += self.stops.flush()
        self.finish_reason = "stop" if self.stops.stopped else output.finish_reason
        self.ids += output.tokens
        if output.accepted is not None:
            self.accepted.append(output.accepted)
            self.drafted.append(min(output.depth, output.nodes - 1))
            self.gained += len(output.tokens)
            self.forwards += output.forwards
        reasoning, text = self.read_thoughts(text)
        if self.tools is not None:
            text = self.tools.push(text)
            if self.finish_reason is not None:
                rest, self.calls = self.tools.end()
                text += rest
        if isinstance(self.asked, ChatRequest) and not self.asked.parallel_tool_calls:
            self.calls = self.calls[:1]
        if self.calls and self.finish_reason == "stop":  # after "length" there may be a call that was cut
            self.finish_reason = "tool_calls"
        self.reasoning += reasoning
        self.text += text
        logprobs = (
            [] if self.asked.top_tokens is None or output.trace is None else self.logprob_entries(output, output.trace)
        )
        self.logprobs += logprobs
        trace = self.trace_entry(output, pieces) if self.asked.trace else None
        return Piece(self.index, output.tokens, reasoning, text, logprobs, trace, self.finish_reason, self.calls)

    def read_thoughts(self, text: str) -> tuple[str, str]:
        """Of a text the thoughts and the rest; at its end also the calls that stood among them."""
        if self.thoughts is None:
            return "", text
        reasoning, text = self.thoughts.push(text)
        if self.finish_reason is not None:
            more, rest = self.thoughts.end()
            reasoning, text = reasoning + more, text + rest
            self.calls = [new_call(*call) for call in self.thoughts.calls]
        return reasoning, text

    def logprob_entries(self, output: RequestOutput, trace: Trace) -> list[dict[str, Any]]:
        """Log-probabilities of the new tokens; the end token is not part of the text. Where the prompt's are told it is told
        too: evaluation harnesses count."""
        echo = isinstance(self.asked, CompletionRequest) and self.asked.echo
        hidden = frozenset[int]() if echo else self.job.request.eos_token_ids
        shown = [token for token in output.tokens if token not in hidden]
        top = self.asked.top_tokens or 0
        return [
            logprob_entry(self.tokenizer, token, logprob, best[:top])
            for token, logprob, best in zip(shown, trace.logprobs, trace.top, strict=False)
        ]

    def echo(self, echoed: Echo) -> Piece:
        """The prompt, as if it were the first step's text."""
        self.text, self.logprobs = echoed.text, list(echoed.logprobs)
        return Piece(self.index, [], "", echoed.text, echoed.logprobs, None, None, [])

    def trace_entry(self, output: RequestOutput, pieces: list[str]) -> dict[str, Any]:
        """Each token's text and whether it was drafted; and the step's tree, where it drafted one."""
        accepted = output.accepted or 0
        entry: dict[str, Any] = {
            "tokens": [{"text": text, "drafted": number < accepted} for number, text in enumerate(pieces)],
            "forwards": output.forwards,
        }
        if output.trace is not None and output.accepted is not None:
            entry["tree"] = {
                "tokens": [self.tokenizer.decode([token]) for token in output.trace.tokens],
                "parents": output.trace.parents,
                "probabilities": [round(value, 4) for value in output.trace.probabilities],
                "accepted": output.trace.path,
            }
        return entry


class Answer:
    """All choices of a client's request. Whoever reads it calls `close` in the end."""

    def __init__(
        self,
        worker: Worker,
        jobs: Sequence[Job],
        asked: CommonRequest,
        model: str,
        prompt_tokens: int,
        echoes: Sequence[Echo] = (),
    ):
        """echoes: of each prompt, where they were asked for."""
        tokenizer = worker.target.text_tokenizer
        self.worker, self.asked, self.model, self.prompt_tokens = worker, asked, model, prompt_tokens
        self.choices = {job: Choice(index, job, asked, tokenizer) for index, job in enumerate(jobs)}
        self.outputs = jobs[0].outputs
        self.echoed = [choice.echo(echoes[choice.index // asked.n]) for choice in self.choices.values() if echoes]
        self.chat = isinstance(asked, ChatRequest)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.began, self.created = time.monotonic(), int(time.time())
        self.first_token: float | None = None  # seconds until it came
        self.failure: Failed | None = None

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises Failed."""
        while any(choice.finish_reason is None for choice in self.choices.values()):
            job, output = await self.outputs.get()
            choice = self.choices[job]
            if choice.finish_reason is not None:
                continue  # its stop string has been found
            if isinstance(output, Failed):
                self.failure = output
                raise output
            if self.first_token is None:
                self.first_token = time.monotonic() - self.began
            yield choice.push(output)
            if choice.finish_reason is not None and output.finish_reason is None:
                self.worker.cancel(job)

    def close(self) -> None:
        for job, choice in self.choices.items():
            if choice.finish_reason is None:
                self.worker.cancel(job)

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices.values())

    def usage(self) -> dict[str, Any]:
        """acceptance_length: tokens gained per target forward, the prompt's left out; null where there was none."""
        forwards = sum(choice.forwards for choice in self.choices.values())
        gained = sum(choice.gained for choice in self.choices.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "acceptance_length": gained / forwards if forwards else None,
        }

    def whole(self) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [
            {
                "index": choice.index,
                **self.message(choice),
                "logprobs": self.logprobs_field(choice.logprobs),
                "finish_reason": choice.finish_reason,
                **self.token_ids(choice),
            }
            for choice in self.choices.values()
        ]
        return {**self.envelope(kind), "choices": choices, "usage": self.usage(), **self.prompt_ids()}

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def prompt_ids(self) -> dict[str, Any]:
        """As vLLM has them: beside a chat's choices, and in each choice of a completion."""
        prompt = next(iter(self.choices)).request.prompt
        return {"prompt_token_ids": prompt} if self.chat and self.asked.return_token_ids else {}

    def token_ids(self, choice: Choice) -> dict[str, Any]:
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": choice.ids, **({} if self.chat else {"prompt_token_ids": choice.job.request.prompt})}

    def message(self, choice: Choice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
        thoughts = {} if choice.thoughts is None else {"reasoning": choice.reasoning or None}
        return {"message": {**message, **thoughts, **({"tool_calls": choice.calls} if choice.calls else {})}}

    def delta(self, piece: Piece) -> dict[str, Any]:
        if not self.chat:
            return {"text": piece.text}
        thoughts = {"reasoning": piece.reasoning} if piece.reasoning else {}
        content = {"content": piece.text} if piece.text or not (thoughts or piece.calls) else {}
        return {"delta": {**thoughts, **content, **({"tool_calls": numbered(piece.calls)} if piece.calls else {})}}

    def logprobs_field(self, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        if self.asked.top_tokens is None:
            return None
        if self.chat:
            return {"content": logprobs}
        return {
            "tokens": [one["token"] for one in logprobs],
            "token_logprobs": [one["logprob"] for one in logprobs],
            "top_logprobs": [
                None if one["logprob"] is None else {best["token"]: best["logprob"] for best in one["top_logprobs"]}
                for one in logprobs
            ],
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """What is streamed: roles first, then what each step added, and the usage where it was asked for. Raises Failed."""
        envelope = self.envelope("chat.completion.chunk" if self.chat else "text_completion")
        counted = self.asked.stream_options is not None and self.asked.stream_options.include_usage
        whole = {**envelope, "usage": None} if counted else envelope
        if self.chat:
            for choice in self.choices.values():
                delta = {"role": "assistant", "content": ""}
                part = {"index": choice.index, "delta": delta, "finish_reason": None}
                yield {**whole, "choices": [part], **(self.prompt_ids() if choice.index == 0 else {})}
        for piece in self.echoed:
            yield {**whole, "choices": [self.part(piece)]}
        async for piece in self.pieces():
            shown = piece.text or piece.reasoning or piece.logprobs or piece.trace or piece.finish_reason
            if not (shown or self.asked.return_token_ids):
                continue  # what it added is held back
            yield {**whole, "choices": [self.part(piece)], **({"trace": piece.trace} if piece.trace else {})}
        if counted:
            yield {**envelope, "choices": [], "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The chunks as they are sent. Raises Failed."""
        async for chunk in self.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def error_event(self, failed: Failed) -> str:
        return f"data: {json.dumps(error_body(str(failed), failed.status))}\n\n"

    def part(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.choice,
            **self.delta(piece),
            "logprobs": self.logprobs_field(piece.logprobs),
            "finish_reason": piece.finish_reason,
            **({"token_ids": piece.ids} if self.asked.return_token_ids else {}),
        }


def logprob_entry(
    tokenizer: PreTrainedTokenizerBase, token: int, logprob: float | None, best: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """As chat completions have it. logprob: None of a prompt's first token. best: the likeliest tokens there."""

    def named(token: int, logprob: float | None) -> dict[str, Any]:
        text = str(tokenizer.decode([token]))
        whole = None if "�" in text else list(text.encode())
        return {"token": text, "logprob": None if logprob is None else max(logprob, -9999.0), "bytes": whole}

    return {**named(token, logprob), "top_logprobs": [named(*one) for one in best]}


def unseen_tokens(tokenizer: PreTrainedTokenizerBase, marks: str) -> frozenset[int]:
    """The special tokens that are no part of an answer's text, where others of them are its marks; else none."""
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    unseen = frozenset(number for number, text in special.items() if text not in marks)
    return unseen if len(unseen) < len(special) else frozenset()


def numbered(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as they are streamed: parts of each carry its number."""
    return [{"index": number, **call} for number, call in enumerate(calls)]
