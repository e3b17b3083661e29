"""data=self: conversations that a chat model writes with itself, so that a head needs no data set (Magpie, arXiv:2406.08464).

Given nothing but its template up to where the user speaks, the target writes what a user might ask; then it answers:

    <|im_start|>user\\n                                       the opening: what the target continues with a question
    <|im_start|>user\\nHow do bees see?<|im_end|>\\n<|im_start|>assistant\\n     the same, rendered for use: answered

Questions are sampled, half of the answers are greedy, and some conversations go on. Only answers are in the loss. The text of
row n depends on its number and the seed alone, not on what is written next to it.

Questions written from nothing are short. With tasks (data.tasks), such as "Summarize this text: {text}", a row has a second
conversation whose question holds the answers of its first: long prompts, and answers that copy from them.
"""

import hashlib
import itertools
import json
import random
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from foredraft.heads.cache_directory import cache_directory
from foredraft.heads.checkpoint import fingerprint
from foredraft.heads.target import Target
from foredraft.inference.engine import Engine
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.request import Request
from foredraft.inference.sampling import SamplingParams
from foredraft.inference.text import continuation
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.conversations import assemble
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.encoding import Encoder, encode
from foredraft.train.data.openings import TurnPrefixes
from foredraft.train.data.question_filters import QuestionFilter, before_loop, loops
from foredraft.train.data.sources import Source
from foredraft.train.data.written_rows import RowFile

TEXT = "{text}"  # in a task: what the target wrote before
SHORTEST_ANSWER = 4  # tokens
SHORTEST_CUT = 40  # tokens of an answer before it repeats itself
LONG = 3600  # seconds left, from which on the user is told how to stop early
SURE = 20  # seconds after which the seconds left are known well enough for that
MAX_REJECTED = 100  # rows of which none is kept, after which no other is tried
EXHAUSTED = 1000  # the same, where earlier rows were kept


