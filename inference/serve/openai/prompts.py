"""Convert messages and prompts to tokens. Text within a message never becomes a special token or another mark of the chat
template (<think>, <tool_call>): nobody can end another role's turn, or speak as the system."""

import copy
import inspect
import re
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.heads.target_model import Target
from foredraft.heads.target_model.messages import (
    REFUSALS,
    as_parts,
    in_turns,
    normalize_messages,
    normalize_tools,
    reasoning_switches,
    rendered,
    shows_tools,
    take_reasoning,
    template_needs,
)
from foredraft.inference.serve.errors import context_exceeded
from foredraft.inference.serve.openai.protocol import ChatRequest, CompletionRequest, content_text, is_tokens
from foredraft.inference.serve.openai.reasoning import reasoning_marks
from foredraft.inference.text import encode_prompt

# Replaces a mark within a message. The private characters themselves are removed from messages.
MARK_PLACEHOLDER = "\ue000{}\ue001"
MARK_PLACEHOLDERS = re.compile("\ue000(\\d+)\ue001")


class PromptEncoder:
    """Encode prompts, in one thread at a time: a tokenizer's options are mutable state, so this uses a copy."""

    def __init__(self, target: Target):
        self.target = target
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(target.text_tokenizer)
        template = str(self.tokenizer.chat_template)
        added = [token for token in self.tokenizer.added_tokens_decoder.values() if token.content.strip()]
        marks = [(token.content, token.special) for token in added if token.special or token.content in template]
        marks.sort(key=lambda mark: -len(mark[0]))  # a mark may contain another one
        self.marks, self.special = [mark for mark, _ in marks], [special for _, special in marks]
        self.spellings: dict[int, list[int]] = {}
        templates = self.tokenizer.chat_template
        default = templates.get("default", "") if isinstance(templates, dict) else template
        self.reads_effort, self.switches = "reasoning_effort" in template, reasoning_switches(default)
        text = rendered([{"role": "developer", "content": "d_a"}, {"role": "user", "content": "q"}], default)
        self.supports_developer_role = "developer" in template and "d_a" in text
        self.reasoning_field = "thinking" if "message.thinking" in template else "reasoning_content"
        self.reserved_names = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()

    def chat(self, request: ChatRequest) -> list[list[int]]:
        """Encode the messages of a chat. Raises ValueError if the template or the tokenizer refuses them."""
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.target.name} has no chat template: use /v1/completions")
        tools: Any = None if request.tool_choice == "none" else request.tools or None
        template = self.tokenizer.get_chat_template(tools=tools)
        if tools is not None and not shows_tools(template):
            raise ValueError(
                f"tools: the chat template of {self.target.name} does not show them to the model. Remove tools, or use a "
                "target whose template reads them"
            )
        given = [message.model_dump(exclude_unset=True) for message in request.messages]
        given = [as_text(message) for message in given]
        messages = normalize_messages(given, template)
        if template_needs(template).object_arguments:
            wrap_broken_arguments(messages)
        messages = in_turns([self.prepare_message(message) for message in messages], template)
        if tools is not None:
            given = [tool.model_dump(exclude_unset=True) for tool in tools]
            tools = self.replace_marks(normalize_tools(given, template))
        facts = {**self.effort(request), **self.replace_marks(request.chat_template_kwargs)}
        if reserved := [name for name in facts if name in self.reserved_names]:
            raise ValueError(f"chat_template_kwargs contains {reserved[0]!r}, which is reserved: remove it")
        try:
            # The tokenizer's own method removes None, but some templates compare a call's content with it.
            (text,), _ = render_jinja_template(
                conversations=[as_parts(messages, template)],
                tools=tools,
                chat_template=template,
                add_generation_prompt=True,
                **self.tokenizer.special_tokens_map | facts,
            )
        except REFUSALS as error:
            raise ValueError(f"the target's chat template refuses these messages: {error}") from None
        pieces = MARK_PLACEHOLDERS.split(text)  # alternating texts and numbers of marks
        tokens = self.encode(pieces[0], False)
        for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
            tokens += self.tokenize_as_text(int(number)) + self.encode(after, False)
            self.check_length(len(tokens))
        return [tokens]

    def effort(self, request: ChatRequest) -> dict[str, Any]:
        """Return variables of the template for the request's effort, and for reasoning on or off. Raises ValueError if the
        template does not use any, unless the model does this anyway, or it is OpenAI's default effort."""
        effort, wanted = request.reasoning_effort, request.wants_reasoning
        name = "enable_thinking" if request.thinking is None else "thinking"
        facts: dict[str, Any] = {"reasoning_effort": effort} if effort is not None and self.reads_effort else {}
        if wanted is None and effort is not None and (not facts or (effort == "none" and self.switches)):
            wanted, name = effort != "none", "reasoning_effort"
        if wanted is None or self.switches:
            return facts | ({} if wanted is None else dict.fromkeys(self.switches, wanted))
        reasons = self.reads_effort or any(reasoning_marks(self.tokenizer.chat_template))
        if not (effort == "medium" if wanted and name == "reasoning_effort" else wanted == reasons):
            raise ValueError(f"{name}: the chat template of {self.target.name} lacks it: remove it")
        return facts

    def tokenize_as_text(self, number: int) -> list[int]:
        """Encode a mark as text. The tokenizer splits only special tokens, so the first character of others is cut off."""
        if number not in self.spellings:
            mark, parts = self.marks[number], {"add_special_tokens": False, "split_special_tokens": True}
            whole = [mark] if self.special[number] else [mark[:1], mark[1:]]
            self.spellings[number] = [token for part in whole for token in self.tokenizer(part, **parts)["input_ids"]]
        return self.spellings[number]

    def prepare_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Prepare a message for the template: name its reasoning as the template does, and replace marks in all text. Earlier
        answers keep marks that are not special, because templates look for reasoning there."""
        if message["role"] == "developer" and not self.supports_developer_role:
            message["role"] = "system"
        if reasoning := message.pop("reasoning", None) or message.pop("reasoning_content", None):
            message[self.reasoning_field] = reasoning
        return self.replace_marks(message, message["role"] == "assistant")

    def replace_marks(self, value: Any, special_only: bool = False) -> Any:
        if isinstance(value, str):
            value = value.replace("\ue000", "").replace("\ue001", "")
            for number, mark in enumerate(self.marks):
                if self.special[number] or not special_only:
                    value = value.replace(mark, MARK_PLACEHOLDER.format(number))
            return value
        if isinstance(value, list):
            return [self.replace_marks(item, special_only) for item in value]
        if isinstance(value, dict):
            items = value.items()
            return {self.replace_marks(key): self.replace_marks(item, special_only) for key, item in items}
        return value

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """Encode prompts of a completion. Special tokens in them are allowed, because a prompt is the whole text."""
        prompt = request.prompt
        prompts: list[Any] = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
        found = [self.encode(one, request.add_special_tokens) if isinstance(one, str) else one for one in prompts]
        for tokens in found:
            unknown = next((token for token in tokens if not 0 <= token < self.target.vocab_size), None)
            if unknown is not None:
                raise ValueError(f"prompt contains token {unknown}, the target has 0 to {self.target.vocab_size - 1}")
        return found

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize a text. One that is far too long is detected in parts, at the cost of about one context."""
        size = 8 * (self.target.context or len(text))
        if len(text) > size:
            count = 0
            for start in range(0, len(text), size):
                count += len(self.tokens(text[start : start + size], False)) - 16  # the boundary may split a word
                self.check_length(count)
        return self.tokens(text, add_special_tokens)

    def check_length(self, count: int) -> None:
        if self.target.context is not None and count > self.target.context:
            raise context_exceeded(self.target.context, f"more than {count}", "messages or prompt", "messages")

    def tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return encode_prompt(self.tokenizer, text, add_special_tokens)
        except (TypeError, UnicodeError):
            raise ValueError("the text is not valid Unicode: it contains half of a surrogate pair") from None


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content as a text, and the reasoning among the parts of an answer by its name."""
    reasoning, content = "", message.get("content")
    if message["role"] == "assistant":
        reasoning, content = take_reasoning(content)
    more = {"reasoning": message.get("reasoning") or reasoning} if reasoning else {}
    return message | {"content": content_text(message["role"], content)} | more


def wrap_broken_arguments(messages: list[dict[str, Any]]) -> None:
    """Make objects of the arguments that a target wrote wrong in an earlier turn, so that its conversation can go on."""
    for call in (call for message in messages for call in message.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict):
            call["function"]["arguments"] = {"arguments": arguments}
