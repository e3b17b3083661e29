"""How each model family writes tool calls: one record per format, to parse answers (tools.py), and the grammar that forces
calls, in llguidance's variant of Lark's rules.

The formats come from the families' chat templates and model cards. No library was found that could replace this table:
xgrammar (`get_model_structural_tag`) forces most of these formats with its grammar engine but parses none, and
transformers' response templates lose calls whose arguments contain a mark, and the text of malformed calls.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from foredraft.inference.grammar import JSON_OPTIONS, as_supported
from foredraft.inference.serve.openai.protocol import Tool

Special = Mapping[str, int | None]  # special tokens; None for end tokens, which rules must not contain
NAME, ID, KEY = "NAME", "#", "KEY"  # placeholders below for the name of a function, the id of a call and a parameter


class Parameters(NamedTuple):
    """Describe arguments that are written one by one, not as JSON."""

    opening: str
    closing: str
    wrapper: tuple[str, str] = ("", "")  # around a value, if the model writes it


class ToolFormat(NamedTuple):
    """Describe the text around the arguments of a call. An opening with {"name" is a JSON object, read in any order."""

    opening: str
    closing: str
    separator: str | None = None  # between calls; None: only one call per answer
    section: tuple[str, str] = ("", "")  # around all calls
    id: str = ""  # a regular expression
    parameters: Parameters | None = None
    also: str = ""  # another mark that may start a call
    quote: str = ""  # a mark around texts, in arguments whose keys are bare
    is_python: bool = False  # calls of functions with keywords, as in Python

    @property
    def is_object(self) -> bool:
        return '{"name"' in self.opening

    @property
    def head(self) -> str:
        """Return the text before the object, or before the arguments."""
        return self.opening.partition('{"name"')[0] if self.is_object else self.opening

    @property
    def name_line(self) -> str:
        """Return the line with the name, if it follows a line that models may omit."""
        rest = self.head.partition("\n")[2]
        return rest if NAME in rest else ""

    @property
    def is_forced(self) -> bool:
        """Return whether a grammar can force calls in this format."""
        return not (self.quote or self.is_python)

    @property
    def is_bare(self) -> bool:
        """Return whether a call may be an object without a mark."""
        return self.is_object and not (self.head or self.section[0])

    @property
    def marks(self) -> list[str]:
        """Return the texts that may start a call."""
        texts = (
            self.section[0].removesuffix("["),
            self.head.partition(NAME)[0],
            self.name_line.partition(NAME)[0],
            self.also,
        )
        return [text.split()[0] for text in texts if text.strip(' \n{"')]  # a brace starts other objects, too

    @property
    def text(self) -> str:
        """Return all text of the format, to search it for special tokens."""
        return "\n".join(
            (*self.section, self.opening, self.closing, self.also, self.quote, *(self.parameters or ())[:2])
        )


HERMES = ToolFormat('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n")  # Qwen2.5, Qwen3, Granite 4
LLAMA = ToolFormat('{"name": "NAME", "parameters": ', "}", also="<|python_tag|>")
MISTRAL = ToolFormat('{"name": "NAME", "arguments": ', "}", ", ", ("[TOOL_CALLS][", "]"))
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]NAME[ARGS]", "", "")
MISTRAL_ID = ToolFormat("[TOOL_CALLS]NAME[CALL_ID]#[ARGS]", "", "", id="[a-zA-Z0-9]{9}")
HARMONY = ToolFormat("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "<|call|>")
QWEN3_CODER = ToolFormat(
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    "\n",
    parameters=Parameters("<parameter=KEY>\n", "\n</parameter>\n"),
)
SEED_OSS = QWEN3_CODER._replace(opening="<seed:tool_call>\n<function=NAME>\n", closing="</function>\n</seed:tool_call>")
GLM = ToolFormat(
    "<tool_call>NAME\n",
    "</tool_call>",
    "\n",
    parameters=Parameters("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
)
MINIMAX = ToolFormat(
    '<invoke name="NAME">\n',
    "</invoke>\n",
    "",
    ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    parameters=Parameters('<parameter name="KEY">', "</parameter>\n"),
)
DEEPSEEK_V3 = ToolFormat(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    "\n",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK_V3_1 = DEEPSEEK_V3._replace(
    opening="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", closing="<｜tool▁call▁end｜>", separator=""
)
KIMI = ToolFormat(
    "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    id="[0-9]{1,4}",
)
GRANITE = MISTRAL._replace(section=("<|tool_call|>[", "]"))  # 3.x
GEMMA = ToolFormat("<|tool_call>call:NAME", "<tool_call|>", "", quote='<|"|>')  # 4
FUNCTION_GEMMA = ToolFormat("<start_function_call>call:NAME", "<end_function_call>", "", quote="<escape>")
LFM = ToolFormat("", "", section=("<|tool_call_start|>", "<|tool_call_end|>"), is_python=True)
OLMO = LFM._replace(section=("<function_calls>", "</function_calls>"))  # 3
APRIEL = MISTRAL._replace(section=("<tool_calls>[", "]</tool_calls>"))
APERTUS = ToolFormat('{"NAME": ', "}", ", ", ("<|tools_prefix|>[", "]<|tools_suffix|>"))
FUNCTIONARY = ToolFormat("<function=NAME>", "</function>", "")  # 3.1
GIGACHAT = ToolFormat('<|function_call|>{"name": "NAME", "arguments": ', "}")  # 3.1
MINICPM = ToolFormat(  # 5
    '<function name="NAME">',
    "</function>",
    "",
    parameters=Parameters('<param name="KEY">', "</param>", ("<![CDATA[", "]]>")),
)
BARE = ToolFormat('{"name": "NAME", "arguments": ', "}")  # forced where `is_forced` is false, or the format is unknown

FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (  # the first one whose texts are all in the template is used
    (("<|channel|>", "<|message|>"), HARMONY),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V3_1),
    (("<|tool_call_argument_begin|>",), KIMI),
    (("<minimax:tool_call>", "<invoke name="), MINIMAX),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<seed:tool_call>", "<parameter="), SEED_OSS),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("[TOOL_CALLS]", "[CALL_ID]"), MISTRAL_ID),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call|>",), GRANITE),
    (("<|tool_call>call:", GEMMA.quote), GEMMA),
    (("<|tool_call_start|>",), LFM),
    (("<function_calls>", "environment"), OLMO),
    (("<start_function_call>", FUNCTION_GEMMA.quote), FUNCTION_GEMMA),
    (("<tool_calls>[",), APRIEL),
    (("<|tools_prefix|>",), APERTUS),
    (("<function=", "</function>"), FUNCTIONARY),
    (("<|function_call|>",), GIGACHAT),
    (("<function name=", "<param name="), MINICPM),
    (("<tool_call>", "arguments"), HERMES),
    (("dictionary of argument name and its value",), LLAMA),
)


def format_of(template: Any) -> ToolFormat | None:
    """Return the format in which a chat template asks for tool calls; None if unknown."""
    return next((style for signs, style in FORMATS if all(sign in str(template) for sign in signs)), None)


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a tool. Clients send the schema, so only its being an object is certain."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def as_list(schema: Any, key: str) -> list[Any]:
    value = schema.get(key) if isinstance(schema, dict) else None
    return value if isinstance(value, list) else []


def types_of(schema: Any) -> set[str]:
    """Return the types that a parameter's schema allows; the empty set if it does not say."""
    found = set[str]()
    for option in (schema, *as_list(schema, "anyOf"), *as_list(schema, "oneOf")):
        named = option.get("type") if isinstance(option, dict) else None
        found |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    return found


def is_text(schema: Any) -> bool:
    """Return whether a parameter is written as plain text, not as JSON."""
    types, keys = types_of(schema), schema.keys() if isinstance(schema, dict) else set[str]()
    return "string" in types or not (types or keys & {"$ref", "enum", "properties", "items", "allOf", "anyOf", "oneOf"})


def call_rules(tools: list[Tool], style: ToolFormat, many: bool, special: Special, answer: str | None = None) -> str:
    """Return the rules for a call of one of these tools, for several calls if the format has a separator, or for an answer
    of this rule instead."""
    before, after = (as_rule(text, special) for text in style.section)
    more = f"({as_rule(style.separator, special)} call)*" if many and style.separator is not None else ""
    rules = ["start: calls" if answer is None else "start: calls | answer", f"calls: {before} call {more} {after}"]
    rules += [] if answer is None else [f"answer: {answer}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        opening = " id ".join(
            as_rule(text.replace(NAME, tool.function.name), special) for text in style.opening.split(ID)
        )
        closing = as_rule(style.closing, special)
        rules.append(f"call_{number}: {opening} arguments_{number} {closing}")
        parameters, lenient = (
            tool.function.parameters or {},
            (tool.function.model_extra or {}).get("strict") is not True,
        )
        if style.parameters is None:
            rules.append(f"arguments_{number}: {json_rule({**parameters, 'type': 'object'}, lenient)}")
        else:
            rules += parameter_rules(f"arguments_{number}", parameters, style.parameters, special, lenient)
    return "\n".join([*rules, f"id: /{style.id}/"] if style.id else rules)


def after_reasoning(rules: str, closing: str, special: Special) -> str:
    """Return the rules of a text that follows reasoning up to this mark; the rules unchanged if the mark is empty."""
    if not closing:
        return rules
    mark = special.get(closing)
    ended = "[suffix=" + json.dumps(closing) + "]: /(.|\\n)*/" if mark is None else f": /(.|\\n)*/ <[{mark}]>"
    start, rest = rules.removeprefix("start: ").split("\n", 1)
    return f"start: reasoning space ({start})\n{rest}\nreasoning{ended}\nspace: /\\s{{0,8}}/"


def parameter_rules(
    name: str, schema: dict[str, Any], style: Parameters, special: Special, lenient: bool = True
) -> list[str]:
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
            rules.append(f"{one}_value: {json_rule(shared | definition, lenient)} {closing}")
    return [f"{name}: {' '.join(parts) or as_rule('', special)}", *rules]


def json_rule(schema: dict[str, Any], lenient: bool = False) -> str:
    """Return a rule for JSON. lenient: leave to the model what a grammar cannot follow, as arguments of a tool that is not
    strict in OpenAI's API; otherwise it is an error."""
    options = JSON_OPTIONS | {"lenient": lenient}
    return f"%json {json.dumps({**as_supported(schema, lenient), 'x-guidance': options})}"


def as_rule(text: str, special: Special) -> str:
    """Return a text as a sequence of strings and special tokens, which strings cannot express."""
    marks = [mark for mark in special if mark in text]
    pieces = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    pieces = [piece for piece in pieces if piece and special.get(piece, 0) is not None]
    found = (f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False) for piece in pieces)
    return " ".join(found) or '""'
