"""Prepare messages for a chat template: earlier tool calls as clients send them and as data sets store them.

OpenAI's protocol has `content: null` next to calls, arguments as a JSON string, and ids of any form. Templates are less
tolerant, and each differs, so `template_needs` renders a small conversation to find out what a template supports.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]
NINE = re.compile("[a-zA-Z0-9]{9}")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning
SYSTEM = ("system", "developer")
# What templates raise for messages that they do not take, on purpose or as `'str' object has no attribute 'items'`.
REFUSALS = (AttributeError, LookupError, RecursionError, TemplateError, TypeError, ValueError)
REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")  # types of a content's parts


class TemplateNeeds(NamedTuple):
    """Describe what a chat template requires of messages."""

    ids: str = "any"  # "nine": of letters and digits (Mistral); "numbered": functions.NAME:0 (Kimi-K2)
    one_call: bool = False  # per message (Llama 3, gpt-oss)
    text_arguments: bool = False  # a JSON string instead of an object (DeepSeek-V3.1)
    no_content: str | None = ""  # the content of a message that only has calls
    one_text: bool = False  # next to calls: reasoning or content, not both (gpt-oss)
    object_arguments: bool = False  # it cannot show arguments that are broken JSON (Qwen3.5, GLM)
    one_system: bool = False  # message, at the start: others are dropped (gpt-oss) or refused (Qwen3.5, Mistral)
    turns: bool = False  # of user and assistant, which alternate (Mistral, Gemma 3)


def normalize_messages(messages: Sequence[Mapping[str, Any]], template: str) -> list[Message]:
    """Return messages in this template's form. Raises ValueError for `tool_calls` that are not calls of functions."""
    return arrange(messages, template_needs(template))


@lru_cache(64)
def template_needs(template: str) -> TemplateNeeds:
    """Return what a template needs, found by rendering conversations with calls and with system messages."""
    said = (("system", "s_a"), ("user", "q"), ("assistant", "c"), ("system", "s_b"), ("user", "q"))
    text = rendered([{"role": role, "content": content} for role, content in said], template)
    needs, call = call_needs(template), {"function": {"name": "f", "arguments": "broken_x"}}
    calling = arrange([{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}], needs)
    is_shown, question = "broken_x" in rendered(calling, template), [{"role": "user", "content": "q"}]
    needs = needs._replace(turns=bool(rendered(question, template)) and not rendered(question * 2, template))
    return needs._replace(object_arguments=not is_shown, one_system="s_a" not in text or "s_b" not in text)


def call_needs(template: str) -> TemplateNeeds:
    """Return the first needs with which the template shows two calls and their arguments; the defaults if it shows none."""
    ids = "numbered" if "<|tool_call_argument_begin|>" in template else "any"
    for choice in itertools.product((ids, "nine"), (False, True), (False, True)):
        needs = TemplateNeeds(*choice)
        if text := shown_calls(template, needs):
            without = shown_calls(template, needs._replace(no_content=None))
            if without and len(without) < len(text):  # these write an answer unless its content is none (DeepSeek-R1)
                needs = needs._replace(no_content=None)
            both = dict.fromkeys((*REASONING, "content"), "c")
            return needs._replace(one_text=not shown_calls(template, needs, **both))
    return TemplateNeeds()


def take_reasoning(content: Any) -> tuple[str, Any]:
    """Return the reasoning among the parts of an answer (Anthropic, Mistral, the AI SDK), and what is left of the content."""
    if not isinstance(content, list):
        return "", content
    parts = [
        part
        for part in content
        if isinstance(part, dict) and (part.get("type") in REASONING_PARTS or isinstance(part.get("thinking"), str))
    ]
    texts = [part.get("thinking") or part.get("reasoning") or part.get("text") or "" for part in parts]
    texts = [part.get("text") if isinstance(part, dict) else part for text in texts for part in as_list(text)]
    return "".join(text for text in texts if isinstance(text, str)), [part for part in content if part not in parts]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def in_turns(messages: list[Message], template: str) -> list[Message]:
    """Return messages in which user and assistant alternate, if the template requires it and does not show them unchanged.
    Texts of one role are joined. A turn that is missing, such as that after a tool's result, becomes an empty one. Messages
    that the template refuses in any case are unchanged, so that its error is about what the client sent."""
    if not template_needs(template).turns:
        return messages
    text = rendered(messages, template)
    if text and all(str(message["content"] or "").strip() in text for message in messages):
        return messages
    turns, turn = list[Message](), "user"
    for message in messages:
        role, last = message["role"], turns[-1] if turns else {}
        if role in ("user", "assistant") and "tool_calls" not in message:
            if role != turn and last.get("role") == role and "tool_calls" not in last:
                turns[-1] = last | {"content": "\n\n".join(filter(None, (last["content"], message["content"])))}
                continue
            turns += [] if role == turn else [{"role": turn, "content": ""}]
            turn = "assistant" if role == "user" else "user"
        turns.append(message)
    turns += [] if any(message["role"] not in SYSTEM for message in turns) else [{"role": turn, "content": ""}]
    return turns if rendered(turns, template) else messages


