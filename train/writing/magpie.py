"""data=self: conversations that a chat model writes with itself, so that a head needs no data set (Magpie, arXiv:2406.08464).

Given nothing but its template up to where the user speaks, the target writes what a user might ask; then it answers:

    <|im_start|>user\\n                                       the opening: what the target continues with a question
    <|im_start|>user\\nHow do bees see?<|im_end|>\\n<|im_start|>assistant\\n     the same, rendered for use: answered

Questions are sampled, half of the answers are greedy, and some conversations go on. Only answers are in the loss. What our
engine writes in row n depends on its number and the seed alone, not on what is written next to it.

Questions written from nothing are short. With tasks (data.tasks), such as "Summarize this text: {text}", a row has a second
conversation whose question holds the answers of its first: long prompts, and answers that copy from them.
"""

import hashlib
import itertools
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.heads.checkpoint import fingerprint
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.cache_directory import cache_directory
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.request import Request
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.conversations import assemble
from foredraft.train.data.corpus import Corpus
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.sources import Source
from foredraft.train.writing.question_filters import QuestionFilter
from foredraft.train.writing.self_chat import MagpieSettings, SelfChat, TurnPrefixes
from foredraft.train.writing.writers import Server, in_process, through_server
from foredraft.train.writing.written_rows import RowFile

MAX_REJECTED = 100  # rows of which none is kept, after which no other is tried
EXHAUSTED = 1000  # the same, where earlier rows were kept


def check_context(target: Target, prefixes: TurnPrefixes, settings: MagpieSettings) -> None:
    """Raise ValueError where the target's context has no room for a question, or for an answer to the shortest one."""
    topics = {None if seed.endswith("...") else seed for seed in settings.seeds}
    opening = max(len(prefixes.opening(topic)) for topic in topics or {None})
    around = len(prefixes.tokens(prefixes.before + prefixes.after)) + 1
    for name, before in (("max_question", opening), ("max_answer", around)):
        most, context = getattr(settings, name), target.context
        if context is not None and before + most > context:
            raise ValueError(
                f"data.{name}={most} does not fit behind the {before} tokens before it: {target.name} reads {context} "
                f"tokens. Set data.{name} to {context - before} at most"
            )


def missing(target: Target, rows: RowFile, tokens: int) -> Iterator[int]:
    """Yield the numbers of rows to write until the file has `tokens` in the loss. Raise ValueError if none is kept."""
    kept, tried = rows.kept, len(rows.done) if rows.kept else 0  # when a row was last kept
    for number in itertools.count():
        if rows.tokens >= tokens:
            return
        if number in rows.done:
            continue
        if rows.kept > kept:
            kept, tried = rows.kept, len(rows.done)
        dropped = len(rows.done) - tried
        if dropped >= (EXHAUSTED if kept else MAX_REJECTED):
            some = f"the last {dropped}" if kept else str(dropped)
            reasons = "; ".join(f"{count} x {reason}" for reason, count in rows.dropped.most_common(3))
            advice = "is it one that was trained to chat? Else give data=text or data=conversations"
            if kept:
                use = f"Set data.tokens=0 to use the {rows.tokens:,} tokens of {rows.path}"
                advice = f"{use}, or data.seeds for other questions"
            raise ValueError(f"none of {some} questions that {target.name} wrote is kept (in all, {reasons}): {advice}")
        yield number


