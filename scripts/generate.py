"""Continue prompts with a drafter:  python scripts/generate.py target=ORG/NAME drafter=DIRECTORY prompt="def main():"

The text goes to stdout; acceptance length and tokens/s go to stderr. A file of prompts (prompts=FILE.jsonl) is answered in
batches; with output=FILE.jsonl the same command continues a run that was stopped.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase, TextStreamer

from foredraft.heads import Target
from foredraft.inference import generate
from foredraft.inference.evaluation.measure import padded
from foredraft.train.cli import entry
from foredraft.train.data.sources import read


@entry("generate")
def main(cfg: DictConfig) -> None:
    prompts = read_prompts(cfg.prompt, cfg.prompts)
    if cfg.batch < 1:
        raise ValueError(f"batch={cfg.batch} must be at least 1")
    if cfg.output is not None and cfg.prompts is None:
        raise ValueError(f"output={cfg.output} takes the answers to prompts=FILE.jsonl; one prompt's goes to stdout")
    target: Target = instantiate(cfg.target)
    tokenizer = target.text_tokenizer
    drafter = instantiate(cfg.drafter, target=target)
    # Special tokens are skipped: a reader of stdout gets the text alone.
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if cfg.prompts is None else None
    settings: dict[str, Any] = {
        "max_new_tokens": cfg.max_new_tokens,
        "temperature": cfg.temperature,
        "top_p": cfg.top_p,
    }
    done = 0 if cfg.output is None else answered(Path(cfg.output), prompts)
    gained = tokens = forwards = 0
    began = time.perf_counter()
    for first in range(done, len(prompts), cfg.batch):
        batch = prompts[first : first + cfg.batch]
        ids, mask = padded([encode(tokenizer, prompt, cfg.chat) for prompt in batch])
        settings |= {"seed": cfg.seed + first, "streamer": streamer}
        answer = generate(target, drafter, ids.to(target.device), mask, **settings)
        tokens += sum(map(len, answer.new_tokens))
        gained += sum(sum(step.emitted) for step in answer.steps)
        forwards += sum(step.forwards * len(step.emitted) for step in answer.steps)
        if streamer is None:
            texts = tokenizer.batch_decode(answer.new_tokens, skip_special_tokens=True)
            write(cfg.output, [{"prompt": prompt, "text": text} for prompt, text in zip(batch, texts, strict=True)])
    seconds = time.perf_counter() - began
    print(
        f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, "
        f"acceptance length {gained / max(1, forwards):.2f} with drafter {cfg.drafter.spec}",
        file=sys.stderr,
    )


def read_prompts(prompt: str | None, file: str | None) -> list[str]:
    """Raises ValueError that names what is missing, or the line of `file` that holds no prompt."""
    if (prompt is None) == (file is None):
        raise ValueError("give one of prompt=TEXT and prompts=FILE.jsonl")
    return [prompt] if prompt is not None else list(column(Path(file or "")))


def column(file: Path) -> Iterator[str]:
    if not file.is_file():
        raise ValueError(f"prompts={file} does not exist: give a JSON Lines file with a column `prompt`")
    for row in read(file):
        if not isinstance(row.value, dict) or not isinstance(row.value.get("prompt"), str):
            raise ValueError(f'{row.where} holds no prompt: write {{"prompt": "..."}} on every line')
        yield row.value["prompt"]


def answered(output: Path, prompts: list[str]) -> int:
    """How many of the prompts a stopped run has answered; half a line at the end is cut off. Raises ValueError where the file
    holds other prompts' answers."""
    if not output.exists():
        return 0
    whole = output.read_bytes().rpartition(b"\n")[0]
    lines = whole.splitlines()
    for number, line in enumerate(lines):
        if number >= len(prompts) or json.loads(line).get("prompt") != prompts[number]:
            raise ValueError(f"output={output}, line {number + 1}: no answer to prompt {number + 1}; give another file")
    os.truncate(output, len(whole) + bool(lines))
    return len(lines)


def write(output: str | None, rows: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if output is None:
        print(text, end="", flush=True)
    else:
        with open(output, "a", encoding="utf-8") as opened:
            opened.write(text)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> list[int]:
    """With the special tokens that the target expects before a text."""
    if not chat:
        return list(tokenizer(prompt).input_ids)
    if tokenizer.chat_template is None:
        raise ValueError(f"chat=true: {tokenizer.name_or_path} has no chat template; leave it false")
    turns = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True).input_ids)


if __name__ == "__main__":
    main()