def as_parts(messages: Sequence[Mapping[str, Any]], template: str) -> list[Message]:
    """Return messages whose texts are lists of parts, for a template that reads nothing else; other messages unchanged."""
    if not reads_parts_only(template):
        return [dict(message) for message in messages]
    texts = [message.get("content") for message in messages]
    parts = [[{"type": "text", "text": text}] if isinstance(text, str) and text else text for text in texts]
    return [{**message, "content": part} for message, part in zip(messages, parts)]


@lru_cache(64)
def reads_parts_only(template: str) -> bool:
    """Return whether the template drops a text that is not in a list of parts (LLaVA, Idefics)."""
    shown = ["q_a" in rendered([{"role": "user", "content": content}], template) for content in ("q_a", PARTS)]
    return shown == [False, True]


def reasoning_switches(template: str) -> list[str]:
    """Return the variables with which a request turns reasoning on and off (the second one is DeepSeek-V3.1's)."""
    asked = [{"role": "user", "content": "q"}]
    return [
        name
        for name in ("enable_thinking", "thinking")
        if rendered(asked, template, None, **{name: True}) != rendered(asked, template, None, **{name: False})
    ]


PARTS = [{"type": "text", "text": "q_a"}]
FULL_TOOL = {"description": "", "parameters": {"type": "object", "properties": {}}}


def normalize_tools(tools: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return tools in this template's form: some refuse one without a description, or without parameters."""
    full = {} if shows_tools(template, full=False) else FULL_TOOL
    functions = [{name: value for name, value in tool["function"].items() if value is not None} for tool in tools]
    return [{**tool, "function": {**function, **full, **function}} for tool, function in zip(tools, functions)]


@lru_cache(64)
def shows_tools(template: str, full: bool = True) -> bool:
    """Return whether the template writes the tools that it gets. full: with everything that a tool may have."""
    tool = {"type": "function", "function": {"name": "f_a", **(FULL_TOOL if full else {})}}
    return "f_a" in rendered([{"role": "user", "content": "q"}], template, [tool])


def shown_calls(template: str, needs: TemplateNeeds, **message: str) -> str:
    """Render a conversation with two calls; return "" if it is refused, or if a call is lost or written as Python."""
    calls = [{"id": f"call-{name}", "function": {"name": name, "arguments": {"key_x": "y"}}} for name in ("f_a", "f_b")]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "z"} for call in calls]
    asked: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls, **message}]
    conversation = arrange([*asked, *results], needs)
    text = rendered(conversation, template)
    complete = "f_a" in text and "f_b" in text and text.count("key_x") >= 2
    return text if complete and "{'" not in text and "None" not in text else ""


def rendered(messages: list[Message], template: str, tools: list[dict] | None = None, **facts: bool) -> str:
    """Return the text, "" if the template refuses the messages."""
    marks = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<s>")
    try:
        texts, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=template, add_generation_prompt=True, **marks, **facts
        )
    except REFUSALS:
        return ""
    return texts[0]


def arrange(messages: Sequence[Mapping[str, Any]], needs: TemplateNeeds) -> list[Message]:
    cleaned = [clean(message, needs) for message in messages]
    if needs.one_system:
        cleaned = with_one_system(cleaned)
    groups = map(in_order, answers(cleaned))
    arranged = [message for group in groups for message in (split(group) if needs.one_call else group)]
    if needs.ids != "any":
        name_calls(arranged, needs.ids)
    return arranged


def with_one_system(messages: list[Message]) -> list[Message]:
    """Join all system messages at the start of the conversation."""
    said = [message for message in messages if message.get("role") in SYSTEM]
    if not said or not all(isinstance(message["content"], str) for message in said):
        return messages
    joined = said[0] | {"content": "\n\n".join(message["content"] for message in said)}
    return [joined, *(message for message in messages if message.get("role") not in SYSTEM)]


