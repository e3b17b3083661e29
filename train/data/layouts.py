"""What a row says: a conversation, in one of the layouts that data sets have, or why it is none.

A conversation is a list of {"role", "content"} with roles system, user, assistant, tool. It is found in ShareGPT's,
UltraChat's and OpenAI's layouts, and in pairs of a prompt and a response.
"""

from typing import Any

Message = dict[str, str]

# Tried in this order, so a set with both `prompt` and `messages` (UltraChat-200k) is read from `messages`.
LISTS = ("messages", "conversations", "conversation", "turns", "data")
PROMPTS = ("prompt", "question", "instruction", "problem", "query")
RESPONSES = ("response", "answer", "output", "completion", "solution")
TEXTS = ("text", "content", "code")
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "developer": "system"}


# A model's thoughts, as engines and templates call them (DeepSeek and Qwen, vLLM, gpt-oss).
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class SkippedRow(ValueError):
    """Why a row is not used: a reason to count by."""


def pick(row: dict, named: str | None, usual: tuple[str, ...]) -> str | None:
    if named is not None:
        return named if named in row else None
    return next((name for name in usual if name in row), None)


def pair(row: dict, prompt: str, response: str | None) -> list[Message]:
    """A prompt and its answer; either may be a list of messages (TRL's layout). Without an answer: a prompt alone."""
    question, answer = row[prompt], row[response] if response else None
    messages = turns(question) if isinstance(question, list) else [{"role": "user", "content": content(question)}]
    if prompt == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():  # Alpaca
        messages[0]["content"] += "\n\n" + content(row["input"])
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.insert(0, {"role": "system", "content": content(row["system"])})
    if isinstance(answer, list):
        return messages + turns(answer)
    return messages + ([{"role": "assistant", "content": content(answer)}] if answer is not None else [])


def turns(items: list, all_user: bool = False) -> list[Message]:
    """all_user: plain strings are all the user's; else they take turns, the user first."""
    if not items:
        raise SkippedRow("a conversation without a turn")
    messages = []
    for number, item in enumerate(items):
        if isinstance(item, str):
            item = {"role": "user" if all_user or number % 2 == 0 else "assistant", "content": item}
        if not isinstance(item, dict):
            raise SkippedRow("a turn that is neither text nor a message")
        if item.get("tool_calls"):
            raise SkippedRow("tool calls")
        named = next((item[name] for name in ("role", "from") if isinstance(item.get(name), str)), None)
        role = ROLES.get(named.lower()) if named is not None else None
        if role is None:
            raise SkippedRow("a role that is not known" if named is not None else "a turn without a role")
        text = next((item[name] for name in ("content", "value") if item.get(name) is not None), None)
        if role == "system" and text == "":
            continue
        message = {"role": role, "content": content(text)}
        if thoughts := next((item[name] for name in THOUGHTS if isinstance(item.get(name), str)), None):
            message["reasoning_content"] = unicode(thoughts)
        messages.append(message)
    return messages


def cut_off(messages: list[Message], reasons: Any) -> list[Message]:
    """The messages, with `finish_reason` at each answer that ended at its limit of tokens. reasons: of the answers, as
    regeneration writes them."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if isinstance(reasons, list) and len(reasons) == len(answers):
        for message, reason in zip(answers, reasons, strict=True):
            if reason == "length":
                message["finish_reason"] = reason
    return messages


def content(value: Any) -> str:
    """Text, or OpenAI's list of text parts."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, dict) and part.get("type") == "text" for part in value)
    ):
        value = "".join(part["text"] for part in value if isinstance(part.get("text"), str))
    if value is None or (isinstance(value, str) and not value.strip()):
        raise SkippedRow("an empty turn")
    if not isinstance(value, str):
        raise SkippedRow("a turn that is not text")
    return unicode(value)


def unicode(text: str) -> str:
    """JSON may spell half of a character (a lone surrogate), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SkippedRow("half a character (a lone surrogate)") from None
    return text
