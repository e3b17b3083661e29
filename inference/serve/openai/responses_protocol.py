"""Requests of OpenAI's Responses API, without state: clients send the whole conversation each time, and no answer is stored
(platform.openai.com/docs/api-reference/responses). They are answered like chat completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from foredraft.inference.serve.openai.protocol import (
    UNSUPPORTED,
    ChatRequest,
    CommonRequest,
    Mode,
    Tokens,
    content_text,
)
from foredraft.inference.serve.openai.response_format import CONSTRAINTS
from foredraft.inference.serve.openai.responses_tools import ResponsesTool, as_call, offered

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
    **dict.fromkeys(("structured_outputs", *CONSTRAINTS), ((), f"use text.format; {CHAT}")),
}
LOGPROBS = "message.output_text.logprobs"  # the name of log-probabilities in `include`
# The types of items, and the texts that each must have.
ITEMS = {
    "message": ["role"],
    "reasoning": [],
    "function_call": ["call_id", "name"],
    "function_call_output": ["call_id"],
    "custom_tool_call": ["call_id", "name", "input"],
    "custom_tool_call_output": ["call_id"],
}
# Items of tools that the model does not learn of, in a conversation that another server began.
LEFT_OUT = ("web_search_call", "file_search_call", "tool_search_call", "tool_search_output")
# The parts of an assistant's message in the order of their items, each with the parts that must not precede it.
LATER = {"reasoning": {"content", "tool_calls"}, "content": {"content", "tool_calls"}, "tool_calls": set[str]()}


def item_type(item: dict[str, Any]) -> str:
    return str(item.get("type") or ("message" if "role" in item else "item_reference"))


def as_message(item: dict[str, Any]) -> dict[str, Any]:
    """Convert an item to a message of a chat, or to a part of the assistant's. encrypted_content of reasoning is ignored,
    because another server encrypted it."""
    match item_type(item):
        case "reasoning":
            text = content_text("assistant", item.get("content") or item.get("summary") or "")
            return {"role": "assistant", "reasoning": text}
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "tool_calls": [as_call(item)]}
        case "function_call_output" | "custom_tool_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")}
    return {"role": item["role"], "content": item.get("content")}


class NamedTool(BaseModel):
    type: Literal["function", "custom"]
    name: str


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


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


def as_chosen(tool: NamedTool) -> dict[str, Any]:
    """Convert the choice of a tool to that of a chat."""
    return {"type": "function", "function": {"name": tool.name}}


class ResponsesRequest(CommonRequest):
    refused: ClassVar = UNSUPPORTED | {name: harmless for name, (harmless, _) in REFUSED.items()}
    remedies: ClassVar = {name: remedy for name, (_, remedy) in REFUSED.items()}

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: Annotated[list[ResponsesTool], BeforeValidator(offered)] = Field([], max_length=1024)
    tool_choice: Annotated[Literal["auto", "none", "required"] | NamedTool | AllowedTools, Mode] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: Tokens | None = None
    max_tool_calls: int | None = Field(None, description="ignored: it limits calls of built-in tools")
    include: list[str] = Field([], description=f"only {LOGPROBS} has an effect here")
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field({})

    @field_validator("input")
    @classmethod
    def check_items(cls, items: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        if isinstance(items, str):
            return items
        for number, item in enumerate(items):
            kind = item_type(item)
            if kind in LEFT_OUT:
                continue
            if kind == "item_reference":
                raise ValueError(f"item {number} is an item_reference: {STORED}")
            if kind not in ITEMS:
                raise ValueError(
                    f"item {number} has type {kind!r}, which is not supported: use one of {', '.join(ITEMS)}"
                )
            if missing := [name for name in ITEMS[kind] if not isinstance(item.get(name), str)]:
                raise ValueError(f"item {number} of type {kind!r} needs {missing[0]!r}, a text")
            if not isinstance(item.get("namespace") or "", str):
                raise ValueError(f"item {number} has namespace {item['namespace']!r}: send a text")
        if not (kept := [item for item in items if item_type(item) not in LEFT_OUT]):
            raise ValueError("send at least 1 item of a type that the model reads")
        return kept

    @model_validator(mode="after")
    def check_chat(self) -> "ResponsesRequest":
        try:
            self.chat()
        except ValidationError as error:
            first = error.errors()[0]
            where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {message}" if where else message) from None
        return self

    def chat(self) -> ChatRequest:
        """Convert to a request for /v1/chat/completions."""
        choice, logprobs = self.tool_choice, LOGPROBS in self.include
        wanted = self.text.format or TextFormat.model_validate({})
        shared = {*type(self).model_fields} & {*ChatRequest.model_fields} - {"tools", "tool_choice", "top_logprobs"}
        facts = self.model_dump(include=shared, exclude_unset=True)
        facts |= {"messages": self.messages(), "max_completion_tokens": self.max_output_tokens, "logprobs": logprobs}
        facts |= {"top_logprobs": self.top_logprobs if logprobs else None, "reasoning_effort": self.reasoning.effort}
        facts |= {"response_format": {"type": wanted.type}, "verbosity": self.text.verbosity}
        if wanted.definition is not None:
            facts["response_format"]["json_schema"] = {"name": wanted.name or "", "schema": wanted.definition}
        facts["tools"] = [{"type": "function", "function": tool.as_function()} for tool in self.tools]
        if isinstance(choice, AllowedTools):
            allowed = {"mode": choice.mode, "tools": [as_chosen(tool) for tool in choice.tools]}
            facts["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        else:
            facts["tool_choice"] = as_chosen(choice) if isinstance(choice, NamedTool) else choice
        return ChatRequest(**facts)

    def messages(self) -> list[dict[str, Any]]:
        """Convert the items to messages. Items of one answer become one message of the assistant."""
        found = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for new in map(as_message, items):
            if new.get("reasoning") == "":  # only its summary or encrypted text was sent
                continue
            if new["role"] == "assistant" and found and found[-1]["role"] == "assistant":
                last, (name,) = found[-1], new.keys() - {"role"}
                if not last.keys() & LATER[name]:
                    last[name] = last[name] + new[name] if name in last else new[name]
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
