"""What a chat model says to itself in a row of data=self (train/writing/magpie.py): questions, answers, a task about them."""

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foredraft.heads.target_model import Target
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.text import continuation, token_texts_of
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.layouts import Message, SkippedRow
from foredraft.train.writing.question_filters import QuestionFilter, before_loop, loops
from foredraft.train.writing.writers import Ask, Reply
from foredraft.train.writing.written_rows import Row

MARK = "\u2402question\u2403"  # stands for what is not written yet when a template is rendered
TEXT = "{text}"  # in a task: what the target wrote before
QUESTIONS, ANSWERS = (0.6, 1.05), (0.7, 1.0)  # lowest and highest temperature
MIN_P = 0.03  # of a question's tokens
SHORTEST_ANSWER = 4  # tokens
SHORTEST_CUT = 40  # tokens of an answer before it repeats itself


class TurnPrefixes:
    """Find what stands around questions and answers in a target's own template.

    Raise ValueError for a template that does not mark where a question ends."""

    def __init__(self, form: ChatFormat):
        self.form, self.tokenizer = form, form.tokenizer
        parts = self.around(("user", MARK))
        if len(parts) != 2:
            raise ValueError(f"{form.name} does not show a question unchanged: data=self needs a template that does")
        self.before, self.after = parts
        if not self.after.strip():
            raise ValueError(
                f"{form.name} does not mark where a question ends: the target cannot end one, as data=self needs it"
            )
        self.between = self.next_turn()

    def around(self, *turns: tuple[str, str], prompt: bool = True) -> list[str]:
        """Return what the template writes before, between and after the turns of which only MARK is given."""
        messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
        return self.form.write(messages, prompt)[0].split(MARK)

    def next_turn(self) -> str | None:
        """Return what stands between an answer and the next question; None if the template shows earlier answers otherwise
        than they were written, or allows no further turn."""
        if re.search("think|reasoning", self.form.template):
            return None  # reasoning of earlier answers is removed
        try:
            parts = self.around(("user", "?"), ("assistant", MARK), ("user", MARK))
        except SkippedRow:
            return None
        return parts[1] if parts[2:] == [self.after] else None

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def opening(self, topic: str | None) -> list[int]:
        """Return what the target continues with a question. topic: what the system prompt names as the user's topic."""
        if topic is None:
            return self.tokens(self.before)
        system = f"You are a helpful assistant. The user asks about {topic}."
        try:
            return self.tokens(self.around(("system", system), ("user", MARK), prompt=False)[0])
        except SkippedRow as error:
            raise ValueError(
                f"data.seeds names topics, for which {self.form.name} takes no system prompt ({error}): write lines that end "
                "in ..., which questions start with"
            ) from None


