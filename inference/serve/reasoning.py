"""Thoughts, told apart from the answer as a text comes, in the two ways that chat templates know.

<think>thoughts</think>answer (Qwen3, QwQ, DeepSeek-R1), of which the prompt may hold the first mark already
<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>: OpenAI's harmony
format (cookbook.openai.com/articles/openai-harmony), whose calls are messages `to=functions.NAME` on channel commentary
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, Protocol

OPENING, CLOSING = "<think>", "</think>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|endoftext|>")  # of a message's text
TAIL = 16  # tokens at a prompt's end that are searched for the first mark


class ThoughtReader(Protocol):
    calls: list[tuple[str, str]]  # the name of a function and its arguments, as they were written

    def push(self, text: str) -> tuple[str, str]:
        """What has become certain: of the thoughts, and of the answer."""
        ...

    def end(self) -> tuple[str, str]: ...


def is_harmony(template: Any) -> bool:
    return MESSAGE in str(template) and "<|channel|>" in str(template)


def thought_reader(
    template: Any, prompt: Sequence[int], decode: Any, tools: Collection[str] | None = None
) -> ThoughtReader | None:
    """For an answer to this prompt; None where the template knows no thoughts. decode: ids to a text with its marks. tools:
    see `HarmonyReader`."""
    if is_harmony(template):
        return HarmonyReader(tools)
    if CLOSING not in str(template):
        return None
    return ThinkReader(decode(prompt[-TAIL:]).rstrip().endswith(OPENING))


def beginning(text: str, marks: Sequence[str]) -> int:
    """Where at the end of a text one of these may begin."""
    starts = range(max(0, len(text) - max(map(len, marks), default=0) + 1), len(text))
    return next((at for at in starts if any(mark.startswith(text[at:]) for mark in marks)), len(text))


class ThinkReader:
    def __init__(self, thinking: bool):
        """thinking: the prompt ends with the opening mark, which some models write again."""
        self.calls: list[tuple[str, str]] = []
        self.held, self.state, self.unmarked = "", "begin", "thoughts" if thinking else "content"
        self.shown = False  # has a thought been?

    def push(self, text: str) -> tuple[str, str]:
        self.held += text
        thoughts = content = ""
        if self.state == "begin":
            start = self.held.lstrip()
            if start.startswith(OPENING):
                self.held, self.state = start[len(OPENING) :], "thoughts"
            elif not OPENING.startswith(start):
                self.state = self.unmarked
        if self.state == "thoughts":
            thoughts = self.take_thoughts()
        if self.state == "after":  # blank lines between both are nobody's
            self.held = self.held.lstrip()
            self.state = "content" if self.held else "after"
        if self.state == "content":
            content, self.held = self.held, ""
        return thoughts, content

    def take_thoughts(self) -> str:
        self.held = self.held if self.shown else self.held.lstrip()
        at = self.held.find(CLOSING)
        found = self.held[: at if at >= 0 else beginning(self.held, [CLOSING])].rstrip()
        if at >= 0:
            self.held, self.state = self.held[at + len(CLOSING) :], "after"
        else:
            self.held = self.held[len(found) :]
        self.shown = self.shown or bool(found)
        return found

    def end(self) -> tuple[str, str]:
        rest, self.held = self.held, ""
        self.state = self.unmarked if self.state == "begin" else self.state
        if self.state == "thoughts":
            return (rest if self.shown else rest.lstrip()).rstrip(), ""
        return "", rest if self.state == "content" else ""


class HarmonyReader:
    def __init__(self, tools: Collection[str] | None = None):
        """tools: those that may be called; None: any. Calls of others are content."""
        self.calls: list[tuple[str, str]] = []
        self.tools = tools
        self.held, self.header = "", True  # it begins in the header of the assistant's message
        self.channel, self.recipient, self.arguments = "final", "", ""

    def push(self, text: str) -> tuple[str, str]:
        self.held += text
        thoughts = content = ""
        while True:
            if self.header:
                at = self.held.find(MESSAGE)
                if at < 0:
                    return thoughts, content
                self.open(self.held[:at])
                self.held = self.held[at + len(MESSAGE) :]
            found = [at for mark in ENDS if (at := self.held.find(mark)) >= 0]
            at = min(found) if found else beginning(self.held, ENDS)
            part, self.held = self.held[:at], self.held[at:]
            if self.recipient:
                self.arguments += part
            elif self.channel == "analysis":
                thoughts += part
            else:
                content += part
            if not found:
                return thoughts, content
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
        """A text without a mark is an answer. A call that no mark ends was cut, and is content."""
        rest, self.held = self.held, ""
        if not self.header:
            thinks = self.channel == "analysis" and not self.recipient
            return (rest, "") if thinks else ("", self.arguments + rest)
        return "", "" if "<|" in rest else rest
