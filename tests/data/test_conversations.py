"""Conversations from files: every published layout, what is dropped and why, and the same split every time."""

import gzip
import importlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any, cast

import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset, DatasetDict

from foredraft.train.data import data_card, encoding
from foredraft.train.data.conversations import corpus
from foredraft.train.data.corpus import count_tokens, has_chats, prompts
from foredraft.train.data.documents import Document, Documents
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.layouts import SkippedRow, parsed_list, tools
from foredraft.train.data.sources import Row, Source
from tests.support.chats import CHATML, tokenizer

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
THOUGHT = {"role": "assistant", "content": "so", "reasoning_content": "hm"}


def test_columns_can_be_named():
    row = Row("", {"q": "hi", "a": "hello", "t": "text", "chat": HI, "prompt": "other"})
    assert Source("x", prompt="q", response="a").conversation(row) == HI
    assert Source("x", messages="chat").conversation(row) == HI
    assert Source("x", text="t", prompt="none").conversation(row) == "text"
    assert Source("x", text="t").conversation(row) == "text"
    assert Source("x", messages="chat", text="t").conversation(row) == HI
    messages = [{"role": "user", "content": "other"}]
    more = Row("", row.value | {"messages": messages, "text": "page", "response": "theirs"})
    assert Source("x", prompt="q", response="a").conversation(more) == HI
    assert Source("x", response="a").conversation(more)[-1] == HI[-1]
    assert Source("x", text="t").conversation(more) == "text"
    assert Source("x", response="a").conversation(Row("", {"messages": HI, "a": "hello"})) == HI  # without a prompt
    assert Source("x", response="a").conversation(Row("", {"messages": HI})) == HI
    with pytest.raises(SkippedRow, match="nothing in column caht or m"):
        Source("x", messages="caht", text="m").conversation(more)
    with pytest.raises(SkippedRow, match="nothing in column questoin"):  # "page" is not what was asked for
        Source("x", prompt="questoin", response="a").conversation(more)
    asked = Source("x").conversation(Row("", {"turns": ["one", "two"]}))
    assert asked == [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"question": f"what is {i}?", "answer": f"it is {i}"} for i in range(120)]
    return write(tmp_path / "rows.jsonl", rows)


def test_a_corpus_says_what_it_dropped_and_where(file: Path, tmp_path: Path):
    with file.open("ab") as more:
        more.write(b'{"question": "cut\n\xff\xfe\n{"question": "no answer"}\n\n')
    data = corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path))
    assert data.card["rows"] == 123 and len(data.train) + data.card["held_out"] == 120
    assert data.card["dropped"] == {"not JSON": 1, "not UTF-8": 1, "no answer in it": 1}
    assert data.card["first_dropped"]["not UTF-8"] == "rows.jsonl:122"
    assert "1 x not JSON (first: rows.jsonl:121)" in data_card.summary(data.card)


def test_the_split_depends_on_what_is_said_alone(file: Path, tmp_path: Path):
    def parts(path: Path) -> list[set[tuple[int, ...]]]:
        data = corpus(tokenizer(CHATML), path=str(path), cache_dir=str(tmp_path), val_split=0.1)
        return [{tuple(document.tokens) for document in part} for part in (data.train, data.validation, data.test)]

    lines = file.read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed(lines)) + lines[0] * 3)  # another order, some rows twice
    one, two = parts(file), parts(other)
    assert one == two and all(one)
    assert not one[0] & one[1] and not one[0] & one[2] and not one[1] & one[2]


