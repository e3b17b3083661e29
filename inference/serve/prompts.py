"""Messages and prompts to tokens. Text that a message holds never becomes a special token: nobody can end a turn that is
not theirs, or speak as the system, by writing the template's own marks."""

import copy
import json
import re
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from foredraft.heads.target import Target
from foredraft.inference.serve.protocol import ChatRequest, CompletionRequest, Message, is_tokens

PLACE = "\ue000{}\ue001"  # of a special token's text in a message; private characters, which are taken out of messages
PLACES = re.compile("\ue000(\\d+)\ue001")


class PromptEncoder:
    """Used by one thread at a time: a tokenizer's options are state of its own, so it has a copy of the target's."""

    def __init__(self, target: Target):
        self.target = target
        self.tokenizer: PreTrainedTokenizerBase = copy.deepcopy(target.text_tokenizer)
        self.specials = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    def chat(self, request: ChatRequest) -> list[list[int]]:
        """Raises ValueError for what the template or the tokenizer refuses."""
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.target.name} has no chat template: use /v1/completions")
        messages = [self.plain(message) for message in request.messages]
        tools: Any = None if request.tool_choice == "none" else request.tools or None
        if tools is not None:
            tools = self.without_specials([tool.model_dump(exclude_unset=True) for tool in tools])
        try:
            text = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the target's chat template refuses these messages: {error}") from None
        pieces = PLACES.split(text)  # text, number of a special token, text ...
        tokens = self.encode(pieces[0], False)
        for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
            tokens += self.tokenizer(self.specials[int(number)], add_special_tokens=False, split_special_tokens=True)[
                "input_ids"
            ]
            tokens += self.encode(after, False)
        return [tokens]

    def plain(self, message: Message) -> dict[str, Any]:
        """What the template is given: text parts joined, and special tokens taken out of all text."""
        given = message.model_dump(exclude_unset=True)
        if isinstance(message.content, list):
            if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in message.content):
                raise ValueError("messages hold parts that are not text: only text is supported here")
            given["content"] = "".join(part["text"] for part in message.content)
        if isinstance(given.get("tool_calls"), list):
            given["tool_calls"] = [with_parsed_arguments(call) for call in given["tool_calls"]]
        return self.without_specials(given)

    def without_specials(self, value: Any) -> Any:
        if isinstance(value, str):
            value = value.replace("\ue000", "").replace("\ue001", "")
            for number, special in enumerate(self.specials):
                value = value.replace(special, PLACE.format(number))
            return value
        if isinstance(value, list):
            return [self.without_specials(item) for item in value]
        if isinstance(value, dict):
            return {key: self.without_specials(item) for key, item in value.items()}
        return value

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        """A prompt's own special tokens are tokens here: it is the whole text."""
        prompt = request.prompt
        prompts: list[Any] = [prompt] if isinstance(prompt, str) or is_tokens(prompt) else prompt
        found = [self.encode(one, True) if isinstance(one, str) else one for one in prompts]
        for tokens in found:
            unknown = next((token for token in tokens if not 0 <= token < self.target.vocab_size), None)
            if unknown is not None:
                raise ValueError(f"prompt holds token {unknown}; the target knows 0 to {self.target.vocab_size - 1}")
        return found

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        except (TypeError, UnicodeError):
            raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair") from None


def with_parsed_arguments(call: Any) -> Any:
    """A call of an earlier answer as templates take it: with its arguments as an object, not as OpenAI's string of JSON."""
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
