"""scripts/evaluate.py as a user types it, and what its figures are made of."""

import contextlib
import csv
import fcntl
import itertools
import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.heads import Target, hub, save_head
from foredraft.heads.base import DraftHead, PackedBatch
from foredraft.heads.hub.card import measured
from foredraft.heads.target_model.capabilities import Capabilities
from foredraft.inference import generate
from foredraft.inference.drafters import Drafter, DraftModel, drafter_for, fixed_form, load_drafter, tree_of
from foredraft.inference.drafters.base import Accepted, Wrapper
from foredraft.inference.evaluation.alignment import Alignment, RecordingDrafter
from foredraft.inference.evaluation.benchmark import BASELINE, Benchmark, Lines, Prompt, Stopwatch, System, rivals
from foredraft.inference.evaluation.report import tables
from foredraft.inference.evaluation.results import (
    Results,
    Spread,
    Table,
    acceptance_error,
    accepted_shares,
    rates_of,
    ratio_error,
)
from foredraft.inference.tree import TokenTree
from foredraft.scripts import evaluate
from foredraft.train import finalize
from foredraft.train.data import prompt_sets
from foredraft.train.data.prompt_sets import questions, tokenize
from tests.support import typed
from tests.support.chats import CHATML, tokenizer
from tests.support.configs import composed
from tests.support.head_factory import make_head
from tests.support.processes import complaint


@pytest.fixture
def run(call, tiny_path):
    """Return run(*arguments), which runs scripts/evaluate.py with them, into the folder `out`."""
    given = f"target.path={tiny_path} target.device=cpu output_dir=out limit=2 repeats=2 max_new_tokens=12"
    return partial(call, evaluate.main, *typed(given))


@pytest.fixture
def head(target, tmp_path) -> Path:
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    return tmp_path / "head"


def test_drafters_are_measured_side_by_side_and_a_second_run_goes_on(run, tmp_path, folder, head, target, tiny_path):
    output = tmp_path / "out"
    given = ["data=text", f"data.path={folder}", "prompt_tokens=24", "temperature=[0,1]"]
    given += [f"drafter=[{head},ngram,nonsense,{{_target_: tests.evaluation.test_evaluate.shifted, name: wrong}}]"]
    run(*given, "repeats=1")
    first = (output / "lines.jsonl").read_text()
    (output / "lines.jsonl").write_text(first + '{"kind": "te')  # killed while it wrote
    run(*given)
    assert (output / "lines.jsonl").read_text().startswith(first)
    found = json.loads((output / "figures.json").read_text())
    ours, names = str(head), {line["drafter"] for line in found["rows"]}
    rivals = {"transformers", "transformers, prompt lookup"}
    tree = tree_of(load_drafter(ours, Target.from_pretrained(tiny_path)))
    assert tree is not None
    form = fixed_form(tree)
    assert names == {"baseline", "ngram", ours, "wrong", f"{ours}, {form}"} | rivals
    assert list(found["alignment"]) == ["wrong"] and "taken 1 token later" in found["alignment"]["wrong"][0]
    assert "'nonsense' is not one of" in found["errors"]["nonsense"]
    everything = [line for line in found["rows"] if line["category"] in ("all", "loops")]
    assert sum(line["texts"] for line in everything if (line["drafter"], line["temperature"]) == (ours, 0)) == 2
    for line in everything:
        if line["drafter"] == f"{ours}, {form}":
            assert line["acceptance_length"] >= 1 and line["chain_acceptance_length"] >= 1
            assert line["speedup"][1] <= line["speedup"][0] <= line["speedup"][2]
    assert all(line["identical"] == line["texts"] == 2 and line["wrong"] == 0 for line in found["identity"])
    assert {line["drafter"] for line in found["identity"]} > {"ngram", f"{ours}, chain of 3"}
    assert set(found["stages"][0]["seconds"]) == {"draft", "forward", "verify", "commit", "host"}
    page = (output / "report.html").read_text()
    assert "nonsense failed and is omitted" in page and page.count("<svg") >= 2 and page.count('class="bars"') >= 2
    assert "the target's own\">" in page  # of a machine under load, all tokens may be: tree=auto then drafts less
    with (output / "figures.csv").open() as file:
        assert {line["drafter"] for line in csv.DictReader(file)} == names
    assert run(*given, "chain=2").code == 2
    save_head(make_head("medusa", target), head, target)  # another training
    assert "out contains a run with other settings, weights or hardware" in complaint(run(*given))


