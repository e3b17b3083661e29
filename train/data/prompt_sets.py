"""The prompts that drafters are measured on: sets by name, and files of your own.

A row is one of Spec-Bench's (`turns`: what a user says, one after the other; `category`), a conversation (OpenAI's
`messages`, ShareGPT's `conversations`), whose last answer is written anew, a `question` as GSM8K has it (also MATH's
`problem`, and Alpaca's `instruction` with its `input`), or a text to continue (`prompt`, as HumanEval has it; a list of them
is turns, as MT-Bench has it on the Hub). Later turns follow the target's own greedy answers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from foredraft.inference.evaluation.benchmark import Prompt
from foredraft.inference.evaluation.progress import report
from foredraft.inference.text import with_start
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.columns import LISTS, PROMPTS, declared, pair, system, template_options
from foredraft.train.data.corpus import Corpus, has_chats, prompts
from foredraft.train.data.layouts import (
    Message,
    SkippedRow,
    check_answers,
    has_system,
    listed,
    turns,
    unicode,
    whole_answers,
)
from foredraft.train.data.sources import Row, Source

ASKED = "turns", *PROMPTS  # columns of what only a user says
COLUMNS = tuple(
    dict.fromkeys(("messages", "turns", "prompt", "question", *LISTS, *PROMPTS))
)  # those of benchmarks first
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SETS = {
    "mt_bench": Source("HuggingFaceH4/mt_bench_prompts"),
    "gsm8k": Source("openai/gsm8k", name="main", split="test"),
    "humaneval": Source("openai/openai_humaneval", split="test"),
    "speed_bench": Source("nvidia/SPEED-Bench", name="qualitative", split="test"),
}
OF_DATA = ("held_out", "long")  # made of the key `data`
# What SPEED-Bench (arXiv:2604.09557) has in the place of texts that others license; its prepare.py fetches them.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
# Spec-Bench's own tables count these categories of MT-Bench as one.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


class Question(NamedTuple):
    category: str
    turns: list[list[Message]]  # what is added to the conversation before each answer; none for raw text
    text: str = ""  # raw text to continue
    tools: list[dict] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 -- never changed: variables of the chat template


def check_name(name: str, lengths: Sequence[int] = ()) -> None:
    """Raise ValueError for prompts that are not known, before a target is loaded. lengths: as in conf/evaluate.yaml."""
    known = [*OF_DATA, "spec_bench", *SETS]
    if name not in known and not Path(name).is_file():
        raise ValueError(f"prompts={name} is neither a file nor one of {', '.join(known)}")
    if name == "long" and not lengths:
        raise ValueError("prompts=long is for evaluate, with lengths such as lengths=[512,2048,8192]")


def questions(name: str, limit: int | None) -> list[Question]:
    """Read the questions of a set or a file; at most `limit`, spread evenly. Rows that are not prompts are left out, and
    counted. Raise ValueError for an unknown name, or if no row is a prompt."""
    check_name(name)
    if name in OF_DATA:
        raise ValueError(
            f"prompts={name} is made of `data`, which evaluate and tune read: give a file, spec_bench or mt_bench"
        )
    there = list(rows(name))
    found: list[Question] = []
    left_out: dict[str, list[str]] = {}  # reason -> places
    for row in there:
        try:
            found.append(question(row, Path(name).stem))
        except SkippedRow as reason:
            left_out.setdefault(str(reason), []).append(row.where)
    reasons = "; ".join(
        f"{places[0]}{f' and {len(places) - 1} more' if places[1:] else ''}: {reason}"
        for reason, places in left_out.items()
    )
    if not found:
        raise ValueError(f"prompts={name} contains no prompt" + (f": {reasons}" if reasons else ""))
    if reasons:
        report(f"prompts={name}: {len(there) - len(found)} of {len(there)} rows are left out; {reasons}")
    has_own_names = any("sub_category" in row.value for row in there if isinstance(row.value, dict))  # SPEED-Bench
    if {one.category for one in found} - MT_BENCH and not has_own_names:
        found = [one._replace(category="mt_bench") if one.category in MT_BENCH else one for one in found]
    count = len(found) if limit is None else min(limit, len(found))
    return [found[len(found) * number // count] for number in range(count)]


def rows(name: str) -> Iterator[Row]:
    try:
        source = Source(spec_bench()) if name == "spec_bench" else SETS.get(name, Source(name))
        yield from source.rows()
    except ValueError as error:
        raise ValueError(f"prompts={name}: {error}. A file of the same rows does: prompts=FILE.jsonl") from None


def spec_bench() -> str:
    """Download the file once, and return its path; a second run finds it in torch's cache, without a network."""
    file = Path(torch.hub.get_dir()) / "foredraft" / "spec_bench.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(SPEC_BENCH, str(file), progress=False)  # moved to its name when complete
        except OSError as error:
            raise ValueError(f"{SPEC_BENCH} cannot be read: {error}") from error
    return str(file)


