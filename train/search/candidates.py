"""The candidates of head=auto: what each is given, checked before anything is loaded."""

import re

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig

from foredraft.train.config_check import check
from foredraft.train.joint import JointDistillation

OWN = ("head", "budget", "heads", "search_share", "judge", "candidates", "output_dir")  # no settings of a candidate
SHARED = (
    "target",
    "data",
    "max_length",
    "packing",
    "seed",
    "self_generated_tokens",
)  # settings that all candidates have


def check_numbers(cfg: DictConfig) -> None:
    if not 0 < cfg.search_share < 1:
        raise ValueError(f"search_share={cfg.search_share} must be between 0 and 1")
    for name in ("num_prompts", "prompt_tokens", "max_new_tokens", "repeats"):
        if cfg.judge[name] < 1:
            raise ValueError(f"judge.{name}={cfg.judge[name]} must be at least 1")


def chosen(cfg: DictConfig) -> dict[str, list[str]]:
    """Return what each candidate is given. Raise ValueError or HydraException if one is not possible."""
    typed = [(group(override), override) for override in HydraConfig.get().overrides.task]
    for _, override in typed:
        if re.match(r"\+*trainer\.(max_steps|num_train_epochs)=", override):
            raise ValueError(f"{override}: head=auto trains as long as budget={cfg.budget} says, leave it out")
    given = [override for name, override in typed if name not in OWN]
    known = {str(name): [*own, *given] for name, own in cfg.candidates.items()}
    names = list(cfg.heads or known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"heads={unknown} are not among candidates, which has {', '.join(known)}")
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"candidates.{name} names a folder: take letters, digits and underscores")
        shared = [key for key in map(group, cfg.candidates[name]) if key in SHARED]
        check_candidate(cfg, name, known[name], shared)
    return {name: known[name] for name in names}


def group(override: str) -> str:
    """Return the first part of its key: trainer of +trainer.max_steps=3."""
    return re.split(r"[.=@]", override.lstrip("+~"))[0]


def check_candidate(cfg: DictConfig, name: str, overrides: list[str], shared: list[str]) -> None:
    """Check a candidate. shared: the keys of SHARED that its own settings name, though what is typed may overrule them."""
    main = HydraConfig.instance().cfg  # which `check` replaces
    try:
        check("train", overrides, 0)
    except HydraException as error:
        raise HydraException(f"candidates.{name}: {error}") from error
    finally:
        HydraConfig.instance().cfg = main
    own = composed(overrides)
    if "candidates" in own:
        raise ValueError(f"candidates.{name} is given head=auto, which is not a head")
    if differ := [*shared, *(key for key in SHARED if own[key] != cfg[key])]:
        raise ValueError(f"candidates.{name} sets {differ[0]}, which all candidates must share")
    if issubclass(get_class(own.objective._target_), JointDistillation):
        raise ValueError(
            f"candidates.{name} tunes the target too, whose text changes: it cannot be compared with others"
        )


def composed(overrides: list[str]) -> DictConfig:
    return hydra.compose("train", overrides)