@pytest.mark.parametrize("chains, form", [(True, "fixed chain"), (False, "fixed tree")])
def test_variants_are_named_by_what_they_draft(target, monkeypatch, chains, form):
    monkeypatch.setattr(Capabilities, "prefers_chains", property(lambda able: chains))
    drafter = drafter_for(make_head("eagle3", target), target, tree="auto")
    names = [system.name for system in evaluate.with_variants("head", drafter, target, 3)]
    assert names == ["head", f"head, {form}", "head, chain of 3"]


def test_acceptance_by_context_continues_the_same_places(run, tmp_path, folder):
    given = ["data=text", f"data.path={folder}", "drafter=ngram", "temperature=[0]", "repeats=1", "rivals=false"]
    given += ["data.val_split=0.3"]  # several files, since each has one text of 48 tokens
    assert run(*given, "lengths=[12,48]").code == 0
    prompts = json.loads((tmp_path / "out" / "prompts.json").read_text())
    assert [(category, len(tokens)) for category, tokens, *_ in prompts] == [
        ("12 tokens", 12), ("12 tokens", 12), ("48 tokens", 48), ("48 tokens", 48)
    ]  # fmt: skip
    assert all(short[1] == long[1][-12:] for short, long in zip(prompts[:2], prompts[2:], strict=True))
    rows = json.loads((tmp_path / "out" / "figures.json").read_text())["rows"]
    assert {row["category"] for row in rows if row["drafter"] == "ngram"} >= {"12 tokens", "48 tokens"}
    for length, message in ((240, "at least 240 tokens"), (250, "leaves 244 tokens for a prompt")):
        assert message in run(*given, f"lengths=[{length}]", f"output_dir=out{length}").err


def test_questions_about_long_texts_have_the_lengths_that_are_asked_for(run, target, tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"word{number}{place}" for place in range(2000)))
    given = [
        "data=text",
        f"data.path={tmp_path}",
        "data.glob=*.txt",
        "data.val_split=0.5",
        "drafter=ngram",
        "temperature=[0]",
        "repeats=1",
        "rivals=false",
    ]
    assert run(*given, "prompts=long", "lengths=[150,200]").code == 0
    prompts = json.loads((tmp_path / "out" / "prompts.json").read_text())
    assert [category for category, *_ in prompts] == [
        f"{length} tokens, {task}" for length in (150, 200) for _ in range(2) for task in ("summary", "find")
    ]
    assert all(abs(len(tokens) - int(category.split()[0])) <= 6 for category, tokens, *_ in prompts)
    for _, tokens, *_ in prompts[1::2]:  # the words to find stand in the part of the text that is shown
        shown, question = target.text_tokenizer.decode(tokens).rsplit('The words "', 1)
        assert question.split('"')[0] in shown
    for message, *more in (
        ("[30, 200]: 30 tokens do not hold a text and a question", "lengths=[30,200]"),
        ("prompts=long is for evaluate, with lengths such as", "lengths=[]", "target.path=not_loaded"),
        ("for prompts=held_out and prompts=long, not gsm8k", "lengths=[9]", "prompts=gsm8k"),
        ("prompts=gsm9k is neither a file", "lengths=[]", "prompts=gsm9k", "target.path=not_loaded"),
    ):
        assert message in run(*given, "prompts=long", *more, f"output_dir=out{len(message)}").err


class Shifted(Wrapper):
    """Make a mistake: every draft is the one that belongs `by` places later."""

    def __init__(self, inner: Drafter, by: int):
        super().__init__(inner)
        self.by = by

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        tree = self.inner.propose(accepted, gumbel)
        tokens = tree.tokens.clone()
        tokens[:, 1:] = tokens.roll(-self.by, 1)[:, 1:]
        return tree._replace(tokens=tokens)


def shifted(target: Target) -> Drafter:
    """Make a drafter for `drafter=[{_target_: ...}]`."""
    return Shifted(DraftModel(target, target, nodes=4, depth=3, width=1, min_probability=0), 1)


class Unread(Wrapper):
    """Make a mistake: the head's hidden states are not those it was trained on."""

    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        return self.inner.propose(accepted._replace(aux_hidden_states=accepted.aux_hidden_states.roll(1, 2)), gumbel)