def question(row: Row, category: str) -> Question:
    """Read one question. Raise SkippedRow for a row that is not a prompt."""
    value = row.value if isinstance(row.value, dict) else {}
    category = str(value.get("category") or category)
    there = {name: listed(value[name]) for name in COLUMNS if value.get(name)}
    column = next((name for name in there if name in ASKED or isinstance(there[name], list)), None)
    asked: Any = there[column] if column else None
    if not isinstance(row.value, dict):
        raise row.value if isinstance(row.value, SkippedRow) else SkippedRow("not an object")
    if PLACEHOLDER in str(value):
        raise SkippedRow("no text, only its source; NVIDIA's prepare.py writes a file of all: prompts=FILE.jsonl")
    if column is None:
        raise SkippedRow("it needs `turns`, `messages`, `conversations`, `question` or `prompt`")
    if column == "prompt" and isinstance(asked, str):
        return Question(category, [], unicode(asked))  # raw text, which shows no tools
    shown = declared(value), template_options(value)
    asked = [asked] if column == "turns" and isinstance(asked, str) else asked
    if isinstance(asked, list) and column in ASKED and all(isinstance(text, str) for text in asked):
        said = turns(asked, all_user=True)
        return Question(category, [[*(system(value) if one is said[0] else []), one] for one in said], "", *shown)
    messages = whole_answers(turns(asked) if column in LISTS else pair(value, column, None))
    messages = messages if has_system(messages) else system(value) + messages
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    check_answers(messages)
    if all(message["role"] == "system" for message in messages):
        raise SkippedRow("nobody asks in it")
    return Question(category, [messages], "", *shown)


def tokenize(
    found: list[Question],
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    answer: Callable[[list[int]], list[int]],
    template: str | None = None,
    thinking: bool | None = None,
) -> Iterator[Prompt]:
    """Yield the prompts of these questions, one per turn, of at most `most` tokens. answer: the target's to a prompt.
    template, thinking: as in chat_template.ChatFormat."""
    form: ChatFormat | None = None
    for one in found:
        if not one.turns:
            raw = tokenizer(one.text, add_special_tokens=False, verbose=False)["input_ids"]
            yield Prompt.of(one.category, with_start(tokenizer, raw), False, most)
            continue
        form = form or ChatFormat(tokenizer, template or (None if tokenizer.chat_template else "plain"), thinking)
        messages: list[Message] = []
        for number, said in enumerate(one.turns, start=1):
            messages += said
            ids = form.with_options(one.options).prompt(messages, one.tools)
            yield Prompt.of(one.category, ids, True, most)
            if number < len(one.turns):
                messages.append(form.message(answer(ids[-most:]), ids))


def held_out(tokenizer: PreTrainedTokenizerBase, data: Corpus, count: int, length: int) -> list[Prompt]:
    """Return about `count` held-out prompts, equally many of each data set of a mix. A set without a prompt that fits is left
    out; raise ValueError if no set has one. length: see `corpus.prompts`."""
    sets = data.test_sets or {"held_out": data.test}
    found: list[Prompt] = []
    reason: ValueError | None = None
    for name, held in sets.items():
        try:
            texts = prompts(tokenizer, held, -(-count // len(sets)), length)
        except ValueError as error:
            reason = error
            continue
        found += [Prompt(name, row, has_chats(held)) for row in texts]
    if not found and reason is not None:
        raise reason
    return found


def summary(prompts: list[Prompt]) -> str:
    """Return the number of prompts per category, and how many were cut."""
    counts = Counter(prompt.category for prompt in prompts)
    cut = sum(prompt.cut > 0 for prompt in prompts)
    names = ", ".join(f"{count} {category}" for category, count in counts.items())
    return f"{len(prompts)} prompts ({names}); the beginning of {cut} cut off, for the context to hold the rest"