def read_lines(key: str, file: str | None, described: str = "conf/data/self.yaml") -> tuple[str, ...]:
    """Read the lines of the file that a key names; a line's \\n is a line break. described: the file that explains them."""
    if file is None:
        return ()
    if not Path(file).is_file():
        raise ValueError(f"{key}={file} is not a file: {described} describes its lines")
    lines = [line.strip().replace("\\n", "\n") for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{key}={file} has no line")
    return tuple(lines)


def row_file(target: Target, form: ChatFormat, settings: MagpieSettings) -> Path:
    """Return where the rows of this target and these settings are, for all runs."""
    weights = fingerprint(target)
    digests = [weights["embedding_digest"], weights.get("weights_digest")]
    facts = json.dumps([digests, form.digest, asdict(settings), str(target.dtype)])
    key = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return cache_directory() / "self_written" / f"{Path(target.name).name}-{key}.jsonl"


def write(
    target: Target,
    form: ChatFormat,
    settings: MagpieSettings,
    file: Path,
    tokens: int,
    batch: int,
    endpoint: str | None = None,
    model: str | None = None,
) -> None:
    """Write rows, many at a time, until the file has `tokens` in the loss, by the server at `endpoint` if it is given. One
    process writes; others that want the same wait for it. The numbers of unfinished rows are written next time."""
    if target.is_collective and endpoint is None:
        raise ValueError(
            f"target.sharding={target.sharding}: data=self lets one process write; write the rows on one device first, then "
            "give data.path=FILE data.tokens=0"
        )
    about = {
        "target": fingerprint(target),
        "magpie": asdict(settings),
        "dtype": str(target.dtype),
        "endpoint": endpoint,
    }
    with RowFile(file, about, wait=True) as rows:
        if rows.tokens >= tokens:
            return
        report(
            f"{endpoint or 'the target'} writes {tokens - rows.tokens:,} tokens into {file}. Ctrl-C loses no finished row: "
            "data.tokens=0 then takes what the file holds"
        )
        server = None if endpoint is None else Server(endpoint, model)
        prefixes, rules = TurnPrefixes(form), QuestionFilter(settings.script)
        for _, row in rows.read():
            for start, end in row.get("asked", []):
                rules.add(prefixes.tokenizer.decode(row["tokens"][start:end]))
        check_context(target, prefixes, settings)
        chats = (SelfChat(n, target, prefixes, settings, rules).row for n in missing(target, rows, tokens))
        with Progress("self-written text", tokens, "answer tokens", done=rows.tokens) as progress:

            def show(texts: dict[Request, list[int]]) -> None:
                # With unfinished answers: the first rows end long after the first answers start.
                unfinished = sum(len(text) for request, text in texts.items() if not request.stop_strings)
                tried = len(rows.done)
                note = f"{100 * rows.kept / max(1, tried):.0f} % of {tried:,} rows kept"
                progress.add(rows.tokens + unfinished - progress.done, note)

            if server is None:
                in_process(target, chats, rows, batch, show, tokens)
            else:
                through_server(server, chats, rows, batch, show)


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
    endpoint: str | None = None,
    model: str | None = None,
    val_split: float = 0.05,
    num_proc: int | None = None,
    cache_dir: str | None = None,
    **settings: Any,
) -> Corpus:
    """Return at least `tokens` tokens of answers that the target wrote, mixed with `conversations` (as data=conversations
    reads them). Existing rows are used first; the target writes the rest. conf/data/self.yaml has the other arguments;
    `settings` are those of MagpieSettings. Raise ValueError without a target to write what is missing."""
    chosen = MagpieSettings(seeds=read_lines("data.seeds", seeds), tasks=read_lines("data.tasks", tasks), **settings)
    file = None if path is None else Path(path)
    if target is not None and (file is None or tokens):
        form = ChatFormat(tokenizer, template, thinking)
        file = file or row_file(target, form, chosen)
        write(target, form, chosen, file, tokens, batch, endpoint, model)
    if file is None or not file.is_file():
        raise ValueError("data=self has no rows, and nothing here lets a target write: give data.path=FILE of rows")
    rows = RowFile(file)
    if rows.tokens < tokens:
        raise ValueError(
            f"{file} has {rows.tokens:,} tokens of answers, fewer than data.tokens={tokens}: give 0 for all"
        )
    lines = bisect_left(rows.lines, tokens) + 1 if tokens else None  # that hold them
    paths = [conversations] if isinstance(conversations, str) else conversations or []
    encoders = [Encoder(tokenizer, Source(str(file), max_samples=lines))]
    encoders += [Encoder(tokenizer, Source(one), template, thinking) for one in paths]
    data = assemble(encoders, weights, val_split, num_proc, cache_dir)
    return data._replace(card=data.card | {"rows_kept": rows.kept / max(1, len(rows.done))})
