"""Data: split by file, packed without a gap, and every loss against its definition."""

import copy
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from foredraft.inference import generate
from foredraft.train.data import corpus, data_card, stdlib
from foredraft.train.data.documents import Document, Documents
from foredraft.train.data.encoding import Encoder
from foredraft.train.data.layouts import SkippedRow
from foredraft.train.data.loading import drop_unknown_tokens, load_corpus
from foredraft.train.data.sources import Row, Source
from foredraft.train.writing import self_generated
from tests.support.tiny import TEXT


def test_a_module_stays_in_its_part_when_python_moves_its_files():
    for old, new in [
        ("json/decoder.py", "test/test_json/test_scan.py"),
        ("datetime.py", "_pydatetime.py"),
        ("unittest/test/test_case.py", "test/test_unittest/test_case.py"),
        ("pathlib.py", "pathlib/_local.py"),
    ]:
        assert stdlib.part(Path(old)) == stdlib.part(Path(new))


@pytest.mark.nightly
def test_held_out_files_hardly_repeat_what_was_trained_on():
    seen = {line.strip() for _, text in stdlib.documents("train") for line in text.splitlines()}
    for part in ("validation", "test"):
        lines = [line.strip() for _, text in stdlib.documents(part, tests=False) for line in text.splitlines()]
        lines = [line for line in lines if len(line) > 30]
        assert sum(line in seen for line in lines) < 0.05 * len(lines)


def test_text_files_are_split_by_file_and_a_text_that_is_held_out_is_trained_on_in_no_other(target, tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"file {number % 20}\n" + TEXT)
    data = corpus.text_files(target.tokenizer, str(tmp_path))
    trained = {target.tokenizer.decode(document.tokens[:8]).split("\n")[0] for document in data.train}
    held = {text.split("\n")[0] for text in data.validation + data.test}
    assert len(held) + len(trained) == 20 and 4 <= len(held) <= 8 and not trained & held


def test_text_files_of_linked_folders_are_read_and_hidden_ones_are_not(target, tmp_path):
    for name in ("texts/1.txt", "more/2.txt", "texts/.git/index", "texts/.3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff" if "index" in name else f"{name}\n{TEXT}".encode())
    (tmp_path / "texts" / "linked").symlink_to(tmp_path / "more")
    assert corpus.text_files(target.tokenizer, str(tmp_path / "texts")).card["files"] == 2
    (tmp_path / "texts" / "B.JSONL").write_text("{}")
    with pytest.raises(ValueError, match=r"B\.JSONL holds rows, not raw text"):
        corpus.text_files(target.tokenizer, str(tmp_path / "texts"))


def test_prompts_start_at_lines_and_have_their_length(target):
    rows = corpus.prompts(target.tokenizer, [TEXT, TEXT], 6, 20)
    assert len(rows) == 6 and all(len(row) == 20 for row in rows)
    starts = {line for line in TEXT.splitlines(keepends=True)}
    assert all(any(target.tokenizer.decode(row).startswith(line) for line in starts) for row in rows)


def test_a_prompt_of_short_texts_is_given_once(target):
    """Ask for more prompts than two texts have places: their standard error would be too small."""
    texts = ["def add(self):\n" * 4, "class Pair:\n    pass\n" * 4]
    assert len(corpus.prompts(target.tokenizer, texts, 32, 20)) == 2
    assert len(corpus.prompts(target.tokenizer, texts, 10**6, 4)) <= 12  # its lines