@torch.inference_mode()
def guess_in_training(head: DraftHead, target: Target, text: list[int], positions: list[int]) -> list[int]:
    """Return the head's best guesses at these positions, from its training forward. The depth-1 draft at position t names
    token t + 2."""
    tokens = torch.tensor([text])
    batch = PackedBatch(tokens, torch.ones_like(tokens).bool(), torch.zeros_like(tokens), torch.arange(len(text))[None])
    out = head(target.forward(tokens, layers=head.layers).aux_hidden_states, target.embed(tokens), batch)[0]
    logits = head.logits(out[0, [position - 2 for position in positions]], 1)
    return head.to_target_ids(logits.argmax(-1)).tolist()


@pytest.mark.parametrize("kind", ["eagle3", "hydra_pp", "medusa", "dflash", "dspark"])
def test_a_head_is_held_against_its_training_forward(target, kind):
    prompt = [9, 30, 7, 45, 11]
    for wrong in (False, True):
        head = make_head(kind, target)
        drafter = drafter_for(head, target)
        recorder = RecordingDrafter(Unread(drafter) if wrong else drafter)
        written = generate(target, recorder, torch.tensor([prompt]), max_new_tokens=24, eos_token_id=-1).new_tokens[0]
        places = [at for at in recorder.guesses if at < len(prompt + written)]
        own = guess_in_training(head, target, prompt + written, places)
        assert ([recorder.guesses[at] for at in places] == own) is not wrong


def test_what_is_more_than_chance():
    assert Alignment(200, {-1: (40, 60), 1: (12, 8)}).faults == []
    (fault,) = Alignment(200, {1: (80, 20)}).faults
    assert fault == (
        "its drafts are shifted: they fit the text at 60 more of 200 positions if they are taken 1 token later"
    )
    (fault,) = Alignment(200, {-1: (80, 20)}).faults
    assert fault.endswith("if they are taken 1 token earlier, as those of a head that is hardly trained do")


def text_line(decoder: str, text: int, seconds: float, repeat: int = 0, **more) -> dict:
    line = {"kind": "text", "decoder": decoder, "temperature": 0.0, "text": text, "repeat": repeat, "seconds": seconds}
    return line | {"tokens": 10, "ids": list(range(10))} | more


def test_figures_of_known_lines():
    texts = [
        Prompt("code", [1], False),
        Prompt("code", [2], False),
        Prompt("talk", [3], True),
        Prompt("talk", [4], True),
    ]
    lines = [text_line("baseline", number, 5.0, repeat) for number in range(3) for repeat in range(3)]
    steps = {"emitted": [4, 1, 5], "accepted": [3, 0, 4], "nodes": [8, 1, 8]}
    lines += [text_line("head", n, second, r, **steps) for n in range(3) for r, second in enumerate((2.0, 2.5, 4.0))]
    lines += [text_line("baseline", 3, 5.5, ids=[7] * 10), text_line("head", 3, 0.6, **steps)]  # a loop
    lines += [text_line("rival", number, 4.0) for number in range(3)]
    table = Table(lines, texts, 0.0)
    assert table.loops == {3} and table.chosen("talk") == {2} and table.chosen("all") == {0, 1, 2}
    assert Spread.of(rates_of(table.timed("head", "code"))) == pytest.approx((4.0, 2.5, 5.0))
    assert table.speedup("head", "all") == pytest.approx((2.0, 1.25, 2.5))
    assert table.speedup("rival", "all") == (1.25, 1.25, 1.25)  # of the one repeat that it has
    found = table.figures("head", "all")
    assert found["acceptance_length"] == pytest.approx(10 / 3)
    assert accepted_shares(lines[9:10]) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert table.figures("missing", "all") is None
    # Three equal texts, and repeats of each: no error. Another text is one more, however often it was decoded.
    assert found["acceptance_error"] == pytest.approx(0)
    other = [text_line("head", 3, 1.0, repeat, emitted=[1], accepted=[0], nodes=[1]) for repeat in range(3)]
    assert acceptance_error(lines[9:12] + other) == pytest.approx(ratio_error([(3, 10), (1, 1)]))


def test_the_error_of_equally_long_texts_is_that_of_a_mean():
    assert ratio_error([(1, 2), (1, 4)]) == pytest.approx(1.0)
    assert ratio_error([(1, 2)]) is None and ratio_error([]) is None


def test_prompts_of_the_data_are_refused_where_no_data_is_read():
    with pytest.raises(ValueError, match="prompts=held_out is made of `data`, which evaluate and tune read"):
        prompt_sets.questions("held_out", 4)


