"""Tool calls: read out of an answer, or forced by a grammar, in the format of the model's family."""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.heads.target.messages import parsed_arguments
from foredraft.inference.grammar import Grammar, Grammars
from foredraft.inference.serve.protocol import ChatRequest, CommonRequest, NamedTool, Tool
from foredraft.inference.serve.reasoning import beginning
from foredraft.inference.serve.tool_formats import (
    BARE,
    HERMES,
    ID,
    KEY,
    LLAMA,
    NAME,
    ToolFormat,
    format_of,
    is_text,
    listed,
    properties_of,
    types_of,
)
from foredraft.inference.serve.tool_rules import call_rules

__all__ = [
    "BARE",
    "HERMES",
    "LLAMA",
    "ToolFormat",
    "ToolReader",
    "callable_tools",
    "format_of",
    "grammar",
    "new_call",
    "reader",
]

SEPARATOR = re.compile(r"[\s,;]*")
DECODER = json.JSONDecoder(strict=False, parse_constant=str)  # models write line ends into strings, and NaN
ATTEMPTS = 128  # marks at most that are taken for calls in vain: each may cost the length of the text


def callable_tools(asked: CommonRequest) -> dict[str, dict[str, Any]]:
    """Return the parameters of each tool that may be called."""
    if not isinstance(asked, ChatRequest) or asked.tool_choice == "none":
        return {}
    return {tool.function.name: tool.function.parameters or {} for tool in asked.tools or []}


def forced(asked: ChatRequest) -> list[Tool]:
    """The tools one of which must be called; none where the model is free."""
    if isinstance(asked.tool_choice, NamedTool):
        return [tool for tool in asked.tools or [] if tool.function.name == asked.tool_choice.function.name]
    return list(asked.tools or []) if asked.tool_choice == "required" else []


def reader(asked: CommonRequest, template: Any) -> "ToolReader | None":
    """What finds the calls in one text of the answer; None where there can be none."""
    known = callable_tools(asked)
    style = format_of(template) or (BARE if isinstance(asked, ChatRequest) and forced(asked) else None)
    return ToolReader(style, [*known], known) if known and style is not None else None


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
            return grammars.lark(call_rules(forced(asked), found or BARE, many, grammars.special))
        if schema is not None and found is not None and asked.tool_choice != "none":
            return grammars.lark(call_rules(asked.tools, found, many, grammars.special, schema))
    return None if schema is None else grammars.json_schema(schema)


class ToolReader:
    """Shows the content of a text as it comes, holds back what may be calls, and gives these at the end."""

    def __init__(self, style: ToolFormat, known: Sequence[str], schemas: Mapping[str, dict[str, Any]] | None = None):
        """schemas: of the parameters of each tool."""
        self.style, self.known, self.schemas, self.marks = style, known, schemas or {}, style.marks
        self.held, self.holding, self.shown = "", False, False
        also = f"(?:{re.escape(style.also)})?" if style.also else ""
        self.head = re.compile(rf"\s*{also}\s*{pattern(style.head, style.id)}\s*")
        self.before, self.after = (re.compile(rf"(?:\s*{pattern(text)})?" if text else "") for text in style.section)
        first, *rest = style.closing.removeprefix("}" if style.is_object else "").split() or [""]
        self.closing = re.compile(
            (rf"\s*{re.escape(first)}" if first else "") + "".join(rf"(?:\s*{re.escape(part)})?" for part in rest)
        )
        if style.parameters is not None:
            opening, closing = style.parameters
            line = ("\n?" if opening.endswith("\n") else ""), ("\n?" if closing.startswith("\n") else "")
            value = rf"{line[0]}(?P<value>.*?){line[1]}{re.escape(closing.strip())}\s*"
            self.parameter = re.compile(pattern(opening) + value, re.DOTALL)

    def push(self, text: str) -> str:
        """What is content for certain."""
        self.held += text
        if self.holding:
            return ""
        found = [at for mark in self.marks if (at := self.held.find(mark)) >= 0]
        bare = self.is_bare()
        self.holding = bool(found) or (bare and "{" in self.held)
        at = 0 if bare else min(found) if found else beginning(self.held, self.marks)
        content, self.held = self.held[:at], self.held[at:]
        self.shown = self.shown or bool(content)
        return content

    def is_bare(self) -> bool:
        """May the text begin with a call that has no mark?"""
        bare = self.style.is_object and not (self.style.head or self.style.section[0])
        return bare and not self.shown and re.match(r"\s*(\{|$)", self.held) is not None

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls; what is no call of a known tool is content."""
        content, calls, at, failed = "", list[dict[str, Any]](), 0, 0
        while at < len(self.held):
            found, end = self.calls_at(at) if failed < ATTEMPTS else ([], at)
            calls += found
            if not found:
                failed += 1
                later = [place for mark in self.marks if (place := self.held.find(mark, at + 1)) >= 0]
                end = min(later) if later and failed < ATTEMPTS else len(self.held)
                content += self.held[at:end]
            at = end
        content = content.rstrip() if calls else content
        return content if self.shown or not calls else content.lstrip(), calls

    def calls_at(self, at: int) -> tuple[list[dict[str, Any]], int]:
        """The calls that follow one another here, and where they end."""
        at, found = matched(self.before, self.held, at), list[dict[str, Any]]()
        while one := self.call_at(matched(SEPARATOR, self.held, at) if found else at):
            found.append(one[0])
            at = one[1]
        return found, matched(self.after, self.held, at)

    def call_at(self, at: int) -> tuple[dict[str, Any], int] | None:
        head = self.head.match(self.held, at)
        if head is None:
            return None
        at, closed = head.end(), self.closing.match(self.held, head.end())
        try:
            if self.style.is_object:
                value, at = DECODER.raw_decode(self.held, at)
                name = value.get("name") if isinstance(value, dict) else None
                arguments = value.get("arguments", value.get("parameters")) if isinstance(value, dict) else None
            elif self.style.parameters is not None:
                name = head["name"]
                arguments, at = self.parameters_at(at, self.schemas.get(name, {}))
                closed = self.closing.match(self.held, at)
                name = name if closed else None
            else:
                name, empty = head["name"], closed is not None and closed.end() > head.end()
                arguments, at = (None, at) if empty else DECODER.raw_decode(self.held, at)
        except (ValueError, RecursionError):
            return None
        arguments = parsed_arguments(arguments)
        if not isinstance(name, str) or name not in self.known or not isinstance(arguments, dict):
            return None
        return new_call(name, json.dumps(arguments)), matched(self.closing, self.held, at)

    def parameters_at(self, at: int, schema: dict[str, Any]) -> tuple[dict[str, Any], int]:
        found, properties = dict[str, Any](), properties_of(schema)
        while one := self.parameter.match(self.held, at):
            found[one["key"]] = typed(one["value"], properties.get(one["key"]))
            at = one.end()
        return found, at


def pattern(text: str, id: str = "") -> str:
    """A text of a format as a regular expression, with any white space for its own."""
    found = r"\s*".join(re.escape(part) for part in text.replace("[", " [").split()).replace(re.escape(ID), id)
    return found.replace(NAME, r"(?P<name>[\w.-]+)").replace(KEY, r"(?P<key>[^\n<>\"]+)")


def matched(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where what matches here ends."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def typed(text: str, definition: Any) -> Any:
    """The value of an argument that is written as text, by the schema of its parameter."""
    nothing = text == "null" and "null" in types_of(definition)
    if not nothing and (is_text(definition) or text in listed(definition, "enum")):
        return text
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """Its id has nine letters and digits: Mistral's templates take no other."""
    function = {"name": name, "arguments": arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}
