"""Block drafters in the layouts that others publish: what loads, as what, and what is refused; and back again."""

import json
import warnings
from typing import Any

import pytest
import torch

from foredraft.heads import load_head
from foredraft.heads.checkpoint import read_head
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.formats import engines
from foredraft.heads.p_eagle import PEagleHead
from foredraft.inference import drafter_for, generate
from foredraft.train import parity_gate
from tests.support import golden
from tests.support.batches import PROMPT
from tests.support.exports import write_export
from tests.support.head_factory import make_head

# name -> kind, hidden states that it reads, block size, anchor first, causal
GOLDEN: dict[str, tuple] = {
    "zlab": ("dflash", [2, 4, 6], 4, False, False),
    "jetspec": ("dflash", [3], 5, False, True),
    "zlab_dflash2": ("dflash2", [2, 4], 4, False, False),
    "vllm_xpress": ("xpress", [2, 4], 4, False, False),
    "speculators_xpress": ("xpress", [2, 4], 4, False, False),
    "deepspec": ("dspark", [2, 4], 3, True, False),
    "deepspec_dflash": ("dflash", [2, 4], 3, True, False),
    "specforge_dspark": ("dspark", [2, 4], 3, True, False),
    "specforge_domino": ("domino", [2, 4], 4, True, False),
    "speculators_dflash": ("dflash", [2, 4], 4, False, False),
    "speculators_dspark": ("dspark", [2, 4], 4, True, False),
}
RENAMED = {  # of files whose names are not those that training writes
    "speculators_xpress": {
        "refiner_head.": "xpress_head.",
        **{f".{theirs}": f".{ours}" for ours, theirs in golden.SPECULATORS_REFINER.items()},
    },
}


def renamed(key: str, name: str) -> str:
    for theirs, ours in RENAMED.get(name, {}).items():
        key = key.replace(theirs, ours)
    return key


@pytest.mark.parametrize("name", GOLDEN)
def test_published_files_are_what_they_say(deep, tmp_path, name):
    config, weights, file = golden.make(name, deep)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = load_head(golden.write(tmp_path, config, weights, file), deep, dtype=torch.float32)
    assert isinstance(head, DFlashHead)
    found = head.kind, head.layers, head.block_size, head.sample_from_anchor, head.causal
    assert found == GOLDEN[name] and head.mask_token_id == 7
    frozen = ("embed_tokens.weight", "lm_head.weight")
    theirs = {renamed(key, name): value for key, value in weights.items() if key not in frozen}
    mine = {key.replace("blocks.", "layers.", 1): value for key, value in head.state_dict().items()}
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key].float()) for key in theirs)
    if name == "zlab":
        assert head.window == 5 and [head.masking(i) for i in range(3)] == [(True, 5), (True, 5), (False, None)]
    assert parity_gate.check(head, deep, PROMPT) < 1e-3


@pytest.mark.parametrize(("name", "before", "depth"), [("p_eagle", False, 8), ("speculators_p_eagle", True, 3)])
def test_p_eagle_files_are_what_they_say(deep, tmp_path, name, before, depth):
    config, weights, _ = golden.make(name, deep)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        head = load_head(golden.write(tmp_path, config, weights), deep, dtype=torch.float32)
    assert isinstance(head, PEagleHead)
    assert (head.layers, head.depth, head.mask_token_id, head.cache_layers) == ([2, 4, 5], depth, 7, 2)
    assert head.norm_before_residual == before
    mine = {key.replace("blocks.", "layers.", 1): value for key, value in head.state_dict().items()}
    assert mine.keys() == weights.keys() and all(torch.equal(mine[key], weights[key].to(mine[key])) for key in mine)
    assert parity_gate.check(head, deep, PROMPT) < 1e-3


