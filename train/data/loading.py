"""The corpus that a program's config names."""

from hydra.utils import instantiate
from omegaconf import DictConfig

from foredraft.heads.target import Target
from foredraft.train.data.corpus import Corpus

WRITES = "foredraft.train.data.magpie.corpus"  # lets the target write what is not there yet


def needs_target(settings: DictConfig) -> bool:
    return settings._target_ == WRITES


def load_corpus(settings: DictConfig, target: Target) -> Corpus:
    more = {"target": target} if needs_target(settings) else {}
    return instantiate(settings, tokenizer=target.text_tokenizer, **more)
