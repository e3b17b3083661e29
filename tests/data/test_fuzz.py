"""Malformed files: a sentence, or a counted skip, and never a crash."""

import json
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foredraft.train.data.conversations import corpus
from tests.support import typed
from tests.support.chats import CHATML, form_of, tokenizer

FORMS = [tokenizer(CHATML), form_of("gemma3").tokenizer]
NAMES = typed("""
    messages conversations data turns prompt question response answer text role from
    content value input instruction output system tool_calls reasoning_content type
""")
WORDS = st.sampled_from(["user", "assistant", "system", "human", "gpt", "critic", "", " ", "hi", "<|im_end|>", "\x00"])
TEXTS = WORDS | st.text(st.characters(exclude_categories=()), max_size=5)  # with half characters
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.sampled_from(NAMES), v, max_size=4)
)
TURN = st.fixed_dictionaries({"role": WORDS, "content": TEXTS | VALUES})
ROWS = VALUES | st.builds(lambda turns: {"messages": turns}, st.lists(TURN | VALUES, max_size=4))
MEGABYTE = json.dumps({"prompt": "x" * (1 << 20), "response": "y"}).encode()
GOOD = [json.dumps({"prompt": f"p{i}", "response": "r"}).encode() for i in range(3)]
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row).encode()),
    ROWS.map(lambda row: json.dumps(row).encode()[:-1]),  # cut
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
    st.sampled_from(
        [b"", b"   ", b"\xff\xfe", b"[" * 60_000, b'{"a":' * 60_000, b"\xef\xbb\xbf{}", b"NaN", b"1" * 5000, MEGABYTE]
    ),
    st.sampled_from(GOOD),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(lines=st.lists(LINES, max_size=6), end=st.sampled_from([b"", b"\n", b"\r\n"]), form=st.sampled_from(FORMS))
def test_malformed_files_are_skipped_and_counted_or_refused_in_a_sentence(lines: list[bytes], end: bytes, form):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(b"\n".join(lines) + end)
        try:
            data = corpus(form, path=str(file), cache_dir=folder)
        except ValueError as error:
            assert "rows.jsonl" in str(error) and len(str(error)) < 600 and not isinstance(error, UnicodeError)
            return
        read = [line for line in file.read_bytes().split(b"\n") if line.removeprefix(b"\xef\xbb\xbf").strip()]
        assert data.card["rows"] == len(read) == data.card["used"] + sum(data.card["dropped"].values())
        assert len(data.train) and all(any(document.loss_mask) for document in data.train)


@pytest.mark.parametrize("damage", ["cut", "zeros", "text", "empty"])
def test_damaged_parquet_is_named(tmp_path: Path, damage: str):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "response": ["c", "d"]}), file)
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[:-9], "zeros": bytes(len(whole)), "text": b"hello", "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"rows\.parquet is not a (readable )?Parquet file"):
        corpus(tokenizer(CHATML), path=str(file), cache_dir=str(tmp_path))


def test_a_json_file_that_is_no_list_of_rows_is_named(tmp_path: Path):
    (tmp_path / "rows.json").write_text('[{"prompt": "a", "response": "b"}, {"pro')
    with pytest.raises(ValueError, match=r"rows\.json starts like a list of rows but is not JSON"):
        corpus(tokenizer(CHATML), path=str(tmp_path / "rows.json"), cache_dir=str(tmp_path))