def test_p_eagle_files_that_ask_for_one_draft_are_used(deep, tmp_path):
    config, weights, _ = golden.make("speculators_p_eagle", deep)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = load_head(golden.write(tmp_path, config, weights), deep, dtype=torch.float32)
    assert parity_gate.check(head, deep, PROMPT) < 1e-3
    ids, settings = torch.tensor([PROMPT]), {"max_new_tokens": 8, "eos_token_id": -1}
    plain = generate(deep, None, ids, **settings).new_tokens
    assert generate(deep, drafter_for(head, deep), ids, **settings).new_tokens == plain


def test_p_eagle_without_an_embedding_takes_the_targets(deep, tmp_path):
    config, weights, _ = golden.make("p_eagle", deep)
    del weights["embed_tokens.weight"]
    weights = {key.replace("layers.0", "midlayer"): value for key, value in weights.items()}  # as EAGLE-3 calls it
    with pytest.warns(UserWarning, match="no embedding is stored"):
        head = load_head(golden.write(tmp_path, config, weights), deep, dtype=torch.float32)
    torch.testing.assert_close(head.embed_tokens.weight, deep.embeddings, atol=1e-3, rtol=1e-2)


def change(config: dict, path: str, value: Any) -> dict:
    *parents, last = path.split(".")
    inside = config
    for parent in parents:
        inside = inside[parent]
    inside[last] = value
    return config


SETTINGS = [
    ("zlab", "dflash_config.projector_type", "medusa", r"projector_type='medusa'"),
    ("zlab", "dflash_config.target_layer_ids", [1, 3, 8], r"has layers \[1, 3, 8\], which must ascend within the 8"),
    ("zlab", "dflash_config.target_layer_ids", [3, 1, 5], "must ascend"),
    ("zlab", "dflash_config.target_layer_ids", [1, 3], r"fc.weight is \(32, 96\) in the file, \(32, 64\)"),
    ("zlab", "dflash_config.mask_token_id", golden.V, "mask_token_id=320 must lie between 0 and 319"),
    ("zlab", "dflash_config", 4, "dflash_config=4"),
    ("zlab", "attention_bias", True, "attention_bias=True"),
    ("zlab", "layer_types", ["sliding_attention"] * 2, "layer_types"),
    ("zlab", "use_sliding_window", False, "without an active sliding_window"),
    *(("zlab", "dflash_config.block_size", size, "block_size") for size in (0, 10**9, "8", None)),
    ("zlab", "num_hidden_layers", 2, "layer_types"),
    ("zlab", "num_hidden_layers", 10**9, "num_hidden_layers=1000000000"),
    ("jetspec", "dflash_config.causal", False, "both true and false"),
    ("jetspec", "hidden_size", 16, "fc.weight"),
    ("deepspec", "confidence_head_with_markov", False, "confidence_head_with_markov=False"),
    ("deepspec", "markov_rank", 5, "markov_w1.weight is"),
    ("specforge_dspark", "dflash_config.markov_head_type", "vanilla", "gate_proj.bias belongs to no layer"),
    ("specforge_dspark", "dflash_config.markov_head_type", "deep", "markov_head_type=deep"),
    ("specforge_dspark", "dflash_config.attention_mode", "mla", "attention_mode=mla"),
    ("specforge_domino", "dflash_config.gru_hidden_dim", 9, "prefix_gru.weight_hh_l0 is"),
    ("speculators_dflash", "aux_hidden_state_layer_ids", [2, 9], r"has layers \[2, 9\]"),
    ("speculators_dflash", "draft_vocab_size", 200, "d2t is missing; lm_head.weight is missing; t2d is missing"),
    ("zlab_dflash2", "dflash_config.output_multiplier", 2.0, "output_multiplier=2.0"),
    ("zlab_dflash2", "dflash_config.conv_group_size", 16, "kernel_projection.weight is"),
    ("vllm_xpress", "xpress_block_size", 8, "xpress_block_size=8"),
    ("vllm_xpress", "xpress_rank", 7, "xpress_head.down_g.weight is"),
    ("speculators_xpress", "xpress_mlp_ratio", 4, "refiner_head.mlp_down.weight is"),
    ("p_eagle", "ptd_token_id", golden.V, "pard_token=320, which must lie between 0 and 319"),
    ("p_eagle", "num_hidden_layers", 3, r"layers\.2\.\S+ is missing"),
    ("p_eagle", "fc_norm", True, "fc_norm=True"),
    ("speculators_p_eagle", "mask_token_id", None, "has no pard_token"),
    ("speculators_dflash", "transformer_layer_config", None, "has no 'hidden_size'"),
]


