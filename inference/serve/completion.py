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
from foredraft.inference.serve.logprobs import TokenLogprob, chat_logprobs, completion_logprobs
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest, CompletionRequest
from foredraft.inference.serve.reasoning import CLOSING, OPENING, HarmonyReader, ThoughtReader, thought_reader
from foredraft.inference.serve.scoring import Scored
from foredraft.inference.serve.tools import ToolReader, callable_tools, new_call, reader
from foredraft.inference.serve.worker import Failed, Job, Worker
from foredraft.inference.text import answer_context, spelling_of
from foredraft.inference.trace import Trace


class Piece(NamedTuple):
    """What one step added to a choice."""

    choice: int
    ids: list[int]
    reasoning: str
    text: str
    logprobs: list[TokenLogprob]
    trace: dict[str, Any] | None
    finish_reason: str | None
    calls: list[dict[str, Any]]  # of tools, all at once at the end


class Echo(NamedTuple):
    """A prompt that stands before its texts, without half a character at its end, which a text may complete."""

    text: str
    logprobs: list[TokenLogprob]  # empty where they were not asked for

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        tokens: Sequence[int],
        scored: Sequence[Scored],
        skip_special_tokens: bool = True,
    ) -> "Echo":
        detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt=())
        if not scored:
            text = detokenizer.decode(tokens)
            return cls(text[: len(text) - len(Detokenizer(tokenizer, skip_special_tokens, tokens).pending())], [])
        text, places = "", []
        for token, one in zip(tokens, scored, strict=False):
            places.append(TokenLogprob(token, *one, len(text), not detokenizer.tokens))
            text += detokenizer.push(token)
        return cls(text, places)


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
        unseen = frozenset[int]() if harmony else unseen_tokens(tokenizer, marks)
        self.marked = harmony or bool(unseen)  # by special tokens, which are not skipped then
        prompt: Sequence[int] = job.request.prompt
        if isinstance(asked, ChatRequest):
            prompt = answer_context(tokenizer, prompt)
        self.detokenizer = Detokenizer(tokenizer, asked.skip_special_tokens and not self.marked, prompt)
        if asked.skip_special_tokens and unseen:
            self.detokenizer.hidden = unseen
        self.stops = StopStrings(asked.stop_strings, asked.include_stop_str_in_output)
        self.length = 0  # of its text, in characters, with what is held back
        self.calls: list[dict[str, Any]] = []
        self.reasoning, self.text, self.logprobs = "", "", list[TokenLogprob]()
        self.ids, self.accepted, self.drafted = list[int](), list[int](), list[int]()  # see accepted_log.py
        self.gained = self.forwards = 0  # in the steps after the prompt's
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> Piece:
        pieces, places = self.spell(output)
        if output.finish_reason is None:
            text = self.stops.push("".join(pieces))
        else:
            text = self.stops.end("".join(pieces[:-1]), "".join(pieces[-1:]))
        self.finish_reason = output.finish_reason
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
        logprobs = []
        if self.asked.top_tokens is not None and output.trace is not None:
            logprobs = self.token_logprobs(output, places, output.trace, self.asked.top_tokens)
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

    def spell(self, output: RequestOutput) -> tuple[list[str], list[tuple[int, bool]]]:
        """The text that each token completes, and where its own starts: after how many characters, and whether first."""
        pieces, places = [], []
        for number, token in enumerate(output.tokens, start=1):
            places.append((self.length, not self.detokenizer.tokens))
            hidden = number == len(output.tokens) and self.hides_end(output)
            pieces.append("" if hidden else self.detokenizer.push(token))
            self.length += len(pieces[-1])
        if output.finish_reason is not None and pieces:
            pieces[-1] += self.detokenizer.end()
        return pieces, places

    def hides_end(self, output: RequestOutput) -> bool:
        """Is its last token an end token, which is not part of the text? A special one may mark the end of a call."""
        if output.finish_reason != "stop" or self.asked.include_stop_str_in_output:
            return False
        special = self.detokenizer.spelling.special if self.marked else frozenset[int]()
        return any(token in self.job.request.eos_token_ids - special for token in output.tokens[-1:])

    def token_logprobs(
        self, output: RequestOutput, places: list[tuple[int, bool]], trace: Trace, top: int
    ) -> list[TokenLogprob]:
        """Of the new tokens, less an end token that is not part of the text. Who counts tokens is told of it: evaluation
        harnesses with the prompt's, trainers with their ids."""
        asked, count = self.asked, len(output.tokens)
        counted = asked.return_token_ids or (isinstance(asked, CompletionRequest) and asked.echo)
        if not counted and output.finish_reason == "stop" and not asked.include_stop_str_in_output:
            count -= output.tokens[-1] in self.job.request.eos_token_ids
        rows = zip(output.tokens[:count], trace.logprobs, trace.top, places, strict=False)
        return [TokenLogprob(token, logprob, best[:top], *place) for token, logprob, best, place in rows]

    def echo(self, echoed: Echo) -> Piece:
        """The prompt, as if it were the first step's text."""
        self.text, self.logprobs, self.length = echoed.text, list(echoed.logprobs), len(echoed.text)
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
                "tokens": [self.detokenizer.spelling.spelled(token)[0] for token in output.trace.tokens],
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
        self.spelling = spelling_of(tokenizer)
        self.worker, self.asked, self.model, self.prompt_tokens = worker, asked, model, prompt_tokens
        self.choices = {job: Choice(index, job, asked, tokenizer) for index, job in enumerate(jobs)}
        self.outputs = jobs[0].outputs
        self.prompts = [job.request.prompt for job in jobs]
        self.told_prompt = set[int]()  # choices whose chunks have told theirs
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
            if isinstance(output, Failed):
                self.failure = output
                raise output
            if self.first_token is None:
                self.first_token = time.monotonic() - self.began
            yield self.choices[job].push(output)

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
        return {"prompt_token_ids": self.prompts[0]} if self.chat and self.asked.return_token_ids else {}

    def token_ids(self, choice: Choice) -> dict[str, Any]:
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": choice.ids, **({} if self.chat else {"prompt_token_ids": choice.job.request.prompt})}

    def message(self, choice: Choice) -> dict[str, Any]:
        if not self.chat:
            return {"text": choice.text}
        message = {"role": "assistant", "content": choice.text or None if choice.calls else choice.text}
        thoughts = {} if choice.thoughts is None else reasoning_fields(choice.reasoning or None)
        return {"message": {**message, **thoughts, **({"tool_calls": choice.calls} if choice.calls else {})}}

    def delta(self, piece: Piece) -> dict[str, Any]:
        if not self.chat:
            return {"text": piece.text}
        thoughts = reasoning_fields(piece.reasoning) if piece.reasoning else {}
        content = {"content": piece.text} if piece.text or not (thoughts or piece.calls) else {}
        calls = [{"index": number, **call} for number, call in enumerate(piece.calls)]
        return {"delta": {**thoughts, **content, **({"tool_calls": calls} if calls else {})}}

    def logprobs_field(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if self.asked.top_tokens is None:
            return None
        form = chat_logprobs if self.chat else completion_logprobs
        return form(self.spelling, logprobs, self.asked.return_tokens_as_token_ids)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """What is streamed: roles first, then what each step added, and the usage where it was asked for. Raises Failed."""
        envelope = self.envelope("chat.completion.chunk" if self.chat else "text_completion")
        options = self.asked.stream_options
        counted = options is not None and options.include_usage

        def chunk(part: dict[str, Any]) -> dict[str, Any]:
            usage = self.usage() if options is not None and options.continuous_usage_stats else None
            return {**envelope, **({"usage": usage} if counted else {}), "choices": [part]}

        if self.chat:
            for choice in self.choices.values():
                delta = {"role": "assistant", "content": ""}
                part = {"index": choice.index, "delta": delta, "finish_reason": None}
                yield chunk(part) | (self.prompt_ids() if choice.index == 0 else {})
        for piece in self.echoed:
            yield chunk(self.part(piece))
        async for piece in self.pieces():
            shown = piece.text or piece.reasoning or piece.logprobs or piece.trace or piece.finish_reason
            if not (shown or self.asked.return_token_ids):
                continue  # what it added is held back
            yield chunk(self.part(piece)) | ({"trace": piece.trace} if piece.trace else {})
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
        ids: dict[str, Any] = {"token_ids": piece.ids} if self.asked.return_token_ids else {}
        if ids and not self.chat and piece.choice not in self.told_prompt:
            self.told_prompt.add(piece.choice)
            ids["prompt_token_ids"] = self.prompts[piece.choice]
        return {
            "index": piece.choice,
            **self.delta(piece),
            "logprobs": self.logprobs_field(piece.logprobs),
            "finish_reason": piece.finish_reason,
            **ids,
        }


def reasoning_fields(text: str | None) -> dict[str, Any]:
    """By both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


def unseen_tokens(tokenizer: PreTrainedTokenizerBase, marks: str) -> frozenset[int]:
    """The special tokens that are no part of an answer's text, where others of them are its marks; else none."""
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    unseen = frozenset(number for number, text in special.items() if text not in marks)
    return unseen if len(unseen) < len(special) else frozenset()
