"""What a run says of its head on held-out text is what counting it by hand, and decoding, give."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from foredraft.heads import Target
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.inference import generate
from foredraft.inference.drafters import drafter_for
from foredraft.inference.generation import tokens_per_forward
from foredraft.train import finalize, held_out, losses, parity_gate
from foredraft.train.data.documents import Document, Documents
from foredraft.train.data.packing import Packed
from foredraft.train.module import DistillationModel
from foredraft.train.writing import self_generated
from foredraft.train.writing.written_rows import RowFile
from tests.support.processes import SMALL, printed, succeeded

NEW, DEPTH = 24, 3
Rows = list[dict[str, torch.Tensor]]


def written(target: Target, count: int, seed: int) -> list[Document]:
    """Return what the target writes greedily after `count` prompts."""
    torch.manual_seed(seed)
    prompts = torch.randint(1, 300, (count, 8))
    text = generate(target, None, prompts, max_new_tokens=NEW, eos_token_id=-1).new_tokens
    pairs = zip(prompts.tolist(), text, strict=True)
    return [Document(row + more, [False] * len(row) + [True] * len(more)) for row, more in pairs]


def row_each(documents: list[Document]) -> Rows:
    return [Packed([document], len(document.tokens), seed=0)[0] for document in documents]


@pytest.fixture(scope="module")
def learned(target: Target) -> DistillationModel:
    """Return a head that has been trained a little."""
    torch.manual_seed(0)
    model = DistillationModel(
        Eagle3Head.for_target(target, ttt_steps=DEPTH, draft_vocab_size=None), target, losses.kl_div
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = row_each(written(target, 16, seed=1))
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for _ in range(100):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def counted_by_hand(model: DistillationModel, documents: list[Document]) -> float:
    """Return how often the drafter's first draft is what the target writes, position by position, each read separately."""
    right = []
    for document in documents:
        text = document.tokens
        best = model.target.forward(torch.tensor([text])).logits[0].argmax(-1).tolist()
        for place in range(document.loss_mask.index(True), len(text)):
            chain, _ = parity_gate.drafted_logits(model.head, model.target, text[: place - 1], text[place - 1])
            right.append(chain[0] == best[place - 1])
    return sum(right) / len(right)


def test_agreement_and_acceptance_are_those_of_an_independent_count(target: Target, learned: DistillationModel):
    documents = [*written(target, 16, seed=1)[:4], *written(target, 2, seed=2)]  # some that it knows
    found = held_out.agreement(learned.with_head(learned.head), row_each(documents))
    assert 0.1 < found["held_out_agreement"][0] < 0.9  # else it would show nothing
    assert abs(found["held_out_agreement"][0] - counted_by_hand(learned, documents)) < 0.02
    chain = drafter_for(learned.head, target, width=1, depth=DEPTH, nodes=DEPTH + 1, min_probability=0.0)
    prompts = torch.tensor([document.tokens[:8] for document in documents])
    decoded = [generate(target, chain, prompts, max_new_tokens=NEW, eos_token_id=-1)]
    assert found["predicted_acceptance_length"] == pytest.approx(tokens_per_forward(decoded), rel=0.05)


def test_it_does_not_depend_on_how_the_text_lies_in_rows(target: Target, learned: DistillationModel):
    documents = written(target, 6, seed=3)
    alone = held_out.agreement(learned.with_head(learned.head), row_each(documents))
    packed = Packed(documents, 2 * (8 + NEW), seed=0, long="truncate")
    together = held_out.agreement(learned.with_head(learned.head), [packed[row] for row in range(len(packed))])
    losses = together.pop("held_out_loss"), alone.pop("held_out_loss")
    assert together == alone and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_documents_that_are_longer_than_a_row_are_read_whole(target: Target, learned: DistillationModel):
    documents = written(target, 6, seed=3)
    alone = held_out.agreement(learned.with_head(learned.head), row_each(documents))
    rows = held_out.rows(Documents.of(documents), length=20, seed=0, context=target.context)
    assert (
        held_out.agreement(learned.with_head(learned.head), rows)["held_out_agreement"] == alone["held_out_agreement"]
    )
    assert {len(row["tokens"]) for row in held_out.rows(Documents.of(documents), length=9, seed=0)} == {18}
    assert {len(row["tokens"]) for row in held_out.rows(Documents.of(documents), length=20, seed=0, context=24)} == {24}


def test_a_step_begins_where_the_one_before_it_ended():
    hits = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 0], [0, 1, 0, 1, 1, 0, 1, 0]]).bool()
    counted = torch.ones_like(hits)
    # From 0: depth 1 right (slot 0), depth 2 right (slot 1): 3 tokens. From 3: right, right: 3. From 6: right, wrong: 2.
    assert held_out.steps(hits, counted) == [3, 3, 2]
    counted[:, :3] = False  # a prompt
    assert held_out.steps(hits, counted) == [3, 2]