@pytest.mark.parametrize(("name", "setting", "value", "message"), SETTINGS)
def test_settings_that_do_not_fit_are_named(deep, tmp_path, name, setting, value, message):
    config, weights, file = golden.make(name, deep)
    with pytest.raises(ValueError, match=message):
        load_head(golden.write(tmp_path, change(config, setting, value), weights, file), deep)


@pytest.mark.parametrize("name", GOLDEN)
def test_weights_that_do_not_fit_are_named(deep, tmp_path, name):
    for number, key in enumerate(("hidden_norm.weight", "layers.1.self_attn.k_norm.weight")):
        config, weights, _ = golden.make(name, deep)
        del weights[key]
        with pytest.raises(ValueError, match=f"{key} is missing"):
            load_head(golden.write(tmp_path / str(number), config, weights), deep)
    config, weights, _ = golden.make(name, deep)
    weights["context_adapter.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"context_adapter\.weight belongs to no layer"):
        load_head(golden.write(tmp_path / "more", config, weights), deep)


@pytest.mark.parametrize("key", ["embed_tokens.weight", "lm_head.weight"])
def test_frozen_copies_must_be_copies(deep, tmp_path, key):
    config, weights, _ = golden.make("deepspec", deep)
    weights[key] = weights[key] + 1
    with pytest.raises(ValueError, match=f"{key} differs from the"):
        load_head(golden.write(tmp_path, config, weights), deep)


# -- which position drafts what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [None, False, True])
def test_a_layout_is_what_the_files_say_or_else_what_their_architecture_is(deep, tmp_path, flag):
    config, weights, _ = golden.make("zlab", deep)
    head = load_head(golden.write(tmp_path, config | {"sample_from_anchor": flag}, weights), deep)
    assert head.sample_from_anchor == bool(flag) and head.depth == (4 if flag else 3)


# -- export -----------------------------------------------------------------------------------------------------------


def vllm_causal(config: dict, layer: int) -> bool:
    """Return whether a layer is causal inside a block for vLLM 0.32, whose rule for a config.json of DFlash is written down
    anew."""
    if "sliding_window_non_causal" in config:  # of the speculators package
        return not config["sliding_window_non_causal"]
    said = config["dflash_config"].get("causal")
    return config["layer_types"][layer] == "sliding_attention" if said is None else said


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "vllm") for kind in ("dflash", "dflash anchor first", "jetspec", "dflash2", "dflash pruned")),
        *((kind, "speculators") for kind in ("dflash", "jetspec", "dflash pruned")),
    ],
)
def test_vllm_masks_a_block_as_it_was_trained(deep, tmp_path, kind, name):
    head = make_head(kind, deep)
    write_export(name, head, deep, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for layer in range(head.cache_layers):
        assert vllm_causal(config, layer) == head.masking(layer)[0]


def test_a_window_that_vllm_would_take_for_another_is_refused(deep, tmp_path):
    with pytest.raises(ValueError, match=r"causal in all layers or in none, .* \(head.window=\d+\): use format=vllm"):
        engines.speculators(make_head("dflash anchor first", deep), deep)
    config, weights, file = golden.make("speculators_dflash", deep)
    layer = config["transformer_layer_config"]
    sliding = ["sliding_attention"] * layer["num_hidden_layers"]
    layer |= {"layer_types": sliding, "sliding_window": 4, "use_sliding_window": True}
    config["sliding_window_non_causal"] = True
    with pytest.raises(ValueError, match="sliding_window_non_causal=True"):
        read_head(golden.write(tmp_path, config, weights, file), deep)
