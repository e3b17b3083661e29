"""Requests of OpenAI's Responses API, without state: clients send the whole conversation each time, and no answer is stored
(platform.openai.com/docs/api-reference/responses). They are answered like chat completions."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from foredraft.inference.serve.openai.protocol import ChatRequest, CommonRequest, Function, Tokens

STORED = "responses are not stored, so send the whole conversation as input"
CHAT = "/v1/chat/completions supports it"
# Refused fields, with their harmless values, and the remedy.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), STORED),
    "conversation": ((), STORED),
    "prompt": ((), STORED),
    "background": ((False,), STORED),
    "truncation": (("disabled",), "shorten the input instead"),
    "context_management": (([],), "shorten the input instead"),
    "n": ((1,), CHAT),
    "trace": ((False,), CHAT),
    "return_token_ids": ((False,), CHAT),
    "max_tokens": ((), "use max_output_tokens"),
    "response_format": ((), "use text.format"),
}
ITEMS = ("message", "reasoning", "function_call", "function_call_output")
TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")  # types of text parts
LOGPROBS = "message.output_text.logprobs"  # the name of log-probabilities in `include`
# The parts of an assistant's message in the order of their items, each with the parts that must not precede it.
LATER = {"reasoning": {"content", "tool_calls"}, "content": {"content", "tool_calls"}, "tool_calls": set[str]()}


class Part(BaseModel):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def refuse_others(cls, part: Any) -> Any:
        if isinstance(part, dict) and part.get("type") == "refusal":
            return {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") not in TEXTS:
            raise ValueError(f"parts of type {part.get('type')!r} are not supported here: send text")
        return part


def as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value or []


def output_parts(value: Any) -> Any:
    """Return parts. What a tool returned may be any JSON."""
    typed = isinstance(value, list) and all(isinstance(part, dict) and "type" in part for part in value)
    return as_parts(
        value if value is None or isinstance(value, str) or typed else json.dumps(value, ensure_ascii=False)
    )


def joined(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


Text = Annotated[list[Part], BeforeValidator(as_parts, json_schema_input_type=str | list[Part])]


class MessageItem(BaseModel):
    type: Literal["message"] = "message"
    role: str
    content: Text

    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": joined(self.content)}


class ReasoningItem(BaseModel):
    """Hold reasoning. encrypted_content is ignored, because another server encrypted it."""

    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None

    def message(self) -> dict[str, Any]:
        return {"role": "assistant", "reasoning": joined(self.content or self.summary or [])}


class FunctionCallItem(BaseModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | dict[str, Any] | None = None

    def message(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}


class FunctionOutputItem(BaseModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[list[Part], BeforeValidator(output_parts, json_schema_input_type=Any)] = []

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)}


def as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    for number, item in enumerate(value if isinstance(value, list) else []):
        kind = item_type(item)
        if kind == "item_reference":
            raise ValueError(f"item {number} is an item_reference: {STORED}")
        if kind not in ITEMS:
            raise ValueError(f"item {number} has type {kind!r}, which is not supported: use one of {', '.join(ITEMS)}")
    return value


def item_type(item: Any) -> Any:
    if isinstance(item, dict):
        return item.get("type") or ("message" if "role" in item else "item_reference")
    return None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(item_type),
]


class FunctionTool(Function):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def refuse_others(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise ValueError(f"tools of type {tool.get('type')!r} are not supported here: use functions")
        return tool


class NamedFunction(BaseModel):
    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")


class TextConfig(BaseModel):
    format: TextFormat | None = TextFormat.model_validate({})
    verbosity: str | None = None


class Reasoning(BaseModel):
    effort: str | None = None


class ResponsesRequest(CommonRequest):
    input: Annotated[
        list[Item], Field(min_length=1), BeforeValidator(as_items, json_schema_input_type=str | list[Item])
    ]
    instructions: str | None = None
    tools: list[FunctionTool] = Field([], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: Tokens | None = None
    max_tool_calls: int | None = Field(None, description="ignored: it limits calls of built-in tools")
    include: list[str] = Field([], description=f"only {LOGPROBS} has an effect here")
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field({})

    @model_validator(mode="before")
    @classmethod
    def refuse_state(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, (harmless, remedy) in REFUSED.items():
            if (value := fields.get(name)) is not None and value not in harmless:
                raise ValueError(f"{name} is not supported here: {remedy}")
        return {name: value for name, value in fields.items() if name not in REFUSED}

    @model_validator(mode="after")
    def check_chat(self) -> "ResponsesRequest":
        try:
            self.chat()
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(first["msg"].removeprefix("Value error, ")) from None
        return self

    def chat(self) -> ChatRequest:
        """Convert to a request for /v1/chat/completions."""
        wanted, choice, logprobs = (
            self.text.format or TextFormat.model_validate({}),
            self.tool_choice,
            LOGPROBS in self.include,
        )
        facts = self.model_dump(include=SHARED, exclude_unset=True)
        facts |= {"messages": self.messages(), "max_completion_tokens": self.max_output_tokens, "logprobs": logprobs}
        facts |= {"top_logprobs": self.top_logprobs if logprobs else None, "reasoning_effort": self.reasoning.effort}
        facts |= {"response_format": {"type": wanted.type}, "verbosity": self.text.verbosity}
        if wanted.definition is not None:
            facts["response_format"]["json_schema"] = {"name": wanted.name or "", "schema": wanted.definition}
        functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in self.tools]
        facts["tools"] = [{"type": "function", "function": function} for function in functions]
        if isinstance(choice, NamedFunction):
            facts["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            facts["tool_choice"] = choice
        return ChatRequest(**facts)

    def messages(self) -> list[dict[str, Any]]:
        """Convert the items to messages. Items of one answer become one message of the assistant."""
        found = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in self.input:
            new = item.message()
            if new.get("reasoning") == "":  # only its summary or encrypted text was sent
                continue
            if new["role"] == "assistant" and found and found[-1]["role"] == "assistant":
                last, (name,) = found[-1], new.keys() - {"role"}
                if not last.keys() & LATER[name]:
                    last[name] = last.get(name, type(new[name])()) + new[name]
                    continue
            found.append(new)
        return found

    def echo(self) -> dict[str, Any]:
        """Return the fields that a response repeats."""
        return {
            "instructions": self.instructions,
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools],
            "tool_choice": self.model_dump(include={"tool_choice"})["tool_choice"],
            "parallel_tool_calls": self.parallel_tool_calls,
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "max_output_tokens": self.max_output_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
        }


SHARED = ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys() - {
    "tools",
    "tool_choice",
    "top_logprobs",
}
