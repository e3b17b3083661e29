"""Data: split by file, packed without a gap, and every loss against its definition."""

import copy
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from foredraft.inference import generate
from foredraft.train.data import corpus, self_generated, stdlib
from foredraft.train.data.documents import Document, Documents
from tests.support.tiny import TEXT


def test_parts_of_the_standard_library_share_no_module():
    groups = {part: {stdlib.group(path) for path, _ in stdlib.documents(part)} for part in stdlib.PARTS}
    assert all(groups.values())
    for one in stdlib.PARTS:
        for other in stdlib.PARTS:
            assert one == other or not groups[one] & groups[other]


def test_a_module_stays_in_its_part_when_python_moves_its_files():
    for old, new in [
        ("json/decoder.py", "test/test_json/test_scan.py"),
        ("datetime.py", "_pydatetime.py"),
        ("unittest/test/test_case.py", "test/test_unittest/test_case.py"),
        ("pathlib.py", "pathlib/_local.py"),
    ]:
        assert stdlib.part(Path(old)) == stdlib.part(Path(new))


def test_held_out_files_hardly_repeat_what_was_trained_on():
    seen = {line.strip() for _, text in stdlib.documents("train") for line in text.splitlines()}
    for part in ("validation", "test"):
        lines = [line.strip() for _, text in stdlib.documents(part, tests=False) for line in text.splitlines()]
        lines = [line for line in lines if len(line) > 30]
        assert sum(line in seen for line in lines) < 0.05 * len(lines)


def test_text_files_are_split_by_file(target, tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"file {number}\n" + TEXT)
    data = corpus.text_files(target.tokenizer, str(tmp_path))
    trained = {target.tokenizer.decode(document.tokens[:8]).split("\n")[0] for document in data.train}
    held = {text.split("\n")[0] for text in data.validation + data.test}
    assert len(held) == 4 and len(trained) == 16 and not trained & held


def test_prompts_start_at_lines_and_have_their_length(target):
    rows = corpus.prompts(target.tokenizer, [TEXT, TEXT], 6, 20)
    assert len(rows) == 6 and all(len(row) == 20 for row in rows)
    starts = {line for line in TEXT.splitlines(keepends=True)}
    assert all(any(target.tokenizer.decode(row).startswith(line) for line in starts) for row in rows)


def test_the_target_writes_its_own_training_text(target, tmp_path):
    text = Document(torch.randint(1, 300, (400,)).tolist(), [True] * 400)
    data = corpus.Corpus(Documents.of([text]), [], [], {"source": "a test"})
    file = tmp_path / "self_generated.safetensors"
    written = self_generated.self_generate(target, data, 100, 1, file, begin=16, new=20)
    assert len(written.train) == 5 and written.card["self_generated_tokens"] >= 5
    greedy = 0
    for document in written.train:
        begin = document.tokens[:16]
        assert any(text.tokens[at : at + 16] == begin for at in range(400)) and not any(document.loss_mask[:16])
        plain = generate(target, None, torch.tensor([begin]), max_new_tokens=20).new_tokens[0]
        greedy += document.tokens[16:] == plain
        assert all(document.loss_mask[16:])
    assert greedy == 3  # every other row, the first one among them
    again = self_generated.self_generate(target, data, 100, 2, file, begin=16, new=20)
    assert list(again.train) == list(written.train) and again.card == written.card


@pytest.fixture
def with_bos(target):
    """The tokenizer of most real models: a text begins with its bos token, unless it is told not to."""
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


def test_the_target_continues_texts_that_begin_with_its_bos(target, with_bos, tmp_path, monkeypatch):
    monkeypatch.setattr(target, "tokenizer", with_bos)
    text = Document(corpus.tokenize(with_bos, [TEXT])[0].tokens[:40], [True] * 40)  # which begins at 0 and at 16
    rows = self_generated.write(target, Documents.of([text] * 10), 20 * 20, 0, begin=16, new=20)
    prompts = [row.tokens[: row.loss_mask.index(True)] for row in rows]
    assert len(rows) == 20 and {len(prompt) for prompt in prompts} == {16, 17}
    assert all(prompt.count(with_bos.bos_token_id) == 1 and prompt[0] == with_bos.bos_token_id for prompt in prompts)
    for prompt, row in zip(prompts[:10], rows):  # of a batch of both lengths, the greedy half comes first
        alone = generate(target, None, torch.tensor([prompt]), max_new_tokens=20).new_tokens[0]
        assert row.tokens[len(prompt) :] == alone
