"""Reasoning, separated from the answer while a text is generated, in the two formats of chat templates.

<think>reasoning</think>answer (Qwen3, QwQ, DeepSeek-R1) or other MARKS, where the prompt may already contain the first mark
<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>: OpenAI's harmony
format (cookbook.openai.com/articles/openai-harmony), whose calls are messages `to=functions.NAME` on channel commentary, or
`to=NAME` after long texts

Both functions split the whole text so far, and what they return for a longer text only adds to it.
"""

import re
from collections.abc import Collection
from typing import Any

from foredraft.inference.serve.stop_strings import find_partial_mark

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A and R7B
    ("<mm:think>", "</mm:think>"),  # MiniMax-M3
)
HARMONY = "<|channel|>analysis", "<|channel|>final<|message|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|endoftext|>")  # end a message's text
END = re.compile("|".join(map(re.escape, ENDS)))
CHANNEL, RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"to=(?:functions\.)?([\w./-]+)")


def is_harmony(template: Any) -> bool:
    return MESSAGE in str(template) and "<|channel|>" in str(template)


def reasoning_marks(template: Any) -> tuple[str, str]:
    """Return the marks around the reasoning of a template's target; empty texts if it has none."""
    return next((pair for pair in MARKS if pair[1] in str(template)), ("", ""))


def pending_marks(template: Any, prompt: str) -> tuple[str, str]:
    """Return the marks of the reasoning that an answer has still to write, in which stop strings do not count. prompt: its
    end, which may have the first mark."""
    opening, closing = HARMONY if is_harmony(template) else reasoning_marks(template)
    return "" if prompt.rstrip().endswith(opening) else opening, closing


def split_reasoning(text: str, is_open: bool, is_end: bool, marks: tuple[str, str] = MARKS[0]) -> tuple[str, str]:
    """Return the reasoning and the content that are certain. is_open: the prompt ends with the opening mark, which some
    models repeat."""
    start, (opening, closing) = text.lstrip(), marks
    if start.startswith(opening):
        text, is_open = start[len(opening) :], True
    elif opening.startswith(start) and not is_end:
        return "", ""
    if not is_open:
        return "", text
    reasoning, mark, content = text.partition(closing)
    if not mark and not is_end:
        reasoning = reasoning[: find_partial_mark(reasoning, [closing])]
    return reasoning.strip(), content.lstrip()


def split_harmony(text: str, tools: Collection[str], is_end: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Return the reasoning and the content that are certain, and complete calls: name and arguments. tools: those that may be
    called. Other calls are content, and so is a call that was cut off, and a text without marks."""
    reasoning, content, calls = "", "", list[tuple[str, str]]()
    header, mark, text = text.partition(MESSAGE)  # it starts in the header of the assistant's message
    if not mark and is_end and "<|" not in header:
        content = header
    while mark:
        end = END.search(text)
        at = end.start() if end else len(text) if is_end else find_partial_mark(text, ENDS)
        body, channel, recipient = text[:at], CHANNEL.search(header), RECIPIENT.search(header)
        if recipient and recipient[1] in tools:
            if end:
                calls.append((recipient[1], body if body.strip() else "{}"))
            elif is_end:
                content += body
        elif channel and channel[1] == "analysis":
            reasoning += body
        else:
            content += body
        header, mark, text = text[at:].partition(MESSAGE)
    return reasoning, content, calls