@dataclass(frozen=True)
class MagpieSettings:
    """Set how a target writes. question_temperature, answer_temperature: lowest and highest. greedy: share of the answers
    that are not sampled. tasks: questions about a text, which replaces {text}. task_share: share of the rows that have
    one."""

    turns: int = 2
    question_temperature: tuple[float, float] = (0.6, 1.05)
    answer_temperature: tuple[float, float] = (0.7, 1.0)
    greedy: float = 0.5
    min_p: float = 0.03  # of questions: least probability of a token as a share of the likeliest one's
    max_question: int = 160
    max_answer: int = 384
    script: str | None = None
    seeds: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    task_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("question_temperature", "answer_temperature"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"data.{name}=[{low},{high}] must be two numbers above 0, the lower one first")
        for name in ("greedy", "task_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must lie between 0 and 1")
        for task in self.tasks:
            if TEXT not in task:
                raise ValueError(f"data.tasks: {task!r} has no {TEXT}, where a text stands that the target wrote")
        for name in ("turns", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least 1")


@dataclass
class Conversation:
    """Hold one row while it is written. tokens: all that is settled; spans as in train/data/written_rows.py."""

    number: int
    random: random.Random
    turns: int
    opening: list[int]  # what the question in hand continues
    first_words: str = ""  # of its question, if a seed gives them
    task: str | None = None  # of the row's second conversation, as long as it has not started
    start: int = 0  # in tokens, of the conversation in hand
    tokens: list[int] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    answering: bool = False
    last: list[int] = field(default_factory=list)  # the prompt of the newest request, and what the target made of it

    def row(self, dropped: str | None = None) -> dict[str, Any]:
        if dropped:
            return {"number": self.number, "dropped": dropped, "tokens": self.last, "temperatures": self.temperatures}
        facts = {"number": self.number, "tokens": self.tokens, "written": self.written, "asked": self.asked}
        if 0 < self.start < len(self.tokens):
            facts["starts"] = [0, self.start]
        return facts | {"temperatures": self.temperatures}


class Writer:
    """Let a target write rows into a file, many at a time."""

    def __init__(self, target: Target, openings: TurnPrefixes, settings: MagpieSettings, rows: RowFile, batch: int):
        self.target, self.openings, self.settings, self.rows, self.batch = target, openings, settings, rows, batch
        self.filter = QuestionFilter(settings.script)
        for question in rows.questions:
            self.filter.add(openings.tokenizer.decode(question))
        self.ends = frozenset(target.eos_token_ids)
        added = openings.tokenizer.added_tokens_decoder
        self.special = {number for number, token in added.items() if token.special}
        self.check_context()
        self.kept, self.tried = rows.kept, len(rows.numbers) if rows.kept else 0  # when a row was last kept
        self.numbers = (number for number in itertools.count() if number not in rows.numbers)
        self.texts: dict[Request, tuple[Conversation, list[int]]] = {}
        self.engine = Engine(target, None, max_num_seqs=batch, reuse_prefixes=True)
        self.advised = False

    def write(self, tokens: int) -> None:
        """Write until the file has `tokens` in the loss. Unfinished rows are left: their numbers are written next time."""
        progress = Progress("self-written text", tokens, "answer tokens", done=self.rows.tokens)
        while self.rows.tokens < tokens:
            for _ in range(self.batch - len(self.texts)):  # a row may be done at once
                self.ask(self.begin(next(self.numbers)))
            for output in self.engine.step() if self.texts else ():
                conversation, text = self.texts[output.request]
                text += output.tokens
                if output.finish_reason is not None:
                    del self.texts[output.request]
                    self.advance(conversation, text, output.finish_reason)
            self.check_yield()
            # With unfinished answers, because the first rows end long after the first answers start.
            progress.add(self.rows.tokens + self.answered() - progress.done, self.note())
            if (progress.seconds_left or 0) > LONG and time.perf_counter() - progress.start > SURE and not self.advised:
                self.advised = True
                report("Ctrl-C loses no row that is done: data.tokens=0 then takes what the file holds")
        progress.close()
        self.engine.close()

    def answered(self) -> int:
        """Return the number of answer tokens in unfinished rows."""
        return sum(
            sum(end - start for start, end in conversation.written) + len(text) * conversation.answering
            for conversation, text in self.texts.values()
        )

    def check_context(self) -> None:
        """Raise ValueError where the target's context has no room for a question, or for an answer to the shortest one."""
        if self.target.context is None:
            return
        topics = {None if seed.endswith("...") else seed for seed in self.settings.seeds} or {None}
        opening = max(len(self.openings.opening(topic)) for topic in topics)
        around = len(self.openings.tokens(self.openings.before + self.openings.after)) + 1
        for name, before in (("max_question", opening), ("max_answer", around)):
            if before + (most := getattr(self.settings, name)) > self.target.context:
                raise ValueError(
                    f"data.{name}={most} does not fit behind the {before} tokens before it: {self.target.name} reads "
                    f"{self.target.context} tokens. Set data.{name} to {self.target.context - before} at most"
                )

    def check_yield(self) -> None:
        if self.rows.kept > self.kept:
            self.kept, self.tried = self.rows.kept, len(self.rows.numbers)
        dropped = len(self.rows.numbers) - self.tried
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.rows.dropped.most_common(3))
        if not self.kept and dropped >= MAX_REJECTED:
            raise ValueError(
                f"none of {dropped} questions that {self.target.name} wrote is kept ({reasons}): is it one that was trained "
                "to chat? Else give data=text or data=conversations"
            )
        if dropped >= EXHAUSTED:
            raise ValueError(
                f"none of the last {dropped} questions that {self.target.name} wrote is kept (of all rows: {reasons}). Set "
                f"data.tokens=0 to use the {self.rows.tokens:,} tokens of {self.rows.path}, or data.seeds for other questions"
            )

    def note(self) -> str:
        tried = len(self.rows.numbers)
        return f"{100 * self.rows.kept / max(1, tried):.0f} % of {tried:,} rows kept"

    def begin(self, number: int) -> Conversation:
        draw = random.Random(f"{self.settings.seed} {number}")
        turns = 1 if self.openings.between is None else draw.randint(1, self.settings.turns)
        seed = draw.choice(self.settings.seeds) if self.settings.seeds else None
        start = seed.removesuffix("...") if seed and seed.endswith("...") else ""
        has_task = self.settings.tasks and draw.random() < self.settings.task_share
        task = draw.choice(self.settings.tasks) if has_task else None
        return Conversation(number, draw, turns, self.openings.opening(None if start else seed), start, task)

    def ask(self, conversation: Conversation) -> None:
        """Let the target write the next question."""
        temperature = round(conversation.random.uniform(*self.settings.question_temperature), 2)
        conversation.temperatures.append(temperature)
        conversation.answering = False
        prompt = conversation.opening + self.openings.tokens(conversation.first_words)
        params = SamplingParams(temperature=temperature, min_p=self.settings.min_p)
        end = self.openings.after.split()[0]
        self.send(conversation, prompt, params, self.settings.max_question, (end,))

    def answer(self, conversation: Conversation) -> None:
        draw, settings = conversation.random, self.settings
        greedy = draw.random() < settings.greedy
        temperature = 0.0 if greedy else round(draw.uniform(*settings.answer_temperature), 2)
        conversation.temperatures.append(temperature)
        conversation.answering = True
        prompt = conversation.tokens[conversation.start :]
        self.send(conversation, prompt, SamplingParams(temperature=temperature), settings.max_answer, ())

    def send(
        self, conversation: Conversation, prompt: list[int], params: SamplingParams, most: int, stops: tuple[str, ...]
    ) -> None:
        seed = conversation.random.getrandbits(40)
        conversation.last = prompt
        if self.target.context is not None and len(prompt) + most > self.target.context:
            self.close(conversation, "conversation longer than the context")
            return
        request = Request(prompt, params, most, seed, self.ends, stops)
        self.texts[request] = conversation, []
        self.engine.add(request)

    def advance(self, conversation: Conversation, text: list[int], reason: str) -> None:
        """Take in a question or an answer that the target has written."""
        if reason == "error":
            raise ValueError(
                f"{self.target.name} gives logits that are not numbers: another dtype may do (target.dtype)"
            )
        conversation.last = conversation.last + text
        if conversation.answering:
            self.take_answer(conversation, text, ended=text[-1] in self.ends)
        else:
            self.take_question(conversation, text, ended=reason == "stop")

    def take_question(self, conversation: Conversation, text: list[int], ended: bool) -> None:
        end = self.openings.after.split()[0]
        said = text[:-1] if text[-1] in self.ends else text
        marks = any(token in self.special for token in said)
        before = conversation.last[: len(conversation.last) - len(text)]
        written = continuation(self.openings.tokenizer, before, said, skip_special_tokens=False)
        question = (conversation.first_words + written.partition(end)[0]).strip()
        reason = self.filter.reason(question, said, marks, ended)
        if reason is not None:
            self.close(conversation, reason)
            return
        self.filter.add(question)
        # Tokens as the template gives them where the head is used, not as the target happened to write them.
        if conversation.written:
            between = self.openings.tokens(f"{self.openings.between}{question}{self.openings.after}")
            first = 1 if between[0] == conversation.tokens[-1] else 0  # the answer has its end token already
            conversation.tokens += between[first:]
        else:
            conversation.tokens = self.openings.tokens(self.openings.before + question + self.openings.after)
        after = len(conversation.tokens) - len(self.openings.tokens(self.openings.after))
        conversation.asked.append([after - len(self.openings.tokens(question)), after])
        conversation.first_words = ""
        self.answer(conversation)

    def take_answer(self, conversation: Conversation, text: list[int], ended: bool) -> None:
        kept = before_loop(text) if loops(text) else len(text)
        if len(text) < SHORTEST_ANSWER or (kept < len(text) and kept < SHORTEST_CUT):
            self.close(conversation, "answer too short" if kept == len(text) else "answer that repeats itself")
            return
        conversation.written.append([len(conversation.tokens), len(conversation.tokens) + kept])
        conversation.tokens = conversation.tokens + text[:kept]
        if ended and kept == len(text) and len(conversation.written) < conversation.turns:
            opening = self.openings.tokens(str(self.openings.between))
            first = 1 if opening[0] == conversation.tokens[-1] else 0
            conversation.opening = conversation.tokens + opening[first:]
            self.ask(conversation)
        else:
            self.close(conversation)

    def start_task_turn(self, conversation: Conversation, task: str) -> None:
        """Start the row's second conversation: a task about what the target answered in the first."""
        spans = [conversation.tokens[start:end] for start, end in conversation.written]
        answers = self.openings.tokenizer.batch_decode(spans, skip_special_tokens=True)
        question = task.replace(TEXT, "\n\n".join(answer.strip() for answer in answers))
        conversation.task, conversation.turns, conversation.start = None, 1, len(conversation.tokens)
        conversation.tokens += self.openings.tokens(self.openings.before + question + self.openings.after)
        self.answer(conversation)

    def close(self, conversation: Conversation, dropped: str | None = None) -> None:
        """Close a conversation, and the row if it has no task. If a later turn failed, the turns before it stay."""
        if conversation.written:
            dropped = None
            conversation.tokens = conversation.tokens[: conversation.written[-1][1]]
            conversation.asked = conversation.asked[: len(conversation.written)]
            if conversation.task is not None:
                self.start_task_turn(conversation, conversation.task)
                return
        self.rows.append(conversation.row(dropped))


