"""Packing: nothing is lost uncounted, and each piece starts at position 0. (That heads draft in rows as they do alone:
test_heads.py; that losses are alike: test_held_out.py.)"""

import pytest
import torch

from foredraft.train.data.packing import Document, Packed, best_fit
from tests.support.batches import batch_of, documents


def pieces(packed: Packed) -> list[tuple[list[int], list[bool]]]:
    """Return tokens and masks of the documents in all sequences."""
    found = []
    for row in (packed[number] for number in range(len(packed))):
        for number in row["documents"].unique():
            here = row["documents"] == number
            assert torch.equal(row["positions"][here], torch.arange(int(here.sum())))
            found += [(row["tokens"][here].tolist(), row["loss_mask"][here].tolist())] if number >= 0 else []
        assert not row["loss_mask"][row["documents"] < 0].any()
    return found


@pytest.mark.parametrize("block", [1, 50, 1 << 22])
def test_the_rest_of_a_long_document_stands_behind_its_prompt(block: int, monkeypatch: pytest.MonkeyPatch):
    """Check that a middle never starts a sequence: 30 is 16, and twice the prompt of 3 with 13 and with 1 more."""
    monkeypatch.setattr("foredraft.train.data.documents.BLOCK", block)
    texts = [*documents(30, 5, 46, 7, 16), *documents(40, prompt=9)]
    wanted = [(text.tokens[:16], text.loss_mask[:16]) for text in texts]
    for number, begins in ((0, (16, 29)), (2, (16, 29, 42))):
        tokens, mask, _ = texts[number]
        for begin in begins:
            rest = [False, *mask[begin + 1 : begin + 13]]
            wanted.append((tokens[:3] + tokens[begin : begin + 13], mask[:3] + rest))
    packed = Packed(texts, length=16, seed=0)
    assert sorted(pieces(packed)) == sorted(wanted)
    assert packed.tokens == sum(len(tokens) for tokens, _ in wanted)
    assert packed.card["documents_longer_than_a_row"] == 3
    assert packed.card["tokens_cut_off"] == 24  # of the one whose prompt takes more than half a row
    assert packed.card["headless_share"] == 0


@pytest.mark.parametrize("prompt, cut_off", [(6, 0), (7, 0), (8, 14), (9, 14)])
def test_the_rest_of_a_document_is_left_out_if_its_prompt_takes_half_a_row(prompt: int, cut_off: int):
    assert Packed(documents(30, prompt=prompt), length=16, seed=0).card["tokens_cut_off"] == cut_off


def test_a_row_holds_eight_tokens_or_more():
    assert len(Packed(documents(8), length=8, seed=0)) == 1
    assert Packed(documents(8), length=12, seed=0).card["padding_share"] == 0.333333
    with pytest.raises(ValueError, match=r"^max_length=7 is too short"):
        Packed(documents(8), length=7, seed=0)


def test_other_rows_have_another_digest():
    texts = documents(30, 5, 46)
    digests = [Packed(texts, 16, 0).digest, Packed(texts, 16, 1).digest, Packed(texts, 17, 0).digest]
    digests += [Packed(texts, 16, 0, long="truncate").digest, Packed(texts[:2], 16, 0).digest]
    assert len(set(digests)) == 5 and {len(digest) for digest in digests} == {16}
    assert Packed(list(texts), 16, 0).digest == digests[0]


def test_the_rest_of_a_text_without_a_bos_token_is_counted():
    packed = Packed([Document(list(range(1, 31)), [True] * 30)], length=16, seed=0)
    assert sorted(pieces(packed)) == [(list(range(1, 17)), [True] * 16), (list(range(17, 31)), [True] * 14)]
    assert packed.card["headless_share"] == round(12 / 26, 6)
    with_bos = Packed([Document(list(range(31)), [False] + [True] * 30)], length=16, seed=0)
    assert with_bos.learned().tolist() == [14, 14]
    assert with_bos.card["headless_share"] == 0 and [0, *range(16, 31)] in [tokens for tokens, _ in pieces(with_bos)]


def test_truncated_documents_stay_whole_or_are_cut_at_the_row_and_counted():
    texts = documents(30, 5, 40, 7, 4, 12)
    packed = batch_of(first := Packed(texts, length=16, seed=0, long="truncate"))
    kept = [
        row[numbers == number].tolist()
        for row, numbers in zip(packed["tokens"], packed["documents"], strict=True)
        for number in numbers.unique()
        if number >= 0
    ]
    assert sorted(kept) == sorted(document.tokens[:16] for document in texts)
    assert first.card["tokens_cut_off"] == 14 + 24 and first.card["documents_longer_than_a_row"] == 2
    assert len(first) == 4  # 16, 16, 12 + 4, 7 + 5
    assert first.card["padding_share"] == 4 / 64


def test_best_fit_fills_rows():
    assert best_fit([7, 5, 3], 10) == [[0, 2], [1]] and best_fit([1, 1], 8) == [[0, 1]]
    sizes = torch.randint(1, 40, (200,)).tolist()
    rows = best_fit(sizes, 64)
    assert sorted(number for row in rows for number in row) == list(range(200))
    assert all(sum(sizes[number] for number in row) <= 64 for row in rows)
    assert len(rows) <= 1.05 * sum(sizes) / 64 + 1


def test_rows_that_teach_nothing_are_left_out_and_counted():
    texts = [Document([1] * 32, [False] * 32), *documents(16)]
    packed = Packed(texts, length=16, seed=0)
    assert len(packed) == 1 and packed.card["documents_left_out"] == 1
    with pytest.raises(ValueError, match="no token of the loss"):
        Packed(texts[:1], length=16, seed=0)
    with pytest.raises(ValueError, match="packing=drop is not known"):
        Packed(texts, length=16, seed=0, long="drop")


def test_a_second_token_is_no_draft():
    """Expect a draft from the third token of a document on: the token before the second one is not a hidden state's."""
    for place, drafts in ((1, 0), (2, 1)):
        documents = [Document([7] * 6, [True] * 6), Document([7] * 5, [at == place for at in range(5)])]
        assert sorted(Packed(documents, 12, seed=0).learned().tolist()) == [drafts, 4]
