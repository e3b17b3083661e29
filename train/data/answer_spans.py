"""Find what the target wrote in a conversation: where each answer starts, and what ends it.

    render(turns before, with generation prompt)    <user> hi <end> <assistant>
    render(turns before, and the answer)            <user> hi <end> <assistant> hello <end> \\n
    learned                                                                    ~~~~~~~~~~~

An answer starts where its generation prompt ends, and includes what the target must write to stop, once. That is the end
mark that the template writes after each answer. A template without one shows what its target stops with in other ways: by
the mark that it writes at the end of a chat only, by the mark of the next turn, or not at all (then it is eos_token).

Reasoning that the template leaves out of an answer, although the generation prompt opens it or the template takes it out of
earlier answers, is put back: the target wrote it. Where the template has {% generation %} marks, only what they enclose is
learned.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

from foredraft.train.data.layouts import THOUGHTS, Message, SkippedRow, split_reasoning

if TYPE_CHECKING:
    from foredraft.train.data.chat_template import ChatFormat

STAND_IN = "\u2402answer\u2403"
THINK = r"(?:<(?:\w+:)?think(?:ing)?(?::\w+)?>|\[THINK\]|<\|START_THINKING\|>)"
CLOSE = THINK.replace("<(", "</(").replace("[T", "[/T").replace("START", "END")
OPENED = re.compile(rf"({THINK})\s*$")  # a generation prompt that opens the reasoning
EMPTY = re.compile(rf"\s*{THINK}?\s*{CLOSE}\s*")
Span = tuple[int, int]
Tools = list[dict] | None


class TurnEnd(NamedTuple):
    """Hold what a template writes after an answer."""

    mark: str = ""  # after every answer
    chat: str = ""  # after the mark of a chat's last answer
    next_turn: str = ""  # what the target stops with, if the template ends no answer at all


class OtherStart(ValueError):
    """Say that the template starts an answer otherwise than its generation prompt does."""


class Written(NamedTuple):
    """Hold a conversation up to an answer, as the target saw and wrote it."""

    text: str
    start: int  # of the answer
    thinking: bool | None  # the template's switch
    message: Message | None  # from which the template writes this very text, if it does


def learned(form: "ChatFormat", messages: list[Message], tools: Tools = None) -> list[tuple[str, list[Span]]]:
    """Return texts with the spans in the loss. One text, or several if the template shows an earlier answer otherwise than it
    was written. Raises SkippedRow or OtherStart where no answer can be learned."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise SkippedRow("no answer in it")
    texts: list[tuple[str, list[Span]]] = []
    reason: ValueError = SkippedRow("no answer in it that is to be learned: the row says so")
    for number in answers:
        if messages[number].get("weight", 1) <= 0:
            continue
        try:
            history = [form.shown(message) for message in messages[:number]]
            text, spans = Turn(form, history, messages[number], tools).find_answer()
        except (SkippedRow, OtherStart) as error:
            reason = error
            continue
        if texts and text.startswith(texts[-1][0]):
            texts[-1] = text, [*texts[-1][1], *spans]
        else:
            texts.append((text, spans))
    if not texts:
        raise reason
    return texts


