"""Rows -> chat template -> tokens and masks, once: written as Arrow by `datasets`, in several processes, and memory-mapped.

The key of the cache is a hash of the files, the tokenizer, the template and this very code, so nothing stale is ever read.
The first process that needs a set prepares it, under the lock of `datasets`; others of this machine, of this run or another,
wait for it without a time-out, and all share one copy of its pages.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from foredraft.heads.target_model import messages as target_messages
from foredraft.heads.target_model.images import ImageReader
from foredraft.inference import text as inference_text
from foredraft.inference.evaluation.progress import Progress
from foredraft.train.data.chat_template import ChatFormat, template_file
from foredraft.train.data.columns import declared, has_images, template_options
from foredraft.train.data.corpus import highest_id, tokenize
from foredraft.train.data.documents import REJECTED, Document
from foredraft.train.data.layouts import Message, SkippedRow, check_answers
from foredraft.train.data.row_order import sockets_fit
from foredraft.train.data.sources import Row, Shard, Source

TRIED = 256  # rows that are encoded before all others, to see whether the template fits


@dataclass
class Encoder:
    """Encode rows of a source as documents."""

    tokenizer: PreTrainedTokenizerBase
    source: Source
    template: str | None = None
    thinking: bool | None = None
    images: ImageReader | None = None  # of a target that supports them; None leaves them out
    form: ChatFormat | None = None

    def digest(self) -> str:
        """Hash all that decides the documents."""
        words = self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else self.tokenizer.name_or_path
        file = template_file(self.template) if self.template else None
        written = file.read_text() if file is not None and file.is_file() else self.tokenizer.chat_template
        named = self.template, written  # a tokenizer may have several templates
        settings = repr((self.source.digest(), named, self.thinking, self.tokenizer.special_tokens_map, words))
        settings += "" if self.images is None else self.images.digest
        others = (target_messages.__file__, inference_text.__file__)
        code = [*sorted(Path(__file__).parent.glob("*.py")), *map(Path, others)]
        return hashlib.sha256(b"".join(map(Path.read_bytes, code)) + settings.encode()).hexdigest()[:16]

    def documents(self, row: Row) -> tuple[list[Document], Any]:
        """Return a row's documents (a reasoning model's conversation can give several), and the conversation or text that
        they were made of. Token ids that the target wrote are used unchanged. Raise SkippedRow, and ValueError where the
        template fits no row."""
        if isinstance(row.value, dict) and row.value.get("tokens") and row.value.keys() & {"written", "dropped"}:
            return self.as_written(row.value)
        if isinstance(row.value, dict) and row.value.keys() >= {"prompt_ids", "ids", "accepted", "drafted"}:
            return self.as_logged(row.value)
        messages = self.source.conversation(row, self.images is not None)
        if isinstance(messages, str):
            return list(tokenize(self.tokenizer, [messages])), messages
        check_answers(messages)
        if self.images is not None:
            messages = [self.located(message) for message in messages]
        self.form = self.form or ChatFormat(self.tokenizer, self.template, self.thinking, self.images)
        form = self.form.with_options(template_options(row.value))
        return form.documents(messages, declared(row.value, self.source.messages)), messages

    def located(self, message: Message) -> Message:
        """Return the message with full paths of its images, which may be relative to the file."""
        if isinstance(message["content"], str):
            return message
        folder = Path(self.source.path).absolute()
        folder = folder if folder.is_dir() else folder.parent
        found = []
        for part in message["content"]:
            if part["type"] == "image" and not part["image"].startswith("data:"):
                part = part | {"image": str(folder / part["image"].removeprefix("file://"))}
            found.append(part)
        return message | {"content": found}

    def as_written(self, row: dict[str, Any]) -> tuple[list[Document], Any]:
        """Return the documents of a row as train/writing/written_rows.py describes it."""
        if "dropped" in row:
            raise SkippedRow(row["dropped"])
        tokens = row["tokens"]
        if max(tokens) > highest_id(self.tokenizer):
            raise SkippedRow("tokens of another target")
        flags = np.zeros(len(tokens), np.uint8)
        for start, end in row["written"]:
            flags[start:end] = 1
        edges = [*row.get("starts", [0]), len(tokens)]
        found = [Document(tokens[a:b], flags[a:b].tolist()) for a, b in pairwise(edges)]
        if "messages" in row:
            messages = row["messages"]
            said = messages[-1]["content"].strip()[:32].partition("\ufffd")[0]
            if said not in self.tokenizer.decode(tokens[edges[-2] :]):
                raise SkippedRow("tokens of another target")
            return found, messages
        asked = row.get("asked", [[0, row["written"][0][0]]])
        return found, [{"role": "user", "content": self.tokenizer.decode(tokens[a:b])} for a, b in asked]

    def as_logged(self, row: dict[str, Any]) -> tuple[list[Document], Any]:
        """Return the document of a row as a server logs it (accepted.py)."""
        prompt, ids = row["prompt_ids"], row["ids"]
        if not prompt or not ids:
            raise SkippedRow("no tokens in it: the server logs them with log_text=true only")
        if max(*prompt, *ids) > highest_id(self.tokenizer):
            raise SkippedRow("tokens of another target")
        flags = [0] * len(prompt) + [1] * len(ids)
        end = len(prompt) + 1  # the prompt's own step gave the first
        for accepted, drafted in zip(row["accepted"], row["drafted"], strict=False):
            end += accepted + 1
            if accepted < drafted and end <= len(flags):
                flags[end - 1] = REJECTED
        return [Document([*prompt, *ids], flags)], [{"role": "user", "content": repr(prompt)}]

    def check(self) -> None:
        """Raise ValueError if there is no row, or if the template fits none of the first ones or has nothing in the loss."""
        rows, shares, refused = list(islice(self.source.rows(), TRIED)), [], None
        readable = [row.value for row in rows if isinstance(row.value, dict)]
        if self.images is not None and any(has_images(value, self.source.messages) for value in readable):
            _ = self.images.processor  # what is wrong with it is wrong with all rows that have images
        for row in rows:
            try:
                found, messages = self.documents(row)
            except SkippedRow:
                continue
            except ValueError as error:
                refused = error
                continue
            if not isinstance(messages, str):
                shares += [sum(document.loss_mask) / max(1, len(document.tokens)) for document in found]
        if not rows:
            raise ValueError(f"data.path={self.source.path} gives nothing to train on: it has no rows")
        if refused is not None and not shares:
            raise refused
        if self.form is None or not shares or any(shares):
            return
        raise ValueError(
            f"{self.form.name} gives {len(shares)} conversations of which 0 % of the tokens are in the loss: mark the "
            "answers with {% generation %} in a template of your own (data.template=FILE)"
        )

    def rows(self, shards: Sequence[Shard]) -> Iterator[dict[str, Any]]:
        """Yield per row its documents, or one entry with the reason why it has none."""
        progress = Progress(f"encoding {self.source.path}")  # by each process
        for row in islice(chain.from_iterable(shard() for shard in shards), self.source.max_samples):
            progress.add()
            blank: dict[str, Any] = {"first": True, "tokens": [], "flags": [], "raw": "", "reason": ""}
            blank |= {"where": row.where, "key": 0, "images": ""}
            try:
                found, messages = self.documents(row)
                found = [document for document in found if any(document.loss_mask)]
                if not found:
                    raise SkippedRow("nothing in it is in the loss")
            except ValueError as reason:  # what is wrong with all rows is said by `check`
                yield blank | {"reason": str(reason)}
                continue
            raw = messages if isinstance(messages, str) else ""
            left_out = self.images is None and has_images(row.value, self.source.messages)
            for number, document in enumerate(found):
                yield blank | {
                    "first": number == 0,
                    "tokens": np.asarray(document.tokens, np.int32),
                    "flags": np.asarray(document.loss_mask, np.uint8),
                    "key": key(messages),
                    "images": json.dumps(document.images) if document.images or left_out else "",
                    "raw": raw,
                }
        progress.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"form": None}  # each process makes its own


def encode(encoder: Encoder, cache_dir: str | None, num_proc: int | None) -> Any:
    """Return a datasets.Dataset of documents and of dropped rows, from the cache if it is there.

    num_proc: processes; None takes one per core, as far as there are parts for them."""
    import datasets  # seconds to import, which most runs need not wait for

    encoder.check()
    datasets.disable_progress_bars()
    features = {
        "first": datasets.Value("bool"),  # of its row
        "key": datasets.Value("int64"),
        "tokens": datasets.List(datasets.Value("int32")),
        "flags": datasets.List(datasets.Value("uint8")),
        "raw": datasets.Value("string"),
        "images": datasets.Value("string"),  # JSON: their places, in order; [] if they are left out
        "reason": datasets.Value("string"),
        "where": datasets.Value("string"),
    }
    shards = encoder.source.shards()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    processes = min(num_proc or cores, len(shards)) if encoder.source.max_samples is None and sockets_fit() else 1
    try:
        return datasets.Dataset.from_generator(
            encoder.rows,
            features=datasets.Features(features),
            cache_dir=cache_dir,
            # A list is shared out, a tuple is not: the first rows are counted by one process.
            gen_kwargs={"shards": shards if encoder.source.max_samples is None else tuple(shards)},
            num_proc=processes if processes > 1 else None,
            fingerprint=encoder.digest(),
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None


def key(messages: list[Message] | str) -> int:
    """Return 31 bits of a hash of a conversation's questions, whatever file it stands in: another answer to a question that
    is trained on would not be held-out text."""
    asked = messages if isinstance(messages, str) else [one["content"] for one in messages if one["role"] == "user"]
    return int.from_bytes(hashlib.sha256(json.dumps(asked or messages).encode()).digest()[:4], "big") >> 1
