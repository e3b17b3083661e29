"""A tiny random model of every family of decoders and of every kind that reads no trees (architectures.yaml), and a target
from a copy of it."""

import copy
import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foredraft.heads import Target
from tests.support import nightly_but

FACTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SIZES: dict[str, Any] = FACTS["sizes"]
VOCAB, CONTEXT, WINDOW = SIZES["vocab_size"], SIZES["max_position_embeddings"], 4
LENGTHS = (21, 13)  # ragged, and both longer than the window


def configs(group: str = "families") -> dict[str, hf.PreTrainedConfig]:
    """Return the configs of a group; without Kimi's if this version of transformers does not have it."""
    known = set(FACTS[group]) - (set() if "kimi_linear" in hf.CONFIG_MAPPING else {"kimi"})
    return {
        name: hf.AutoConfig.for_model(**copy.deepcopy(FACTS[group][name])) for name in FACTS[group] if name in known
    }


FAMILIES = configs()
HYBRIDS = dict.fromkeys(FACTS["hybrids"]) | configs("hybrids")
SCALED = configs("scaled")
HYBRID_WINDOW = 12  # also the chunk and the number of keys that sparse attention picks
CASES = [
    (family, attention)
    for family, config in FAMILIES.items()
    for attention in ("sdpa", "eager")
    if attention == "eager" or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
]
# By day one family of each sort: full attention, windows, windows with sinks and experts, latent keys.
FEW = [("llama", "sdpa"), ("gemma2", "eager"), ("mistral", "sdpa"), ("gpt_oss", "eager"), ("deepseek_v3", "sdpa")]
a_few_families = pytest.mark.parametrize("family, attention", nightly_but(CASES, *FEW))


class Pair(NamedTuple):
    plain: hf.PreTrainedModel
    target: Target


def plain_model(config: hf.PreTrainedConfig, **settings: Any) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, **settings).eval()


@functools.cache
def pair(family: str, attention: str) -> Pair:
    """Return a model as transformers makes it, and a target from a copy of it."""
    plain = plain_model(FAMILIES[family], attn_implementation=attention)
    for parameter in plain.parameters():
        if parameter.ndim < 2:  # norms, biases, sinks: at their initial 0 or 1 one left out would not show
            parameter.data += 0.3 * torch.randn_like(parameter)
    target = Target(copy.deepcopy(plain))
    # transformers only knows eager attention with sinks and soft caps; older versions said that sdpa had soft caps
    only_eager = family in ("gpt_oss", "gemma2") and not plain._supports_sdpa
    own = "eager" if attention == "eager" and not only_eager else "foredraft"
    assert target.model.config._attn_implementation == own
    assert plain.config._attn_implementation == attention
    return Pair(plain, target)


@functools.cache
def hybrid(kind: str) -> Pair:
    """Return a model as transformers makes it, and a target from a copy of it."""
    if HYBRIDS[kind] is None:
        pytest.skip(f"transformers {hf.__version__} has no {kind}")
    plain = plain_model(HYBRIDS[kind])
    plain.generation_config.eos_token_id = None
    return Pair(plain, Target(copy.deepcopy(plain), name=kind))
