"""Reasoning, separated from the answer while a text is generated, in the two formats of chat templates.

<think>reasoning</think>answer (Qwen3, QwQ, DeepSeek-R1), where the prompt may already contain the first mark
<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>: OpenAI's harmony
format (cookbook.openai.com/articles/openai-harmony), whose calls are messages `to=functions.NAME` on channel commentary
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from foredraft.inference.serve.stop_strings import find_partial_mark

OPENING, CLOSING = "<think>", "</think>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|endoftext|>")  # end a message's text
TAIL = 16  # number of tokens at the end of a prompt that are searched for the first mark


class ReasoningReader(Protocol):
    calls: list[tuple[str, str]]  # name of a function and its arguments, as the model wrote them

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the content that have become certain."""
        ...

    def end(self) -> tuple[str, str]: ...


def is_harmony(template: Any) -> bool:
    return MESSAGE in str(template) and "<|channel|>" in str(template)


def new_reasoning_reader(
    template: Any, prompt: Sequence[int], decode: Any, tools: Collection[str] | None = None
) -> ReasoningReader | None:
    """Return a reader for an answer to this prompt; None if the template does not support reasoning. decode: converts ids to
    text with marks. tools: see `HarmonyReader`."""
    if is_harmony(template):
        return HarmonyReader(tools)
    if CLOSING not in str(template):
        return None
    return ThinkReader(decode(prompt[-TAIL:]).rstrip().endswith(OPENING))


class ThinkReader:
    def __init__(self, thinking: bool):
        """Initialize the reader. thinking: the prompt ends with the opening mark, which some models repeat."""
        self.calls: list[tuple[str, str]] = []
        self.buffer, self.state, self.unmarked = "", "start", "reasoning" if thinking else "content"
        self.shown = False  # whether some reasoning was returned

    def push(self, text: str) -> tuple[str, str]:
        self.buffer += text
        reasoning = content = ""
        if self.state == "start":
            start = self.buffer.lstrip()
            if start.startswith(OPENING):
                self.buffer, self.state = start[len(OPENING) :], "reasoning"
            elif not OPENING.startswith(start):
                self.state = self.unmarked
        if self.state == "reasoning":
            reasoning = self.take_reasoning()
        if self.state == "after":  # blank lines between reasoning and content belong to neither
            self.buffer = self.buffer.lstrip()
            self.state = "content" if self.buffer else "after"
        if self.state == "content":
            content, self.buffer = self.buffer, ""
        return reasoning, content

    def take_reasoning(self) -> str:
        self.buffer = self.buffer if self.shown else self.buffer.lstrip()
        at = self.buffer.find(CLOSING)
        found = self.buffer[: at if at >= 0 else find_partial_mark(self.buffer, [CLOSING])].rstrip()
        if at >= 0:
            self.buffer, self.state = self.buffer[at + len(CLOSING) :], "after"
        else:
            self.buffer = self.buffer[len(found) :]
        self.shown = self.shown or bool(found)
        return found

    def end(self) -> tuple[str, str]:
        rest, self.buffer = self.buffer, ""
        self.state = self.unmarked if self.state == "start" else self.state
        if self.state == "reasoning":
            return (rest if self.shown else rest.lstrip()).rstrip(), ""
        return "", rest if self.state == "content" else ""


class HarmonyReader:
    def __init__(self, tools: Collection[str] | None = None):
        """Initialize the reader. tools: names of tools that may be called; None is any. Other calls are content."""
        self.calls: list[tuple[str, str]] = []
        self.tools = tools
        self.buffer, self.header = "", True  # it starts in the header of the assistant's message
        self.channel, self.recipient, self.arguments = "final", "", ""

    def push(self, text: str) -> tuple[str, str]:
        self.buffer += text
        reasoning = content = ""
        while True:
            if self.header:
                at = self.buffer.find(MESSAGE)
                if at < 0:
                    return reasoning, content
                self.open(self.buffer[:at])
                self.buffer = self.buffer[at + len(MESSAGE) :]
            found = [at for mark in ENDS if (at := self.buffer.find(mark)) >= 0]
            at = min(found) if found else find_partial_mark(self.buffer, ENDS)
            part, self.buffer = self.buffer[:at], self.buffer[at:]
            if self.recipient:
                self.arguments += part
            elif self.channel == "analysis":
                reasoning += part
            else:
                content += part
            if not found:
                return reasoning, content
            self.close()

    def open(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"to=functions\.([\w.-]+)", header)
        self.channel, self.recipient = channel[1] if channel else "final", recipient[1] if recipient else ""
        if self.tools is not None and self.recipient not in self.tools:
            self.recipient = ""
        self.header = False

    def close(self) -> None:
        if self.recipient:
            self.calls.append((self.recipient, self.arguments if self.arguments.strip() else "{}"))
        self.recipient, self.arguments, self.header = "", "", True

    def end(self) -> tuple[str, str]:
        """Return the rest. A text without marks is content, and so is a call without an end, which was cut off."""
        rest, self.buffer = self.buffer, ""
        if not self.header:
            thinks = self.channel == "analysis" and not self.recipient
            return (rest, "") if thinks else ("", self.arguments + rest)
        return "", "" if "<|" in rest else rest
