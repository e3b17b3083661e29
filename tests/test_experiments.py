"""Every recipe in conf/experiment composes, and says how it is run, on what, and how its cost is planned."""

import re
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from scripts.plan import spelled_out

CONF = Path(__file__).resolve().parent.parent / "conf"
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


def test_the_recipes_that_were_asked_for_are_there():
    assert {name for name in RECIPES} >= {
        *("llama31_8b_eagle3", "llama33_70b_eagle3", "qwen3_8b_eagle3", "qwen3_8b_eagle31"),
        *("vicuna_7b_medusa1", "vicuna_7b_medusa2", "vicuna_7b_hydra_pp", "gpt_oss_20b_eagle3"),
    }


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_composes(name: str):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        cfg = hydra.compose("train", [f"experiment={name}", "data.path=FOLDER"])
    OmegaConf.resolve(cfg)
    assert cfg.output_dir == f"outputs/{name}" and cfg.trainer.output_dir == f"outputs/{name}/checkpoints"
    assert cfg.target.path.count("/") == 1 and cfg.trainer.num_train_epochs >= 1 and cfg.trainer.max_steps == -1
    assert f"experiment={name} data.path=FOLDER" in text and re.search(r"80 GB", text)
    planned = re.search(r"# What it needs:  python scripts/plan.py (.+)", text)
    assert planned is not None
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        plan = hydra.compose("plan", [spelled_out(argument) for argument in planned[1].split()])
    assert (CONF.parent / plan.target.path).is_file() and plan.engine.name == cfg.engine.name
