"""Tool calls: read out of a text in the two formats that templates announce, and forced by a grammar.

Hermes (github.com/NousResearch/Hermes-Function-Calling; also Qwen2.5 and Qwen3):
<tool_call>{"name": ..., "arguments": {...}}</tool_call>
Llama 3.1 to 3.3 (its model card's JSON-based calling): {"name": ..., "parameters": {...}} as the whole answer
Of another template's model, calls that it chose itself stay content; forced ones are bare JSON in Hermes' words.
"""

import json
import re
import uuid
from typing import Any, NamedTuple

from foredraft.inference.grammar import JSON_OPTIONS, Grammar, Grammars
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest, NamedTool, Tool


class ToolFormat(NamedTuple):
    opening: str
    closing: str
    arguments: str  # the key of a call's arguments


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolFormat("", "", "parameters")
BARE = ToolFormat("", "", "arguments")


def format_of(template: Any) -> ToolFormat | None:
    """The format that a chat template tells its model to call in; None for others."""
    text = str(template)
    if "<tool_call>" in text and "arguments" in text and "<function=" not in text and "<arg_key>" not in text:
        return HERMES
    return LLAMA if "dictionary of argument name and its value" in text else None


def forced(asked: ChatRequest) -> list[Tool]:
    """The tools one of which must be called; none where the model is free."""
    if isinstance(asked.tool_choice, NamedTool):
        return [tool for tool in asked.tools or [] if tool.function.name == asked.tool_choice.function.name]
    return list(asked.tools or []) if asked.tool_choice == "required" else []


def reader(asked: CommonRequest, template: Any) -> "ToolReader | None":
    """What finds the calls in one text of the answer; None where there can be none."""
    if not isinstance(asked, ChatRequest) or not asked.tools or asked.tool_choice == "none":
        return None
    found = format_of(template) or (BARE if forced(asked) else None)
    return None if found is None else ToolReader(found, [tool.function.name for tool in asked.tools])


def grammar(asked: CommonRequest, template: Any, grammars: Grammars) -> Grammar | None:
    """What an answer must follow: calls of the forced tools, or its response_format, beside which tools may be called as
    well. Raises ValueError as `Grammars` does."""
    found, wanted = format_of(template), asked.response_format
    schema: dict[str, Any] | None = None
    if wanted is not None and wanted.type != "text":
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.definition
    if isinstance(asked, ChatRequest) and asked.tools:
        many = asked.parallel_tool_calls and not isinstance(asked.tool_choice, NamedTool)
        if forced(asked):
            return grammars.lark(call_rules(forced(asked), found or BARE, many))
        if schema is not None and found is not None and asked.tool_choice != "none":
            return grammars.lark(call_rules(asked.tools, found, many, schema))
    return None if schema is None else grammars.json_schema(schema)


def call_rules(tools: list[Tool], style: ToolFormat, many: bool, schema: dict[str, Any] | None = None) -> str:
    """Lark's rules for a call of one of these tools, or of several where the format has marks around each; or for JSON of a
    schema instead."""
    line = "\n" if style.opening else ""
    rules = ["start: calls" if schema is None else "start: calls | answer"]
    rules.append('calls: call ("\\n" call)*' if many and style.opening else "calls: call")
    rules += [] if schema is None else [f"answer: %json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        before = f'{style.opening}{line}{{"name": {json.dumps(tool.function.name)}, "{style.arguments}": '
        schema = {"type": "object", **(tool.function.parameters or {}), "x-guidance": JSON_OPTIONS}
        after = f"}}{line}{style.closing}"
        rules.append(f"call_{number}: {json.dumps(before)} arguments_{number} {json.dumps(after)}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return "\n".join(rules)


class ToolReader:
    """Shows the content of a text as it comes, holds back what may be calls, and gives these at the end."""

    def __init__(self, style: ToolFormat, known: list[str]):
        self.style, self.known = style, known
        self.held, self.shown = "", False

    def push(self, text: str) -> str:
        """What is content for certain."""
        self.held += text
        at = self.held.find(self.style.opening) if self.style.opening else self.bare()
        if at < 0:
            mark = self.style.opening
            ends = range(max(0, len(self.held) - len(mark) + 1), len(self.held))
            at = next((end for end in ends if mark.startswith(self.held[end:])), len(self.held))
        content, self.held = self.held[:at], self.held[at:]
        self.shown = self.shown or bool(content)
        return content

    def bare(self) -> int:
        """Where JSON without marks begins: at the beginning, or not at all."""
        return 0 if not self.shown and re.match(r"\s*(\{|$)", self.held) else len(self.held)

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls; what is no call of a known tool is content."""
        calls = self.calls(self.held.strip())
        return ("", calls) if calls else (self.held, [])

    def calls(self, rest: str) -> list[dict[str, Any]]:
        found = []
        while rest:
            if not rest.startswith(self.style.opening):
                return []
            rest = rest[len(self.style.opening) :].lstrip()
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            call = self.call(value)
            if call is None:
                return []
            found.append(call)
            rest = rest[end:].lstrip().removeprefix(self.style.closing).lstrip()
        return found

    def call(self, value: Any) -> dict[str, Any] | None:
        arguments = value.get(self.style.arguments) if isinstance(value, dict) else None
        if not isinstance(arguments, dict) or value.get("name") not in self.known:
            return None
        return new_call(value["name"], json.dumps(arguments))


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """Its id has nine letters and digits: Mistral's templates take no other."""
    function = {"name": name, "arguments": arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}
