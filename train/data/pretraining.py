"""Text that a new target learns from, the tokenizer that is made of it, and its tokens in rows."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from foredraft.train.data import stdlib

EOS = "<|endoftext|>"
AT_ONCE = 64  # texts that are tokenised together: as lists of numbers, all of them take gigabytes
CHAT = Path(__file__).with_name("plain_chat.jinja")  # it learns text without turns: any template is as good


def texts(part: str, more: str | None) -> Iterator[str]:
    """The standard library's part, its tests too where it is learned from; and of every line of the file `more` all texts,
    one below the other."""
    yield from (text for _, text in stdlib.documents(part, tests=part == "train"))
    if more is None:
        return
    if not Path(more).is_file():
        raise ValueError(f"target.more_text={more} is no file: give JSON Lines, such as GSM8K's")
    for number, line in enumerate(Path(more).read_text("utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"target.more_text={more}: line {number} is no JSON object")
        yield "\n".join(value for value in row.values() if isinstance(value, str))


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE. Indentation stays together with its newline's spaces, digits are split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, model_max_length=2048)
    fast.chat_template = CHAT.read_text()
    return fast


def tokens_of(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All documents one after another, each closed by EOS, as one row of ids."""
    parts = []
    for start in range(0, len(texts), AT_ONCE):
        rows = tokenizer(texts[start : start + AT_ONCE], add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(torch.tensor([token for row in rows for token in [*row, tokenizer.eos_token_id]]))
    return torch.cat(parts)


class Windows(Dataset):
    """All tokens in rows of `length`; what is left at the end is left out."""

    def __init__(self, tokens: np.ndarray, length: int):
        self.rows = tokens[: len(tokens) // length * length].reshape(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.rows[row].astype(np.int64))
        return {"input_ids": ids, "labels": ids}
