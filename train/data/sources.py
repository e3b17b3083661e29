"""Rows of files and of Hub datasets: JSON Lines, JSON, Parquet, Arrow. What a row says is for columns.py to tell.

A row that cannot be read is a `SkippedRow` with its reason, never lost.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi

from foredraft.train.data.columns import (
    LISTS,
    PROMPTS,
    RESPONSES,
    TEXTS,
    cells,
    cut_off,
    joined,
    pair,
    pick,
    raw_text,
    system,
    weighted,
)
from foredraft.train.data.layouts import Message, SkippedRow, has_system, listed, turns
from foredraft.train.data.layouts import parsed as parsed_json

SHARD = 1 << 24  # bytes of a file of JSON Lines that one process reads at a time
SHARD_ROWS = 10_000  # and rows of a dataset from the Hub


class Shard(NamedTuple):
    """Name a part of a source's rows, which one process reads."""

    reader: str  # of READERS
    path: str
    start: int  # byte of a file of lines, row group of a Parquet file, row of an Arrow file
    stop: int
    first: int  # number of its first line or row


class Row(NamedTuple):
    where: str  # "file.jsonl:12", "row 12"
    value: Any  # the row as it was read, or why it could not be


@dataclass(frozen=True)
class Source:
    """Describe where rows come from, and which columns hold what. A column that is None is looked for under its usual
    names."""

    path: str  # a JSON Lines or Parquet file, a folder of them, or a dataset's id on the Hub
    name: str | None = None  # of a Hub dataset with several configurations
    split: str = "train"
    data_files: str | None = None  # which files of a Hub dataset
    max_samples: int | None = None  # number of rows to read; of a Hub dataset only these are downloaded
    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    text: str | None = None

    def rows(self) -> Iterator[Row]:
        """Return every row, in order. Raise ValueError that names a path with nothing to read."""
        return islice(chain.from_iterable(map(self.read, self.shards())), self.max_samples)

    def shards(self) -> list[Shard]:
        """Return all rows, in parts that several processes may read. With max_samples a dataset on the Hub is one part."""
        here = files(self.path)
        if here:
            return [shard for file in here for shard in shards(file)]
        if self.max_samples is not None:
            return [Shard("hub", self.path, 0, self.max_samples, 0)]
        table = hub(self, streamed=False)
        found: list[Shard] = []
        first = 0
        for file in table.cache_files:
            rows = len(table.from_file(file["filename"]))
            found += [
                Shard("arrow", file["filename"], row, min(row + SHARD_ROWS, rows), first + row)
                for row in range(0, rows, SHARD_ROWS)
            ]
            first += rows
        # A split such as train[:10%] is a part of its files.
        return found if first == len(table) else [Shard("hub", self.path, 0, len(table), 0)]

    def read(self, shard: Shard) -> Iterator[Row]:
        if shard.reader != "hub":
            return READERS[shard.reader](shard)
        rows = hub(self, streamed=self.max_samples is not None)
        return (Row(f"row {number}", without_nulls(value)) for number, value in enumerate(rows))

    def conversation(self, row: Row, images: bool = False) -> list[Message] | str:
        """Return the row's conversation, with its images or without, or its raw text. Raise SkippedRow."""
        if isinstance(row.value, SkippedRow):
            raise row.value
        if not isinstance(row.value, dict):
            raise SkippedRow("not an object with columns")
        value = cells(row.value)
        if found := self.turns(value, images):
            found = weighted(found, value)
            return found if has_system(found) else system(value) + found
        if "error" in value:
            raise SkippedRow("no answer came")  # regeneration says why
        if column := pick(value, self.text, TEXTS):
            return raw_text(value, column)
        raise SkippedRow("no conversation and no text in it")

    def turns(self, value: dict, images: bool) -> list[Message] | None:
        """Return the turns that are in this row's columns; None if it has none."""
        column, prompt = pick(value, self.messages, LISTS), pick(value, self.prompt, PROMPTS)
        items = parsed_json(listed(value[column])) if column else None
        if isinstance(items, list) and (items or not prompt):
            beside = value.get("images", value.get("image", [])) if images else None
            beside = beside if beside is None or isinstance(beside, list) else [beside]
            found = turns(items, column == "turns", None if beside is None else [*beside])
            found = cut_off(found, value.get("finish_reasons"))
            chosen = listed(value.get("chosen"))  # LLaMA-Factory's preferences have the answer apart
            apart = isinstance(chosen, list) and found and found[-1]["role"] == "user"
            return joined(found, turns(chosen)) if apart else found
        response = pick(value, self.response, RESPONSES)
        if prompt and (response or prompt != "input"):
            return pair(value, prompt, response)
        chosen = listed(value.get("chosen"))  # a preference without a separate prompt
        return turns(chosen) if isinstance(chosen, list) else None

    def digest(self) -> str:
        """Return a hash of the files, or of what names a Hub dataset."""
        total = hashlib.sha256(repr(self).encode())
        for file in files(self.path):
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        return total.hexdigest()[:16]


