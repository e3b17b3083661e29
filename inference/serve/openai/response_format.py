"""The form of an answer: JSON, a schema or a grammar, as OpenAI's response_format or under the names of other servers."""

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

# Names in earlier versions of vLLM, in SGLang and in llama.cpp -> the name in vLLM's structured_outputs.
CONSTRAINTS = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
CONSTRAINTS |= {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"}
ESCAPED_OR_END = re.compile(r"\\.|/|\n", re.DOTALL)  # what a pattern between slashes must escape, unless it is escaped


class JsonSchema(BaseModel):
    name: str = ""
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar: str | None = Field(None, description="in llguidance's variant of Lark, or llama.cpp's GBNF")

    @model_validator(mode="before")
    @classmethod
    def wrap_schema(cls, fields: Any) -> Any:
        """Accept the schema next to the type, where llama.cpp and others have it, also with json_object."""
        schema = fields.get("schema") if isinstance(fields, dict) else None
        if schema is None or fields.get("json_schema") is not None or fields.get("type") == "text":
            return fields
        return {"type": "json_schema", "json_schema": {"schema": schema}}

    @model_validator(mode="after")
    def check_type(self) -> "ResponseFormat":
        for name, value in (("json_schema", self.json_schema), ("grammar", self.grammar)):
            if (self.type == name) != (value is not None):
                raise ValueError(f"{name} must be given exactly for type {name}")
        return self


def converted(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace structured_outputs, and constraints of other names, by response_format. Raises ValueError for two of them."""
    wanted, fields = fields.get("structured_outputs", {}), dict(fields)
    if not isinstance(wanted, dict):
        raise ValueError(f"structured_outputs is {wanted!r}: send an object such as {{'regex': '[0-9]+'}}")
    fields.pop("structured_outputs", None)
    wanted = {name: value for name, value in wanted.items() if value is not None and value is not False}
    for other, name in CONSTRAINTS.items():
        value = fields.pop(other, "")
        if value not in ("", []) and wanted.setdefault(name, value) != value:  # clients send these for none
            raise ValueError(f"{other} differs from another constraint of the kind {name}: remove one of them")
    if not wanted:
        return fields
    if fields.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise ValueError(f"response_format cannot be combined with {', '.join(wanted)}: remove one of them")
    return {**fields, "response_format": as_response_format(wanted)}


def as_response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    """Convert the content of structured_outputs. Raises ValueError unless it is a single constraint."""
    match list(wanted.items()):
        case [("json", dict(schema))]:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case [("json", str(text))]:
            try:
                return as_response_format({"json": json.loads(text)})
            except (TypeError, ValueError, RecursionError):
                raise ValueError(f"structured_outputs.json is not a JSON object: {text[:40]!r}") from None
        case [("json_object", True)]:
            return {"type": "json_object"}
        case [("regex", str(text))]:
            escaped = ESCAPED_OR_END.sub(lambda end: {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(end[0], end[0]), text)
            return {"type": "grammar", "grammar": f"start: /{escaped}/"}
        case [("choice", list(texts))] if texts and all(isinstance(text, str) for text in texts):
            quoted = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts)
            return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"}
        case [("grammar", str(text))]:
            return {"type": "grammar", "grammar": text}
    raise ValueError(
        f"structured_outputs contains {json.dumps(wanted)[:80]}: send one of json (an object), json_object (true), regex, "
        "choice (a list of texts) and grammar"
    )