def clean(message: Mapping[str, Any], needs: TemplateNeeds) -> Message:
    """Remove null values, and write calls as the template requires. A refusal counts as an answer. Older clients name a
    call `function_call`, and the role of its result `function`."""
    message = {name: value for name, value in message.items() if value is not None}
    old, refusal = message.pop("function_call", None), message.pop("refusal", None)
    calls = message.pop("tool_calls", None) or (old and [{"function": old}])
    if message.get("role") == "function":
        message["role"] = "tool"
    if message.get("role") == "tool" and not message.get("tool_call_id"):
        message.pop("tool_call_id", None)
    if refusal and not message.get("content"):
        message["content"] = refusal
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls is {str(calls)[:40]!r}, not a list of calls")
        message["tool_calls"] = [clean_call(call, needs.text_arguments) for call in calls]
    if calls and needs.one_text and message.get("content") and any(message.get(name) for name in REASONING):
        content = message.pop("content")
        message |= {name: f"{message[name]}\n\n{content}" for name in REASONING if message.get(name)}
    if not message.get("content"):
        message["content"] = needs.no_content if calls else ""
    return message


def clean_call(call: Any, text_arguments: bool) -> dict[str, Any]:
    """Return a call with parsed arguments, {} if they are missing or empty. Invalid JSON stays text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("tool_calls has a call without the name of a function")
    arguments = parsed_arguments(function.get("arguments"))
    if text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    other_keys = {
        name: value for name, value in call.items() if value not in (None, "") and name not in ("name", "arguments")
    }
    # The name comes first: Mistral's template writes the whole object.
    return {"type": "function", **other_keys, "function": {"name": function["name"], "arguments": arguments}}


def parsed_arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return arguments
    return {} if arguments in (None, []) else arguments  # PHP writes an empty object as a list


def answers(messages: list[Message]) -> Iterator[list[Message]]:
    """Group each message with the results of tools that follow it."""
    group: list[Message] = []
    for message in messages:
        if message.get("role") != "tool" and group:
            yield group
            group = []
        group.append(message)
    if group:
        yield group


def in_order(group: list[Message]) -> list[Message]:
    """Sort results like their calls: most templates show them without ids."""
    message, *results = group
    ids = [str(call.get("id")) for call in message.get("tool_calls", [])]
    if any(str(result.get("tool_call_id")) not in ids for result in results):
        return group
    return [message, *sorted(results, key=lambda result: ids.index(str(result.get("tool_call_id"))))]


def split(group: list[Message]) -> list[Message]:
    """Spread several calls of one message over several messages, each with its result."""
    message, *results = group
    calls = message.get("tool_calls", [])
    if len(calls) < 2:
        return group
    parts = []
    for call in calls:
        parts.append({**message, "tool_calls": [call]})
        results_of_call = [
            number for number, result in enumerate(results) if result.get("tool_call_id") in (None, call.get("id"))
        ]
        parts += [results.pop(number) for number in results_of_call[:1]]
        rest = {name: message[name] for name in ("role", "weight") if name in message}
        message = rest | {"content": message["content"] and ""}
    return parts + results


def name_calls(messages: list[Message], ids: str) -> None:
    """Replace the ids of calls and their results, in place, by those that the template requires. A result without one
    answers the next call, and so does one of several with the same id."""
    number, names, waiting = 0, dict[str, str](), dict[str, str]()
    for message in messages:
        waiting = {} if "tool_calls" in message else waiting
        for call in message.get("tool_calls", []):
            given = str(call.get("id", number))
            call["id"] = names[given] = template_id(given, call["function"]["name"], number, ids)
            waiting[call["id"]] = given
            number += 1
        if message.get("role") == "tool":
            given = str(message.get("tool_call_id"))
            name = next((name for name, other in waiting.items() if other == given), names.get(given))
            name = name or next(iter(waiting), "") or template_id(given, "unknown", number, ids)
            message["tool_call_id"] = name
            waiting.pop(name, None)


def template_id(given: str, name: str, number: int, ids: str) -> str:
    if ids == "numbered":
        return f"functions.{name}:{number}"
    return given if NINE.fullmatch(given) else hashlib.sha256(given.encode()).hexdigest()[:9]
