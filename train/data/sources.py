"""Rows of files and of Hub datasets: JSON Lines, JSON, CSV (also in gzip), Parquet, Arrow. What a row says is for columns.py.

A row that cannot be read is a `SkippedRow` with its reason, never lost.
"""

import csv
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi

from foredraft.heads.target_model.files import check_no_pointer, hub_reason
from foredraft.train.data.arrow_rows import arrow_batches, rows_of, without_nulls
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
    unwrapped,
    weighted,
)
from foredraft.train.data.corpus import of_split, walk
from foredraft.train.data.layouts import (
    LIST,
    Message,
    SkippedRow,
    has_system,
    listed,
    parsed_list,
    turns,
    whole_answers,
)
from foredraft.train.data.layouts import parsed as parsed_json
from foredraft.train.data.packed import ending, unpacked

TABLES = (".csv", ".tsv")
PLAIN = (".jsonl", ".json", ".ndjson", *TABLES)
ENDINGS = (*PLAIN, ".parquet", *(f"{name}.gz" for name in PLAIN))  # of files in a directory
SHARD = 1 << 24  # bytes of a file of JSON Lines that one process reads at a time
SHARD_ROWS = 10_000  # and rows of a dataset from the Hub


class Row(NamedTuple):
    where: str  # "file.jsonl:12", "row 12"
    value: Any  # the row as it was read, or why it could not be


Shard = Callable[[], Iterator[Row]]  # reads a part of a source's rows, in any process


