"""Continue prompts with a drafter:  python scripts/generate.py target=ORG/NAME drafter=DIRECTORY prompt="def main():"

The text goes to stdout; acceptance length and tokens/s go to stderr.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase, TextStreamer

from heads import Target
from inference import generate
from train.cli import entry
from train.data.sources import read


@entry("generate")
def main(cfg: DictConfig) -> None:
    prompts = read_prompts(cfg.prompt, cfg.prompts)
    target: Target = instantiate(cfg.target)
    tokenizer = target.text_tokenizer
    drafter = instantiate(cfg.drafter, target=target)
    # Special tokens are skipped: a reader of stdout gets the text alone.
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if cfg.prompts is None else None
    settings = {"max_new_tokens": cfg.max_new_tokens, "temperature": cfg.temperature, "top_p": cfg.top_p}
    gained = tokens = forwards = 0
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        ids = encode(tokenizer, prompt, cfg.chat).to(target.device)
        answer = generate(target, drafter, ids, seed=cfg.seed + number, streamer=streamer, **settings)
        tokens += len(answer.new_tokens[0])
        gained += sum(sum(step.emitted) for step in answer.steps)
        forwards += len(answer.steps)
        if streamer is None:
            text = tokenizer.decode(answer.new_tokens[0], skip_special_tokens=True)
            print(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False), flush=True)
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


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool):
    """(1, length) int64, with the special tokens that the target expects before a text."""
    if not chat:
        return tokenizer(prompt, return_tensors="pt").input_ids
    if tokenizer.chat_template is None:
        raise ValueError(f"chat=true: {tokenizer.name_or_path} has no chat template; leave it false")
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


if __name__ == "__main__":
    main()
