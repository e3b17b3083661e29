"""`python scripts/bench/compare.py` from training to the table, on a tiny target."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch

from foredraft.scripts.bench import compare_measure
from foredraft.scripts.bench.compare import main, named
from tests.support.processes import forking_python
from tests.support.tiny import TEXT

SMALL = [
    "data=text",
    "target=hf",
    "target.device=cpu",
    "heads=[medusa]",
    "prompts=3",
    "timed_prompts=1",
    "proven_prompts=2",
    "prompt_tokens=16",
    "new_tokens=16",
    "+train.recipe=embedded",
    "+train.length=64",
    "+train.self_generated_tokens=0",
    "+train.trainer={max_steps:2,warmup_steps:1}",
    "train.evaluate.prompts=2",
    "+train.evaluate={prompt_tokens:16,new_tokens:8,eval_steps:0}",
]


@pytest.fixture
def compare(tmp_path: Path, tiny_path: Path, monkeypatch, capfd):
    """compare(*arguments): what it printed; its table is in out/."""
    (tmp_path / "text.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", forking_python())  # of the trainings
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*arguments: str) -> tuple[int, str]:
        common = [f"target.path={tiny_path}", "data.path=text.py", "output_dir=out", "hydra/job_logging=disabled"]
        monkeypatch.setattr(sys, "argv", ["scripts/bench/compare.py", *SMALL, *common, *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capfd.readouterr()
        return code, out.out + out.err

    yield run
    torch.set_num_threads(threads)


def test_heads_are_trained_once_and_every_drafter_has_its_row(compare):
    code, out = compare()
    assert code == 0, out
    with open("out/compare.csv") as file:
        table = {row["drafter"]: row for row in csv.DictReader(file)}
    assert {"plain", "medusa", "medusa, auto", "ngram", "suffix", "lookahead"} <= set(table)
    assert not any("eagle" in name for name in table)  # it was not trained
    for name, row in table.items():
        for label in ("T=0", "T=1"):
            assert float(row[f"tokens/s {label}"]) > 0 and float(row[f"speedup {label}"]) > 0
            if name != "plain":
                assert float(row[f"acceptance {label}"]) >= 1 and float(row["identical"]) == 1
    assert int(table["medusa"]["parameters"]) > 0 and float(table["medusa"]["train_seconds"]) > 0
    assert int(table["ngram"]["parameters"]) == 0
    assert table["ngram"]["over transformers T=0"] and table["plain"]["over transformers T=1"]
    assert not table["suffix"]["over transformers T=0"]  # transformers has no such drafter
    text = Path("out/compare.md").read_text()
    assert text.count("lossless") == len(table) and "held-out prompts" in text
    assert Path("out/compare.png").read_bytes().startswith(b"\x89PNG")
    Path("out").rename("copied")  # measured where nothing is trained
    (Path("copied") / "measured.json").unlink()
    code, out = compare("output_dir=copied", "train_missing=false", "timed_prompts=0", "heads=[medusa,eagle]")
    assert code == 0 and "medusa: trained before" in out and "train/run.py" not in out
    assert (
        "tokens/s" not in Path("copied/compare.csv").read_text()
        and "eagle" not in Path("copied/compare.md").read_text()
    )


def test_a_head_that_fails_does_not_lose_the_others(compare, monkeypatch):
    """One cannot be trained; of the other, trees and chains have rows, which a second run does not measure again."""
    given = "heads=[dflash,eagle]", "+train.head.block_size=3", "timed_prompts=0"
    code, out = compare(*given)
    assert code == 2 and "not in the table: eagle (training ended with exit code" in out
    with open("out/compare.csv") as file:
        table = {row["drafter"]: row for row in csv.DictReader(file)}
    assert {"dflash", "dflash, chain", "ngram"} <= set(table) and not any("eagle" in name for name in table)
    assert len(table["dflash, chain"]["accepted per depth T=0"].split()) <= 2 < float(table["dflash"]["parameters"])
    known = json.loads(Path("out/measured.json").read_text())
    monkeypatch.setattr(compare_measure, "load_drafter", lambda *given, **options: pytest.fail("measured again"))
    compare(*given)
    assert json.loads(Path("out/measured.json").read_text()) == known


def test_a_head_that_is_not_there_is_named(compare):
    code, out = compare("heads=[medusae]")
    assert code == 2 and "heads=['medusae'] are not among conf/head and variants" in out


def test_heads_in_braces_are_found_wherever_a_row_names_them():
    row = {"drafter": {"spec": "{eagle3}+ngram"}, "baseline": {"assistant_model": "{draft_model}"}}
    assert named(row) == ["eagle3", "draft_model"]