@pytest.mark.parametrize("width, form", [(1, "fixed chain"), (2, "fixed tree")])
def test_figures_of_a_training_run(target, width, form):
    """Measure the speed on two of four texts. One of the two is a loop, which counts only for `acceptance_length_all`."""
    drafter = drafter_for(make_head("medusa", target), target, width=width)
    assert drafter.depth == 3, "of the figures below"
    fixed = f"head, {form}"
    texts, lines = [Prompt("code", [number], False) for number in range(4)], []
    fast = {"emitted": [3, 3, 3], "accepted": [2, 2, 2], "nodes": [4] * 3}
    slow = {"emitted": [1] * 9, "accepted": [0] * 9, "nodes": [1] * 9}
    for temperature in finalize.TEMPERATURES:
        for number in range(4):
            shared = {"temperature": temperature} | ({"ids": [7] * 10} if number == 2 else {})
            batched = fast if number < 3 else slow | {"nodes": [4] * 9}
            lines.append(text_line(fixed, number, 0, kind="batched", **batched, **shared))
            for name, seconds, steps in (
                (BASELINE, 5.0, slow),
                (finalize.AUTO, 4.0, fast),
                (fixed, 2.5, fast),
            ):
                if number in (0, 2):
                    lines.append(text_line(name, number, seconds, **steps, **shared))
    benchmark: Any = SimpleNamespace(lines=SimpleNamespace(lines=lines), texts=texts, new_tokens=10)
    rows, facts = [], {"drafter": fixed}
    for temperature in finalize.TEMPERATURES:
        table = Table(lines, texts, temperature)
        for name, category in itertools.product(table.by_decoder, ("all", "loops")):
            row = table.figures(name, category) or {}
            rows.append({"drafter": name, "temperature": temperature, "category": category, **row})
    identity = [facts | {"temperature": t, "texts": 2, "identical": 1} for t in finalize.TEMPERATURES]
    stages = [facts | {"temperature": 0.0, "seconds": {"draft": 0.1}}]
    results = Results({"preempted_share": 0.01}, rows, [], identity, stages, {}, {})
    figures = finalize.figures_of(benchmark, results, drafter)
    drafts = {"fixed chain": "chains of at most 3 drafts", "fixed tree": "trees of at most 4 nodes"}[form]
    assert figures["drafts"] == drafts and ("drafts", drafts) in measured(figures)
    assert figures["acceptance_length"] == 1.8 and figures["acceptance_length_all"] == 2.0
    assert figures["accepted_per_depth"] == [0.4, 0.4, 0.0]
    assert (figures["tokens_per_second"], figures["baseline_tokens_per_second"]) == (4.0, 2.0)
    assert (figures["speedup"], figures["speedup_auto"]) == (2.0, 1.25) and figures["identical_in_dtype"] == 0.5
    assert (figures["prompts"], figures["timed_prompts"], figures["repetitive_prompts"]) == (4, 2, 1)


def test_batches_give_the_lines_of_texts_alone(target, tmp_path):
    """Decode texts of different lengths, two of which may end early, in batches of one setting each. Only some are timed."""
    texts = [Prompt("code", list(range(200, 212 + 3 * number)), number % 2 == 1) for number in range(5)]
    head = make_head("eagle3", target)
    system = System("head", drafter_for(head, target), batched=True)
    lines = Lines(tmp_path / "lines.jsonl")
    benchmark = Benchmark(target, [System(BASELINE, None), system], texts, 24, lines, num_timed=2)
    benchmark.run([0.0, 1.0], 1)
    assert {line["text"] for line in lines.of("batched")} == set(range(5)) and len(lines.of("batched")) == 10
    for line in lines.of("batched"):
        count, out = system.decode(target, texts[line["text"]], 24, line["temperature"], line["text"] + 1)
        assert out is not None and count == line["tokens"] and out.new_tokens[0] == line["ids"]
        for name in ("accepted", "emitted"):
            assert line[name] == [getattr(step, name)[0] for step in out.steps]
    assert {line["decoder"] for line in lines.of("text")} == {BASELINE, "head"}
    assert {line["text"] for line in lines.of("text")} == set(benchmark.timed_texts()) and len(lines.of("text")) == 8
    benchmark.run([0.0, 1.0], 1)  # as a run that goes on
    assert len(lines.of("batched")) == 10 and len(lines.of("text")) == 8


def test_loops_are_not_timed(tmp_path):
    texts = [Prompt("code", [number], False) for number in range(6)]
    lines = Lines(tmp_path / "lines.jsonl")
    for number in range(6):
        ids = [7] * 10 if number < 2 else list(range(10))
        lines.add({"kind": "batched", "decoder": "head", "temperature": 0.0, "text": number, "ids": ids})
    target: Any = None
    assert Benchmark(target, [], texts, 10, lines, num_timed=2).timed_texts() == [2, 4]
    assert Benchmark(target, [], texts, 10, lines).timed_texts() == list(range(6))
    assert Benchmark(target, [], texts[:2], 10, lines, num_timed=8).timed_texts() == [0, 1]


