"""conf/ as a program sees it."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from tests.support import CONF


def composed(program: str, *arguments: str) -> DictConfig:
    """Read conf/<program>.yaml, such as train or export, with these arguments of a command line."""
    path = CONF / program
    with initialize_config_dir(str(path.parent), version_base=None):
        return compose(path.name, list(arguments))
