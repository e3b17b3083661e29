"""Continue prompts with a drafter:  python scripts/generate.py target=ORG/NAME drafter=DIRECTORY prompt="def main():"

The text is written to stdout; acceptance length and tokens/s are written to stderr. A file of prompts (prompts=FILE.jsonl,
rows as in train/data/prompt_sets.py) is answered in batches. A prompt that cannot be answered (because it is too long, for
example) gets a line with `error`. With output=FILE.jsonl the same command resumes an interrupted run, and answers failed
prompts again.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.cli import check_at_least, entry
from foredraft.heads import Target
from foredraft.heads.checkpoint import fingerprint
from foredraft.inference import generate
from foredraft.inference.drafters import Drafter
from foredraft.inference.evaluation.measure import left_pad
from foredraft.inference.evaluation.progress import Progress, report
from foredraft.inference.generation import read_settings
from foredraft.inference.text import Detokenizer, answer_context, continuation, encode_prompt
from foredraft.train.data.chat_template import ChatFormat
from foredraft.train.data.layouts import unicode
from foredraft.train.data.prompt_sets import COLUMNS, Question, question
from foredraft.train.data.sources import Row, Source
from foredraft.train.runtime.locks import hold, write_atomically

Answer = dict[str, Any]  # a line of the output: `prompt` (or the column that has it), and `text` or `error`


@entry("generate")
def main(cfg: DictConfig) -> None:
    if (cfg.prompt is None) == (cfg.prompts is None):
        raise ValueError("set either prompt=TEXT or prompts=FILE.jsonl")
    if cfg.prompts is not None and not Path(cfg.prompts).is_file():
        raise ValueError(f"prompts={cfg.prompts} is not a file: give a JSON Lines file of prompts or conversations")
    rows = [Row("prompt", {"prompt": cfg.prompt})] if cfg.prompts is None else list(Source(cfg.prompts).rows())
    check_at_least(cfg, 1, "batch_size", "max_new_tokens")
    if cfg.output is not None and cfg.prompts is None:
        raise ValueError(
            f"output={cfg.output} needs prompts=FILE.jsonl; the answer to a single prompt is written to stdout"
        )
    target: Target = instantiate(cfg.target)
    if cfg.chat and target.text_tokenizer.chat_template is None:
        raise ValueError(f"chat=true: {target.text_tokenizer.name_or_path} has no chat template. Set chat=false.")
    writer = Writer(target, instantiate(cfg.drafter, target=target), cfg)
    began = time.perf_counter()
    if cfg.prompts is None:
        writer.generate([writer.encode(rows[0])], [0], Printer(target.text_tokenizer, cfg.chat))
    else:
        answer_file(cfg, rows, writer)
    seconds = time.perf_counter() - began
    print(
        f"{writer.tokens} tokens in {seconds:.1f} s, {writer.tokens / seconds:.1f} tokens/s, "
        f"acceptance length {writer.accepted / max(1, writer.forwards):.2f} with drafter {cfg.drafter.path}",
        file=sys.stderr,
    )


class Printer:
    """Stream a text to stdout, as a streamer of `generate`, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool):
        self.tokenizer, self.chat = tokenizer, chat
        self.detokenizer: Detokenizer | None = None

    def put(self, tokens: Tensor) -> None:
        """Accept the prompt at the first call, and new tokens at all others."""
        ids = tokens.flatten().tolist()
        if self.detokenizer is None:
            prompt = answer_context(self.tokenizer, ids) if self.chat else ids
            self.detokenizer = Detokenizer(self.tokenizer, prompt=prompt)
        else:
            print("".join(map(self.detokenizer.push, ids)), end="", flush=True)

    def end(self) -> None:
        print("" if self.detokenizer is None else self.detokenizer.end(), flush=True)


