"""What stands around questions and answers in a chat template, for a target that writes both (train/data/magpie.py)."""

import re

from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.layouts import Message, SkippedRow

MARK = "\u2402question\u2403"  # stands for what is not written yet when a template is rendered


class TurnPrefixes:
    """Find what stands around questions and answers in a target's own template.

    Raise ValueError for a template that does not mark where a question ends."""

    def __init__(self, form: ChatFormat):
        self.form, self.tokenizer = form, form.tokenizer
        whole = form.render([{"role": "user", "content": MARK}], prompt=True)[0]
        if whole.count(MARK) != 1:
            raise ValueError(f"{form.name} does not show a question unchanged: data=self needs a template that does")
        self.before, self.after = whole.split(MARK)
        if not self.after.strip():
            raise ValueError(
                f"{form.name} does not mark where a question ends: the target cannot end one, as data=self needs it"
            )
        self.between = self.next_turn()

    def next_turn(self) -> str | None:
        """Return what stands between an answer and the next question; None if the template shows earlier answers otherwise
        than they were written, or allows no further turn."""
        if re.search("think|reasoning", self.form.template):
            return None  # reasoning of earlier answers is removed
        answer = MARK.replace("question", "answer")
        turns: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        try:
            text = self.form.render([*turns, {"role": "user", "content": MARK}], prompt=True)[0]
        except SkippedRow:
            return None
        _, found, rest = text.partition(answer)
        between, also, after = rest.partition(MARK)
        return between if found and also and after == self.after else None

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def opening(self, topic: str | None) -> list[int]:
        """Return what the target continues with a question. topic: what the system prompt names as the user's topic."""
        if topic is None:
            return self.tokens(self.before)
        system: Message = {"role": "system", "content": f"You are a helpful assistant. The user asks about {topic}."}
        try:
            text = self.form.render([system, {"role": "user", "content": MARK}])[0]
        except SkippedRow as error:
            raise ValueError(
                f"data.seeds names topics, for which {self.form.name} takes no system prompt ({error}): write lines that end "
                "in ..., which questions start with"
            ) from None
        return self.tokens(text.partition(MARK)[0])