def test_a_table_as_spreadsheets_write_it(tmp_path: Path):
    file = tmp_path / "rows.csv"
    long = "word, " * 40_000
    cells = f'question; answer;system\n"what;\nis ""it""?";{long};\nwhy?;so;be brief\nhow?;so;a;b\n'
    file.write_text(cells, encoding="utf-8-sig")
    first, second, third = Source(str(file)).rows()
    assert first.where == "rows.csv:3" and first.value == {"question": 'what;\nis "it"?', "answer": long}
    assert second.value == {"question": "why?", "answer": "so", "system": "be brief"}
    assert str(third.value) == "more cells than the header names"
    (tmp_path / "rows.tsv").write_text("prompt\tresponse\nyes, no?\tno\n")
    assert next(Source(str(tmp_path / "rows.tsv")).rows()).value == {"prompt": "yes, no?", "response": "no"}
    assert [row.where for row in Source(str(tmp_path)).rows()] == [
        "rows.csv:3",
        "rows.csv:4",
        "rows.csv:5",
        "rows.tsv:2",
    ]
    write(tmp_path / "rows.jsonl", [{"text": "a"}])  # next to which tables are metadata, or copies
    assert [row.where for row in Source(str(tmp_path)).rows()] == ["rows.jsonl:1"]
    assert len([*Source(str(tmp_path), data_files="*.csv").rows()]) == 3
    file.write_text('question,answer\na,"b\nc,d\n')  # the quote would swallow all rows
    with pytest.raises(ValueError, match=r"rows\.csv: the row that starts in line 2 cannot be read: unexpected end"):
        [*Source(str(file)).rows()]
    file.write_text('question,answer\na,b\n"Oh" he said,c\n')
    with pytest.raises(
        ValueError, match=r"line 3 cannot be read: ',' expected .* Write each quotation mark of a text twice"
    ):
        [*Source(str(file)).rows()]
    file.write_text('question,answer\n"a\nb","c\nd"\ne,"f\ng,"h"\n')  # the row is where its quote opens
    with pytest.raises(ValueError, match="the row that starts in line 5 cannot be read"):
        [*Source(str(file)).rows()]
    file.write_text('question,"answer\na,b\n')
    with pytest.raises(ValueError, match="the row that starts in line 1 cannot be read"):
        [*Source(str(file)).rows()]
    file.write_bytes(b"question,answer\n\xe9,b\n")
    with pytest.raises(ValueError, match=r"rows\.csv cannot be read after line 0: 'utf-8' codec .* Save it in UTF-8"):
        [*Source(str(file)).rows()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cell", ["{1, 2}", "b'x'", "{[]: 1}", "{{}: 1}", "-" * 10**5 + "1", "1+" * 10**4 + "1j"])
def test_a_list_that_only_python_can_write_skips_its_row(cell):
    turns = f"[{{'role': 'user', 'content': '\\d'}}, {{'role': 'tool', 'content': {cell}}}]"
    with pytest.raises(SkippedRow, match="a list that is neither JSON nor Python"):
        Source("").conversation(Row("", {"messages": turns}))
    assert parsed_list(r"['\d']") == [r"\d"]


def test_a_list_as_python_writes_it_does_not_replace_a_prompt_or_a_text():
    for row in ({"text": "a"}, {"prompt": "a"}, {"prompt": "a", "response": "b"}):
        for cell in ("[{'x': 1}]", "['x', 'y']"):
            assert Source("").conversation(Row("", row | {"data": cell})) == Source("").conversation(Row("", row))
    turns = "['a', 'b']"
    assert len(Source("", messages="data").conversation(Row("", {"data": turns, "text": "a"}))) == 2


def test_lists_in_a_table_as_pandas_writes_them(tmp_path: Path):
    city = {"type": "function", "function": {"name": "city", "parameters": {"type": "object", "strict": True}}}
    call = {"type": "function", "function": {"name": "city", "arguments": {"near": None, "sea": True}}}
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": 'it\'s "so"\n[1]'},
                {"role": "assistant", "content": "é\\n", "name": None},
            ]
        },
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"question": "and?", "answer": "[{'a': 1}]", "history": [["a", "b's"]]},
    ]
    rows[1]["tools"] = [city]
    pandas.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    assert "None" in (tmp_path / "rows.csv").read_text()
    write(tmp_path / "rows.jsonl", rows)
    one, two = (Source(str(tmp_path / name)) for name in ("rows.csv", "rows.jsonl"))
    found = [one.conversation(row) for row in one.rows()]
    assert found == [two.conversation(row) for row in two.rows()] and len(found) == 4
    assert tools(next(row.value["tools"] for row in one.rows() if "tools" in row.value)) == [city]
    (tmp_path / "rows.csv").write_text(
        "messages\n\"[{'role': 'user', 'content': 'a'}\n {'role': 'assistant'}]\"\n"
    )  # of arrays
    with pytest.raises(SkippedRow, match="a list that is neither JSON nor Python, as pandas writes arrays into CSV"):
        one.conversation(next(one.rows()))


def test_a_tiny_set_still_holds_something_out(tmp_path: Path):
    rows = [{"prompt": f"p{i}", "response": "r"} for i in range(3)]
    data = corpus(tokenizer(CHATML), path=str(write(tmp_path / "a.jsonl", rows)), cache_dir=str(tmp_path))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [1, 1, 1]
    with pytest.raises(ValueError, match="at least two"):
        corpus(tokenizer(CHATML), path=str(write(tmp_path / "b.jsonl", rows[:1])), cache_dir=str(tmp_path))


