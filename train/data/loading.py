"""The corpus that a program's config names."""

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads.target import Target
from foredraft.train.data.corpus import Corpus

WRITES = "foredraft.train.data.magpie.corpus"  # lets the target write what is not there yet
READS_IMAGES = "foredraft.train.data.conversations.corpus"


def needs_target(settings: DictConfig) -> bool:
    return settings._target_ == WRITES


def load_corpus(settings: DictConfig, target: Target) -> Corpus:
    more: dict[str, Any] = {"target": target} if needs_target(settings) else {}
    if settings._target_ == READS_IMAGES:
        more["images"] = target.images
    return instantiate(settings, tokenizer=target.text_tokenizer, **more)