def test_the_target_writes_its_own_training_text(target, tmp_path, monkeypatch):
    monkeypatch.setattr(self_generated, "START", 16)
    monkeypatch.setattr(self_generated, "NEW", 20)
    text = Document(torch.randint(1, 300, (400,)).tolist(), [True] * 400)
    data = corpus.Corpus(Documents.of([text]), [], [], {"source": "a test"})
    file = tmp_path / "self_generated.jsonl"
    written = self_generated.self_generate(target, data, 100, 1, file)
    assert len(written.train) == 5 and written.card["self_generated_tokens"] >= 5
    greedy = 0
    for document in written.train:
        begin = document.tokens[:16]
        assert any(text.tokens[at : at + 16] == begin for at in range(400)) and not any(document.loss_mask[:16])
        plain = generate(target, None, torch.tensor([begin]), max_new_tokens=20).new_tokens[0]
        greedy += document.tokens[16:] == plain
        assert all(document.loss_mask[16:])
    assert greedy == 3  # every other row, the first one among them
    again = self_generated.self_generate(target, data, 100, 2, file)
    assert list(again.train) == list(written.train) and again.card == written.card


@pytest.fixture
def with_bos(target):
    """Return the tokenizer of most real models: a text starts with its bos token, unless it is told not to."""
    found = copy.deepcopy(target.tokenizer)
    found.add_special_tokens({"bos_token": "<s>"})
    begin = found.bos_token_id
    found.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    assert found("a")["input_ids"][0] == begin != found.eos_token_id
    return found


def test_texts_begin_as_the_model_expects(target, with_bos, tmp_path):
    begin, end = with_bos.bos_token_id, with_bos.eos_token_id
    for tokenizer, first in ((with_bos, [begin]), (target.tokenizer, [])):
        ids = tokenizer("def add(self)", add_special_tokens=False)["input_ids"]
        assert corpus.tokenize(tokenizer, ["def add(self)", ""])[0].tokens == [*first, *ids, end]
        rows = corpus.prompts(tokenizer, [TEXT], 4, 20)
        assert len(rows) == 4 and all(len(row) == 20 for row in rows)
        assert all((row[:1] == first) == bool(first) and begin not in row[1:] for row in rows)


@pytest.mark.parametrize("text", ["<s>hi{eos}", " <s>hi{eos}\n", "<s>hi", "hi{eos}", "hi{eos}\n", "hi"])
def test_a_text_that_is_rendered_already_starts_and_ends_once(target, with_bos, text: str):
    """Check a tokenizer that adds its bos token to each text, and one that does not."""
    ids = with_bos("hi", add_special_tokens=False)["input_ids"]
    for tokenizer, adds in ((with_bos, True), (copy.deepcopy(with_bos), False)):
        if not adds:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A")
        (document,) = corpus.tokenize(tokenizer, [text.format(eos=tokenizer.eos_token)])
        first = [tokenizer.bos_token_id] if adds or "<s>" in text else []
        assert document.tokens == [*first, *ids, tokenizer.eos_token_id]
        assert document.loss_mask == [False] * len(first) + [True] * (len(ids) + 1)
        if "{eos}" not in text and adds:
            (prompt,) = corpus.prompts(tokenizer, [text + "\n"], 1, 2)
            assert prompt.count(tokenizer.bos_token_id) == 1