def test_texts_are_compared_in_the_table_of_all_of_them():
    texts = [Prompt("code", [1], False), Prompt("talk", [2], False)]
    table = Table([text_line("baseline", number, 5.5) for number in range(2)], texts, 0.0)
    where = {"drafter": "baseline", "temperature": 0.0}
    rows = [table.figures("baseline", category) | where | {"category": category} for category in ("all", "code")]
    identity = [where | {"texts": 2, "identical": 1, "rounding": 1, "wrong": 0}]
    results = Results({}, rows, [], identity, [], {}, {})
    found = {title: dict(zip(heads, body[0])) for title, heads, body in tables(results, ("all", "code"))}
    assert found["Temperature 0, all: 2 texts"]["text"] == "identical up to rounding in 1 text"
    assert "text" not in found["Temperature 0, code: 1 text"]


def test_half_a_line_is_cut_off_and_failures_are_tried_again(tmp_path):
    file = tmp_path / "lines.jsonl"
    lines = Lines(file)
    lines.add({"kind": "text", "decoder": "a"})
    lines.failed("b", ValueError("no\n reason"))
    with file.open("a") as opened:
        opened.write('{"kind"')
    again = Lines(file)
    assert again.lines == [{"kind": "text", "decoder": "a"}]
    again.add({"kind": "text", "decoder": "b"})
    assert len(Lines(file).lines) == 2


def test_prompts_of_every_layout(tmp_path, target, capsys):
    file = tmp_path / "set.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]},
        {"category": "rag", "turns": ["Three?"]},
        {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Four?"}]},
        {"question": "Five?", "answer": "6"},
        {"task_id": "HumanEval/0", "prompt": "def add(self, other):" * 30},
        {"conversations": []},  # ShareGPT has some
    ]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = questions(str(file), None)
    assert "1 of 6 rows are left out; set.jsonl:6: it needs `turns`" in capsys.readouterr().err
    assert [one.category for one in found] == ["mt_bench", "rag", "set", "set", "set"]
    assert [one.category for one in questions(str(file), 2)] == ["mt_bench", "set"]
    asked: list[list[int]] = []

    def answer(ids: list[int]) -> list[int]:
        asked.append(ids)
        return target.tokenizer("class Pair").input_ids

    prompts = list(tokenize(found, target.tokenizer, 120, answer))
    assert len(prompts) == 6 and len(asked) == 1 and asked[0] == prompts[0].tokens
    second = target.tokenizer.decode(prompts[1].tokens)
    assert "One?" in second and "class Pair" in second and second.rstrip().endswith("Assistant:")
    assert [prompt.ends for prompt in prompts] == [True] * 5 + [False]
    assert prompts[5].cut > 0 and len(prompts[5].tokens) == 120
    assert prompt_sets.summary(prompts).startswith("6 prompts (2 mt_bench, 1 rag, 3 set); the beginning of 1 cut off")