def test_the_same_set_as_json_lines_array_folder_parquet_csv_and_saved_by_datasets(file: Path, tmp_path: Path):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).to_csv(tmp_path / "rows.csv")
    for name in ("array.json", "rows.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "1.jsonl", rows[:50]), write(tmp_path / "folder" / "2.jsonl", rows[50:])
    (tmp_path / "folder" / "state.json").write_text("{}")  # of another program
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    splits = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:9])}
    DatasetDict(splits).save_to_disk(tmp_path / "splits")
    found = []
    plain = ["rows.jsonl", "array.json", "rows.csv"]
    for name in (*plain, *(f"{name}.gz" for name in plain), "rows.parquet", "folder", "saved", "splits"):
        path = tmp_path / name
        data = corpus(tokenizer(CHATML), path=str(path), cache_dir=str(tmp_path))
        found.append(data_card.describe(data.train)["hash"])
    assert len(set(found)) == 1
    for name in plain:
        (tmp_path / f"cut_{name}.gz").write_bytes((tmp_path / f"{name}.gz").read_bytes()[:-9])
        with pytest.raises(ValueError, match=rf"cut_{name}\.gz cannot be read: Compressed file ended"):
            corpus(tokenizer(CHATML), path=str(tmp_path / f"cut_{name}.gz"), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"has no split dev: choose one with data\.split=NAME"):
        corpus(tokenizer(CHATML), path=str(tmp_path / "splits"), split="dev")
    with pytest.raises(ValueError, match=r"data_files=\*\.arrow is for folders and the Hub, and .*saved is one set"):
        corpus(tokenizer(CHATML), path=str(tmp_path / "saved"), data_files="*.arrow")
    assert len(corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path), max_samples=50).train) < 50


def test_of_a_folder_the_files_of_the_split_are_read(tmp_path: Path):
    for name in ("data/train-00000.jsonl", "data/test_a.jsonl", "dev/rows.jsonl", "more.jsonl", "evaluations.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [{"messages": HI}])

    def names(split: str) -> set[str]:
        return {row.where.partition(":")[0] for row in Source(str(tmp_path), split=split).rows()}

    both = {"more.jsonl", "evaluations.jsonl"}
    assert names("train") == both | {"train-00000.jsonl"}
    assert names("test") == names("test_a") == both | {"test_a.jsonl"}
    assert names("dev") == both | {"rows.jsonl"}
    assert len(names("other")) == 5  # no file is named for it
    for path in (tmp_path, tmp_path / "more.jsonl"):
        with pytest.raises(ValueError, match=r"^data\.split=train\[:10%\] cuts only .*: set data\.max_samples=N"):
            Source(str(path), split="train[:10%]").shards()
    assert names("testing") == both | {"test_a.jsonl"} and names("validation") == both | {"rows.jsonl"}
    (tmp_path / "data/train-00000.jsonl").rename(tmp_path / "training.jsonl")
    assert names("train") == both | {"training.jsonl"}

    def chosen(files: str | list[str]) -> set[str]:
        return {row.where.partition(":")[0] for row in Source(str(tmp_path), data_files=files).rows()}

    assert chosen("more.jsonl") == chosen("./more.jsonl") == {"more.jsonl"}
    assert chosen(["d*/*", "e*"]) == {"test_a.jsonl", "rows.jsonl", "evaluations.jsonl"}
    assert len(chosen("*.jsonl")) == 3 and len(chosen("**/*.jsonl")) == 5
    with pytest.raises(ValueError, match=r"has no file data\.data_files=train/\*"):
        chosen("train/*")


def test_a_folder_has_the_endings_that_a_file_may_have(tmp_path: Path):
    line = json.dumps({"messages": HI}).encode() + b"\n"
    (tmp_path / "a.ndjson").write_bytes(line)
    (tmp_path / "c4-train.00000-of-00512.json.gz").write_bytes(gzip.compress(line))
    (tmp_path / "metadata.csv.gz").write_bytes(gzip.compress(b"prompt,response\na,b\n"))  # tables are read alone only
    assert len(list(Source(str(tmp_path)).rows())) == 2


@pytest.mark.parametrize(("module", "kind"), [("bz2", "bzip2"), ("lzma", "xz"), ("zipfile", "zip"), ("zstd", "zstd")])
def test_an_archive_is_refused_by_its_name(tmp_path: Path, module: str, kind: str):
    """Refuse zip files (spreadsheets are such): if one is not compressed, some of its lines look like rows."""
    file, line = tmp_path / "rows.jsonl", json.dumps({"messages": HI}).encode() + b"\n"
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("rows.jsonl", line * 3)
    elif kind == "zstd":
        file.write_bytes(b"\x28\xb5\x2f\xfd" + line)
    else:
        file.write_bytes(importlib.import_module(module).compress(line))
    with pytest.raises(ValueError, match=f"is packed by {kind}: unpack it"):
        Source(str(file)).shards()


def test_arrow_as_polars_writes_it_and_times_that_python_lacks(tmp_path: Path):
    columns = {"prompt": pyarrow.array(["a"]), "response": pyarrow.array(["b"])}
    columns["t"] = pyarrow.array([10**18], pyarrow.timestamp("us"))  # in the year 33658
    batch = pyarrow.record_batch(columns)
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), batch.schema) as file:
        file.write(batch)
    with pyarrow.ipc.new_stream(str(tmp_path / "b.arrow"), batch.schema) as file:
        file.write(batch)
    pyarrow.parquet.write_table(pyarrow.Table.from_batches([batch]), tmp_path / "c.parquet")
    for name in ("a.arrow", "b.arrow", "c.parquet"):
        assert [row.value for row in Source(str(tmp_path / name)).rows()] == [{"prompt": "a", "response": "b"}]


