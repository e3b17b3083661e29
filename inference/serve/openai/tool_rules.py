"""The grammar of forced tool calls, in llguidance's variant of Lark's rules."""

import json
import re
from collections.abc import Mapping
from typing import Any

from foredraft.inference.grammar import JSON_OPTIONS
from foredraft.inference.serve.openai.protocol import Tool
from foredraft.inference.serve.openai.tool_formats import (
    ID,
    KEY,
    NAME,
    Parameters,
    ToolFormat,
    as_list,
    is_text,
    properties_of,
)

Special = Mapping[str, int | None]  # special tokens; None for end tokens, which rules must not contain


def call_rules(
    tools: list[Tool], style: ToolFormat, many: bool, special: Special, schema: dict[str, Any] | None = None
) -> str:
    """Return the rules for a call of one of these tools, for several calls if the format has a separator, or for JSON of a
    schema instead."""
    before, after = (as_rule(text, special) for text in style.section)
    more = f"({as_rule(style.separator, special)} call)*" if many and style.separator is not None else ""
    rules = ["start: calls" if schema is None else "start: calls | answer", f"calls: {before} call {more} {after}"]
    rules += [] if schema is None else [f"answer: {json_rule(schema)}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        opening = " id ".join(
            as_rule(text.replace(NAME, tool.function.name), special) for text in style.opening.split(ID)
        )
        closing = as_rule(style.closing, special)
        rules.append(f"call_{number}: {opening} arguments_{number} {closing}")
        parameters = tool.function.parameters or {}
        if style.parameters is None:
            rules.append(f"arguments_{number}: {json_rule({'type': 'object', **parameters})}")
        else:
            rules += parameter_rules(f"arguments_{number}", parameters, style.parameters, special)
    return "\n".join([*rules, f"id: /{style.id}/"] if style.id else rules)


def parameter_rules(name: str, schema: dict[str, Any], style: Parameters, special: Special) -> list[str]:
    """Return the rules for arguments that are written one by one, in the order of the schema."""
    properties, required = properties_of(schema), as_list(schema, "required")
    rules, parts = list[str](), list[str]()
    shared = {named: schema[named] for named in ("$defs", "definitions") if named in schema}
    for number, (key, definition) in enumerate(properties.items()):
        one = f"{name}_{number}"
        parts.append(one if key in required else f"{one}?")
        rules.append(f"{one}: {as_rule(style.opening.replace(KEY, key), special)} {one}_value")
        choices = as_list(definition, "enum")
        closing = as_rule(style.closing, special)
        if choices and all(isinstance(choice, str) for choice in choices):
            rules.append(f"{one}_value: ({' | '.join(as_rule(choice, {}) for choice in choices)}) {closing}")
        elif is_text(definition):
            rules.append(f"{one}_value[suffix={json.dumps(style.closing)}]: /(.|\\n)*/")
        else:
            rules.append(f"{one}_value: {json_rule(shared | definition)} {closing}")
    return [f"{name}: {' '.join(parts) or as_rule('', special)}", *rules]


def json_rule(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def as_rule(text: str, special: Special) -> str:
    """Return a text as a sequence of strings and special tokens, which strings cannot express."""
    marks = [mark for mark in special if mark in text]
    pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    pieces = [piece for piece in pieces if piece and special.get(piece, 0) is not None]
    found = (f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False) for piece in pieces)
    return " ".join(found) or '""'