class Turn(NamedTuple):
    """Hold an answer, and the turns before it as the template wants them."""

    form: "ChatFormat"
    history: list[Message]
    answer: Message
    tools: Tools

    def render(self, *said: Message, prompt: bool = False, thinking: bool | None = None) -> str:
        """Return the turns before the answer, and these messages."""
        return self.form.write([*self.history, *said], prompt, tools=self.tools, thinking=thinking)[0]

    def find_answer(self) -> tuple[str, list[Span]]:
        """Return the conversation up to the answer, and the spans that the target wrote of it. Raises OtherStart for an
        answer that starts otherwise than its generation prompt, SkippedRow for one without the reasoning that the target
        starts with."""
        form, answer = self.form, self.answer
        try:
            written = self.with_thoughts() or self.without_thoughts()
        except OtherStart:
            if not form.tagged:
                raise
            text, shown = self.render(form.shown(answer)), form.shown(answer)
            written = Written(text, common(text, self.render()), None, shown)
        calls = [call["function"]["name"] for call in answer.get("tool_calls") or []]
        if any(name not in written.text[written.start :] for name in calls):
            raise SkippedRow("a tool call that the chat template does not show")
        text, end = self.with_end(written)
        spans = [(written.start, end)]
        if form.tagged and written.message is not None:
            whole = [*self.history, written.message]
            _, marked = form.write(whole, marked=True, tools=self.tools, thinking=written.thinking)
            spans = within(form, text, spans[0], marked)
        return text, [without_end(form, text, span, answer) for span in spans]

    def behind_prompt(self, message: Message, thinking: bool | None, thoughts: str = "") -> Written:
        """Return a message behind its generation prompt, with reasoning that the template leaves out between both."""
        prompt, text = self.render(prompt=True, thinking=thinking), self.render(message, thinking=thinking)
        if not thoughts and text.startswith(prompt):
            said, header = text.removeprefix(prompt), self.form.header
            if not header or not said.startswith(header) or prompt != self.render(thinking=thinking):
                return Written(text, len(prompt), thinking, message)
            if self.history and self.history[-1]["role"] == "tool":  # Gemma 4 goes on without the header
                return Written(prompt + said.removeprefix(header), len(prompt), thinking, None)
            return Written(text, len(prompt + header), thinking, message)
        return Written(prompt + thoughts + self.after_header(prompt, text, thinking), len(prompt), thinking, None)

    def with_thoughts(self) -> Written | None:
        """Return an answer behind its reasoning; None if it has none, or if the template neither shows nor opens it."""
        form, plain = self.form, split_reasoning(self.answer)
        thoughts = "" if form.thinking is False else str(plain.get("reasoning_content") or "").strip("\n")
        if not thoughts or not form.supports_reasoning:
            return None
        plain = {name: value for name, value in plain.items() if name not in THOUGHTS}
        thinking = form.switched_to(True)

        def shown(message: Message) -> Written | None:
            if self.render(message, thinking=thinking) == self.render(plain, thinking=thinking):
                return None
            try:
                written = self.behind_prompt(message, thinking)
            except OtherStart:
                return None
            answer = written.text[written.start :]
            if EMPTY.match(answer):  # the template has no reasoning, and shows it as content behind the empty one
                return None
            return written if thoughts.strip() in answer else None

        if by_name := shown(plain | dict.fromkeys(THOUGHTS, thoughts)):
            return by_name
        prompt = self.render(prompt=True, thinking=thinking)
        if opened := OPENED.search(prompt):
            close = opened[1][0] + "/" + opened[1][1:]
            close = opened[1].replace("START", "END") if "START" in opened[1] else close
            close = f"\n{close}\n\n" if prompt.endswith("\n") else close
            return self.behind_prompt(plain, thinking, thoughts + close)
        if form.opens_reasoning or "</think>" not in form.template:
            return None
        said = plain["content"] or ""
        tags = f"<think>\n{thoughts}\n</think>\n\n"  # SmolLM3 wrote them so
        if "reasoning_content" not in self.answer:
            tags = self.answer["content"].removesuffix(said)
        if in_text := shown(plain | {"content": tags + said}):
            return in_text
        tags = tags.lstrip() if tags.lstrip().startswith("<think>") else "<think>" + tags
        return self.behind_prompt(plain, thinking, tags)

    def without_thoughts(self) -> Written:
        """Return an answer that was written with thinking off, where the template has that switch."""
        plain = {name: value for name, value in split_reasoning(self.answer).items() if name not in THOUGHTS}
        message = plain if self.form.supports_reasoning else self.answer
        written = self.behind_prompt(message, self.form.switched_to(False))
        before, said = written.text[: written.start], written.text[written.start :]
        opened = OPENED.search(before) and (written.message is None or not re.search(CLOSE, said))
        if opened or EMPTY.match(said):
            raise SkippedRow("an answer without the reasoning that its target starts with")
        return written

    def after_header(self, prompt: str, text: str, thinking: bool | None) -> str:
        """Return what the template writes of an answer behind that part of its header which the generation prompt has too.

        Both are compared from the last message on: Mistral's template shows a system prompt in the last question only. Raises
        OtherStart if they differ in more than the empty reasoning that some templates write."""
        stand_in = {"role": "assistant", "content": STAND_IN}
        header, found, _ = self.render(stand_in, thinking=thinking).partition(STAND_IN)
        asked = str(self.history[-1]["content"]).strip() if self.history else ""
        turns = self.render(thinking=thinking)
        generation = prompt.removeprefix(turns) if prompt.startswith(turns) else ""
        if generation.strip() and header.endswith(generation) and text.startswith(header):
            return text[len(header) :]
        end = len(turns) if prompt.startswith(turns) and header.startswith(turns) else None  # <think> has a "hi", too
        begin = max(0, header.rfind(asked, 0, end))
        since = prompt[max(0, prompt.rfind(asked, 0, end)) :]
        at = begin + len(self.form.shared(since, header[begin:]))
        more = at < len(header) and at < begin + len(since)
        only_reasoning = EMPTY.fullmatch(header, at) or EMPTY.fullmatch(since, at - begin)
        if not found or text[:at] != header[:at] or (more and not only_reasoning):
            raise OtherStart(
                f"{self.form.name} starts an answer otherwise ({header[at:][:40]!r}) than its generation prompt does "
                f"({since[at - begin :][:40]!r}), so the loss mask cannot be found: give a template with {{% generation %}} "
                "marks (data.template=FILE)" + (", or another data.thinking" if self.form.switch else "")
            )
        empty = EMPTY.match(text, at)
        return text[empty.end() if empty else at :]

    def with_end(self, written: Written) -> tuple[str, int]:
        """Return the text with what the target must write to stop, and where that ends."""
        ends, text = self.form.turn_end, written.text.removesuffix(self.form.turn_end.chat)
        end = len(text.rstrip())
        if self.answer.get("finish_reason") == "length":
            return text, end
        eos = self.form.tokenizer.eos_token or "\0"
        said, stop, added = text[written.start : end].partition(eos)
        if stop and added:  # the target stops there, whatever the template adds
            return text[: written.start] + said + eos, written.start + len(said + eos)
        if text[written.start : end].endswith(ends.mark or "\0"):
            return text, end
        calls = self.answer.get("tool_calls") and (ends.mark or ends.next_turn)
        if calls and (mark := self.mark_after_calls(written.thinking)) is not None:
            return text + mark, len((text + mark).rstrip())
        if not ends.next_turn:
            return text, end
        text = text if ends.next_turn != self.form.tokenizer.eos_token else text[:end]
        return text + ends.next_turn, len(text + ends.next_turn)

    def mark_after_calls(self, thinking: bool | None) -> str | None:
        """Return the mark of the tools' results with which an answer that calls them ends; None if the template shows none.
        It is empty if the call ends with a mark, and words follow (Gemma 4, Apertus) or any turn's start (functionary)."""
        results = [
            {"role": "tool", "content": STAND_IN, "name": call["function"]["name"], "tool_call_id": call.get("id")}
            for call in self.answer["tool_calls"]
        ]
        text = self.render(self.answer, thinking=thinking)

        def follows(*turns: Message) -> str:
            try:
                longer = self.render(self.answer, *turns, thinking=thinking)
            except SkippedRow:
                return ""
            return longer.removeprefix(text) if longer.startswith(text) else ""

        if not (rest := follows(*results)):
            return None
        mark = next_mark(self.form, rest)
        if not text.rstrip().endswith(tuple(self.form.marks)):
            return mark
        return mark if rest.startswith(mark) and not follows({"role": "user", "content": "?"}).startswith(mark) else ""


