"""Tool calls: parsed from an answer, or forced by a grammar, in the format of the model's family."""

import ast
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

from foredraft.heads.target_model.messages import parsed_arguments
from foredraft.inference.grammar import Grammar, Grammars
from foredraft.inference.serve.openai.protocol import ChatRequest, CommonRequest, NamedTool, Tool
from foredraft.inference.serve.openai.tool_formats import (
    BARE,
    ID,
    KEY,
    NAME,
    ToolFormat,
    after_reasoning,
    as_list,
    call_rules,
    format_of,
    is_text,
    json_rule,
    properties_of,
    types_of,
)
from foredraft.inference.serve.stop_strings import find_partial_mark

# The start of an object, or of a list of objects, that may be a call without a mark; the end of a text that may become one.
OBJECT = r'(?<!\s)\s*(?:\[\s*)?\{\s*"(?:name|type|function|arguments|parameters)"'
PARTIAL_OBJECT = re.compile(r'(?<!\s)\s*(?:\[\s*)?(?:\{\s*(?:"\w*)?)?$')
# The start of an object up to its arguments.
ARGUMENTS = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
SEPARATOR = re.compile(r"[\s,;]*")
DECODER = json.JSONDecoder(strict=False, parse_constant=str)  # models write newlines within strings, and NaN
# A text in quotes, which may contain the others; a bare key; a name of Python, which Gemma's template writes.
BARE_WORD = re.compile(r'("(?:[^"\\]|\\.)*")|([{,]\s*)([\w.-]+)\s*:|\b(None|True|False)\b')
PYTHON_NAMES = {"True": True, "False": False, "None": None}  # in place of JSON's
JSON_NAMES = {"true": True, "false": False, "null": None}  # which models write in Python, too
# In calls of Python: a text in quotes, or a name before a parenthesis, whose signs become letters.
QUOTED_OR_NAME = re.compile(r"""("(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?)|(?<![\w./-])[\w./-]+(?=\()""", re.DOTALL)
AS_LETTERS, AS_SIGNS = str.maketrans("./-", "\ua7f7\ua78c\ua7fb"), str.maketrans("\ua7f7\ua78c\ua7fb", "./-")
ATTEMPTS = 128  # maximum number of failed attempts to parse a call: each may cost the length of the text


def callable_tools(request: CommonRequest) -> dict[str, dict[str, Any]]:
    """Return the parameters of each tool that may be called."""
    if not isinstance(request, ChatRequest) or request.tool_choice == "none":
        return {}
    return {tool.function.name: tool.function.parameters or {} for tool in request.tools or []}


def forced_tools(request: ChatRequest) -> list[Tool]:
    """Return the tools of which one must be called; the empty list if the model may choose."""
    if isinstance(request.tool_choice, NamedTool):
        return [tool for tool in request.tools or [] if tool.function.name == request.tool_choice.function.name]
    return list(request.tools or []) if request.tool_choice == "required" else []


def new_tool_reader(request: CommonRequest, template: Any) -> "ToolReader | None":
    """Return a reader for the calls in one text of the answer; None if there cannot be any."""
    tools, style = callable_tools(request), call_format(request, template)
    return ToolReader(style, tools) if tools and style is not None else None


def call_format(request: CommonRequest, template: Any) -> ToolFormat | None:
    """Return the format in which an answer calls tools; None if the template's is unknown, and calls are not forced."""
    found = format_of(template)
    is_forced = isinstance(request, ChatRequest) and bool(forced_tools(request))
    return BARE if is_forced and not (found and found.is_forced) else found


