"""fresh_text=true: what the target has written is read once, and while the head trains it writes more."""

from pathlib import Path

import pytest
import torch

from foredraft.train.data.documents import Document, Documents
from foredraft.train.data.row_order import EpochStream
from foredraft.train.writing import self_generated
from foredraft.train.writing.written_rows import RowFile
from tests.support.processes import ONE, SMALL_EAGLE3, TWO, complaint, end, losses, program, succeeded, torchrun

FRESH = ["self_generated_tokens=512", "fresh_text=true", "trainer.optim=adamw", "trainer.max_steps=7"]


def test_each_epoch_reads_its_own_rows():
    asked = []

    def later(epoch: int) -> list[str]:
        asked.append(epoch)
        return [f"{epoch} {row}" for row in range(5 - epoch)]  # fewer and fewer

    stream = EpochStream(["0 0", "0 1", "0 2", "0 3"], 11, 0, later)
    read = [stream[index] for index in range(len(stream))]
    assert asked == [1, 2]
    assert [row[0] for row in read] == list("00001111222")
    assert len(set(read)) == 11
    assert EpochStream(["0 0"] * 4, 11, 0, later)[9] == read[9]  # as a resumed run reads it
    assert asked == [1, 2, 2]


def test_more_text_goes_on_where_the_last_ended(target, tmp_path: Path, monkeypatch):
    texts = Documents.of([Document(list(range(3, 43)), [True] * 40), Document(list(range(50, 90)), [True] * 40)])
    monkeypatch.setattr(self_generated, "START", 8)
    monkeypatch.setattr(self_generated, "NEW", 8)
    given = (target, texts, 16, 0)
    # Five beginnings of 8 tokens in each document: ten, of which two go into a part.
    parts = [self_generated.write(*given, tmp_path / f"{part}.jsonl", part) for part in range(6)]
    begins = [tuple(document.tokens[-16:-8]) for part in parts for document in part]
    assert sorted(begins[:10]) == sorted({*begins[:10]})
    assert begins[10:] == begins[:2]
    again = parts[0][0].tokens, parts[5][0].tokens
    assert again[0] != again[1]  # what was continued greedily is sampled then
    monkeypatch.setattr(self_generated, "in_process", None)
    kept = self_generated.write(*given, tmp_path / "5.jsonl", 5)
    assert list(kept) == list(parts[5])


SLOW = """import time
from foredraft.train.writing import self_generated
from foredraft.train.run import main
slept, write = [], self_generated.write
def late(*given):
    if len(given) == 6 and not slept:
        slept.append(time.sleep(18))
    return write(*given)
self_generated.write = late
main()
"""


@pytest.mark.nightly
def test_two_processes_read_the_text_that_one_does(tiny_path: Path, folder: Path, tmp_path: Path):
    """Wait longer for new text than processes wait for each other in the middle of a step."""
    given = [*SMALL_EAGLE3, f"target.path={tiny_path}", f"data.path={folder}", *FRESH]
    alone = succeeded(end(program(*given, ONE, "output_dir=alone", cwd=tmp_path)))
    assert "after each time the target writes others" in alone.out
    (tmp_path / "slow.py").write_text(SLOW)
    ddp = [TWO, "strategy=ddp", "+trainer.ddp_timeout=15", "output_dir=together"]
    together = end(torchrun("slow.py", *given, *ddp, cwd=tmp_path))
    assert together.code == 0, together.err[-3000:]
    found = [torch.tensor(losses(tmp_path / name)) for name in ("alone", "together")]
    assert len(found[0]) == 7
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)
    for name in ("alone", "together"):
        files = sorted((tmp_path / name).glob("self_generated*.jsonl"))
        texts = [tuple(document.tokens) for file in files for document in self_generated.documents(RowFile(file))]
        assert len(files) > 2 and len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["self_generated_tokens=0"], "self_generated_tokens=0 lets the target write none"),
        (["hidden_states=offline"], "set hidden_states=online"),
        (
            ["+trainer.dataloader_num_workers=2"],
            "dataloader_num_workers=2: with fresh_text=true the process that reads",
        ),
    ],
)
def test_what_cannot_be_written_anew_is_refused(here, tiny_path: Path, folder: Path, changes, words):
    given = [*SMALL_EAGLE3, f"target.path={tiny_path}", f"data.path={folder}", *FRESH]
    assert words in complaint(here(*given, *changes))