def common(one: str, other: str) -> int:
    """Return the length of the common start of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def turn_end(form: "ChatFormat") -> TurnEnd:
    """Return what the template writes after an answer, found with an answer that another turn follows or not."""
    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": STAND_IN}
    try:
        last = form.write([user, answer])[0].partition(STAND_IN)[2]
        followed = form.write([user, answer, user])[0].partition(STAND_IN)[2]
    except SkippedRow:
        return TurnEnd()
    kept = form.shared(last, followed)
    if kept.strip():
        return TurnEnd(kept.strip(), last[len(kept) :])
    return TurnEnd() if last.strip() else TurnEnd(next_turn=next_mark(form, followed))


def next_mark(form: "ChatFormat", text: str) -> str:
    """Return the mark of the turn that starts here, or eos_token if it starts with words."""
    eos = str(form.tokenizer.eos_token or "")
    marks = "|".join(re.escape(mark) for mark in form.marks if mark != form.tokenizer.bos_token)
    found = re.match(rf"\s*(?:{marks})", text) if marks else None
    return found[0] if found else eos


def within(form: "ChatFormat", text: str, span: Span, marked: list[Span]) -> list[Span]:
    """Return the parts of a span that the template marks as generated, with the end mark that follows the last one."""
    start, end = span
    found = [(max(a, start), min(len(text[:b].rstrip()), end)) for a, b in marked if b > start]
    if found and found[-1][0] < found[-1][1] and not text[found[-1][1] : end].removesuffix(form.turn_end.mark).strip():
        found[-1] = found[-1][0], end
    return found


def without_end(form: "ChatFormat", text: str, span: Span, message: Message) -> Span:
    """Return the span of an answer; of one that was cut off only up to there, since its target wrote no end."""
    if message.get("finish_reason") != "length":
        return span
    last = (message["content"] or "").rstrip() or str(message.get("reasoning_content", "")).rstrip()
    start, end = span[0], span[0] + len(text[slice(*span)].removesuffix(form.turn_end.mark))
    at = text.rfind(last, start, end)
    return (start, end) if at < 0 else (start, at + len(last))