@dataclass(frozen=True)
class Source:
    """Describe where rows come from, and which columns hold what. None looks for a column under its usual names."""

    path: str  # a JSON Lines, Parquet or CSV file, a folder of them or of `save_to_disk`, or a dataset's id on the Hub
    name: str | None = None  # of a Hub dataset with several configurations
    split: str = "train"
    data_files: str | Sequence[str] | None = None  # which files of a folder or Hub dataset: train/*.parquet
    max_samples: int | None = None  # number of rows to read; of a Hub dataset only these are downloaded
    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        count = self.max_samples
        if isinstance(count, float) and count.is_integer():  # 1e4
            count = int(count)
            object.__setattr__(self, "max_samples", count)
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"data.max_samples={count} is not a number of rows: give 1 or more, or null for all")

    def rows(self) -> Iterator[Row]:
        """Return every row, in order. Raise ValueError that names a path with nothing to read."""
        return islice(chain.from_iterable(shard() for shard in self.shards()), self.max_samples)

    def shards(self) -> list[Shard]:
        """Return all rows, in parts that several processes may read. With max_samples a dataset on the Hub is one part."""
        here = files(self.path, self.split, self.data_files)
        if here:
            parts = [part for file in here for part in shards(file)]
        elif self.max_samples is not None:
            parts = [partial(table, hub(self, streamed=True), 0)]
        else:
            rows = hub(self, streamed=False)
            starts = range(0, len(rows), SHARD_ROWS)
            parts = [partial(table, rows.select(range(at, min(at + SHARD_ROWS, len(rows)))), at) for at in starts]
        return [partial(read, part) for part in parts]

    def conversation(self, row: Row, images: bool = False) -> list[Message] | str:
        """Return the row's conversation, with its images or without, or its raw text. Raise SkippedRow."""
        if isinstance(row.value, SkippedRow):
            raise row.value
        if not isinstance(row.value, dict):
            raise SkippedRow("not an object with columns")
        value = cells(row.value)
        named = {name for name in (self.messages, self.prompt, self.text) if name is not None}
        if named and not named & value.keys() and "error" not in value:
            raise SkippedRow(f"nothing in column {' or '.join(sorted(named))}")
        if found := self.turns(value, images):
            found = whole_answers(weighted(found, value))
            return found if has_system(found) else system(value) + found
        if "error" in value:
            raise SkippedRow("no answer came")  # regeneration says why
        if column := usual_unless(value, self.text, TEXTS, self.messages, self.prompt, self.response):
            return raw_text(value, column)
        if any(isinstance(cell, str) and LIST.match(cell) for cell in value.values()):
            raise SkippedRow(
                "a list that is neither JSON nor Python, as pandas writes arrays into CSV: write JSON Lines"
            )
        raise SkippedRow("no conversation and no text in it")

    def turns(self, value: dict, images: bool) -> list[Message] | None:
        """Return the turns that are in this row's columns; None if it has none."""
        prompt = usual_unless(value, self.prompt, PROMPTS, self.messages, self.text)
        # Without a prompt, a named response answers nothing, and does not replace the messages.
        response = self.response if prompt or self.prompt else None
        column = usual_unless(value, self.messages, LISTS, self.prompt, response, self.text)
        # What Python writes may be other data next to a prompt or a text.
        other = prompt or usual_unless(value, self.text, TEXTS, self.messages)
        items = (parsed_json if other else parsed_list)(listed(value[column])) if column else None
        given = value.get("images", value.get("image", []))
        row_images = [image for image in (given if isinstance(given, list) else [given]) if image] if images else None
        if isinstance(items, list) and (items or not prompt):
            found = turns(items, column == "turns", row_images)
            found = cut_off(found, value.get("finish_reasons"))
            chosen = listed(value.get("chosen"))  # LLaMA-Factory's preferences have the answer apart
            apart = isinstance(chosen, list) and found and found[-1]["role"] in ("user", "tool")
            return joined(found, turns(chosen)) if apart else found
        response = pick(value, self.response, ("response", "output", *RESPONSES) if prompt == "input" else RESPONSES)
        if prompt and (response or prompt != "input"):
            return pair(value, prompt, response, row_images)
        chosen = listed(value.get("chosen"))  # a preference without a separate prompt
        return turns(chosen) if isinstance(chosen, list) else None

    def digest(self) -> str:
        """Return a hash of the files, or of what names a Hub dataset."""
        total = hashlib.sha256(repr(self).encode())
        for file in files(self.path, self.split, self.data_files):
            with file.open("rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        return total.hexdigest()[:16]


def usual_unless(value: dict, named: str | None, usual: tuple[str, ...], *others: str | None) -> str | None:
    """Return what `pick` does, but no usual column of a row with one of the others, which the user named in its place."""
    return None if named is None and value.keys() & {*others} else pick(value, named, usual)


def files(path: str, split: str, chosen: str | Sequence[str] | None = None) -> list[Path]:
    """Return the files at `path`, or none if it can only be a dataset on the Hub. split: of several that `datasets` saved.
    chosen: the pattern of those to read in a folder, or several, in place of a split."""
    root = Path(path)
    if "[" in split and root.exists():
        raise ValueError(f"data.split={split} cuts only datasets of the Hub: set data.max_samples=N for the first N")
    if (root / "dataset_dict.json").is_file():
        root = root / split
        if not root.is_dir():
            raise ValueError(f"data.path={path} has no split {split}: choose one with data.split=NAME")
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():  # the other files are metadata
        if chosen is not None:
            raise ValueError(
                f"data.data_files={chosen} is for folders and the Hub, and {root} is one set of save_to_disk"
            )
        return [root / part["filename"] for part in json.loads((root / "state.json").read_text())["_data_files"]]
    if root.is_dir():
        found = sorted(file for file in walk(root) if file.name.lower().endswith(ENDINGS))
        found = [file for file in found if not file.name.endswith(".about.json")]  # written_rows.py
        if not found:
            raise ValueError(f"data.path={path} contains no {', '.join(ENDINGS)} file (raw text: data=text)")
        if broken := next((file for file in found if not file.exists()), None):
            raise ValueError(f"{broken} is a link to a file that is missing: restore the file, or remove the link")
        packed = {file.with_suffix("") for file in found if file.suffix.lower() == ".gz"}
        if twice := next((file for file in found if file in packed), None):
            raise ValueError(f"{twice} and {twice.name}.gz would both be read: remove one of them")
        if chosen is None:
            rows = [file for file in found if ending(file) not in TABLES]  # a table is metadata or a copy
            return of_split(rows or found, root, split)
        patterns = [chosen] if isinstance(chosen, str) else chosen
        named = {file for one in patterns if not one.startswith("/") for file in root.glob(one)}
        if not named.intersection(found):
            raise ValueError(f"data.path={path} has no file data.data_files={chosen}")
        return [file for file in found if file in named]
    if root.is_file():
        return [root]
    if root.exists():  # such as <(zcat rows.jsonl.gz)
        raise ValueError(f"data.path={path} is a pipe or a device, which is read only once: write its rows to a file")
    if path.count("/") > 1 or path.startswith((".", "/", "~")) or path.lower().endswith(ENDINGS):
        raise ValueError(f"data.path={path} does not exist: give a file, a folder, or a dataset's id on the Hub")
    return []


def read(shard: Shard) -> Iterator[Row]:
    """Read a part, with the requests in its rows unwrapped."""
    return (row._replace(value=unwrapped(row.value)) if isinstance(row.value, dict) else row for row in shard())


def shards(file: Path) -> list[Shard]:
    check_no_pointer(file)
    kind = ending(file)
    with unpacked(file) as inside:
        begins, is_packed = inside.read(64), isinstance(inside, gzip.GzipFile)
    if begins.startswith(b"PAR1"):
        return parquet_shards(file)
    if kind == ".parquet":
        raise ValueError(f"{file} is not a Parquet file: its first bytes are {begins[:4]!r}, not b'PAR1'")
    if kind == ".arrow":
        return [partial(arrow, file, None, 0)]
    if kind in TABLES:
        return [partial(table_of_text, file)]
    is_array = begins.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if is_array or is_packed:
        return [partial(json_array if is_array else json_lines, file)]
    found, start, line = list[Shard](), 0, 0
    with file.open("rb") as opened:
        while part := opened.read(SHARD):
            part += opened.readline()
            found.append(partial(json_lines, file, start, start + len(part), line))
            start, line = start + len(part), line + part.count(b"\n")
    return found


def json_lines(file: Path, start: int = 0, stop: int | None = None, first: int = 0) -> Iterator[Row]:
    """Read some bytes of a file, of which `first` lines come before, line by line. (The reader of `datasets` rejects a whole
    file for one bad line or one odd type.)"""
    with unpacked(file) as lines:
        lines.seek(start)
        for number, line in enumerate(lines, start=first + 1):
            if line.strip():
                yield Row(f"{file.name}:{number}", parsed(line))
            if stop is not None and lines.tell() >= stop:
                return


def table_of_text(file: Path) -> Iterator[Row]:
    """Read a CSV file with a header, separated by commas, semicolons or tabs. Empty cells are left out of their row."""
    csv.field_size_limit(2**31 - 1)  # an answer may be longer than the 131,072 characters that are allowed otherwise
    last = 0
    try:
        with unpacked(file) as opened, TextIOWrapper(opened, encoding="utf-8-sig", newline="") as lines:
            header = lines.readline()
            lines.seek(0)
            rows = csv.DictReader(lines, delimiter=max(",;\t", key=header.count), strict=True)
            last = rows.line_num if rows.fieldnames else 0  # of the header
            for row in rows:
                last, more = rows.line_num, row.pop(None, None)
                filled = {name.strip(): cell for name, cell in row.items() if cell}
                value = SkippedRow("more cells than the header names") if more else filled
                yield Row(f"{file.name}:{last}", value)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} cannot be read after line {last}: {error}. Save it in UTF-8") from error
    except csv.Error as error:
        remedy = "Write each quotation mark of a text twice and the text between quotation marks, or write JSON Lines"
        raise ValueError(f"{file}: the row that starts in line {last + 1} cannot be read: {error}. {remedy}") from error


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return SkippedRow("not UTF-8")
    except RecursionError:
        return SkippedRow("nested too deeply")
    except ValueError:
        return SkippedRow("not JSON")