def files(path: str) -> list[Path]:
    """Return the files at `path`, or none if it can only be a dataset on the Hub."""
    root = Path(path)
    if root.is_dir():
        found = sorted(file for file in root.rglob("*") if file.suffix in (".jsonl", ".json", ".parquet"))
        found = [file for file in found if not file.name.endswith(".about.json")]  # written_rows.py
        if not found:
            raise ValueError(f"data.path={path} contains no .jsonl, .json or .parquet file (raw text: data=text)")
        return found
    if root.is_file():
        return [root]
    if path.count("/") > 1 or path.startswith((".", "/", "~")) or root.suffix in (".jsonl", ".json", ".parquet"):
        raise ValueError(f"data.path={path} does not exist: give a file, a folder, or a dataset's id on the Hub")
    return []


def shards(file: Path) -> list[Shard]:
    with file.open("rb") as opened:
        begins = opened.read(64)
        if begins.startswith(b"PAR1"):
            return parquet_shards(file)
        if file.suffix == ".parquet":
            raise ValueError(f"{file} is not a Parquet file: its first bytes are {begins[:4]!r}, not b'PAR1'")
        if begins.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return [Shard("array", str(file), 0, 0, 0)]
        opened.seek(0)
        found, start, line = [], 0, 0
        while part := opened.read(SHARD):
            part += opened.readline()
            found.append(Shard("lines", str(file), start, start + len(part), line))
            start, line = start + len(part), line + part.count(b"\n")
    return found


def json_lines(shard: Shard) -> Iterator[Row]:
    """Read line by line, not by `datasets`, whose reader rejects a whole file for one bad line or one odd type."""
    with open(shard.path, "rb") as lines:
        lines.seek(shard.start)
        for number, line in enumerate(lines, start=shard.first + 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield Row(f"{Path(shard.path).name}:{number}", parsed(line))
            if lines.tell() >= shard.stop:
                return


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return SkippedRow("not UTF-8")
    except RecursionError:
        return SkippedRow("nested too deeply")
    except ValueError:
        return SkippedRow("not JSON")


def json_array(shard: Shard) -> Iterator[Row]:
    """Read a file that is one list of rows, as ShareGPT is published."""
    file = Path(shard.path)
    rows = parsed(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    if isinstance(rows, SkippedRow):
        raise ValueError(f"{file} starts like a list of rows but is {rows}: write one JSON object per line")
    for number, value in enumerate(rows):
        yield Row(f"{file.name}[{number}]", value)


def parquet_shards(file: Path) -> list[Shard]:
    import pyarrow.parquet  # with its libraries, which most runs need not load

    try:
        facts = pyarrow.parquet.read_metadata(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} is not a readable Parquet file: {' '.join(str(error).split())[:300]}") from error
    rows = [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]
    return [Shard("parquet", str(file), group, group + 1, sum(rows[:group])) for group in range(len(rows))]


def parquet(shard: Shard) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(shard.path) as file:
            parts = file.iter_batches(row_groups=range(shard.start, shard.stop), batch_size=256)
            for number, value in enumerate((row for part in parts for row in part.to_pylist()), start=shard.first):
                yield Row(f"row {number}", without_nulls(value))
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{shard.path} cannot be read: {' '.join(str(error).split())[:300]}") from error


def arrow(shard: Shard) -> Iterator[Row]:
    """Yield the rows of what `datasets` has downloaded."""
    import datasets  # seconds to import, and most runs read files

    table = datasets.Dataset.from_file(shard.path)
    for number in range(shard.start, shard.stop):
        yield Row(f"row {shard.first + number - shard.start}", without_nulls(table[number]))


def without_nulls(value: Any) -> Any:
    """Return the value without fields that are null: Arrow gives every object of a column the fields of all others,
    arguments of other tools' calls among them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


READERS = {"lines": json_lines, "array": json_array, "parquet": parquet, "arrow": arrow}


def read(file: Path) -> Iterator[Row]:
    """Yield all rows of a file."""
    return (row for shard in shards(file) for row in READERS[shard.reader](shard))


def hub(source: Source, streamed: bool) -> Any:
    """Load a dataset of the Hub, downloaded into the cache of `datasets`, or streamed. Raise ValueError if there is none."""
    import datasets

    trouble = f"data.path={source.path} is neither here nor a dataset that the Hub gives"
    try:
        HfApi().dataset_info(source.path, timeout=10)  # load_dataset would repeat its own requests for a long time
    except Exception as error:  # of the network or of the Hub, by one of two HTTP libraries
        datasets.config.HF_HUB_OFFLINE = True  # what was downloaded before can still be read
        trouble += f" ({' '.join(str(error).split())[:300]})"
    try:
        return datasets.load_dataset(
            source.path, name=source.name, data_files=source.data_files, split=source.split, streaming=streamed
        )
    except Exception as error:  # pyarrow's, the Hub's, and those of many file formats have no common ground
        raise ValueError(f"{trouble}: {' '.join(str(error).split())[:300]}") from error
