"""Every recipe in conf/recipe composes, and says how it is run, on what, and what it costs by plan.py. So do examples and
documents."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from foredraft.scripts.plan import main, plan
from tests.support import nightly_but
from tests.support.configs import composed

CONF = Path(__file__).resolve().parents[2] / "conf"
TARGET_8B = f"target.path={CONF.parent}/scripts/targets/qwen3-8b.json"
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))


def planned(name: str) -> tuple[float, float, DictConfig]:
    """Return GiB and hours that the recipe's comments state, and the config of the plan that they name."""
    text = (CONF / "recipe" / f"{name}.yaml").read_text()
    found = re.search(r"tokens: ([\d.]+) GiB.*, ([\d.]+) hours, by\n# +python scripts/plan.py (.+)", text)
    assert found is not None
    config = composed("plan", *found[3].split())
    return float(found[1]), float(found[2]), config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes(name: str):
    text = (CONF / "recipe" / f"{name}.yaml").read_text()
    cfg = composed("train", f"recipe={name}", "data.path=DIRECTORY")
    OmegaConf.resolve(cfg)
    assert cfg.output_dir == f"outputs/{name}"
    assert cfg.data._target_ == "foredraft.train.data.conversations.corpus"  # learned from answers alone
    assert cfg.target.path.count("/") == 1 and cfg.trainer.num_train_epochs >= 1 and cfg.trainer.max_steps == -1
    assert f"recipe={name} data.path=DIRECTORY" in text and re.search(r"80 GB", text)
    _, _, wanted = planned(name)
    assert (CONF.parent / wanted.target.path).is_file() and wanted.strategy == cfg.strategy


@pytest.mark.parametrize("name", nightly_but(RECIPES, "llama33_70b_eagle3"))
def test_a_recipe_costs_what_it_says(name: str):
    gib, hours, wanted = planned(name)
    wanted.target.path = str(CONF.parent / wanted.target.path)
    found = plan(wanted)
    assert found["total"] == pytest.approx(gib, rel=0.02) and found["hours"] == pytest.approx(hours, rel=0.05)


@pytest.mark.parametrize(
    "file", sorted((CONF.parent / "scripts" / "examples").glob("*.sh")), ids=lambda file: file.stem
)
def test_an_example_costs_what_its_recipe_or_plan_says(file: Path):
    text = file.read_text()
    told = [float(number) for number in re.findall(r"(?:Time: +|Memory: +)([\d.]+) (?:hours|GiB)", text)]
    if (recipe := re.search(r"recipe=(\w+)", text)) is not None:
        gib, hours, _ = planned(recipe[1])
        assert told == [hours, gib]
    elif told:
        found = plan(composed("plan", TARGET_8B, "head=eagle3", "tokens=100000000"))
        assert told == pytest.approx([found["hours"], found["total"]], rel=0.03)


def test_the_tutorial_shows_what_plan_prints(call: Callable, tmp_path: Path):
    (tmp_path / "scripts").symlink_to(CONF.parent / "scripts")
    page = (CONF.parent / "docs" / "tutorials" / "train-8b-one-gpu.md").read_text()
    command, shown = re.findall(r"```(?:bash|text)\n(.*?)```", page.split("<!-- run -->")[1], re.S)[:2]
    ended = call(main, *shlex.split(command.replace("\\\n", ""))[2:])
    assert ended.code == 0
    assert [line for line in shown.splitlines() if line.strip() != "..." and line not in ended.out.splitlines()] == []


def test_what_documents_say_about_memory_is_what_plan_says():
    changes: dict[str, list[str]] = {"": [], "8bit": ["target.quantization=8bit"], "4bit": ["target.quantization=4bit"]}
    changes["short"] = ["max_length=1024", "head.draft_vocab_size=8192"]
    found = {
        name: round(plan(composed("plan", TARGET_8B, "head=eagle3", "strategy=single", *change))["total"], 1)
        for name, change in changes.items()
    }
    tutorial, heads, trouble = (
        " ".join((CONF.parent / "docs" / name).read_text().split())
        for name in ("tutorials/train-8b-one-gpu.md", "heads/index.md", "troubleshooting.md")
    )
    assert f"says that {found['']} GiB are needed" in tutorial
    assert f"`target.quantization=8bit` ({found['8bit']} GiB) or `4bit` ({found['4bit']} GiB)" in tutorial
    assert f"`max_length=1024 head.draft_vocab_size=8192` needs {found['short']} GiB" in tutorial
    assert f"`head=eagle3 target.quantization=8bit` ({found['8bit']} GiB by `plan`" in heads
    assert f"needs {found['short']} GiB instead of {found['']} (by `plan`)" in trouble


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: file.stem)
def test_what_a_yaml_names_can_be_called(file: Path):
    for name in re.findall(r"_target_: (\S+)", file.read_text()):
        assert callable(get_object(name))


def test_defaults_that_the_tutorial_gives_are_those_of_the_presets():
    text = (CONF.parent / "docs" / "tutorials" / "train-8b-one-gpu.md").read_text()
    row = r"^\| `([\w.]+)` \| [^|]+ \| ([\d.e-]+)(?:, preset cpu ([\d.e-]+))?(?:, with `init_from` ([\d.e-]+))? \|$"
    rows = re.findall(row, text, re.M)
    assert {"trainer.learning_rate", "max_length", "trainer.gradient_accumulation_steps"} <= {key for key, *_ in rows}
    presets = ["preset=gpu"], ["preset=cpu"], ["preset=gpu", "init_from=HEAD"]
    gpu, cpu, continued = (composed("train", *changes) for changes in presets)
    for key, default, on_cpu, with_head in rows:
        given = float(default), float(on_cpu or default), float(with_head or default)
        assert given == tuple(OmegaConf.select(cfg, key) for cfg in (gpu, cpu, continued)), key
