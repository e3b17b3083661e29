"""Requests in OpenAI's protocol. Defaults are OpenAI's (temperature 1, top_p 1), not those of the target's generation config,
of which only the end tokens are used. Unsupported fields are refused by name, unless they do not change the answer.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from foredraft.inference.grammar import Grammar
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.serve.openai.response_format import ResponseFormat, converted

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
UNSET_AT_MINUS_ONE = ("max_tokens", "max_completion_tokens", "seed")  # the maximum that fits; a random seed
# Fields that would change an answer, and their values that would not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "web_search_options", "chat_template", "truncate_prompt_tokens", "prompt_logprobs"), ()),
    **dict.fromkeys(("functions", "allowed_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "continue_final_message"), (False,)),
    **dict.fromkeys(("detokenize", "include_reasoning", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning"), (True,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    "function_call": ("auto", "none"),
    "modalities": (["text"], []),
    "suffix": (),
    "verbosity": ("medium",),
    "spaces_between_special_tokens": (True, False),  # fast tokenizers never add them
    "priority": (0,),
}
# What clients send for a field that is not set: forms have empty texts, and PHP writes an empty object as a list.
EMPTY: tuple[Any, ...] = (None, "", [], {})
# Fields for identification, billing and caching, and predictions of the text for a faster answer.
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
IGNORED |= {"request_id", "cache_salt", "client_metadata", "prediction", "guided_decoding_backend", "cache_prompt"}
IGNORED |= {"keep_alive", "session_id"}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(False, description="with include_usage: usage so far in every chunk")
    include_obfuscation: bool | None = Field(
        False, description="accepted but not supported: it would hide lengths from network observers"
    )


class CommonRequest(BaseModel):
    """Validate what all endpoints support."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid")
    refused: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED
    remedies: ClassVar[dict[str, str]] = {}  # of refused fields; others are to be removed

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    min_tokens: int = Field(0, ge=0, le=2**31)
    seed: Seed | None = Field(None, description="choice i uses seed + i; without one, or with -1, answers differ")
    stop: str | list[str] | None = Field(None, description="end the text; in a chat they do not count within reasoning")
    stop_token_ids: list[int] = Field([], max_length=1024)
    ignore_eos: bool = Field(False, description="end only at max_tokens, stop or stop_token_ids, as benchmarks need")
    skip_special_tokens: bool = Field(True, description="false shows special tokens, except the one that ends the text")
    include_stop_str_in_output: bool = Field(False, description="true shows what ended the text: stop or end token")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1, description="0 leaves the likeliest token, as in OpenAI's API")
    top_k: int | None = Field(None, ge=-1, le=2**31, description="0 and -1 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[int, Bias] | None = Field(None, max_length=1024)
    response_format: ResponseFormat | None = None
    store: bool | None = Field(None, description="false excludes this request from logs and from learning")
    trace: bool = Field(False, description="return the origin of each token, and the tree of its step")
    return_token_ids: bool = Field(False, description="return prompt_token_ids and token_ids, as vLLM does")
    return_tokens_as_token_ids: bool = Field(False, description="name tokens in logprobs token_id:N, as vLLM does")
    speculative: bool = Field(True, description="false disables drafting: the same text, to compare the speed")

    @model_validator(mode="before")
    @classmethod
    def refuse_unsupported(cls, fields: Any) -> Any:
        """Refuse unsupported fields, remove fields without effect, and convert constraints to a response_format."""
        if not isinstance(fields, dict):
            return fields
        for name, harmless in cls.refused.items():
            value = fields.get(name)
            if value not in ("", None, *harmless) and (name, value) != ("best_of", fields.get("n")):
                raise ValueError(f"{name} is not supported here: {cls.remedies.get(name, 'remove it')}")
        dropped = {*cls.refused, *IGNORED, *(name for name in UNSET_AT_MINUS_ONE if fields.get(name) == -1)}
        dropped |= {"logprobs"} if fields.get("logprobs") is False else set()  # 0 for pydantic, which asks for them
        known = {*cls.model_fields, "structured_outputs"} - {"input", "messages", "prompt"}
        dropped |= {name for name in known & fields.keys() if fields[name] in EMPTY}
        return converted({name: value for name, value in fields.items() if value is not None and name not in dropped})

    @model_validator(mode="after")
    def check_stop(self) -> "CommonRequest":
        if len(self.stop_strings) > 16 or not all(len(stop) <= 1000 for stop in self.stop_strings):
            raise ValueError("stop supports at most 16 strings of at most 1000 characters")
        if self.ignore_eos and self.has_grammar:
            raise ValueError("ignore_eos cannot be combined with response_format or a forced tool: remove one of them")
        if self.budget is not None and self.min_tokens > self.budget:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.budget}")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings without empty ones, which some clients send instead of none."""
        return tuple(stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop)

    @property
    def num_texts(self) -> int:
        return self.n

    @property
    def budget(self) -> int | None:
        return self.max_tokens

    @property
    def top_tokens(self) -> int | None:
        """Return the number of alternatives to each token; None without a request for log-probabilities."""
        return None

    @property
    def has_grammar(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    def sampling(self, grammar: Grammar | None) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k if self.top_k is not None and self.top_k > 0 else None,
            top_p=None if self.top_p is None else max(self.top_p, 1e-9),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
            grammar=grammar,
        )


