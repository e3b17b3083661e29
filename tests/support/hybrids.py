"""A tiny random model of every kind that reads no trees (architectures.yaml), and a target from a copy of it."""

import copy
import functools

import pytest
import transformers as hf

from foredraft.heads import Target
from tests.support import architectures
from tests.support.architectures import FACTS, Pair, random_model

SIZES = architectures.SIZES | {"num_hidden_layers": 2}
WINDOW = 12  # also the chunk and the number of keys that sparse attention picks
CONFIGS = dict.fromkeys(FACTS["hybrids"]) | architectures.configs("hybrids")


@functools.cache
def pair(kind: str) -> Pair:
    """Return a model as transformers makes it, and a target from a copy of it."""
    if CONFIGS[kind] is None:
        pytest.skip(f"transformers {hf.__version__} has no {kind}")
    plain = random_model(CONFIGS[kind])
    plain.generation_config.eos_token_id = None
    return Pair(plain, Target(copy.deepcopy(plain), name=kind))
