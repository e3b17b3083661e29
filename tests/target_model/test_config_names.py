"""Promise: every head trains for, drafts for and is saved for a target whose config has other names for the usual sizes
(`attribute_map`: GPT-2's n_embd, MPT's d_model), leaves some of them out, or gives one for each layer."""

import copy
import warnings

import pytest
import torch
import transformers as hf
from hydra.errors import InstantiationException

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.eagle import EagleHead
from foredraft.heads.layers import DecoderLayer
from foredraft.heads.llama_config import from_json, head_rope, settings_like
from foredraft.heads.target_model.logits import LogitScaling, check_logits
from foredraft.inference import drafter_for
from foredraft.train.checks import check_target
from tests.conformance.families import default_settings, families
from tests.conformance.shrink import shrink
from tests.support import names, nightly_but
from tests.support.architectures import FAMILIES, SCALED, plain_model
from tests.support.configs import composed
from tests.support.decoding import check_drafts
from tests.support.head_factory import learn, new_head, same

VOCAB = 128
USUAL = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
OPENAI = USUAL | {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 96, "initializer_range": 0.2}
ROTATED = OPENAI | {"rotary_dim": 8}
LAYERS = USUAL | {"n_layers": 4, "n_heads": 4, "d_model": 32, "max_seq_len": 96, "initializer_range": 0.2}
NEO = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 96, "window_size": 8}
EXPERTS = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
XGLM = {"d_model": 32, "num_layers": 4, "attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": 96}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16}
CONFIGS = {
    "gpt2": hf.GPT2Config(**OPENAI),
    "gptj": hf.GPTJConfig(**ROTATED),
    "codegen": hf.CodeGenConfig(**ROTATED | {"n_head": 8, "rotary_dim": 4}),
    "gpt_bigcode": hf.GPTBigCodeConfig(**OPENAI, multi_query=True),
    "gpt_neo": hf.GPTNeoConfig(**USUAL, **NEO, attention_types=[[["global", "local"], 2]], initializer_range=0.2),
    "bloom": hf.BloomConfig(**USUAL, hidden_size=32, n_layer=4, n_head=4, initializer_range=0.2),
    "mpt": hf.MptConfig(**LAYERS),
    "dbrx": hf.DbrxConfig(
        **LAYERS, ffn_config=EXPERTS, attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}
    ),
    "xglm": hf.XGLMConfig(**USUAL, **XGLM, init_std=0.2),
    "ctrl": hf.CTRLConfig(**OPENAI, dff=64),
    "mamba2": hf.Mamba2Config(**USUAL, **MAMBA, chunk_size=16),
}
KINDS = names("head")
OF_TREES = ("draft_model",)  # what drafts with layers of the target's own kind, under masks and positions of ours
BY_DAY = {("gpt2", kind) for kind in KINDS} | {(family, "eagle3") for family in CONFIGS} | {("mpt", "draft_model")}
# What a kind takes from a config is the same in every family: one stands for those that are built alike.
BUILT = ("medusa", "dflash", "mtp", "draft_model")


def make_target(family: str) -> Target:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32)
    return Target(model, name=family)


@pytest.mark.parametrize(
    ("family", "kind"), nightly_but(sorted(BY_DAY | {(f, k) for f in CONFIGS for k in BUILT}), *BY_DAY)
)
def test_a_head_trains_is_saved_and_drafts(family: str, kind: str, tmp_path) -> None:
    target = make_target(family)
    if kind in OF_TREES and not target.capabilities.trees:
        with pytest.raises(InstantiationException, match=f"{target.capabilities.why}.*choose another"):
            new_head(kind, target)
        return
    head = new_head(kind, target)
    assert 0 < learn(kind, head, target) < 50
    save_head(head, tmp_path / "head", target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_head(tmp_path / "head", target)
    assert same(again, head)
    check_drafts(target, drafter_for(again, target), torch.arange(3, 23)[None])


def test_a_kind_of_layers_without_a_rope_gives_the_heads_none() -> None:
    sliding = {"rope_type": "default", "rope_theta": 500.0}
    ropes = {"rope_parameters": {"full_attention": None, "sliding_attention": sliding}}
    assert head_rope(ropes) == sliding


def test_a_size_for_each_layer_gives_the_heads_the_largest(fresh: Target) -> None:
    fresh.config = copy.deepcopy(fresh.config)
    fresh.config.__dict__["intermediate_size"] = [64, 64, 96, 64, 64, 64]  # Gemma 3n's
    assert EagleHead.for_target(fresh).config.intermediate_size == 96


@pytest.mark.nightly
@pytest.mark.parametrize("family", families())
def test_the_config_of_every_family_shapes_a_layer(family: str) -> None:
    kind = families()[family]
    try:
        config = kind(**{key: value for key, value in shrink(default_settings(kind)).items() if key != "model_type"})
        with torch.device("meta"):
            target = Target(hf.AutoModelForCausalLM.from_config(config), name=family)
    except (ValueError, ImportError) as error:
        pytest.skip(f"transformers makes none: {error}")
    if family == "blt":  # several transformers one in the other, and decoded plainly
        with pytest.raises(ValueError, match="no hidden_size"):
            settings_like(target)
        return
    with torch.device("meta"):
        DecoderLayer(from_json(settings_like(target)))


@pytest.mark.parametrize("name", SCALED)
def test_each_scale_of_logits_is_read_from_the_config(name: str) -> None:
    target = Target(plain_model(SCALED[name]), name=name)
    assert target.scaled != LogitScaling(None, None, None)
    check_logits(target)


def test_a_factor_of_one_is_no_scale() -> None:
    config = copy.deepcopy(FAMILIES["llama"])
    config.update({"logits_scaling": 1.0, "lm_head_multiplier": 1.0})
    assert LogitScaling.of(config) == LogitScaling(None, None, None)


def test_a_target_with_narrower_embeddings_is_refused_before_a_head_is_made() -> None:
    """OPT-350m projects its embeddings, and no head does."""
    config = copy.deepcopy(FAMILIES["opt"])
    config.word_embed_proj_dim = 16
    target = Target(plain_model(config), name="opt")
    with pytest.raises(ValueError, match="opt has embeddings of width 16 and hidden states of width 32"):
        check_target(composed("train"), target)