class Message(BaseModel):
    """Hold a message, which the target's chat template gets with all extra fields (such as tool_calls)."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None  # text, parts, or any JSON that a tool returned


# Type of a text part -> its text field. Clients send those of the Responses API to chat completions, too.
PARTS = {"text": "text", "input_text": "text", "output_text": "text", "reasoning_text": "text", "summary_text": "text"}
PARTS["refusal"] = "refusal"
# The types of media as tools return them, and what a file has, but not its entry in a listing.
MEDIA = {"image_url", "input_image", "image", "input_file", "file", "input_audio", "audio", "media"}
DATA = {"file", "source", "data", "file_data", "file_id", "file_url", "base64", "blob"}


def content_text(role: str, content: Any) -> str | None:
    """Join the text parts of a message; a tool's result may be any JSON. Raises ValueError for other parts, except the media
    that a tool returned: a note replaces them, because an agent sends them again with each later request."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    is_result = role in ("tool", "function")
    texts = [part_text(part, is_result) for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "".join(texts)
    kinds = [part["type"] for part in parts if isinstance(part, dict) and "type" in part]
    if is_result and not any(isinstance(part, dict) and isinstance(text, str) for part, text in zip(parts, texts)):
        return json.dumps(content, ensure_ascii=False)
    if is_result:  # parts next to others, such as resources of MCP
        written = (json.dumps(part, ensure_ascii=False) for part in parts)
        return "".join(text if isinstance(text, str) else other for text, other in zip(texts, written))
    of_type = f" of type {', '.join(map(str, kinds))}" if kinds else ""
    raise ValueError(f"messages contain parts{of_type} that are not text: only text is supported here")


def part_text(part: Any, is_result: bool) -> Any:
    if not isinstance(part, dict):
        return part
    kind, resource = str(part.get("type")), part.get("resource")
    is_entry = kind == "file" and DATA.isdisjoint(part) and not str(part.get("url")).startswith("data:")
    has_blob = isinstance(resource, dict) and "blob" in resource  # in MCP
    is_media = has_blob or (kind in MEDIA and not is_entry)
    return f"[{kind} omitted: not text]" if is_result and is_media else part.get(PARTS.get(kind))


def as_mode(choice: Any) -> Any:
    """Return a choice of tools, of which Cursor writes a mode as an object."""
    mode = choice.get("type") if isinstance(choice, dict) and len(choice) == 1 else None
    return mode if isinstance(mode, str) else choice


Mode = BeforeValidator(as_mode)


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern="^[a-zA-Z0-9_./-]{1,128}$")  # OpenAI's names, and those of MCP
    parameters: dict[str, Any] | None = None

    @field_validator("parameters", mode="before")
    @classmethod
    def as_object(cls, parameters: Any) -> Any:
        return {} if parameters in ("", []) else parameters


class Tool(BaseModel):
    """Hold a tool, which the target's chat template gets unchanged."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"]
    function: FunctionName


class Allowed(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class ChatRequest(CommonRequest):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    enable_thinking: bool | None = Field(None, description="as in chat_template_kwargs, and like thinking")
    thinking: bool | dict[str, Any] | None = Field(None, description='{"type": "disabled"} asks for no reasoning')
    tools: list[Tool] | None = Field(None, max_length=1024)
    tool_choice: Annotated[Literal["auto", "none", "required"] | NamedTool | AllowedTools | None, Mode] = None
    parallel_tool_calls: bool = True
    echo: Literal[False] = False
    add_special_tokens: Literal[False] = Field(False, description="the chat template writes them")

    @model_validator(mode="after")
    def check_chat(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError(f"tools contains two tools of one name: {', '.join(names)}")
        choice = self.tool_choice
        chosen = choice.allowed_tools.tools if isinstance(choice, AllowedTools) else [choice]
        allowed = [tool.function.name for tool in chosen if isinstance(tool, NamedTool)]
        if unknown := [name for name in allowed if name not in names]:
            raise ValueError(f"tool_choice names {unknown[0]!r}, but tools contains {', '.join(names) or 'none'}")
        if isinstance(choice, AllowedTools):  # the model does not learn of the other tools
            self.tools = [tool for tool in self.tools or [] if tool.function.name in allowed]
            self.tool_choice, names = choice.allowed_tools.mode, allowed
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice required needs tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @property
    def wants_reasoning(self) -> bool | None:
        chosen = self.thinking.get("type") != "disabled" if isinstance(self.thinking, dict) else self.thinking
        return self.enable_thinking if chosen is None else chosen

    @property
    def has_grammar(self) -> bool:
        return self.tool_choice not in (None, "auto", "none") or super().has_grammar

    @property
    def budget(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def is_tokens(prompt: list[Any]) -> bool:
    """Return whether this is a single prompt of tokens. So is an empty list, which is refused when it is decoded."""
    return not prompt or isinstance(prompt[0], int)


class CompletionRequest(CommonRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0, le=2**31, description="0, with echo and logprobs: score the prompt")
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool = Field(True, description="false encodes a prompt's text without a bos token")
    echo: bool = Field(False, description="put the prompt before each text; with logprobs, include those of the prompt")

    @property
    def num_texts(self) -> int:
        return self.n * (1 if isinstance(self.prompt, str) or is_tokens(self.prompt) else len(self.prompt))

    @property
    def top_tokens(self) -> int | None:
        return self.logprobs
