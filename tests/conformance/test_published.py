"""Check published configs, shrunken, through all that this project does.

    FOREDRAFT_PUBLISHED=FOLDER python -m pytest -m conformance -rs tests/conformance

takes the config.json files of FOLDER, a test each (of FOLDER/targets: whether they load, train, decode as they do alone and
export; of FOLDER/heads: whether they are recognized, load on a target of their shape and draft), and every family of
transformers (whether it decodes as transformers does, and drafted as alone, in one sequence and in ragged batches). What is
refused is skipped, with the sentence that a user would get. The other tests check the checks, with separate configs.
"""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foredraft.heads import Target
from tests.conformance.checks import skipped_where_refused
from tests.conformance.families import check_family, families
from tests.conformance.heads import check_head
from tests.conformance.targets import check_target, small_family
from tests.support import ROOT

pytestmark = pytest.mark.conformance
NEW = 48  # tokens that are decoded of each prompt


def files(folder: Path) -> list[Any]:
    """Return a parameter per config.json. Raises ValueError if the folder has none."""
    kinds = {"targets": lambda config, name: check_target(config, NEW)}
    kinds["heads"] = lambda config, name: check_head(config, NEW, name)
    found = [(part, file) for part in kinds for file in sorted((folder / part).glob("*.json"))]
    if not found:
        raise ValueError(f"{folder} has no config.json files in targets/ or heads/ (any name ending in .json)")
    return [
        pytest.param(partial(kinds[part], json.loads(file.read_text()), file.stem), id=file.stem)
        for part, file in found
    ]


GIVEN = os.environ.get("FOREDRAFT_PUBLISHED")
NOTHING = pytest.param(None, marks=pytest.mark.skip("FOREDRAFT_PUBLISHED names no folder"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", [NOTHING] if GIVEN is None else files(Path(GIVEN)))
def test_a_published_file_does_what_it_should_or_is_refused(check: Any) -> None:
    with skipped_where_refused():
        check()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", families())
def test_a_family_does_what_it_should_or_is_refused(name: str) -> None:
    with skipped_where_refused():
        check_family(small_family(families()[name]), NEW)


def example(name: str) -> dict[str, Any]:
    """Read a published config.json."""
    return json.loads((ROOT / "tests" / "conformance" / "examples" / f"{name}.json").read_text())


# A hybrid inside a wrapper that also reads images, mrope of a part of each head; and longrope of three quarters, tied.
QWEN, PHI = example("targets/qwen3.5"), example("targets/phi-4-mini")
EAGLE, DSPARK = example("heads/eagle3"), example("heads/dspark")  # the second is SpecForge's, for Qwen3-4B


@pytest.mark.parametrize("config", [QWEN, PHI], ids=["qwen3.5", "phi-4-mini"])
def test_a_published_target_does_all_it_should(config: dict[str, Any]) -> None:
    assert check_target(config, new_tokens=12) == "chains"


# nvidia's for gpt-oss-120b, which drafts with the target's
WITHOUT_LM_HEAD = {"draft_vocab_size": None, "_partial": True}


@pytest.mark.parametrize(
    "config, kind",
    [(EAGLE, "eagle3"), (WITHOUT_LM_HEAD, "eagle3"), (DSPARK, "dspark")],
    ids=["eagle3", "without lm_head", "dspark"],
)
def test_a_published_head_drafts(config: dict[str, Any], kind: str) -> None:
    assert check_head(config, new_tokens=6).kind == kind


FAMILIES = {"qwen3_5_text": ("chains", 8), "reformer": ("decoded plainly", 30)}  # tokens
FAMILIES |= {"recurrent_gemma": ("chains", 8)}  # fails on a first forward of one token
FAMILIES |= dict.fromkeys(("prophetnet", "cpmant", "xlm", "xlnet"), ("decoded plainly", 6))


@pytest.mark.filterwarnings("ignore:.*Drafting is disabled")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_decodes_as_transformers_does(family: str) -> None:
    how, tokens = FAMILIES[family]
    assert check_family(small_family(families()[family]), tokens) == [how]


@pytest.mark.filterwarnings("ignore:.*Drafting is disabled")
def test_a_family_without_a_cache_decodes_as_transformers_does_without_one() -> None:
    how, note = check_family(small_family(families()["blt"]), new_tokens=4)
    assert how == "decoded plainly"
    assert note.startswith("as without a cache; with one 'BltConfig' object has no attribute")


def test_another_text_than_the_targets_fails() -> None:
    class Forgetful(Target):
        def forward_tree(self, tokens: Any, *facts: Any, **named: Any) -> Any:
            return super().forward_tree(tokens * 0, *facts, **named)

    with pytest.raises(RuntimeError, match="plain: another text, first different at "):
        check_family(Forgetful(small_family(families()["qwen3_5_text"]).model), new_tokens=8)