@pytest.mark.nightly
def test_a_run_logs_it_and_says_that_it_repeats_its_text(here, tiny_path: Path, folder: Path, tmp_path: Path):
    given = [*SMALL, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "head=medusa"]
    fast = ["trainer.max_steps=12", "eval.steps=6", "eval.check_float32=false", "eval.timed_prompts=1"]
    ended = succeeded(here(*given, *fast))
    assert re.search(
        r"^the \d+ rows are read \d+\.\d times: loss and accuracy on them overestimate the head", ended.out, re.M
    )
    assert len(printed(ended.out)) == 12
    lines = re.findall(
        r"^step (?:6|12)/12  acceptance length \d\.\d\d \u00b1 \d\.\d\d \(validation\)$", ended.out, re.M
    )
    apart = re.findall(
        r"^step (\d+)/12  held out: loss \S+  accuracy by depth ([\d. ]+)  which predicts", ended.out, re.M
    )
    assert len(lines) == 2 and [step for step, _ in apart] == ["6", "12"]
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    history = json.loads((tmp_path / "out/history.json").read_text())
    best = next(entry for entry in history if entry["step"] == metrics["step"] and "held_out_loss" in entry)
    assert metrics["held_out_loss"] == best["held_out_loss"]
    assert metrics["held_out_agreement"] == [
        best[f"held_out_acc_{depth}"] for depth in range(1, 4 + 1) if f"held_out_acc_{depth}" in best
    ]
    report = (tmp_path / "out/report.html").read_text()
    assert report.index("held-out agreement") < report.index("Acceptance length")
    assert "Held-out accuracy per depth" in report


@pytest.mark.nightly
def test_self_generated_text_is_measured_on_text_of_the_same_kind(here, tiny_path: Path, folder: Path, tmp_path: Path):
    given = [*SMALL, f"target.path={tiny_path}", f"data.path={folder}", "output_dir=out", "head=medusa"]
    fast = ["trainer.max_steps=8", "eval.steps=0", "eval.check_float32=false", "eval.timed_prompts=1"]
    succeeded(here(*given, *fast, "self_generated_tokens=4000", "keep_checkpoints=true"))
    files = [RowFile(tmp_path / "out" / f"{name}.jsonl") for name in ("self_generated", "held_out")]
    own, apart = map(self_generated.documents, files)
    assert len(apart) and not {tuple(d.tokens) for d in own} & {tuple(d.tokens) for d in apart}
    assert all(not document.loss_mask[0] and document.loss_mask[-1] for document in apart)
    assert isinstance(apart, Documents)


@pytest.mark.parametrize(("long", "short", "all_of_them"), [(34, 5, True), (100, 100, False)])
def test_shorter_documents_are_measured_like_longer_ones(long, short, all_of_them):
    """Use sequences as long as the longest document, which are packed from that on: here with a document each."""
    longest, *others = [494] + [300] * long + [260] * short
    texts = Documents.of([Document([1] * size, [True] * size) for size in (longest, *others)])
    sizes = [int((row["documents"] >= 0).sum()) for row in held_out.rows(texts, 256, seed=0)]
    assert sizes.pop(0) == longest
    assert sizes.count(260) == pytest.approx(sizes.count(300) * short / long, abs=1)
    assert (len(sizes) == len(others)) == all_of_them


def test_a_short_run_is_measured_on_fewer_rows_from_all_over_the_text():
    rows = [{"tokens": torch.full((100,), row)} for row in range(40)]
    numbers = [int(row["tokens"][0]) for row in held_out.for_run(rows, trained=8_000)]
    assert numbers == list(range(0, 40, 4))
    assert len(held_out.for_run(rows, trained=0)) == 4
    assert held_out.for_run(rows, trained=10**6) == rows and held_out.for_run(rows[:3], trained=0) == rows[:3]


@pytest.mark.parametrize(
    ("seconds", "minutes", "expected"),
    [(100.0, 0.0, (64, 8)), (0.01, 1.5, (64, 8)), (1.0, 4.0, (13, 2)), (1.0, 20.0, (54, 6)), (100.0, 4.0, (4, 2))],
)
def test_a_run_with_a_limit_of_time_decodes_as_many_prompts_as_fit(
    target, monkeypatch, capsys, seconds, minutes, expected
):
    # seconds: of a text of 16 tokens, an eighth of those measured
    clock = iter([0.0, seconds])
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a training whose other processes have ended
    monkeypatch.setattr(finalize, "generate", lambda *_, **__: None)
    monkeypatch.setattr(finalize, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    settings = SimpleNamespace(timed_prompts=8, max_new_tokens=128)
    assert finalize.measured_prompts(target, [[1, 2]] * 64, settings, minutes) == expected
    assert ("held-out prompts are decoded" in capsys.readouterr().out) == (expected != (64, 8))
