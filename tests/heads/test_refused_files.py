"""Files of heads that are not whole, or say what no head of ours is, are refused by name: each weight and each setting."""

import re
from typing import Any

import pytest
import torch

from foredraft.heads import load_head
from tests.support import golden, nightly_but

IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"
FLAT, SPECULATORS = "safeailab_eagle3 specforge modelopt vllm_qwen3", "speculators speculators_qwen3"  # EAGLE-3
EAGLE, MEDUSA, HYDRA = "safeailab_eagle vllm_eagle", "medusa_v1 medusa_v2", "hydra hydra_pp"
BLOCKS = """zlab jetspec zlab_dflash2 vllm_xpress speculators_xpress deepspec deepspec_dflash specforge_dspark
    specforge_domino speculators_dflash speculators_dflash2 speculators_dspark"""
# What follows from other weights, or repeats some of the target's.
IMPLIED = ("t2d", "embed_tokens.weight", "rotary_emb.inv_freq")


def swapped(d2t: torch.Tensor) -> torch.Tensor:
    ids = d2t + torch.arange(len(d2t))
    ids[[3, 9]] = ids[[9, 3]]
    return ids - torch.arange(len(d2t))


def refuses(deep, folder, message: str, config: dict, weights: dict, file: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_head(golden.write(folder, config, weights, file), deep)


def cases(rows: list[tuple[str, Any, Any, str]]) -> list:
    """Return a case of each layout in a row's first column."""
    found = [(name, key, value, message) for names, key, value, message in rows for name in names.split()]
    return [pytest.param(*case, id=f"{case[0]}: {number} {case[1]}") for number, case in enumerate(found)]


# -- weights ------------------------------------------------------------------------------------------------------------


LAYOUTS = [*FLAT.split(), *SPECULATORS.split(), *EAGLE.split(), *MEDUSA.split(), *HYDRA.split()]


@pytest.mark.parametrize("name", nightly_but(LAYOUTS, FLAT.split()[0], MEDUSA.split()[0]))
def test_no_weight_may_be_missing_or_narrow_or_of_whole_numbers(deep, tmp_path, name):
    config, weights, file = golden.make(name, deep)
    for key, tensor in weights.items():
        if not key.endswith(IMPLIED):
            # Without the key `bias`, EAGLE-1's files may have one or not.
            config |= {"bias": True} if key == "fc.bias" else {}
            rest = {other: value for other, value in weights.items() if other != key}
            narrow, whole = rest | {key: tensor[:-1].clone()}, rest | {key: tensor.to(torch.int8)}
            refuses(deep, tmp_path, rf"\b{re.escape(key)} is missing", config, rest, file)
            refuses(deep, tmp_path, re.escape(key), config, narrow, file)
            refuses(deep, tmp_path, f"{re.escape(key)} is torch.int8", config, whole, file)


@pytest.mark.parametrize("name", BLOCKS.split())
def test_a_block_drafters_weights_are_named(deep, tmp_path, name):
    config, weights, file = golden.make(name, deep)
    for key in ("hidden_norm.weight", "layers.1.self_attn.k_norm.weight"):
        rest = {other: value for other, value in weights.items() if other != key}
        refuses(deep, tmp_path, f"{key} is missing", config, rest, file)


ADDED = [  # layouts, and what none of them has
    (f"{FLAT} {SPECULATORS} {EAGLE} {MEDUSA} {HYDRA} {BLOCKS}", "another.weight"),
    ("safeailab_eagle3 specforge vllm_qwen3", "midlayer.self_attn.q_proj.bias"),
    (f"modelopt {SPECULATORS}", "layers.0.self_attn.q_proj.bias"),
    (f"{FLAT} {SPECULATORS} {EAGLE}", "layers.1.mlp.up_proj.weight"),
    (EAGLE, "layers.0.input_layernorm.weight"),
    (EAGLE, "norm.weight"),
    ("vllm_eagle", "fc.bias"),
    ("vllm_eagle", "model.fc.weight"),
    (MEDUSA, "0.2.weight"),
    ("medusa_v1", "5.0.linear.weight"),
    ("medusa_v1", "medusa_head.0.1.weight"),
    (HYDRA, "hydra_mlp.3.0.linear.weight"),
    ("hydra", "hydra_mlp.0.2.linear.weight"),
    ("hydra_pp", "prefix_embedding_layer.norm.weight"),
]


@pytest.mark.parametrize(("name", "key"), [(name, key) for names, key in ADDED for name in names.split()])
def test_no_weight_may_be_left_over(deep, tmp_path, name, key):
    config, weights, file = golden.make(name, deep)
    refuses(deep, tmp_path, re.escape(key), config, weights | {key: torch.ones(2)}, file)


STORED = [
    (f"{FLAT} {SPECULATORS}", "d2t", lambda d2t: d2t + golden.V, "d2t names target ids"),
    (f"{FLAT} {SPECULATORS}", "d2t", swapped, "d2t names target ids"),
    (f"{FLAT} {SPECULATORS}", "d2t", lambda d2t: d2t.int(), "d2t is torch.int32"),
    ("specforge", "fc.weight", lambda rows: rows.to(torch.float8_e4m3fn), "fc.weight is torch.float8_e4m3fn"),
    (
        "safeailab_eagle3 specforge speculators",
        "t2d",
        lambda t2d: ~t2d,
        "t2d .* does not mark the tokens that d2t names",
    ),
    (
        "speculators safeailab_eagle deepspec",
        "embed_tokens.weight",
        lambda t: t + 1,
        "embed_tokens.weight differs from the",
    ),
    ("deepspec", "lm_head.weight", lambda rows: rows + 1, "lm_head.weight differs from the"),
    ("medusa_v1", "0.1.weight", lambda rows: rows[:, :16], r"0.1.weight is \(320, 16\)"),
    (
        "hydra_pp",
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq",
        lambda frequencies: frequencies / 2,
        "belongs to another rope than",
    ),
]


@pytest.mark.parametrize(("name", "key", "change", "message"), cases(STORED))
def test_weights_that_contradict_others_are_named(deep, tmp_path, name, key, change, message):
    config, weights, file = golden.make(name, deep)
    refuses(deep, tmp_path, message, config, weights | {key: change(weights[key]).contiguous()}, file)


# -- settings -----------------------------------------------------------------------------------------------------------

REMOVED = "removed"
PROPORTIONAL = {"rope_type": "proportional", "factor": 2.0}
SETTINGS = [
    # EAGLE-3, whose layer's settings are apart in the package speculators
    (f"{FLAT} {SPECULATORS}", "draft_vocab_size", golden.VD - 1, "lm_head.weight"),
    *(
        (names, prefix + key, value, message)
        for names, prefix in ((FLAT, ""), (SPECULATORS, f"{LAYER}."))
        for key, value, message in (
            ("vocab_size", 2 * golden.V, "vocab_size: the head has 640, the target|t2d"),
            ("rope_parameters", PROPORTIONAL, "a rope of type proportional"),
            ("mlp_bias", True, "mlp_bias=True"),
            ("hidden_act", "gelu", "hidden_act=gelu"),
            ("num_key_value_heads", 4, "self_attn.k_proj.weight"),
        )
    ),
    ("safeailab_eagle3 vllm_qwen3", "rope_scaling", PROPORTIONAL, "a rope of type proportional"),
    ("safeailab_eagle3 speculators", IDS, [2, 4, 9], r"takes hidden states \[2, 4, 9\]"),
    ("safeailab_eagle3", IDS, [4, 2, 5], "must ascend"),
    ("deepspec_eagle3", "target_layer_ids", [1, 2, 3, 5, 8], "must ascend within 0..8"),
    ("deepspec_eagle3", "target_layer_ids", REMOVED, r"fc.weight is \(32, 160\) in the file, \(32, 96\)"),
    ("safeailab_eagle3", IDS, [2, 4], r"fc.weight is \(32, 96\) in the file, \(32, 64\)"),
    ("specforge", f"eagle_config.{IDS}", [1, 3, 8], r"\[1, 3, 8\] may count outputs of layers from 0 or hidden_states"),
    ("specforge", f"eagle_config.{IDS}", [3, 5, 9], r"\[3, 5, 9\] may count"),
    ("specforge", f"eagle_config.{IDS}", [1, 1, 4], "must ascend"),
    ("specforge", IDS, [1, 3, 4], "do not name the same layers"),
    ("specforge", "eagle_config.return_normed", True, "return_normed=True, which is not supported"),
    ("specforge", "eagle_config.use_aux_hidden_state", False, "fc.weight belongs to no layer"),
    ("specforge", "fc_norm", False, "fc_norm.0.weight belongs to no layer"),
    ("specforge", "norm_before_fc", True, "input_norm.weight is missing"),
    ("modelopt", "eagle_config.use_last_layernorm", False, "use_last_layernorm=False"),
    ("modelopt", "eagle_config.use_mtp_layernorm", True, "use_mtp_layernorm=True"),
    ("modelopt", "eagle_config.parallel_draft_step", 4, "parallel_draft_step=4"),
    ("speculators", "norm_before_residual", REMOVED, "norm_before_residual, whose default is true in vLLM"),
    ("speculators", "speculators_model_type", "peagle", "has no pard_token, the token at positions without text"),
    ("speculators", "speculators_model_type", "eagle9", "speculators_model_type=eagle9"),
    ("speculators", "norm_before_fc", False, "input_norm.weight belongs to no layer"),
    ("speculators", f"{LAYER}.model_type", "qwen3", "model_type=qwen3"),
    ("speculators", LAYER, REMOVED, "has no 'transformer_layer_config'"),
    ("vllm_qwen3", "qk_norm", False, "q_norm.weight belongs to no layer"),
    ("speculators_qwen3", f"{LAYER}.model_type", "llama", "model_type=llama; only qwen3"),
    # EAGLE-1, Medusa, Hydra
    (EAGLE, "hidden_size", 64, "fc.weight"),
    (EAGLE, "vocab_size", 640, "vocab_size: the head has 640, the target 320"),
    (EAGLE, "rope_scaling", {"type": "proportional", "alpha": 1000.0}, "a rope of type proportional"),
    (EAGLE, "rope_parameters", PROPORTIONAL, "a rope of type proportional"),
    (EAGLE, "mlp_bias", True, "mlp_bias=True"),
    (EAGLE, "quantization_config", {"bits": 4}, "quantization_config=.*is supported"),
    (EAGLE, "hidden_act", "gelu", "hidden_act=gelu"),
    (EAGLE, "num_key_value_heads", 4, "self_attn.k_proj.weight"),
    *(("vllm_eagle", "bias", value, "fc.bias is missing") for value in (True, 1, "true")),
    ("medusa_v1", "medusa_num_heads", 6, "medusa_num_heads=6, but the weights are of 5"),
    ("medusa_v1", "medusa_num_layers", 2, "0.2.weight is missing"),
    ("medusa_v1", "medusa_num_layers", REMOVED, "has no 'medusa_num_layers'"),
    ("medusa_v1", "version", "2", "version 2, .* but 0.1.weight is stored"),
    ("medusa_v1", "version", "3", "version=3"),
    ("medusa_v2", "medusa_num_heads", 4, "medusa_num_heads=4, but the weights are of 3"),
    ("medusa_v2", "medusa_num_layers", 1, "0.1.linear.* belongs to no layer"),
    ("medusa_v2", "version", REMOVED, "0.2.weight is missing"),
    (HYDRA, "hydra_num_heads", 4, "hydra_mlp.3.*is missing"),
    (HYDRA, "hydra_num_heads", 2, "hydra_lm_head.2.*belongs to no layer"),
    (HYDRA, "hydra_num_layers", REMOVED, "has no 'hydra_num_layers'"),
    (HYDRA, "hydra_head_arch", "eagle-attn", "hydra_head_arch=eagle-attn"),
    (HYDRA, "hydra_head_arch", REMOVED, "has no 'hydra_head_arch'"),
    (HYDRA, "grounded_heads", False, "grounded_heads=False"),
    (HYDRA, "hidden_state_offset", 1, "hidden_state_offset=1"),
    ("hydra", "hydra_num_layers", 3, "hydra_mlp.0.2.linear.bias is missing"),
    ("hydra_pp", "hydra_num_layers", 5, "hydra_mlp.0.9.linear.bias is missing"),
    # blocks
    ("zlab", "dflash_config.projector_type", "medusa", r"projector_type='medusa'"),
    ("zlab", "dflash_config.target_layer_ids", [1, 3, 8], r"has layers \[1, 3, 8\], which must ascend within the 8"),
    ("zlab", "dflash_config.target_layer_ids", [3, 1, 5], "must ascend"),
    ("zlab", "dflash_config.target_layer_ids", [1, 3], r"fc.weight is \(32, 96\) in the file, \(32, 64\)"),
    ("zlab", "dflash_config.mask_token_id", golden.V, "mask_token_id=320, which must be a whole number from 0 to 319"),
    ("zlab", "dflash_config", 4, "dflash_config=4"),
    ("zlab", "attention_bias", True, "attention_bias=True"),
    ("zlab", "layer_types", ["sliding_attention"] * 2, "layer_types"),
    ("zlab", "use_sliding_window", False, "without an active sliding_window"),
    *(("zlab", "dflash_config.block_size", size, "block_size") for size in (0, 10**9, "8", None)),
    ("zlab", "num_hidden_layers", 2, "layer_types"),
    ("zlab", "num_hidden_layers", 10**9, "num_hidden_layers=1000000000"),
    ("zlab", "dflash_config.attention_value_scale", 0.5, "attention_value_scale=0.5"),
    ("zlab", "is_neox_style", False, "is_neox_style=False"),
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
    ("speculators_dflash", LAYER, None, "has no 'hidden_size'"),
    ("zlab_dflash2", "dflash_config.output_multiplier", 2.0, "output_multiplier=2.0"),
    ("zlab_dflash2", "dflash_config.input_embedding_scale", 8.0, "input_embedding_scale=8.0, and .* has 1.0"),
    ("zlab_dflash2", "dflash_config.final_logit_softcapping", 30.0, "final_logit_softcapping=30.0, and .* has 0.0"),
    ("zlab deepspec specforge_domino", IDS, [3, 5, 6], r"target_layer_ids=\[1, 3.* do not name the same layers"),
    ("zlab_dflash2", "is_causal", None, "config.json has no dflash_config.causal, which in sliding layers is true"),
    ("deepspec specforge_dspark speculators_dspark", "dspark_draft_topk", 8, "dspark_draft_topk=8"),
    ("deepspec zlab safeailab_eagle3", "rope_is_neox_style", False, "rope_is_neox_style=False"),
    ("deepspec zlab", "use_gemma_norm", True, "use_gemma_norm=True; only False"),
    ("zlab_dflash2", "dflash_config.conv_group_size", 16, "kernel_projection.weight is"),
    ("zlab_dflash2", "dflash_config.conv_group_size", 0, "conv_group_size=0"),
    ("zlab_dflash2", "dflash_config.selector_top_k", 1.5, "selector_top_k=1.5"),
    ("zlab_dflash2", "dflash_config.selector_top_k", -1, "selector_top_k=-1"),
    ("specforge_domino", "dflash_config.pure_draft_prefix_len", "4", "pure_draft_prefix_len='4'"),
    ("vllm_xpress", "xpress_num_passes", 0, "xpress_num_passes=0"),
    ("zlab_dflash2", "sliding_window", "x", "sliding_window='x'"),
    ("vllm_xpress", "xpress_block_size", 8, "xpress_block_size=8"),
    ("vllm_xpress", "xpress_rank", 7, "xpress_head.down_g.weight is"),
    ("speculators_xpress", "xpress_mlp_ratio", 4, "refiner_head.mlp_down.weight is"),
    ("p_eagle", "ptd_token_id", golden.V, "pard_token=320, which must be a whole number from 0 to 319"),
    ("p_eagle", "num_hidden_layers", 3, r"layers\.2\.\S+ is missing"),
    ("p_eagle", "fc_norm", True, "fc_norm=True"),
    ("speculators_p_eagle", "mask_token_id", None, "has no pard_token"),
    # what is not even of the right type
    ("vllm_qwen3", "architectures", True, "has architectures=True, which is not a list of names"),
    *(
        (name, path, value, f"config.json has a value of another type or size than a head of kind .*{error}")
        for name, path, value, error in (
            ("specforge", "draft_vocab_size", {}, "TypeError"),
            ("speculators", LAYER, ["a"], "AttributeError"),
            ("safeailab_eagle3", "intermediate_size", None, "expected int, got NoneType"),
            ("zlab", "dflash_config.target_layer_ids", None, "TypeError"),
            ("zlab", "rope_theta", "x", "rope_theta='x'"),
            ("p_eagle", "rope_theta", [100], r"rope_theta=\[100\]"),
            ("vllm_eagle", "partial_rotary_factor", "x", "partial_rotary_factor='x'"),
            ("vllm_xpress", "xpress_rank", 10**9, "RuntimeError"),
        )
    ),
]


@pytest.mark.parametrize(("name", "path", "value", "message"), cases(SETTINGS))
def test_settings_that_do_not_fit_are_named(deep, tmp_path, name, path, value, message):
    config, weights, file = golden.make(name, deep)
    *parents, last = path.split(".")
    settings = config
    for parent in parents:
        settings = settings[parent]
    if value is REMOVED:
        del settings[last]
    else:
        settings[last] = value
    refuses(deep, tmp_path, message, config, weights, file)


def test_a_shallow_target_needs_the_layers_said(target, tmp_path):
    config, weights, file = golden.make("safeailab_eagle3", target)
    refuses(target, tmp_path, "a target of 6 layers is too shallow for the paper's three", config, weights, file)


def test_what_is_no_head_is_refused(deep, tmp_path):
    config, weights = {"architectures": ["BertModel"]}, {"x": torch.ones(2)}
    refuses(deep, tmp_path, "no head in a supported layout", config, weights, golden.SAFE)


def test_configs_that_are_none_are_refused(deep, tmp_path):
    golden.write(tmp_path, *golden.make("specforge", deep))
    for text, message in (("[1, 2]", "contains no settings"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path, deep)