def test_a_file_next_to_its_compressed_copy_is_refused(tmp_path: Path):
    file = write(tmp_path / "a.jsonl", [{"messages": HI}])
    assert [row.where for row in Source(str(tmp_path), name="main").rows()] == ["a.jsonl:1"]
    for ending in ("gz", "GZ"):
        packed = tmp_path / f"a.jsonl.{ending}"
        packed.write_bytes(gzip.compress(file.read_bytes()))
        with pytest.raises(ValueError, match=r"a\.jsonl and a\.jsonl\.gz would both be read: remove one of them"):
            Source(str(tmp_path)).shards()
        packed.unlink()
    with pytest.raises(ValueError, match=r"data\.path=B\.JSONL does not exist"):  # no id on the Hub
        Source("B.JSONL").shards()


def test_files_of_linked_folders_are_read_once(tmp_path: Path):
    for name in ("data/far/1.jsonl", "data/2.JSONL", "shards/3.jsonl", ".old/4.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, [{"messages": HI}])
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "shards")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data" / "far")
    (tmp_path / "data" / "far" / "up").symlink_to(tmp_path)
    rows = Source(str(tmp_path / "data")).rows()
    assert sorted(row.where for row in rows) == ["1.jsonl:1", "2.JSONL:1", "3.jsonl:1"]
    for name in ("split/train/1.jsonl", "split/test/2.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        write(tmp_path / name, [{"messages": HI}])
    (tmp_path / "split" / "latest").symlink_to("train")  # which sorts before train
    assert [row.where for row in Source(str(tmp_path / "split")).rows()] == ["1.jsonl:1"]


@pytest.mark.parametrize("count", [0, -1, 1.5, "all"])
def test_a_number_of_rows_that_is_none_is_refused(count: Any):
    with pytest.raises(
        ValueError, match=rf"^data\.max_samples={count} is not a number of rows: give 1 or more, or null"
    ):
        Source("rows.jsonl", max_samples=count)
    assert repr(Source("rows.jsonl", max_samples=cast(int, 1e4))) == repr(Source("rows.jsonl", max_samples=10_000))


def test_a_pipe_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        ValueError, match="pipe is a pipe or a device, which is read only once: write its rows to a file"
    ):
        Source(str(tmp_path / "pipe")).shards()


def test_hidden_files_and_folders_with_the_name_of_a_file_are_not_read(tmp_path: Path):
    for name in ("1.jsonl", "._1.jsonl", ".ipynb_checkpoints/1-checkpoint.jsonl", "2.json/3.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, [{"messages": HI}])
    assert [row.where for row in Source(str(tmp_path)).rows()] == ["1.jsonl:1", "3.jsonl:1"]
    (tmp_path / "0.jsonl").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(ValueError, match=r"0\.jsonl is a pointer of Git LFS"):
        Source(str(tmp_path)).shards()
    (tmp_path / "4.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"4\.jsonl is a link to a file that is missing"):
        Source(str(tmp_path)).shards()


def test_a_second_run_reads_the_cache_and_a_changed_file_is_read_anew(file: Path, tmp_path: Path, monkeypatch):
    first = corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(encoding.Encoder, "rows", Encoder.check)  # called, it would fail
        again = corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path))
    assert list(again.train) == list(first.train) and again.card == first.card
    write(file, [{"text": f"line {i}"} for i in range(9)])
    assert len(corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path)).train) < 9