@dataclass(frozen=True)
class MagpieSettings:
    """Set how a target writes; conf/data/self.yaml describes each setting."""

    turns: int = 2
    greedy: float = 0.5
    max_question: int = 160
    max_answer: int = 384
    script: str | None = None
    seeds: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    task_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("greedy", "task_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must lie between 0 and 1")
        for name in ("turns", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least 1")
        for task in self.tasks:
            if TEXT not in task:
                raise ValueError(f"data.tasks: {task!r} has no {TEXT}, where a text stands that the target wrote")


class SelfChat:
    """Write a row: a conversation of the target with itself, and if it has a task, a second one about the answers of the
    first. The row depends on its number only, and on earlier questions.

    start: of the conversation in hand. last: the newest prompt, and what the target made of it."""

    def __init__(
        self, number: int, target: Target, prefixes: TurnPrefixes, settings: MagpieSettings, rules: QuestionFilter
    ):
        self.number, self.target, self.prefixes, self.settings, self.rules = number, target, prefixes, settings, rules
        self.draw, self.ends = random.Random(f"{settings.seed} {number}"), frozenset(target.eos_token_ids)
        self.start, self.dropped = 0, ""
        self.last, self.tokens = list[int](), list[int]()
        self.written, self.asked = list[list[int]](), list[list[int]]()

    async def row(self, ask: Ask) -> Row:
        """Write the row by these replies."""
        self.ask, draw, settings = ask, self.draw, self.settings
        turns = 1 if self.prefixes.between is None else draw.randint(1, settings.turns)
        seed = draw.choice(settings.seeds) if settings.seeds else None
        has_task = settings.tasks and draw.random() < settings.task_share
        task = draw.choice(settings.tasks) if has_task else None
        with self.attempt():
            await self.chat(turns, seed)
        if task is not None and self.written:
            with self.attempt():
                await self.answer_task(task)
        if not self.written:
            return {"number": self.number, "dropped": self.dropped, "tokens": self.last}
        row: Row = {"number": self.number, "tokens": self.tokens, "written": self.written, "asked": self.asked}
        return row | ({"starts": [0, self.start]} if 0 < self.start < len(self.tokens) else {})

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Remove a turn that fails, and note why."""
        try:
            yield
        except SkippedRow as reason:
            self.dropped = str(reason)
            del self.tokens[self.written[-1][1] if self.written else 0 :], self.asked[len(self.written) :]

    async def chat(self, turns: int, seed: str | None) -> None:
        """Let the target ask and answer, turn by turn, as long as it ends its answers."""
        first_words = seed.removesuffix("...") if seed and seed.endswith("...") else ""
        prefixes, opening = self.prefixes, self.prefixes.opening(None if first_words else seed)
        for turn in range(turns):
            between = prefixes.before if turn == 0 else str(prefixes.between)
            if turn > 0:
                opening, first_words = self.joined(between), ""
            question = await self.question(opening, first_words)
            # Tokens as the template gives them where the head is used, not as the target happened to write them.
            self.tokens = self.joined(between + question + prefixes.after)
            end = len(self.tokens) - len(prefixes.tokens(prefixes.after))
            self.asked.append([end - len(prefixes.tokens(question)), end])
            if not await self.answer():
                return

    def joined(self, text: str) -> list[int]:
        """Return the tokens of a conversation that goes on with this text. An answer may have its end token already."""
        more = self.prefixes.tokens(text)
        return self.tokens + (more[1:] if self.tokens[-1:] == more[:1] else more)

    async def question(self, opening: list[int], first_words: str) -> str:
        """Let the target write the next question. Raise SkippedRow if it is rejected."""
        tokenizer, mark = self.prefixes.tokenizer, self.prefixes.after.split()[0]
        params = SamplingParams(temperature=round(self.draw.uniform(*QUESTIONS), 2), min_p=MIN_P)
        prompt = opening + self.prefixes.tokens(first_words)
        reply = await self.reply(prompt, params, self.settings.max_question, (mark,))
        said = reply.tokens[:-1] if reply.tokens[-1] in self.ends else reply.tokens
        marks = any(token in token_texts_of(tokenizer).special for token in said)
        text = continuation(tokenizer, prompt, said, skip_special_tokens=False)
        question = (first_words + text.partition(mark)[0]).strip()
        reason = self.rules.reason(question, said, marks, ended=reply.finish_reason == "stop")
        if reason is not None:
            raise SkippedRow(reason)
        self.rules.add(question)
        return question

    async def answer(self) -> bool:
        """Let the target answer, and return whether it ended the answer. What repeats itself is cut off."""
        greedy = self.draw.random() < self.settings.greedy
        params = SamplingParams(temperature=0.0 if greedy else round(self.draw.uniform(*ANSWERS), 2))
        text = (await self.reply(self.tokens[self.start :], params, self.settings.max_answer)).tokens
        kept = before_loop(text) if loops(text) else len(text)
        if len(text) < SHORTEST_ANSWER or (kept < len(text) and kept < SHORTEST_CUT):
            raise SkippedRow("answer too short" if kept == len(text) else "answer that repeats itself")
        self.written.append([len(self.tokens), len(self.tokens) + kept])
        self.tokens += text[:kept]
        return text[-1] in self.ends and kept == len(text)

    async def answer_task(self, task: str) -> None:
        """Write the row's second conversation: a task about what the target answered in the first."""
        spans = [self.tokens[start:end] for start, end in self.written]
        answers = self.prefixes.tokenizer.batch_decode(spans, skip_special_tokens=True)
        question = task.replace(TEXT, "\n\n".join(answer.strip() for answer in answers))
        self.start = len(self.tokens)
        self.tokens += self.prefixes.tokens(self.prefixes.before + question + self.prefixes.after)
        await self.answer()

    async def reply(self, prompt: list[int], params: SamplingParams, most: int, stops: tuple[str, ...] = ()) -> Reply:
        seed, context = self.draw.getrandbits(40), self.target.context
        self.last = prompt
        if context is not None and len(prompt) + most > context:
            raise SkippedRow("conversation longer than the context")
        reply = await self.ask(Request(prompt, params, most, seed, self.ends, stops))
        if not reply.tokens:
            raise ValueError("data.endpoint: the server returns no token ids, as vLLM and SGLang do. Use one of them")
        self.last = prompt + reply.tokens
        return reply
