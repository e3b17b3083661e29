"""Published tables are what figures.json gives; the program that measures them continues where it was stopped."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from foredraft.heads import save_head
from foredraft.inference import drafter_for, generate
from foredraft.inference.evaluation.benchmark import Prompt
from foredraft.scripts import docs_heads
from foredraft.scripts.bench import by_context, matched, spec_bench, systems, tables
from tests.support import typed
from tests.support.head_factory import make_head

ENTRY = {
    "command": "python x.py",
    "commit": "abc",
    "date": "2026-11-26",
    "hardware": "a CPU",
    "n": 3,
    "standard_error": "over questions",
    "columns": [{"title": "system"}, {"title": "speed-up", "digits": 2, "unit": "x"}],
    "rows": [["baseline", 1], ["suffix", [1.234, 0.056]], ["none", None]],
}
TABLE = """| system | speed-up |
|---|---:|
| baseline | 1.00x |
| suffix | 1.23x ± 0.06 |
| none |  |
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FIGURES", tmp_path / "figures.json")
    (tmp_path / "figures.json").write_text(tables.dump({"speed": ENTRY}))
    (tmp_path / "README.md").write_text(f"# x\n\n<!-- figures: speed -->\n{TABLE}<!-- end -->\n")
    return tmp_path


def test_every_table_of_the_repository_is_generated():
    entries = tables.load()
    assert not [fault for name, entry in entries.items() for fault in tables.faults(name, entry)]
    for path in tables.documents():
        assert tables.written(path.read_text(), entries) == path.read_text(), path
    used = {found["name"] for path in tables.documents() for found in tables.MARKED.finditer(path.read_text())}
    assert used | docs_heads.MEASURED.keys() == entries.keys()


def test_a_generated_table_passes(repository: Path, capsys):
    assert tables.main(["--check"]) == 0
    assert tables.load() == {"speed": ENTRY} and "1 tables" in capsys.readouterr().out


def test_a_stale_table_fails_and_is_rewritten(repository: Path, capsys):
    readme = repository / "README.md"
    readme.write_text(readme.read_text().replace("1.23x", "1.94x"))
    assert tables.main(["--check"]) == 1 and "figures.json does not give" in capsys.readouterr().out
    assert tables.main([]) == 0 and TABLE in readme.read_text()


@pytest.mark.parametrize(
    "row, fails", [("| suffix | 1.87x |", True), ("| suffix | 2.44 |", True), ("| a | 3 drafts |", False)]
)
def test_a_typed_figure_fails(repository: Path, capsys, row: str, fails: bool):
    with (repository / "README.md").open("a") as readme:
        readme.write(f"\n| drafter | value |\n|---|---|\n{row}\n")
    assert tables.main(["--check"]) == fails and (row in capsys.readouterr().out) == fails


def test_what_a_figure_needs_is_named(repository: Path, capsys):
    (repository / "figures.json").write_text(tables.dump({"speed": ENTRY | {"hardware": "", "rows": [["suffix"]]}}))
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == "speed has no hardware\nspeed: suffix has not 2 cells\n"


def test_an_unknown_name_is_named(repository: Path):
    with pytest.raises(ValueError, match="figures: sped is not in"):
        tables.written("<!-- figures: sped -->\n<!-- end -->", tables.load())


def test_the_caption_has_all_that_a_figure_needs():
    text = tables.markdown(ENTRY | {"note": "A model, float32"})
    assert text.startswith(TABLE)
    assert all(str(ENTRY[name]) in text for name in tables.TOLD)


def test_the_standard_error_of_a_mean_is_the_usual_one():
    """Compare the jackknife of a mean with the standard error of the mean."""
    values = [1.0, 2.0, 4.0, 9.0]
    questions = [[({"tokens": value}, {})] * 3 for value in values]  # repeats add nothing
    found = spec_bench.jackknife(questions, lambda some: spec_bench.total(some, "tokens") / len(some))
    mean = sum(values) / 4
    assert found == pytest.approx([mean, math.sqrt(sum((value - mean) ** 2 for value in values) / 3 / 4)])


def line(batch: int, repeat: int, forwards: int) -> spec_bench.Line:
    facts = {"tokens": 3 + batch, "seconds": 1.0, "texts": [[1]], "forwards": forwards, "emitted": 2 * forwards}
    return {"system": "a", "batch": batch, "repeat": repeat} | facts


def test_repeats_are_of_one_question_and_an_answer_of_one_token_hides_nothing():
    once, often = ([line(n, r, n) for n in range(3) for r in range(repeats)] for repeats in (1, 4))
    found, again = (spec_bench.row("a", "a", lines, "seconds") for lines in (once, often))
    assert again[:4] == found[:4] == ["a", pytest.approx([4.0, 1 / math.sqrt(3)]), [1.0, 0.0], [2.0, 0.0]]
    assert (found[-1], again[-1]) == ("3 of 3", "12 of 12")
    assert spec_bench.row("a", "a", often[:4], "seconds") == ["a", 3.0, 1.0, None, "4 of 4"]  # of one question


BENCH = OmegaConf.create(
    {"transformers": True, "batch_size": 1, "chain": 3, "max_new_tokens": 12, "ignore_eos": True, "eager": False}
    | {"vllm": None, "eagle": None}
)


def test_one_text_has_no_standard_error():
    assert by_context.cell([(2, 6)], [(2, 4)]) == "3.00, +50%"
    assert by_context.cell([(2, 6), (2, 4)], [(2, 4), (2, 4)]) == "2.50 (0.50), +25% (25%)"


def test_what_drafting_costs_is_measured_in_texts_of_two_tokens_too(target):
    drafter, prompt = drafter_for(make_head("medusa", target), target), Prompt("code", [5, 6, 7], False)
    assert matched.draft_cost(target, drafter, prompt, 2) > 0