def read_lines(key: str, file: str | None) -> tuple[str, ...]:
    """Read data.seeds or data.tasks; a line's \\n is a line break."""
    if file is None:
        return ()
    if not Path(file).is_file():
        raise ValueError(f"data.{key}={file} is not a file: conf/data/self.yaml describes its lines")
    lines = [line.strip().replace("\\n", "\n") for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"data.{key}={file} has no line")
    return tuple(lines)


def row_file(target: Target, form: ChatFormat, settings: MagpieSettings) -> Path:
    """Return where the rows of this target and these settings are, for all runs."""
    facts = json.dumps([fingerprint(target)["embedding_digest"], form.digest, asdict(settings), str(target.dtype)])
    key = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return cache_directory() / "self_written" / f"{Path(target.name).name}-{key}.jsonl"


def write(target: Target, form: ChatFormat, settings: MagpieSettings, file: Path, tokens: int, batch: int) -> None:
    """Write until the file has `tokens` in the loss. One process writes; others that want the same wait for it."""
    if target.is_collective:
        raise ValueError(
            f"target.sharding={target.sharding}: data=self lets one process write; write the rows on one device first, then "
            "give data.path=FILE data.tokens=0"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file.with_suffix(".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"another process writes {file}: waiting for it")
        lock.acquire()
    try:
        rows = RowFile(file, {"target": fingerprint(target), "settings": asdict(settings), "dtype": str(target.dtype)})
        if rows.tokens < tokens:
            report(f"the target writes {tokens - rows.tokens:,} tokens into {file}")
            Writer(target, TurnPrefixes(form), settings, rows, batch).write(tokens)
        rows.close()
    finally:
        lock.release()


def corpus(
    tokenizer: PreTrainedTokenizerBase,
    target: Target | None = None,
    tokens: int = 250_000,
    path: str | None = None,
    seeds: str | None = None,
    tasks: str | None = None,
    conversations: str | list[str] | None = None,
    weights: list[float] | None = None,
    template: str | None = None,
    thinking: bool | None = None,
    batch: int = 64,
    val_split: float = 0.05,
    num_proc: int | None = None,
    cache_dir: str | None = None,
    **settings: Any,
) -> Corpus:
    """Return at least `tokens` tokens of answers that the target wrote, mixed with `conversations` (as data=conversations
    reads them). Existing rows are used first; the target writes the rest.

    tokens: 0 uses the file unchanged. path: the file of rows; None is one in the cache, of this target and these
    settings. weights: how often the rows, and each path of conversations, are read in an epoch. settings: of
    `MagpieSettings`. Raise ValueError without a target to write what is missing.
    """
    pairs: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    chosen = MagpieSettings(seeds=read_lines("seeds", seeds), tasks=read_lines("tasks", tasks), **pairs)
    file = None if path is None else Path(path)
    if target is not None and (file is None or tokens):
        form = ChatFormat(tokenizer, template, thinking)
        file = file or row_file(target, form, chosen)
        write(target, form, chosen, file, tokens, batch)
    if file is None or not file.is_file():
        raise ValueError(
            "data=self has no rows yet, and nothing here lets a target write: give data.path=FILE of such rows"
        )
    held = RowFile(file)
    if held.tokens < tokens:
        raise ValueError(
            f"{file} holds {held.tokens:,} tokens of answers, fewer than data.tokens={tokens}: give 0 for all"
        )
    lines = bisect_left(held.lines, tokens) + 1 if tokens else None  # that hold them
    paths = [conversations] if isinstance(conversations, str) else conversations or []
    encoders = [Encoder(tokenizer, Source(str(file), max_samples=lines))]
    encoders += [Encoder(tokenizer, Source(one), template, thinking) for one in paths]
    data = assemble([encode(encoder, cache_dir, num_proc) for encoder in encoders], encoders, weights, val_split)
    return data._replace(card=data.card | {"rows_kept": held.kept / max(1, len(held.numbers))})