class Writer:
    """Generate answers, and count tokens and forwards."""

    def __init__(self, target: Target, drafter: Drafter, cfg: DictConfig):
        self.target, self.drafter, self.tokenizer, self.cfg = target, drafter, target.text_tokenizer, cfg
        self.settings: dict[str, Any] = {
            "max_new_tokens": cfg.max_new_tokens,
            "temperature": cfg.temperature,
            "top_p": cfg.top_p,
        }
        read_settings(None, self.settings, target, 1)  # raises what would be every prompt's error
        self.accepted = self.tokens = self.forwards = 0

    def answer(self, rows: Sequence[Row], numbers: Sequence[int]) -> list[Answer]:
        """Return the answers to these rows of the file, decoded as a batch. If the batch fails (a prompt is too long, or
        memory is full), each half is tried, down to the single row, whose answer is the error."""
        try:
            texts = self.generate([self.encode(row) for row in rows], numbers)
            return [{**asked(row), "text": text} for row, text in zip(rows, texts, strict=True)]
        except torch.AcceleratorError:
            raise  # the device is unusable in this process
        except Exception as error:
            failure = " ".join(str(error).split()) or type(error).__name__
            failure = failure if isinstance(error, ValueError) else f"{type(error).__name__}: {failure}"
        if len(rows) == 1:
            report(f"{rows[0].where}: {failure}")
            return [{**asked(rows[0]), "error": failure}]
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(rows) // 2
        return self.answer(rows[:half], numbers[:half]) + self.answer(rows[half:], numbers[half:])

    def generate(
        self,
        prompts: Sequence[tuple[list[int], Sequence[int]]],
        numbers: Sequence[int],
        streamer: Printer | None = None,
    ) -> list[str]:
        """Return the answers to what `encode` returned."""
        ids, mask = left_pad([prompt for prompt, _ in prompts])
        seeds = [self.cfg.seed + number for number in numbers]
        more: dict[str, Any] = {"seed": seeds, "streamer": streamer, **self.settings}
        answer = generate(self.target, self.drafter, ids.to(self.target.device), mask, **more)
        self.tokens += sum(map(len, answer.new_tokens))
        self.accepted += sum(sum(step.emitted) for step in answer.steps)
        self.forwards += sum(len(step.emitted) for step in answer.steps)
        pairs = zip(prompts, answer.new_tokens, strict=True)
        return [continuation(self.tokenizer, before, tokens) for (_, before), tokens in pairs]

    def encode(self, row: Row) -> tuple[list[int], Sequence[int]]:
        """Return the prompt's ids, and those that precede the text of the answer. Raises ValueError for a row without a
        prompt."""
        text = row.value.get("prompt") if isinstance(row.value, dict) else None
        if not isinstance(text, str):
            said = question(row, "")
            if len(said.turns) != 1:
                raise ValueError(
                    f"the row has {len(said.turns)} turns without answers: give a conversation as `messages`"
                )
        elif self.cfg.chat:
            said = Question("", [[{"role": "user", "content": unicode(text)}]])
        else:
            ids = encode_prompt(self.tokenizer, unicode(text))
            if not ids:
                raise ValueError("the prompt is empty: give at least one token (the bos token, say)")
            return ids, ids
        ids = self.form.with_options(said.options).prompt(said.turns[0], said.tools)
        return ids, answer_context(self.tokenizer, ids)

    @cached_property
    def form(self) -> ChatFormat:
        return ChatFormat(self.tokenizer, None if self.tokenizer.chat_template else "plain")


def asked(row: Row) -> Answer:
    """Return the column of a row that has its prompt."""
    value = row.value if isinstance(row.value, dict) else {}
    name = next((name for name in ("prompt", *COLUMNS) if value.get(name) is not None), "prompt")
    return {name: json.loads(json.dumps(value.get(name), default=str))}  # Parquet has types that JSON lacks


def answer_file(cfg: DictConfig, rows: list[Row], writer: Writer) -> None:
    """Answer the rows that have no line in the output yet, or an error."""

    def batches(numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Answer]]]:
        with Progress("answering", len(rows), "prompts", done=len(rows) - len(numbers)) as progress:
            for first in range(0, len(numbers), cfg.batch_size):
                some = numbers[first : first + cfg.batch_size]
                yield some, writer.answer([rows[number] for number in some], some)
                progress.add(len(some))

    if cfg.output is None:
        for _, answers in batches(range(len(rows))):
            report(lines(answers).removesuffix("\n"), sys.stdout)
        return
    output = Path(cfg.output)
    lock = hold(output, "output")
    check_same_settings(output, writer)
    done = answered(output, rows)
    if failed := [number for number, line in done.items() if "error" in line]:
        for some, answers in batches(failed):
            done |= zip(some, answers, strict=True)
        write_atomically(output, lines(done.values()))
        lock.close()
        lock = hold(output, "output")  # the new file
    with output.open("a", encoding="utf-8") as opened:
        for _, answers in batches(range(len(done), len(rows))):
            opened.write(lines(answers))
            opened.flush()
    lock.close()


def check_same_settings(output: Path, writer: Writer) -> None:
    """Note what decides the answers, next to them. Raises ValueError if those in the file had other settings."""
    note = output.with_name(f"{output.name.removesuffix('.jsonl')}.about.json")
    facts = fingerprint(writer.target)
    target, digests = facts["name"], {name: value for name, value in facts.items() if name.endswith("_digest")}
    now = {"target": str(Path(target).resolve()) if Path(target).exists() else target} | digests
    now |= {name: writer.cfg[name] for name in ("chat", "max_new_tokens", "temperature", "top_p", "seed")}
    before = now | (json.loads(note.read_text()) if note.is_file() and output.stat().st_size else {})
    if different := [f"{name} {before[name]}" for name in now if before[name] != now[name]]:
        raise ValueError(
            f"output={output} was written with other settings ({', '.join(different)}): give the same, or another output"
        )
    write_atomically(note, json.dumps(now, indent=1) + "\n")


def answered(output: Path, rows: Sequence[Row]) -> dict[int, Answer]:
    """Read the lines of an interrupted run, and remove an incomplete last line. Raises ValueError if the file contains
    answers to other prompts."""
    whole = output.read_bytes().rpartition(b"\n")[0]
    done = [json.loads(line) for line in whole.splitlines()]
    for number, line in enumerate(done):
        column = asked(rows[number]) if number < len(rows) else {}
        if not column or lines([{name: line.get(name) for name in column}]) != lines([column]):
            raise ValueError(
                f"output={output}, line {number + 1} is not an answer to prompt {number + 1}. Use another file."
            )
    os.truncate(output, len(whole) + bool(done))
    return dict(enumerate(done))


def lines(answers: Iterable[Answer]) -> str:
    """Format the answers as JSON Lines. Unpaired surrogates, which UTF-8 cannot encode, are escaped."""
    found = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
    return found.encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    main()