def test_nothing_to_measure_is_named(target):
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        matched.first_turns(target, "mt_bench", 0, 8)


def test_drafts_that_the_forward_over_the_prompt_accepts_are_not_of_later_ones(embedded):
    prompt = torch.tensor([embedded.text_tokenizer("import os\n").input_ids])
    prompt = generate(embedded, None, prompt, max_new_tokens=150, eos_token_id=-1).sequences[0].tolist()  # it loops
    plain = systems.foredraft(embedded, None, BENCH, {})([prompt], 0)
    lookup = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
    found = systems.transformers(embedded.model, [0], BENCH, **lookup)([prompt], 0)
    assert found.texts == plain.texts and plain.forwards == plain.emitted == 11
    assert found.emitted < 11 and found.forwards <= found.emitted


def test_drafts_of_vllm_behind_the_end_of_a_text_are_not_counted(tmp_path, monkeypatch, capsys):
    """Let it draft twice for a text of 6 tokens, and accept 3 drafts each time, of which the last 3 tokens are cut off."""
    counters = {"drafts": 0, "accepted_tokens": 0}

    class LLM(SimpleNamespace):
        def get_metrics(self):
            return [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counters.items()]

        def generate(self, prompts, settings, use_tqdm):
            counters.update(drafts=2, accepted_tokens=6)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * 6)]) for _ in prompts]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))
    for name in ("vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.reader"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(Counter=SimpleNamespace))
    job = dict.fromkeys(
        ("target", "dtype", "max_model_len", "batch_size", "eager", "max_new_tokens", "eos_token_ids"), 1
    )
    (tmp_path / "job.json").write_text(json.dumps(job | {"ignore_eos": True, "speculative": {"method": "eagle3"}}))
    monkeypatch.setattr(sys, "argv", ["vllm_worker.py", str(tmp_path / "job.json")])
    monkeypatch.setattr(sys, "stdin", ["[[7, 8]]"])
    runpy.run_path(str(systems.RIVALS / "vllm_worker.py"), run_name="__main__")
    answer = json.loads(capsys.readouterr().out.removeprefix("answer "))
    assert (answer["forwards"], answer["emitted"]) == (2, 5)


def test_transformers_decodes_without_the_penalties_of_the_checkpoint(fresh, tmp_path):
    fresh.model.generation_config.repetition_penalty = 1.5
    fresh.model.save_pretrained(tmp_path / "target")
    fresh.name, prompts = str(tmp_path / "target"), [list(range(200, 220))]
    rival = systems.rivals(fresh, BENCH, tmp_path, 20)["transformers"]
    assert rival.answer(prompts, 0).texts == systems.foredraft(fresh, None, BENCH, {})(prompts, 0).texts


def test_systems_side_by_side(target, tiny_path, tmp_path, call, monkeypatch):
    """Run two systems on two questions; a run that was stopped answers what is left, and publishes its table."""
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps({"prompt": f"def add_{n}(self"}) + "\n" for n in "ab"))
    monkeypatch.setattr(tables, "FIGURES", tmp_path / "figures.json")
    tables.FIGURES.write_text("{}")
    given = typed(f"""
        eagle3_head={tmp_path / "head"} target.path={tiny_path} target.device=cpu target.dtype=float32 limit=2
        prompts={tmp_path / "questions.jsonl"} output_dir=out ignore_eos=true
    """)
    assert call(spec_bench.main, *given, "max_new_tokens=12").code == 0
    answers = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 14 and all(json.loads(line)["tokens"] == 12 for line in answers)
    (tmp_path / "out" / "answers.jsonl").write_text("\n".join(answers[:5]) + "\n" + answers[5][:20])
    ended = call(spec_bench.main, *given, "max_new_tokens=12", "table=here")
    assert ended.code == 0 and "| EAGLE-3 + suffix |" in ended.out
    assert (tmp_path / "out" / "answers.jsonl").read_text().splitlines()[:5] == answers[:5]
    rows = {row[0]: row[1:] for row in tables.load()["here"]["rows"]}
    assert list(rows)[:3] == ["transformers", "transformers, prompt lookup", "baseline"] and len(rows) == 7
    assert rows["baseline"][1:3] == [[1.0, 0.0], [1.0, 0.0]]
    assert all(row[-1] == "2 of 2" for row in rows.values()), rows  # float32
    refused = call(spec_bench.main, *given, "max_new_tokens=13")
    assert refused.code == 2 and "has answers under other settings" in refused.err


def test_settings_that_others_do_not_have_are_for_ours_alone(target, tiny_path, tmp_path, call):
    save_head(make_head("eagle3", target), tmp_path / "head", target)
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "def add(self"}) + "\n")
    given = typed(f"""
        eagle3_head={tmp_path / "head"} target.path={tiny_path} target.device=cpu target.dtype=float32
        limit=1 repeats=2
        prompts={tmp_path / "questions.jsonl"} output_dir=out max_new_tokens=8 ignore_eos=true
    """)
    given += ["sampling=[{temperature: 0.7}, {temperature: 0.7, top_k: 5}]", "drafters=[{name: suffix, path: suffix}]"]
    assert "sampling=" in call(spec_bench.main, *given).err
    assert call(spec_bench.main, *given, "transformers=false").code == 0
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    assert [row[0] for row in rows] == [
        "baseline, temperature=0.7",
        "suffix, temperature=0.7",
        "baseline, temperature=0.7, top_k=5",
        "suffix, temperature=0.7, top_k=5",
    ]
    assert [row[-1] for row in rows] == ["2 of 2"] * 4  # each is the text of the baseline with the same settings