def test_each_template_of_a_tokenizer_has_its_own_cache(file: Path, tmp_path: Path):
    words = tokenizer(None)
    words.chat_template = {"default": CHATML, "other": CHATML.replace("_start|>", "_start|>an ")}
    cached = {"path": str(file), "cache_dir": str(tmp_path)}
    default, other = (corpus(words, template=name, **cached).train[0] for name in (None, "other"))
    assert "an assistant" in words.decode(other.tokens) and "an assistant" not in words.decode(default.tokens)


def test_a_card_counts_rows_also_if_each_gives_several_documents(tmp_path: Path):
    reasoning = "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    form = tokenizer(CHATML.replace("{{ m.content", reasoning + "{{ m.content"))
    rows = [
        {"messages": [one for at in range(3) for one in ({"role": "user", "content": f"{i} {at}"}, THOUGHT)]}
        for i in range(30)
    ]
    data = corpus(form, path=str(write(tmp_path / "r.jsonl", rows)), cache_dir=str(tmp_path), val_split=0.2)
    held = len(data.validation) + len(data.test)
    assert len(data.train) + held == 90 and data.card["held_out"] == held / 3 < data.card["used"] == 30


def test_raw_text_is_supervised_whole_and_held_out_as_text(tmp_path: Path):
    path = write(tmp_path / "text.jsonl", [{"text": f"line {i}\n" * 5} for i in range(40)])
    data = corpus(tokenizer(None), path=str(path), cache_dir=str(tmp_path), val_split=0.2)
    assert all(all(document.loss_mask) for document in data.train)
    held = data.test.raw_texts()
    assert (
        len(held) == len(data.test) > 0
        and not has_chats(data.test)
        and set(held) < {f"line {i}\n" * 5 for i in range(40)}
    )


def test_nothing_to_train_on_names_the_reasons_and_the_remedy(tmp_path: Path):
    for rows, match in (
        ([], "it has no rows"),
        ([{"q": "x"}] * 4, r"4 x no conversation.*data\.prompt and data\.response"),
    ):
        with pytest.raises(ValueError, match=match):
            corpus(tokenizer(CHATML), path=str(write(tmp_path / "no.jsonl", rows)), cache_dir=str(tmp_path))
    (tmp_path / "wide.json").write_text(json.dumps({"data": [{"messages": HI}] * 4}, indent=1))
    with pytest.raises(ValueError, match=r"x not JSON\. Write one JSON object per line in UTF-8, or Parquet"):
        corpus(tokenizer(CHATML), path=str(tmp_path / "wide.json"), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        corpus(tokenizer(CHATML), path=str(tmp_path / "none.jsonl"), cache_dir=str(tmp_path))


def test_a_template_that_marks_nothing_is_an_error_that_names_it(file: Path, tmp_path: Path):
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}")
    with pytest.raises(ValueError, match=r"own.jinja.*0 %.*{% generation %}"):
        corpus(tokenizer(None), path=str(file), cache_dir=str(tmp_path), template=str(own))


def test_prompts_of_conversations_end_where_the_answer_begins(file: Path, tmp_path: Path):
    form = tokenizer(CHATML)
    data = corpus(form, path=str(file), cache_dir=str(tmp_path), val_split=0.1)
    rows = prompts(form, data.test, 4, 16)
    assert len(rows) == 4
    assert all(form.decode(row).startswith("<|im_start|>user\nwhat is ") for row in rows)
    assert all(form.decode(row).endswith("?<|im_end|>\n<|im_start|>assistant\n") for row in rows)
    with pytest.raises(ValueError, match="more than 8 tokens"):
        prompts(form, data.test, 4, 1)


def test_held_out_conversations_that_are_not_chosen_stay_arrays(file: Path, tmp_path: Path, monkeypatch):
    """Check that they are not converted: millions of tokens would become Python's numbers, at each measurement, while all
    processes wait."""
    form = tokenizer(CHATML)
    data = corpus(form, path=str(file), cache_dir=str(tmp_path), val_split=0.4)
    read, get = [], Documents.__getitem__
    monkeypatch.setattr(Documents, "__getitem__", lambda self, number: read.append(number) or get(self, number))
    assert len(data.test) > 4 and len(prompts(form, data.test, 2, 16)) == 2 and len(read) == 2


def test_the_card_counts_what_is_trained_on(tmp_path: Path):
    documents = [Document([1, 2, 3, 4], [False, True, True, True]), Document([4, 4], [True, True])]
    card = data_card.describe(documents)
    assert (card["documents"], card["tokens"], card["longest"]) == (2, 6, 4)
    assert card["supervised_share"] == round(5 / 6, 4)
    changed = [documents[0]._replace(loss_mask=[True] * 4), documents[1]]
    assert data_card.describe(changed)["hash"] != card["hash"]
    counts = count_tokens(documents, 9)
    found = data_card.coverage(counts, torch.tensor([3, 4]))
    assert found == {"different_tokens": 3, "vocabulary_coverage": round(4 / 5, 6)}
    assert data_card.coverage(counts, None)["vocabulary_coverage"] == 1.0
    data_card.save(tmp_path, {"source": "here"} | card)
    assert json.loads((tmp_path / "data_card.json").read_text())["tokens"] == 6


def test_two_answers_to_a_question_are_on_one_side_of_the_split(tmp_path: Path):
    rows = [{"prompt": f"question {i}", "response": f"answer {n}"} for i in range(40) for n in range(3)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = corpus(tokenizer(CHATML), path=str(path), cache_dir=str(tmp_path), val_split=0.2)
    parts = [
        {tuple(d.tokens[: d.loss_mask.index(True)]) for d in part} for part in (data.train, data.validation, data.test)
    ]
    assert len(data.train) == 3 * len(parts[0]) and sum(map(len, parts)) == 40
    assert has_chats(data.test) and not has_chats(["raw text"])


def test_a_set_of_its_own_is_measured_on_and_its_questions_are_trained_on_nowhere(file: Path, tmp_path: Path):
    given = [{"question": f"what is {i}?", "answer": "so"} for i in (*range(9), 900, 901)]
    test = write(tmp_path / "test.jsonl", given)
    data = corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path), val_path=str(test), weights=[1])
    said = [{tokenizer(CHATML).decode(document.tokens) for document in part} for part in (data.train, data.test)]
    assert len(data.test) == 11 and all("so<|im_end|>" in text for text in said[1]) and not data.test_sets
    assert not any(f"what is {i}?" in text for i in range(9) for text in said[0])
    assert data.validation and 100 < len(data.train) + len(data.validation) <= 111
    with pytest.raises(ValueError, match=r"val_path=.*empty.jsonl holds nothing to measure on"):
        empty = write(tmp_path / "empty.jsonl", [{"q": 1}])
        corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path), val_path=str(empty))


def test_the_held_out_questions_of_a_mix_are_known_by_their_set(file: Path, tmp_path: Path):
    other = write(tmp_path / "other.jsonl", [{"question": f"why {i}?", "answer": "so"} for i in range(120)])
    data = corpus(tokenizer(CHATML), path=[str(file), str(other)], cache_dir=str(tmp_path), val_split=0.1)
    first, second = data.test_sets[str(file)], data.test_sets[str(other)]
    assert len(first) + len(second) == len(data.test) and len(first) > 0
    assert all("why" in tokenizer(CHATML).decode(document.tokens) for document in second)


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path):
    data_card.check_same(tmp_path, {"hash": "b"})  # none there yet
    (tmp_path / "data_card.json").write_text('{"hash": "a"}')
    data_card.check_same(tmp_path, {"hash": "a"})
    with pytest.raises(ValueError, match=r"unfinished run on other data \(hash a there, b here"):
        data_card.check_same(tmp_path, {"hash": "b"})


def test_a_run_is_not_resumed_with_other_weights_in_the_targets_place(tmp_path: Path):
    (tmp_path / "data_card.json").write_text('{"hash": "a"}')  # of an earlier version
    data_card.check_same(tmp_path, {"hash": "a", "weights_digest": "c"})
    (tmp_path / "data_card.json").write_text('{"hash": "a", "weights_digest": "b"}')
    data_card.check_same(tmp_path, {"hash": "a", "weights_digest": None})  # a part of the checkpoint is here
    with pytest.raises(ValueError, match=r"on other weights of the target \(weights_digest b there, c here"):
        data_card.check_same(tmp_path, {"hash": "a", "weights_digest": "c"})