def answer_grammar(request: CommonRequest, template: Any, grammars: Grammars, closing: str = "") -> Grammar | None:
    """Return the grammar of an answer: calls of the forced tools, or its response_format, possibly with calls. closing: the
    mark that ends the reasoning that the prompt opens. Raises ValueError like `Grammars`."""
    found, wanted, special = call_format(request, template), request.response_format, grammars.special
    schema: dict[str, Any] | None = None
    answer: str | None = None
    if wanted is not None and wanted.type == "grammar":
        answer = f"%lark {{\n{grammars.as_lark(wanted.grammar or '')}\n}}"
    elif wanted is not None and wanted.type != "text":
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.definition
        answer = json_rule(schema)
    rules = None if answer is None or (schema is not None and not closing) else f"start: answer\nanswer: {answer}"
    if isinstance(request, ChatRequest) and request.tools and found is not None:
        many = request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool)
        if forced := forced_tools(request):
            rules = call_rules(forced, found, many, special)
        elif answer is not None and found.is_forced and request.tool_choice != "none":
            rules = call_rules(request.tools, found, many, special, answer)
    if rules is not None:
        return grammars.lark(after_reasoning(rules, closing, special))
    return None if schema is None else grammars.json_schema(schema)


class ToolReader:
    """Split a text into content and calls. What may be a call is held back, and parsed at the end of the text."""

    def __init__(self, style: ToolFormat, tools: Mapping[str, dict[str, Any]]):
        """Compile the format's patterns. tools: name -> schema of its parameters."""
        self.style, self.tools, self.marks = style, tools, style.marks
        self.mark = re.compile("|".join([*map(re.escape, self.marks), *([OBJECT] if style.is_bare else [])]))
        also = rf"(?:{re.escape(style.also)}\s*)?" if style.also else ""
        head = pattern(style.head.removesuffix(style.name_line), style.id)
        head = rf"(?:{head}\s*)?{pattern(style.name_line)}" if style.name_line else head
        self.head = re.compile(rf"\s*{also}{head}\s*")
        before, after = style.section
        parts = [part for part in (after[: after.startswith("]")], after.removeprefix("]")) if part]
        self.before = re.compile(rf"(?:\s*{pattern(before)})?" if before else "")
        self.after = re.compile("".join(rf"(?:\s*{pattern(part)})?" for part in parts))  # a mark may be an end token
        first, *rest = style.closing.removeprefix("}" if style.is_object else "").split() or [""]
        before = r"[\s}]*" if style.is_object else r"\s*"  # models may close one brace too many
        self.closing = re.compile(
            (rf"{before}{re.escape(first)}" if first else "") + "".join(rf"(?:\s*{re.escape(part)})?" for part in rest)
        )
        if style.parameters is not None:
            opening, closing, wrapper = style.parameters
            line = ("\n?" if opening.endswith("\n") else ""), ("\n?" if closing.startswith("\n") else "")
            value = rf"{line[0]}(?P<value>.*?){line[1]}"
            value = "(?:{}(?P<wrapped>.*?){}|{})".format(*map(re.escape, wrapper), value) if wrapper[0] else value
            self.parameter = re.compile(rf"{pattern(opening)}{value}{re.escape(closing.strip())}\s*", re.DOTALL)
            # Models may leave out the end of the last value. Without the lookbehind, white space would cost its square.
            follows = "|".join([r"\Z", *map(re.escape, self.marks), *([pattern(after)] if after else [])])
            end = rf"(?<!\s)(?=\s*{pattern(style.closing)}\s*(?:{follows}))"
            self.unended, self.key_mark = re.compile(pattern(opening) + value + end, re.DOTALL), opening.split(KEY)[0]

    def split(self, text: str, is_end: bool, known: int = 0) -> tuple[str, list[dict[str, Any]]]:
        """Return the certain content, and at the end the calls. Malformed calls and calls of unknown tools are content.
        known: number of characters that were certain before."""
        mark = self.mark.search(text, known)
        if mark is not None:
            return self.parse(text, mark.start()) if is_end else (text[: mark.start()], [])
        if is_end:
            return text, []
        at = find_partial_mark(text, self.marks)
        if self.style.is_bare and (partial := PARTIAL_OBJECT.search(text, known)):
            at = min(at, partial.start())
        return text[:at], []

    def parse(self, text: str, start: int) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of a whole text whose first mark is at `start`."""
        content, calls, at, failed = "", list[dict[str, Any]](), start, 0
        while at < len(text):
            found, end = self.calls_at(text, at) if failed < ATTEMPTS else ([], at)
            calls += found
            if not found:
                failed += 1
                later = self.mark.search(text, at + 1) if failed < ATTEMPTS else None
                end = later.start() if later else len(text)
                content += text[at:end]
            at = end
        if calls:
            content = content.rstrip() if start else content.strip()
        return text[:start] + content, calls

    def unfinished(self, text: str) -> list[dict[str, Any]]:
        """Return the call that a forced answer was writing when it was cut, with the arguments up to there (of those that are
        written one by one, the complete ones); none before its name is complete."""
        found = (ARGUMENTS if self.style.is_object else self.head).search(text)
        if found is None or found["name"] not in self.tools:
            return []
        arguments = text[found.end() :]
        if self.style.parameters is not None:
            complete, _ = self.parameters_at(text, found.end(), self.tools[found["name"]])
            arguments = as_text(complete)[:-1]
        return [new_call(found["name"], arguments)]

    def calls_at(self, text: str, at: int) -> tuple[list[dict[str, Any]], int]:
        """Return the consecutive calls at this position, and where they end."""
        at, calls = match_end(self.before, text, at), list[dict[str, Any]]()
        if self.style.is_python:
            inside, closing, _ = text[at:].partition(self.style.section[1])
            read = [self.call(*call) for call in python_calls(inside)]
            found = [call for call in read if call is not None]
            return (found, at + len(inside + closing)) if found and len(found) == len(read) else ([], at)
        while True:
            found, end = self.call_at(text, match_end(SEPARATOR, text, at) if calls else at)
            if not found:
                return calls, match_end(self.after, text, at)
            calls, at = calls + found, end

    def call_at(self, text: str, start: int) -> tuple[list[dict[str, Any]], int]:
        """Return the call at this position (or all calls between one pair of marks), and where it ends."""
        head = self.head.match(text, start)
        if head is None:
            return [], start
        at = head.end()
        if self.style.is_object:
            return self.objects_at(text, at, start == 0 or "\n" in head[0])
        if self.style.parameters is not None:
            arguments, end = self.parameters_at(text, at, self.tools.get(head["name"], {}))
            is_call = self.closing.match(text, end) is not None
        elif self.style.quote:
            arguments, end = decode_marked(text, at, self.style.quote, self.style.closing)
            is_call = end > at
        elif match_end(self.closing, text, at) > at:
            arguments, end, is_call = None, at, True
        else:
            arguments, end = decode_json(text, at)
            is_call = end > at
        call = self.call(head["name"], arguments) if is_call else None
        return ([], start) if call is None else ([call], match_end(self.closing, text, end))

    def objects_at(self, text: str, at: int, on_its_line: bool) -> tuple[list[dict[str, Any]], int]:
        """Parse calls as JSON: one, a list, or several between a pair of marks."""
        found, end = list[dict[str, Any]](), at
        while not found or self.style.head:
            value, at = decode_json(text, at)
            calls = [self.object_call(one, on_its_line) for one in (value if isinstance(value, list) else [value])]
            if not calls or None in calls:
                break
            found += [call for call in calls if call is not None]
            end, at = at, match_end(SEPARATOR, text, at)
        return found, match_end(self.closing, text, end)

    def object_call(self, value: Any, on_its_line: bool) -> dict[str, Any] | None:
        """Parse a call in the format's form or OpenAI's. Other keys, or only a name in the middle of a line, are content."""
        inner = value.get("function") if isinstance(value, dict) else None
        value = inner if isinstance(inner, dict) else value
        if not isinstance(value, dict):
            return None
        is_unsure = value.keys() - {"name", "function", "type", "id"} or (self.style.is_bare and not on_its_line)
        if is_unsure and not value.keys() & {"arguments", "parameters"}:
            return None
        return self.call(value.get("name", inner), value.get("arguments") or value.get("parameters"))

    def call(self, name: Any, arguments: Any) -> dict[str, Any] | None:
        arguments = parsed_arguments(arguments)
        if not isinstance(name, str) or name not in self.tools or not isinstance(arguments, dict):
            return None
        try:
            return new_call(name, as_text(arguments))
        except (TypeError, ValueError):  # what JSON does not have, such as complex numbers and infinity
            return None

    def parameters_at(self, text: str, at: int, schema: dict[str, Any]) -> tuple[dict[str, Any], int]:
        found, properties = dict[str, Any](), properties_of(schema)
        while one := self.parameter.match(text, at) or self.unended.match(text, at):
            value = one.groupdict().get("wrapped")
            value, end = one["value"] if value is None else value, one.end()
            if one.re is self.unended and self.key_mark in value:  # another end is missing, too: where is not certain
                break
            found[one["key"]], at = parse_argument(value, properties.get(one["key"])), end
        return found, at


def pattern(text: str, id: str = "") -> str:
    """Return a regular expression for a text of a format, which accepts any white space."""
    found = r"\s*".join(re.escape(part) for part in text.replace("[", " [").split()).replace(re.escape(ID), id)
    found = found.replace(re.escape("functions."), r"\s*(?:functions\.)?")  # Kimi-K2 may leave it out
    return found.replace(NAME, r"(?P<name>[\w./-]+)").replace(KEY, r"(?P<key>[^\n<>\"]+)")


def decode_json(text: str, at: int) -> tuple[Any, int]:
    """Return the value at this position and where it ends; None and the position itself if there is none."""
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


class JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def python_calls(text: str) -> list[tuple[str, dict[str | None, Any]]]:
    """Return names and arguments of the calls in a list, or one on each line; none if there is anything else. Names may have
    signs, and texts in quotes may have newlines."""
    text = QUOTED_OR_NAME.sub(
        lambda found: found[1].replace("\n", "\\n") if found[1] else found[0].translate(AS_LETTERS), text
    )
    try:
        values = [statement.value for statement in JsonNames().visit(ast.parse(text.strip())).body]
        calls = [call for value in values for call in getattr(value, "elts", [value])]
        if any(call.args or None in [one.arg for one in call.keywords] for call in calls):
            return []
        return [
            (call.func.id.translate(AS_SIGNS), {one.arg: ast.literal_eval(one.value) for one in call.keywords})
            for call in calls
        ]
    except (SyntaxError, ValueError, AttributeError, TypeError, RecursionError, MemoryError):
        return []


def decode_marked(text: str, at: int, quote: str, closing: str) -> tuple[Any, int]:
    """Return the object at this position, whose keys are bare and whose texts stand between marks, and where it ends."""
    parts, end = list[str](), at
    for number, piece in enumerate(text[at:].split(quote)):
        if number % 2:
            parts.append(json.dumps(piece))
            end += len(piece) + 2 * len(quote)
            continue
        bare, ended, _ = piece.partition(closing)
        parts.append(BARE_WORD.sub(as_json, bare))
        end += len(bare)
        if ended:
            break
    value, size = decode_json("".join(parts).strip(), 0)
    return value, end if size else at


def as_json(found: re.Match[str]) -> str:
    """Return JSON for a match of BARE_WORD."""
    if found[3]:
        return f'{found[2]}"{found[3]}":'
    return found[1] or json.dumps(PYTHON_NAMES[found[4]])


def match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where the match at this position ends."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def parse_argument(text: str, definition: Any) -> Any:
    """Convert an argument that is written as text, by the schema of its parameter."""
    nothing = text == "null" and "null" in types_of(definition)
    if not nothing and (is_text(definition) or text in as_list(definition, "enum")):
        return text
    try:
        value = json.loads(text, parse_constant=str)
        json.dumps(value, allow_nan=False)  # 1e999 is infinite
    except (ValueError, RecursionError):
        return python_value(text)
    return value


def python_value(text: str) -> Any:
    """Return a list, an object or a name as some models write them, the text itself if it is anything else."""
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)  # it may contain sets and complex numbers
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text
    return value if value is None or isinstance(value, (bool, list, dict)) else text


def as_text(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON with the letters of every language. A model may write a surrogate pair as two escapes, or
    half of one, which UTF-8 cannot encode."""
    text = json.dumps(arguments, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def new_call(name: str, arguments: str) -> dict[str, Any]:
    """Return a call in OpenAI's form. Its id has nine letters and digits, because Mistral's templates require it."""
    function = {"name": name, "arguments": arguments}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}