def test_what_makes_a_text_a_file_is_not_learned(target, tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" + f"file {number}\r\n  end\n".encode())
    data = corpus.text_files(target.tokenizer, str(tmp_path))
    decoded = {target.tokenizer.decode(document.tokens[:-1]) for document in data.train}
    assert decoded < {f"file {number}\n  end" for number in range(6)}
    assert {*data.validation, *data.test} < {f"file {number}\n  end" for number in range(6)}


def with_extra(target, monkeypatch) -> PreTrainedTokenizerFast:
    """Return the target with a tokenizer that has a token beyond the embeddings."""
    words = copy.deepcopy(target.tokenizer)
    fill = [f"<fill {number}>" for number in range(target.vocab_size - len(words))]
    words.add_special_tokens({"additional_special_tokens": [*fill, "<extra>"]})
    assert words.convert_tokens_to_ids("<extra>") == target.vocab_size == 320
    monkeypatch.setattr(target, "tokenizer", words)
    return words


ROWS = [{"prompt": f"what is {n}?", "response": f"it is {n}"} for n in range(12)]
KNOWN = [*range(10, 40)]
LACKS = {
    "an answer": {"prompt": "q", "response": "see <extra>"},
    "a prompt": {"prompt": "see <extra>", "response": "a"},
    "text": {"text": "see <extra> there"},
    "token ids": {"number": 0, "tokens": [*KNOWN, 320, 5], "written": [[10, 20]], "asked": [[0, 9]]},
    "token ids of an answer": {"number": 0, "tokens": [*KNOWN, 320, 5], "written": [[10, 32]], "asked": [[0, 9]]},
}


@pytest.mark.parametrize("kind", LACKS)
def test_a_row_with_a_token_that_the_target_lacks_is_dropped_and_named(target, tmp_path, monkeypatch, kind: str):
    with_extra(target, monkeypatch)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, LACKS[kind]]))
    settings = {"path": str(tmp_path / "rows.jsonl"), "template": "plain", "cache_dir": str(tmp_path)}
    target_ = {"_target_": "foredraft.train.data.conversations.corpus"}
    data = load_corpus(OmegaConf.create(target_ | settings), target)
    assert data.card["dropped"] == {"a token that the target lacks: <extra>": 1}
    assert "1 x a token that the target lacks: <extra>\n" in data_card.summary(data.card)
    rows = [*data.train, *data.validation, *data.test]
    assert len(rows) == 12 and all(max(document.tokens) < 320 for document in rows)
    corpus.count_tokens(data.train, target.vocab_size)


def test_texts_with_a_token_that_the_target_lacks_are_dropped_where_they_are_held_out_too(target, monkeypatch):
    words = with_extra(target, monkeypatch)
    texts = ["good", "<extra>"]
    data = corpus.from_texts(words, texts, texts, texts, {"source": "here"})
    data = drop_unknown_tokens(data, target)
    assert len(data.train) == 1 and data.validation == data.test == ["good"]
    assert data.card["dropped"] == {"a token that the target lacks: <extra>": 2}
    with pytest.raises(ValueError, match=r"here\) gives nothing to train on: .*<extra>"):
        drop_unknown_tokens(corpus.from_texts(words, texts[1:], [], [], {"source": "here"}), target)


def test_ids_with_holes_are_no_other_targets(target):
    """Use a tokenizer with fewer tokens than its highest id suggests."""
    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 400}, unk_token="a"))
    words = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="b")
    row = {"number": 0, "tokens": [0, 400, 1], "written": [[1, 3]], "asked": [[0, 1]]}
    (document,), _ = Encoder(words, Source("x")).documents(Row("", row))
    assert document.tokens == [0, 400, 1]
    with pytest.raises(SkippedRow, match="tokens of another target"):
        Encoder(words, Source("x")).documents(Row("", row | {"tokens": [0, 401, 1]}))


def test_the_target_continues_texts_that_begin_with_its_bos(target, with_bos, tmp_path, monkeypatch):
    monkeypatch.setattr(target, "tokenizer", with_bos)
    monkeypatch.setattr(self_generated, "START", 16)
    monkeypatch.setattr(self_generated, "NEW", 20)
    text = Document(corpus.tokenize(with_bos, [TEXT])[0].tokens[:40], [True] * 40)  # which starts at 0 and at 16
    rows = self_generated.write(target, Documents.of([text] * 10), 20 * 20, 0, tmp_path / "own.jsonl")
    prompts = [row.tokens[: row.loss_mask.index(True)] for row in rows]
    assert len(rows) == 20 and {len(prompt) for prompt in prompts} == {16, 17}
    assert all(prompt.count(with_bos.bos_token_id) == 1 and prompt[0] == with_bos.bos_token_id for prompt in prompts)
    for prompt, row in list(zip(prompts, rows, strict=True))[::2]:  # the greedy ones, of a batch of both lengths
        alone = generate(target, None, torch.tensor([prompt]), max_new_tokens=20).new_tokens[0]
        assert row.tokens[len(prompt) :] == alone
