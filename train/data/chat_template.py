"""A tokenizer's own chat template, and the loss mask: which tokens of a conversation are the target's to write.

What a template marks with {% generation %} is in the loss. Without such marks it is what an assistant turn adds after its
prompt:

    render(turns before, with generation prompt)    <user> hi <end> <assistant>
    render(turns before, and the answer)            <user> hi <end> <assistant> hello <end> \\n
    in the loss                                                                 ~~~~~~~~~~~

up to the last character that is not white space: after its end token a target writes no more, the template does. Nothing
is added to what the template says: no system prompt, no token.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.train.data.corpus import Document
from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]


def template_file(template: str) -> Path:
    """The Jinja file that data.template names; "plain" is the one that lies beside this file."""
    return Path(__file__).with_name("plain_chat.jinja") if template == "plain" else Path(template)


class ChatFormat:
    """template: a Jinja file in place of the tokenizer's own. thinking: the template's switch for thoughts; None leaves it
    at its default. Raises ValueError where there is no template, or it has no such switch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None, thinking: bool | None = None):
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
        self.name = f"the chat template of {where}" if template is None else f"the chat template {template}"
        self.tagged = bool(GENERATION.search(self.template))
        if thinking is not None and not re.search(r"\b(enable_)?thinking\b", self.template):
            raise ValueError(f"data.thinking={str(thinking).lower()}: {self.name} knows no thinking; leave it null")
        self.options = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}

    @property
    def digest(self) -> str:
        """A hash of all that decides tokens and masks, but for the conversation."""
        tokenizer = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.sha256(f"{self.template}\0{self.options}\0{tokenizer}".encode()).hexdigest()[:16]

    def render(self, messages: list[Message], prompt: bool = False, marked: bool = False) -> tuple[str, list[Span]]:
        """The text, and where `marked` the spans of characters that the template marks as generated. Raises SkippedRow
        where the template refuses the conversation (Mistral's and Gemma's want user and assistant in turn)."""
        settings: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.options}
        # A template knows thoughts by one of three names.
        messages = [
            one | dict.fromkeys(THOUGHTS, one["reasoning_content"]) if "reasoning_content" in one else one
            for one in messages
        ]
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **settings,
            )
        except TemplateError as error:
            raise SkippedRow(f"the chat template refuses it: {error}") from None
        return texts[0], spans[0] if marked else []

    def marked(self, messages: list[Message]) -> list[tuple[str, list[Span]]]:
        """Text and the spans in the loss. One text, or one per answer where the template shows an earlier answer otherwise
        than when it was written (a thinking model's earlier thoughts are taken out)."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise SkippedRow("no answer in it")
        messages = messages[: answers[-1] + 1]
        if self.tagged:
            text, spans = self.render(messages, marked=True)
            if len(spans) == len(answers):
                spans = [without_end(text, span, messages[number]) for span, number in zip(spans, answers)]
            return [(text, spans)]
        found = []
        for number in answers:
            before, after = self.render(messages[:number], prompt=True)[0], self.render(messages[: number + 1])[0]
            if not after.startswith(before):
                raise ValueError(
                    f"{self.name} begins an answer otherwise than its generation prompt does ({before[-40:]!r}), so the "
                    "loss mask cannot be found: give a template with {% generation %} marks (data.template=FILE)"
                    + (", or another data.thinking" if self.options else "")
                )
            span = without_end(after, (len(before), len(after.rstrip())), messages[number])
            found.append((after, span))
        whole = found[-1][0]
        if all(whole.startswith(after) for after, _ in found):
            return [(whole, [span for _, span in found])]
        return [(after, [span]) for after, span in found]

    def documents(self, messages: list[Message]) -> list[Document]:
        """Tokens and masks. Raises SkippedRow for a conversation without an answer, or that the template refuses."""
        return [self.tokenize(text, spans) for text, spans in self.marked(messages)]

    def tokenize(self, text: str, spans: list[Span]) -> Document:
        """A token belongs to the answer where its first character does."""
        out = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        starts = np.array([start for start, _ in out["offset_mapping"]])
        mask = np.zeros(len(starts), bool)
        for a, b in spans:
            mask |= (starts >= a) & (starts < b)
        return Document(out["input_ids"], mask.tolist())

    def prompt(self, messages: list[Message]) -> list[int]:
        """The tokens that the target continues with its answer to the last turn."""
        text, _ = self.render(messages, prompt=True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def without_end(text: str, span: Span, message: Message) -> Span:
    """The span of an answer in the text; of one that was cut off only up to there, since its target wrote no end."""
    if message.get("finish_reason") != "length":
        return span
    last = message["content"].rstrip()
    at = text.rfind(last, *span)
    return span if at < 0 else (span[0], at + len(last))
