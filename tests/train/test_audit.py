"""`evaluate audit=true`: where a head's first guesses are right."""

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import save_head
from foredraft.scripts import evaluate
from foredraft.train import held_out
from foredraft.train.audit import audit, texts_of
from foredraft.train.data.corpus import Corpus, count_tokens, tokenize
from foredraft.train.data.documents import Document, Documents
from foredraft.train.parity_gate import drafted_logits
from tests.support import typed
from tests.support.head_factory import make_head

TEXTS = [f"def f_{number}(x):\n    return x + {number}\n" * 6 for number in range(6)]


@pytest.fixture
def data(target):
    return Corpus(tokenize(target.text_tokenizer, TEXTS), TEXTS[:2], TEXTS[:2], {"source": "test"})


@torch.no_grad()
def first_guess(head: DraftHead, target, text: list[int]) -> int:
    """Return the drafter's first guess of the token after `text`, whose last token is the bonus token."""
    chain, _ = drafted_logits(head, target, text[:-1], text[-1])
    return chain[0]


def test_no_row_is_longer_than_the_target_reads(target: Target):
    texts = Documents.of([Document([1] * size, [True] * size) for size in (300, 40, 200)])
    lengths = {len(row["tokens"]) for row in held_out.rows(texts, 512, 0, context=256)}
    assert lengths == {256}


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_shares_of_the_answers_are_those_of_the_drafter(target, data, kind):
    torch.manual_seed(0)
    head, prompts = make_head(kind, target), [list(range(5, 12)), list(range(40, 49))]
    counts, ids = count_tokens(data.train, target.vocab_size), head.draft_ids
    texts = texts_of(target, data, prompts, max_new_tokens=10)
    lines = {line.text: line for line in audit(head, target, texts, counts)}
    hits, named = [], []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        for _ in range(10):
            input_ids = torch.cat([input_ids, target.forward(input_ids).logits[:, -1:].argmax(-1)], dim=1)
        text = input_ids[0].tolist()
        for at in range(len(prompt) - 1, len(text) - 1):
            named.append(text[at + 1])
            hits.append(first_guess(head, target, text[: at + 1]) == text[at + 1])
    line = lines["answers to the prompts"]
    assert line.tokens == len(named)
    assert line.agreement[0] == pytest.approx(sum(hits) / len(hits))
    assert line.rare == pytest.approx((counts[named] < 6).float().mean().item())
    outside = 0.0 if ids is None else sum(token not in ids.tolist() for token in named) / len(named)
    assert line.outside == pytest.approx(outside)
    assert set(lines) == {"training rows", "held-out rows", "answers to the prompts"}


def test_evaluate_prints_the_table(call, tmp_path, target, tiny_path):
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"text_{number}.py").write_text(text)
    given = f"target.path={tiny_path} target.device=cpu output_dir={tmp_path}/out limit=1 repeats=1 max_new_tokens=8"
    given += f" temperature=[0] rivals=false prompt_tokens=16 data=text data.path={tmp_path} data.glob=*.py audit=true"
    out = call(evaluate.main, *typed(given), f"drafter=[{tmp_path}/head+ngram]").out
    assert "right first guesses" in out and out.count("answers to the prompts") == 1
    ended = call(evaluate.main, *typed(given.replace("/out", "/other")), "drafter=[ngram]")
    assert ended.code == 2 and "audit=true is for trained heads" in ended.err
