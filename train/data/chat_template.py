"""Conversations as text and tokens, by a tokenizer's own chat template, with what the target wrote in the loss.

Nothing is added to what the template says, no system prompt and no token, but for what answer_spans.py names.
"""

import copy
import hashlib
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.heads.target_model.images import ImageReader
from foredraft.heads.target_model.messages import REFUSALS, as_parts, normalize_messages, reasoning_switches
from foredraft.inference.text import answer_context, continuation
from foredraft.train.data.answer_spans import OPENED, STAND_IN, Span, TurnEnd, common, learned, turn_end
from foredraft.train.data.corpus import Document
from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow, split_reasoning

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
HARMONY = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|$)", re.DOTALL)


def template_file(template: str) -> Path:
    """Return the Jinja file that data.template names; "plain" is the one next to this file."""
    return Path(__file__).with_name("plain_chat.jinja") if template == "plain" else Path(template)


class ChatFormat:
    """Turn conversations into tokens and loss masks by a chat template.

    template: a Jinja file in place of the tokenizer's own, or the name of one that the tokenizer has. thinking: the
    template's switch for reasoning; None leaves it at its default. images: of a target that takes them. tools: use the
    template for rows with tools, of a tokenizer that has a separate one. Raises ValueError if there is no template, or it has
    no such switch."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        thinking: bool | None = None,
        images: ImageReader | None = None,
        tools: bool = False,
    ):
        where = tokenizer.name_or_path or "this tokenizer"
        named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        if template is None and tokenizer.chat_template is None:
            raise ValueError(
                f"{where} has no chat template, and the data are conversations: give one with data.template=FILE "
                "(data.template=plain suits a model without one), and the same one where the head is used"
            )
        if template is None and named and "default" not in named:
            raise ValueError(f"{where} has the chat templates {', '.join(named)}: choose one with data.template=NAME")
        if template is not None and template not in named and not template_file(template).is_file():
            raise ValueError(f"data.template={template} is not a file: give a Jinja chat template, or plain")
        if not tokenizer.is_fast:
            raise ValueError(f"{where} is a slow tokenizer: masks need the characters of each token; save a fast one")
        self.tokenizer = tokenizer
        if template is None:
            self.template: str = tokenizer.get_chat_template(tools=[{}] if tools else None)
        else:
            self.template = named[template] if template in named else template_file(template).read_text()
        self.images = images
        self.name = f"the chat template of {where}" if template is None else f"the chat template {template}"
        self.tagged = bool(GENERATION.search(self.template))
        self.supports_reasoning = bool(re.search("think|reasoning", self.template))
        self.switch, self.thinking, self.options = bool(reasoning_switches(self.template)), thinking, switched(thinking)
        if thinking is not None and not self.switch:
            raise ValueError(f"data.thinking={str(thinking).lower()}: {self.name} does not support thinking; set null")
        added = {token.content for token in tokenizer.added_tokens_decoder.values()} | {"<think>", "</think>"}
        self.marks = sorted((mark for mark in added if mark.strip()), key=len, reverse=True)  # one may hold another
        with_tools = template is None and not tools and "tool_use" in named
        self.with_tools = ChatFormat(tokenizer, template, thinking, images, tools=True) if with_tools else self

    def with_options(self, options: dict[str, Any]) -> "ChatFormat":
        """Return the format of a row that sets these variables of the template, unless this format sets them."""
        if not options:
            return self
        form = copy.copy(self)
        form.options = options | self.options
        if self.switch and self.thinking is None:
            set_by_row = (options[name] for name in switched(True) if isinstance(options.get(name), bool))
            form.thinking = next(set_by_row, None)
        form.with_tools = form if self.with_tools is self else self.with_tools.with_options(options)
        return form

    @property
    def digest(self) -> str:
        """Return a hash of all that decides tokens and masks, except the conversation."""
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.sha256(f"{self.template}\0{self.options}\0{tokenizer}".encode()).hexdigest()[:16]

    def write(
        self,
        messages: list[Message],
        prompt: bool = False,
        marked: bool = False,
        tools: list[dict] | None = None,
        thinking: bool | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the text of messages in the template's own names, and if `marked` the spans of characters that the template
        marks as generated. thinking: None is as the format's. Raises SkippedRow where the template refuses the conversation
        (Mistral's and Gemma's want user and assistant in turn)."""
        settings: dict[str, Any] = self.tokenizer.special_tokens_map | self.options | switched(thinking)
        try:
            texts, spans = render_jinja_template(
                conversations=[as_parts(messages, self.template)],
                chat_template=self.template,
                tools=tools,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **settings,
            )
        except REFUSALS as error:
            raise SkippedRow(f"the chat template refuses it: {error}") from None
        return texts[0], spans[0] if marked else []

    def shown(self, message: Message) -> Message:
        """Return an earlier message as the template wants it. Reasoning has one of several names; reasoning in the text stays
        there if the template reads no name."""
        apart = self.supports_reasoning and (self.thinking is False or self.names_reasoning)
        if message["role"] != "assistant" or not apart:
            return message
        message = split_reasoning(message)
        thoughts = None if self.thinking is False else message.get("reasoning_content")
        message = {name: value for name, value in message.items() if name not in THOUGHTS}
        return message | (dict.fromkeys(THOUGHTS, thoughts) if thoughts else {})

    @cached_property
    def names_reasoning(self) -> bool:
        """Return whether the template reads reasoning under a name, apart from the text."""
        answer = {"role": "assistant", "content": "?"} | dict.fromkeys(THOUGHTS, STAND_IN)
        try:
            return STAND_IN in self.write([{"role": "user", "content": "?"}, answer])[0]
        except SkippedRow:
            return False

    @cached_property
    def opens_reasoning(self) -> bool:
        """Return whether the generation prompt opens the reasoning."""
        asked = [{"role": "user", "content": "?"}]
        return bool(OPENED.search(self.write(asked, True, thinking=self.switched_to(True))[0]))

    @cached_property
    def header(self) -> str:
        """Return what the generation prompt adds to a question; "" for a template whose questions end with it."""
        asked = [{"role": "user", "content": "?"}]
        try:
            turns, prompt = self.write(asked)[0], self.write(asked, True)[0]
        except SkippedRow:
            return ""
        return prompt.removeprefix(turns) if prompt.startswith(turns) else ""

    @cached_property
    def turn_end(self) -> TurnEnd:
        return turn_end(self)

    def switched_to(self, thinking: bool) -> bool | None:
        """Return the setting of the template's switch for an answer with reasoning or without; None if it is given."""
        return thinking if self.switch and self.thinking is None else None

    def shared(self, one: str, other: str) -> str:
        """Return the common start of both texts, without a part of a mark."""
        end = common(one, other)
        for text in (one, other):
            for mark in self.marks:
                at = text.find(mark, max(0, end - len(mark) + 1), end + len(mark) - 1)
                end = at if 0 <= at < end else end
        return one[:end]

    def documents(self, messages: list[Message], tools: list[dict] | None = None) -> list[Document]:
        """Return tokens and masks. Raise SkippedRow for a conversation without an answer, or that the template refuses."""
        if tools and self.with_tools is not self:
            return self.with_tools.documents(messages, tools)
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        images = [part["image"] for content in contents for part in content if part["type"] == "image"]
        messages = [self.strip_end(message) for message in normalize_messages(messages, self.template)]
        return [self.tokenize(text, spans, images) for text, spans in learned(self, messages, tools)]

    def strip_end(self, message: Message) -> Message:
        """Return an answer without the end mark that some data sets have in its text, which the template writes itself."""
        if message["role"] != "assistant" or not isinstance(message["content"], str):
            return message
        for mark in {self.turn_end.mark, str(self.tokenizer.eos_token)} & set(self.marks):
            text = message["content"].rstrip()
            if text.endswith(mark):
                message = message | {"content": text.removesuffix(mark)}
        return message

    def tokenize(self, text: str, spans: list[Span], images: Sequence[str] = ()) -> Document:
        """Assign each token to the answer if its first character is. images: of the whole conversation, of which the text
        may be a beginning."""
        if images and self.images is not None:
            images = images[: text.count(self.images.placeholder)]
        if images and self.images is not None:
            tokens, begins = self.images.tokenize(text, images)
        else:
            out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            tokens, begins = out["input_ids"], [start for start, _ in out["offset_mapping"]]
        starts = np.array(begins)
        mask = np.zeros(len(starts), bool)
        for a, b in spans:
            mask |= (starts >= a) & (starts < b)
        return Document(tokens, mask.tolist(), tuple(images))

    def prompt(self, messages: list[Message], tools: list[dict] | None = None) -> list[int]:
        """Return the tokens that the target continues with its answer to the last turn."""
        form = self.with_tools if tools else self
        shown = [form.shown(message) for message in normalize_messages(messages, form.template)]
        text, _ = form.write(shown, True, tools=tools)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def message(self, tokens: list[int], prompt: list[int]) -> Message:
        """Return the answer that a target wrote in these tokens to a prompt, for the turns that follow it. gpt-oss' channels
        become reasoning and content; the <think> tags of others stay in the content, where their templates look for them."""
        if tokens and self.tokenizer.added_tokens_decoder.get(tokens[-1], None) is not None:
            tokens = tokens[:-1] if self.tokenizer.added_tokens_decoder[tokens[-1]].special else tokens
        before = answer_context(self.tokenizer, prompt)
        text = continuation(self.tokenizer, before, tokens, skip_special_tokens=False)
        channels = [(name, said) for name, said in HARMONY.findall(text)]
        if not channels:
            return {"role": "assistant", "content": text}
        thoughts = "".join(said for name, said in channels if name == "analysis")
        content = "".join(said for name, said in channels if name == "final")
        return {"role": "assistant", "content": content} | ({"reasoning_content": thoughts} if thoughts else {})


def switched(thinking: bool | None) -> dict[str, bool]:
    """Return a template's switch for reasoning, which has one of two names."""
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