def test_prompts_show_the_tools_and_template_variables_of_a_row_and_the_settings_of_the_data(tmp_path):
    """Check that what is measured is what a head was trained for: with tools, and without thinking."""
    words = tokenizer("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ thinking }}" + CHATML)
    tool, asked = {"name": "add", "parameters": {}}, {"turns": ["One?"]}
    rows = [asked, asked | {"tools": [tool]}, asked | {"chat_template_kwargs": {"thinking": True}}]
    rows.append({"messages": [{"role": "user", "content": "One?"}], "tools": json.dumps([tool])})
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "raw.jsonl").write_text(json.dumps({"prompt": "One", "tools": ["hammer"]}) + "\n")  # no functions
    assert [one.text for one in questions(str(tmp_path / "raw.jsonl"), None)] == ["One"]
    found = questions(str(tmp_path / "set.jsonl"), None)
    for settings, begins in (
        ({}, ["<", "add<", "True<", "add<"]),
        ({"thinking": False, "template": None}, ["False<", "addFalse<", "False<", "addFalse<"]),
        ({"template": "plain"}, ["User: One?"] * 4),
    ):
        texts = [words.decode(one.tokens) for one in tokenize(found, words, 999, lambda ids: [], **settings)]
        assert all(text.startswith(begin) for text, begin in zip(texts, begins, strict=True))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("spec_bend", None, "prompts=spec_bend is neither a file nor one of held_out, long, spec_bench"),
        ("file", "", "contains no prompt"),
        ("file", '{"turns": []}', "contains no prompt: file:1: it needs `turns`"),
        ("file", '{"conversations": [{"from": "gpt", "value": "a"}]}', "contains no prompt: file:1: nobody asks in it"),
        ("file", "nothing", "contains no prompt: file:1: not JSON"),
        ("file", '{"prompt": "half \\ud83d"}', "contains no prompt: file:1: half a character"),
        ("file", '{"turns": [" "]}', "contains no prompt: file:1: an empty turn"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(ValueError, match=message):
        questions(name, None)


def test_spec_bench_is_downloaded_once(tmp_path, monkeypatch):
    source = tmp_path / "question.jsonl"
    source.write_text(json.dumps({"category": "rag", "turns": ["Who?"]}) + "\n")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    monkeypatch.setattr(prompt_sets, "SPEC_BENCH", source.as_uri())
    first = questions("spec_bench", None)
    source.unlink()
    assert questions("spec_bench", None) == first and [one.category for one in first] == ["rag"]
    shutil.rmtree(tmp_path / "hub")
    with pytest.raises(ValueError, match=r"^prompts=spec_bench: file:\S+ cannot be read: .*prompts=FILE.jsonl$"):
        questions("spec_bench", None)


def test_rows_of_speed_bench_keep_their_categories_and_those_without_text_are_left_out(tmp_path, capsys):
    """Write rows in the layout of nvidia/SPEED-Bench; more than half of its texts are only named by their source."""
    facts = {
        "question_id": "1",
        "sub_category": "x",
        "source": "y",
        "src_id": "2",
        "difficulty": "",
        "multiturn": False,
    }
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    given = (("coding", ["Sort."]), ("rag", ["Who?", "Why?"]), ("math", [placeholder]))
    lines = [json.dumps({**facts, "category": category, "turns": turns}) for category, turns in given]
    (tmp_path / "qualitative.jsonl").write_text("\n".join(lines))
    found = questions(str(tmp_path / "qualitative.jsonl"), None)
    assert [(one.category, len(one.turns)) for one in found] == [("coding", 1), ("rag", 2)]
    assert "1 of 3 rows are left out; qualitative.jsonl:3: no text, only" in capsys.readouterr().err


def test_no_limit_is_every_prompt(run, tmp_path):
    """Let them have a category that is called as that of all texts: its figures are written once."""
    (tmp_path / "set.jsonl").write_text('{"prompt": "one", "category": "all"}\n' * 3)
    run(*typed("prompts=set.jsonl limit=0 drafter=ngram max_new_tokens=2 repeats=1 rivals=false"))
    assert len(json.loads((tmp_path / "out" / "prompts.json").read_text())) == 3
    with (tmp_path / "out" / "figures.csv").open() as file:
        rows = [(row["drafter"], row["temperature"], row["category"]) for row in csv.DictReader(file)]
    assert len(rows) == len({*rows}) > 0


def test_nothing_to_measure_is_named(run):
    for given, sentence in (
        ("limit=-1", "limit=-1 must be at least 0"),
        ("temperature=-0.5", "temperature=[-0.5] must be at least 0"),
        ("temperature=[]", "temperature=[]: give at least one"),
        ("drafter=[]", "drafter=[]: give names, directories, or groups of keys"),
        ("drafter=null", "drafter=[None]: give names, directories, or groups of keys"),
    ):
        ended = run(given)
        assert ended.code == 2 and sentence in ended.err


@pytest.mark.parametrize("name", ["baseline", "transformers", "ngram"])
def test_two_systems_of_one_name_are_refused(run, tmp_path, name):
    """A drafter called as the baseline would take its place, and all speeds would be relative to it."""
    (tmp_path / "set.jsonl").write_text('{"prompt": "one"}\n')
    ended = run("prompts=set.jsonl", f"drafter=[ngram,{{path: suffix, name: {name}}}]")
    assert ended.code == 2 and f"several systems are called {name}: give one a name" in ended.err


class Fails(Wrapper):
    def propose(self, accepted: Accepted, gumbel: Tensor | None) -> TokenTree:
        if len(accepted.text[0]) > 24:
            raise RuntimeError("no room")
        return self.inner.propose(accepted, gumbel)


def fails(target: Target) -> Drafter:
    return Fails(DraftModel(target, target, nodes=4, depth=3, width=1, min_probability=0))


def test_a_drafter_that_failed_has_no_figures_of_the_texts_before(run, tmp_path):
    """Let a drafter decode the first prompt, which is short, and fail at the second."""
    (tmp_path / "set.jsonl").write_text('{"prompt": "one"}\n' + json.dumps({"prompt": "def add(self):\n" * 6}) + "\n")
    drafters = "drafter=[ngram,{_target_: tests.evaluation.test_evaluate.fails, name: short}]"
    ended = run(*typed("prompts=set.jsonl repeats=1 rivals=false temperature=[0]"), drafters)
    found = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert found["errors"] == {"short": "RuntimeError: no room"} and "short failed and is omitted" in ended.out
    assert {row["drafter"] for row in found["rows"]} == {"baseline", "ngram"}
    assert [line["text"] for line in Lines(tmp_path / "out" / "lines.jsonl").of("text") if line["decoder"] == "short"]
    assert ": short, temperature 0" not in (tmp_path / "out" / "report.html").read_text()


def where(device: str, is_collective: bool) -> Any:
    """Return what a stopwatch reads of a target."""
    return SimpleNamespace(device=torch.device(device), is_collective=is_collective)


@pytest.mark.parametrize("name", ["suffix", "ngram+suffix"])
def test_no_text_drafts_itself(name, target):
    """Decode a text twice, as a benchmark does; a drafter that remembers would copy the text from the time before."""
    system, text = System(name, load_drafter(name, target)), Prompt("code", list(range(300, 312)), False)
    first, again = (system.decode(target, text, 24, 0.0, 1)[1] for _ in range(2))
    assert [step.accepted for step in again.steps] == [step.accepted for step in first.steps]


@pytest.mark.parametrize("device, is_collective", [("cpu", False), ("cuda", False), ("cpu", True)])
def test_a_thread_that_sleeps_has_no_core_but_where_it_waits_in_any_case(device: str, is_collective: bool):
    watch = Stopwatch(where(device, is_collective))
    time.sleep(0.05)
    waited = watch.stop()[1]
    assert waited > 0.5 if (device, is_collective) == ("cpu", False) else waited == 0


def test_two_of_them_do_not_write_into_one_folder(run, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        message = complaint(run("drafter=[ngram]"))
    assert f"output_dir=out is being written by process {os.getpid()}: wait until that has ended" in message
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}


def test_heads_are_found_wherever_they_are_named(tmp_path, monkeypatch, target, tiny_path):
    """Name a directory without a slash, one with a +, and one after another drafter. Each has a digest, so a run with other
    weights is refused."""
    monkeypatch.chdir(tmp_path)
    heads = ["mine", "a+b/head", "other/head"]
    for place in heads:
        save_head(make_head("medusa", target), tmp_path / place, target)
    cfg = composed("evaluate", f"target={tiny_path}", "drafter=[mine,'a+b/head','suffix+other/head']")
    assert evaluate.head_paths(cfg) == [(head, None) for head in heads]
    evaluate.check_same_run(tmp_path / "settings.json", cfg, target)
    (tmp_path / "lines.jsonl").write_text('{"kind": "text"}\n')
    save_head(make_head("eagle3", target), tmp_path / "mine", target)
    with pytest.raises(ValueError, match="other settings, weights or hardware"):
        evaluate.check_same_run(tmp_path / "settings.json", cfg, target)


def test_another_head_in_the_same_repository_is_another_run(server, target, tiny_path, tmp_path):
    """A resumed run would mix the texts of two heads."""
    cfg = composed("evaluate", f"target={tiny_path}", "drafter=[{path: org/head, revision: main}]")
    (tmp_path / "lines.jsonl").write_text('{"kind": "text"}\n')
    for kind, refused in (("medusa", False), ("eagle3", True)):
        save_head(make_head(kind, target), tmp_path / kind, target)
        hub.push(tmp_path / kind, "org/head", private=False, replace=True, dry_run=False)
        with pytest.raises(ValueError, match="other settings, weights") if refused else contextlib.nullcontext():
            evaluate.check_same_run(tmp_path / "settings.json", cfg, target)


def test_a_revision_is_that_of_the_hubs_part_next_to_a_directory(head, tiny_path):
    cfg = composed("evaluate", f"target={tiny_path}", f"drafter=[{{path: {head}+org/head, revision: v2}}]")
    assert evaluate.head_paths(cfg) == [(str(head), None), ("org/head", "v2")]


def test_another_draft_model_in_the_same_place_is_another_run(tiny_path, target, tmp_path):
    shutil.copytree(tiny_path, tmp_path / "small")
    cfg = composed("evaluate", f"target={tiny_path}", f"drafter=['draft:{tmp_path}/small+suffix']")
    for _ in range(2):  # the second one goes on
        evaluate.check_same_run(tmp_path / "settings.json", cfg, target)
        (tmp_path / "lines.jsonl").write_text('{"kind": "text"}\n')
    weights = load_file(tmp_path / "small" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(0.0)
    save_file(weights, tmp_path / "small" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="other settings, weights or hardware"):
        evaluate.check_same_run(tmp_path / "settings.json", cfg, target)


def test_a_draft_model_is_an_assistant_wherever_it_is_named(tiny_path, target):
    drafters = f"drafter=['draft:{tiny_path}+suffix','draft:/nothing']"
    named = evaluate.assistants(composed("evaluate", f"target={tiny_path}", drafters))
    assert named == {f"draft:{tiny_path}": str(tiny_path), "draft:/nothing": "/nothing"}
    assisted = [system.name for system in rivals(target, named) if "assisted" in system.name]
    assert assisted == [f"transformers, assisted by draft:{tiny_path}"]  # the other one failed as a drafter, too


def test_held_out_prompts_leave_room_for_the_answer(tiny_path, folder, target):
    """Use prompts of 200 tokens, before answers of 100, in a context of 256."""
    given = (
        f"target={tiny_path} drafter=suffix data=text data.path={folder} prompt_tokens=200 max_new_tokens=100 limit=2 "
        "data.val_split=0.3"
    )
    assert target.context == 256
    prompts = evaluate.find_prompts(composed("evaluate", *typed(given)), target)
    assert {len(prompt.tokens) for prompt in prompts} == {156} and all(prompt.cut for prompt in prompts)
    assert "the beginning of 2 cut off" in prompt_sets.summary(prompts)


def test_transformers_decodes_without_the_penalties_of_the_checkpoint(fresh, monkeypatch):
    fresh.model.generation_config.update(repetition_penalty=1.3, eos_token_id=[0])
    own, text, ids, decode = (
        fresh.model.generation_config,
        Prompt("code", list(range(5, 25)), True),
        [],
        fresh.model.generate,
    )
    monkeypatch.setattr(fresh.model, "generate", lambda *a, **k: ids.append(decode(*a, **k)) or ids[-1])
    System("transformers", {}).decode(fresh, text, 40, 0.0, 1)
    assert (
        ids[0][0, 20:].tolist() == generate(fresh, None, torch.tensor([text.tokens]), max_new_tokens=40).new_tokens[0]
    )
    assert fresh.model.generation_config is own


def test_a_run_that_failed_before_its_first_text_is_no_run(run, tmp_path):
    (tmp_path / "set.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "one"}\n' * 2)
    given = "max_new_tokens=2 repeats=1 rivals=false temperature=[0.0]"
    assert "could be loaded" in complaint(run(*typed(f"prompts=set.jsonl drafter=/no/head {given}")))
    assert run(*typed(f"prompts=other.jsonl drafter=ngram {given}")).code == 0
    assert len(json.loads((tmp_path / "out" / "prompts.json").read_text())) == 2


def test_another_target_or_machine_is_another_run(tiny_path, tmp_path, monkeypatch):
    """Change a layer, which the digest of the embedding does not cover, and then the processor."""
    shutil.copytree(tiny_path, tmp_path / "target")
    cfg = composed("evaluate", f"target={tmp_path}/target", "drafter=ngram")
    for weight in (0.0, 1.0):
        weights = load_file(tmp_path / "target" / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"].fill_(weight)
        save_file(weights, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
        target = Target.from_pretrained(tmp_path / "target", dtype="float32", device="cpu")
        with (
            pytest.raises(ValueError, match="other settings, weights or hardware")
            if weight
            else contextlib.nullcontext()
        ):
            evaluate.check_same_run(tmp_path / "settings.json", cfg, target)
        (tmp_path / "lines.jsonl").write_text('{"kind": "text"}\n')
        if not weight:  # the same files, downloaded or copied again, are the same target
            os.utime(tmp_path / "target" / "model.safetensors", (1, 1))
            evaluate.check_same_run(tmp_path / "settings.json", cfg, target)
            monkeypatch.setattr(evaluate, "device_name", lambda device: "another")
            with pytest.raises(ValueError, match=r"weights or hardware \(hardware: "):
                evaluate.check_same_run(tmp_path / "settings.json", cfg, target)
            monkeypatch.undo()