def json_array(file: Path) -> Iterator[Row]:
    """Read a file that is one list of rows, as ShareGPT is published."""
    with unpacked(file) as opened:
        rows = parsed(opened.read())
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
    return [partial(arrow, file, group, sum(rows[:group])) for group in range(len(rows))]


def arrow(file: Path, group: int | None, first: int) -> Iterator[Row]:
    """Read a group of rows of a Parquet file, of which `first` rows come before, or all of a file that `datasets` saved."""
    import pyarrow.parquet

    try:
        with pyarrow.memory_map(str(file)) as opened:
            if group is None:
                parts: Any = arrow_batches(opened)
            else:
                parts = pyarrow.parquet.ParquetFile(opened).iter_batches(row_groups=[group], batch_size=256)
            rows = chain.from_iterable(map(rows_of, parts))
            yield from (Row(f"row {number}", value) for number, value in enumerate(rows, start=first))
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())[:300]}") from error


def table(rows: Iterable[dict], first: int) -> Iterator[Row]:
    """Yield rows of a table with their numbers. `first` rows come before."""
    return (Row(f"row {number}", without_nulls(value)) for number, value in enumerate(rows, start=first))


def hub(source: Source, streamed: bool) -> Any:
    """Load a dataset of the Hub, downloaded into the cache of `datasets`, or streamed. Raise ValueError if there is none."""
    import datasets

    trouble = f"data.path={source.path} is neither here nor a dataset that the Hub gives"
    try:
        HfApi().dataset_info(source.path, timeout=10)  # load_dataset would repeat its own requests for a long time
    except Exception as error:  # of the network or of the Hub, by one of two HTTP libraries
        datasets.config.HF_HUB_OFFLINE = True  # what was downloaded before can still be read
        trouble += f" ({hub_reason(error)})"
    try:
        return datasets.load_dataset(
            source.path, name=source.name, data_files=source.data_files, split=source.split, streaming=streamed
        )
    except Exception as error:  # pyarrow's, the Hub's, and those of many file formats have no common ground
        raise ValueError(f"{trouble}: {' '.join(str(error).split())[:300]}") from error
