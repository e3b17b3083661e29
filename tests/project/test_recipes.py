"""Every recipe in conf/recipe composes, and says how it is run, on what, and what it costs by plan.py."""

import re
from pathlib import Path

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from foredraft.scripts.plan import plan
from tests.support import nightly_but
from tests.support.configs import composed

CONF = Path(__file__).resolve().parents[2] / "conf"
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
    assert cfg.output_dir == f"outputs/{name}" and cfg.trainer.output_dir == f"outputs/{name}/checkpoints"
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


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda file: file.stem)
def test_what_a_yaml_names_can_be_called(file: Path):
    for name in re.findall(r"_target_: (\S+)", file.read_text()):
        assert callable(get_object(name))


def test_defaults_that_the_tutorial_gives_are_those_of_the_presets():
    text = (CONF.parent / "docs" / "tutorials" / "train-8b-one-gpu.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| ([\d.e-]+)(?:, preset cpu ([\d.e-]+))? \|$", text, re.M)
    assert {"trainer.learning_rate", "max_length", "trainer.gradient_accumulation_steps"} <= {key for key, *_ in rows}
    gpu, cpu = (composed("train", f"preset={name}") for name in ("gpu", "cpu"))
    for key, default, on_cpu in rows:
        given = float(default), float(on_cpu or default)
        assert given == (OmegaConf.select(gpu, key), OmegaConf.select(cpu, key)), key
