"""A tokenizer's own chat template, and the loss mask: which tokens of a conversation are the target's to write.

What a template marks with {% generation %} is in the loss. Without such marks it is what an assistant turn adds after its
prompt:

    render(turns before, with generation prompt)    <user> hi <end> <assistant>
    render(turns before, and the answer)            <user> hi <end> <assistant> hello <end> \\n
    in the loss                                                                 ~~~~~~~~~~~

up to the last character that is not white space: after its end token a target writes no more, the template does. Nothing
is added to what the template says, no system prompt and no token, but for thoughts that it takes out of an answer whose
generation prompt begins them (DeepSeek-R1, QwQ): those the target wrote.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.heads.target.images import ImageReader
from foredraft.train.data.corpus import Document
from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow, split_thoughts

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
SWITCH = re.compile(r"(?<![.\w'\"])(enable_)?thinking\b(?!['\"])")  # not message.thinking
BEGUN = re.compile(r"<think>\s*$")  # thoughts, in the generation prompt
EMPTY = re.compile(r"(<think>)?\s*</think>")
HARMONY = re.compile(r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|$)", re.DOTALL)
STAND_IN = "\u2402answer\u2403"
Span = tuple[int, int]


def template_file(template: str) -> Path:
    """The Jinja file that data.template names; "plain" is the one that lies beside this file."""
    return Path(__file__).with_name("plain_chat.jinja") if template == "plain" else Path(template)


class ChatFormat:
    """template: a Jinja file in place of the tokenizer's own. thinking: the template's switch for thoughts; None leaves it
    at its default. images: of a target that takes them. Raises ValueError where there is no template, or it has no such
    switch."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        thinking: bool | None = None,
        images: ImageReader | None = None,
    ):
        where = tokenizer.name_or_path or "this tokenizer"
        if template is None and tokenizer.chat_template is None:
            raise ValueError(
                f"{where} has no chat template, and the data are conversations: give one with data.template=FILE "
                "(data.template=plain suits a model that knows none), and the same one where the head is used"
            )
        if template is not None and not template_file(template).is_file():
            raise ValueError(f"data.template={template} is no file: give a Jinja chat template, or plain")
        if not tokenizer.is_fast:
            raise ValueError(f"{where} is a slow tokenizer: masks need the characters of each token; save a fast one")
        self.tokenizer = tokenizer
        self.template = tokenizer.get_chat_template() if template is None else template_file(template).read_text()
        self.images = images
        self.name = f"the chat template of {where}" if template is None else f"the chat template {template}"
        self.tagged = bool(GENERATION.search(self.template))
        self.knows_thoughts = bool(re.search("think|reasoning", self.template))
        # What an answer without text has as its content, for templates that ask for it and for those that expect text.
        self.nothing = None if re.search(r"\bcontent('\])? is (not )?none", self.template) else ""
        self.switch, self.thinking, self.options = bool(SWITCH.search(self.template)), thinking, switched(thinking)
        if thinking is not None and not self.switch:
            raise ValueError(f"data.thinking={str(thinking).lower()}: {self.name} knows no thinking; leave it null")

    @property
    def digest(self) -> str:
        """A hash of all that decides tokens and masks, but for the conversation."""
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.sha256(f"{self.template}\0{self.options}\0{tokenizer}".encode()).hexdigest()[:16]

    def render(
        self,
        messages: list[Message],
        prompt: bool = False,
        marked: bool = False,
        tools: list[dict] | None = None,
        thinking: bool | None = None,
    ) -> tuple[str, list[Span]]:
        """The text, and where `marked` the spans of characters that the template marks as generated. thinking: None is as
        the format's. Raises SkippedRow where the template refuses the conversation (Mistral's and Gemma's want user and
        assistant in turn)."""
        settings: dict[str, Any] = self.tokenizer.special_tokens_map | self.options | switched(thinking)
        try:
            texts, spans = render_jinja_template(
                conversations=[[self.shown(message) for message in messages]],
                chat_template=self.template,
                tools=tools,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **settings,
            )
        except (TemplateError, TypeError) as error:
            raise SkippedRow(f"the chat template refuses it: {error}") from None
        return texts[0], spans[0] if marked else []

    def shown(self, message: Message) -> Message:
        """The message as templates want it, which know thoughts by one of several names."""
        if message["role"] != "assistant" or not self.knows_thoughts:
            return message
        message = split_thoughts(message)
        if "tool_calls" in message and not message["content"]:
            message = message | {"content": self.nothing}
        thoughts = None if self.thinking is False else message.get("reasoning_content")
        message = {name: value for name, value in message.items() if name not in THOUGHTS}
        return message | (dict.fromkeys(THOUGHTS, thoughts) if thoughts else {})

    def marked(self, messages: list[Message], tools: list[dict] | None = None) -> list[tuple[str, list[Span]]]:
        """Text and the spans in the loss. One text, or one per answer where the template shows an earlier answer otherwise
        than when it was written (a thinking model's earlier thoughts are taken out). Raises SkippedRow where no answer can be
        learned."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise SkippedRow("no answer in it")
        messages = messages[: answers[-1] + 1]
        if self.tagged:
            text, spans = self.render(messages, marked=True, tools=tools)
            if len(spans) == len(answers):
                spans = [without_end(text, span, messages[number]) for span, number in zip(spans, answers)]
            return [(text, spans)]
        found, reasons = [], []
        for number in answers:
            try:
                found.append(self.answered(messages[: number + 1], tools))
            except SkippedRow as reason:
                reasons.append(reason)
        if not found:
            raise reasons[0]
        whole = found[-1][0]
        if all(whole.startswith(text) for text, _ in found):
            return [(whole, [span for _, span in found])]
        return [(text, [span]) for text, span in found]

    def answered(self, messages: list[Message], tools: list[dict] | None) -> tuple[str, Span]:
        """The conversation up to an answer, as the target saw and wrote it, and the span that it wrote.

        An answer without thoughts was written with thinking off, where the template has that switch. Raises ValueError for a
        template whose answers begin otherwise than its generation prompts, SkippedRow for an answer whose thoughts the
        template wants and nobody knows."""
        said = split_thoughts(messages[-1])
        thoughts = "" if self.thinking is False else str(said.get("reasoning_content", "")).strip("\n")
        thinking = bool(thoughts) if self.switch and self.thinking is None else None
        before = self.render(messages[:-1], True, tools=tools, thinking=thinking)[0]
        after = self.render(messages, tools=tools, thinking=thinking)[0]
        if not after.startswith(before):
            other = self.render(
                [*messages[:-1], {"role": "assistant", "content": STAND_IN}], tools=tools, thinking=thinking
            )[0]
            begin = next(n for n, (a, b) in enumerate(zip(after, other, strict=False)) if a != b)
            opened = BEGUN.search(before)
            stem = before[: opened.start()] if opened else before
            asked = str(messages[-2]["content"]).strip() if messages[1:] else ""
            since = stem[max(0, stem.rfind(asked)) :] if asked else stem
            # Up to where any answer begins, but for what all begin with (gpt-oss' <|channel|>), which is written too.
            if (at := after.rfind(since, 0, begin)) < 0:
                raise ValueError(
                    f"{self.name} begins an answer otherwise than its generation prompt does ({before[-40:]!r}), so the "
                    "loss mask cannot be found: give a template with {% generation %} marks (data.template=FILE)"
                    + (", or another data.thinking" if self.switch else "")
                )
            after = before + (f"{thoughts}\n</think>\n\n" if opened else "") + after[at + len(since) :]
        span = len(before), len(after.rstrip())
        if not thoughts and EMPTY.match(after[len(before) :].lstrip()):
            raise SkippedRow("an answer without the thoughts that its target begins with")
        return after, without_end(after, span, said)

    def documents(self, messages: list[Message], tools: list[dict] | None = None) -> list[Document]:
        """Tokens and masks. Raises SkippedRow for a conversation without an answer, or that the template refuses."""
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        images = [part["image"] for content in contents for part in content if part["type"] == "image"]
        return [self.tokenize(text, spans, images) for text, spans in self.marked(messages, tools)]

    def tokenize(self, text: str, spans: list[Span], images: Sequence[str] = ()) -> Document:
        """A token belongs to the answer where its first character does. images: of the whole conversation, of which the text
        may be a beginning."""
        if images and self.images is not None:
            images = images[: text.count(self.images.placeholder)]
        if images and self.images is not None:
            tokens, begins = self.images.tokenize(text, images)
        else:
            out = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
            )
            tokens, begins = out["input_ids"], [start for start, _ in out["offset_mapping"]]
        starts = np.array(begins)
        mask = np.zeros(len(starts), bool)
        for a, b in spans:
            mask |= (starts >= a) & (starts < b)
        return Document(tokens, mask.tolist(), tuple(images))

    def prompt(self, messages: list[Message], tools: list[dict] | None = None) -> list[int]:
        """The tokens that the target continues with its answer to the last turn."""
        text, _ = self.render(messages, prompt=True, tools=tools)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def message(self, tokens: list[int]) -> Message:
        """The answer that a target wrote in these tokens, for the turns that follow it. gpt-oss' channels become thoughts and
        content; the <think> tags of others stay in the content, where their templates look for them."""
        if tokens and self.tokenizer.added_tokens_decoder.get(tokens[-1], None) is not None:
            tokens = tokens[:-1] if self.tokenizer.added_tokens_decoder[tokens[-1]].special else tokens
        text = self.tokenizer.decode(tokens)
        channels = [(name, said) for name, said in HARMONY.findall(text)]
        if not channels:
            return {"role": "assistant", "content": text}
        thoughts, content = (
            "".join(said for name, said in channels if name == which) for which in ("analysis", "final")
        )
        return {"role": "assistant", "content": content} | ({"reasoning_content": thoughts} if thoughts else {})


def switched(thinking: bool | None) -> dict[str, bool]:
    """A template's switch for thoughts, which has one of two names."""
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


def without_end(text: str, span: Span, message: Message) -> Span:
    """The span of an answer in the text; of one that was cut off only up to there, since its target wrote no end."""
    if message.get("finish_reason") != "length":
        return span
    last = message["content"].rstrip() or str(message.get("reasoning_content", "")).rstrip()
    at = text.rfind(last, *span)
    return span if at < 0 else (span[0], at + len(last))
