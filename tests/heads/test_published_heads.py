"""Peculiarities of published config.json files, each on a shrunken target with weights made in its layout: the head loads
and drafts, or is refused in a sentence that its user can act on."""

import json
import re
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaForCausalLM

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.base import PackedBatch
from foredraft.heads.checkpoint import fingerprint, same_weights, stored_digest
from foredraft.heads.dflash import FULL
from foredraft.heads.eagle3 import SLIDING, Eagle3Head
from foredraft.heads.formats import engines
from foredraft.inference import drafter_for
from tests.conformance.heads import shrink_head
from tests.conformance.shrink import HIDDEN, VOCAB
from tests.support import golden
from tests.support.decoding import check_drafts
from tests.support.golden import LATENT, eagle1, eagle3, random
from tests.support.head_factory import edit, learn, same, write_export
from tests.support.tiny import tiny_config

IDS = "eagle_aux_hidden_state_layer_ids"
PROMPT = torch.randint(1, VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))


@cache
def tiny_target(layers: int, gpt_oss: bool = False, kind: str | None = None) -> Target:
    """Make a target. kind: the model type that a llama claims."""
    torch.manual_seed(0)
    if gpt_oss:
        sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": VOCAB}
        config = GptOssConfig(num_hidden_layers=layers, initializer_range=0.1, pad_token_id=0, eos_token_id=0, **sizes)
        return Target(GptOssForCausalLM(config), name="a gpt-oss")
    config = tiny_config(num_hidden_layers=layers, vocab_size=VOCAB, initializer_range=0.1)
    target = Target(LlamaForCausalLM(config), name="a llama")
    target.config.model_type = kind or target.config.model_type
    return target


def load(directory: Path, target: Target, drafts: bool = True) -> tuple[Any, list[str]]:
    """Return the head, and its warnings; check that it drafts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = load_head(directory, target)
    if drafts:
        check_drafts(target, drafter_for(head, target), PROMPT, max_new_tokens=8)
    return head, [str(one.message) for one in caught if "is used with its own settings" in str(one.message)]


# SafeAILab's EAGLE-3 for Llama-3.1-8B: 2048 positions and no rope on a target with 131072 and theta 500000.
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SIZES |= {"max_position_embeddings": 2048, "num_hidden_layers": 1, "vocab_size": 128256, "rms_norm_eps": 1e-05}
LAYER = SIZES | {"hidden_act": "silu", "model_type": "llama", "tie_word_embeddings": False}
LLAMA3 = LAYER | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}
NAMED = LLAMA3 | {"architectures": ["LlamaForCausalLMEagle3"]}
MIXTRAL = LAYER | {"architectures": ["LlamaForCausalLM"], "model_type": "mixtral", "vocab_size": 32000}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1000000.0}
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
DYNAMIC = {"alpha": 1000.0, "beta_fast": 32, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}  # AngelSlim's for Hunyuan
PARTIAL = {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}

# TorchSpec's for Kimi-K2.5
LATENT_SIZES = dict(zip(LATENT, (1536, 512, 128, 64, 128), strict=True)) | {"num_key_value_heads": 32}
MLA = NAMED | LATENT_SIZES | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
MLA |= {"rope_theta": 50000.0, "rope_scaling": YARN}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},  # a class under no name, which nothing loads
    "draft_vocab_size": 32000,
    "has_no_defaults_at_init": False,
    IDS: None,
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "/cluster/Llama", "architectures": []}},
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LAYER,
}


def ids(layer_ids: list[int] | None, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {IDS: layer_ids, "use_aux_hidden_state": True} | more}


def llama_layer(config: dict[str, Any]) -> dict[str, Tensor]:
    return eagle3({name: value for name, value in config.items() if name not in LATENT}, "midlayer")


def with_lm_head(config: dict[str, Any]) -> dict[str, Tensor]:
    return eagle1(config) | {"lm_head.weight": tiny_target(8).model.lm_head.weight.detach().half()}


def with_changed_rows(make: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    """Make a head that stores the embedding of its target before that was fine-tuned or quantized."""
    return make(config) | {"embed_tokens.weight": (tiny_target(8).embeddings * 1.1).half()}


def with_biases(config: dict[str, Any]) -> dict[str, Tensor]:
    """Make EAGLE-1 for Qwen2, whose layers have biases of queries, keys and values."""
    weights = eagle1(config)
    projections = [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    return weights | {name.replace("weight", "bias"): random(len(weights[name])) for name in projections}


def without_bias(config: dict[str, Any]) -> dict[str, Tensor]:
    return {name: weight for name, weight in eagle1(config).items() if name != "fc.bias"}


def prefixed(prefix: str, config: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": weight for name, weight in eagle1(config).items()}


def as_sglang_names(config: dict[str, Any]) -> dict[str, Tensor]:
    outside = ("lm_head.weight", "d2t", "t2d")
    return {name if name in outside else f"model.{name}": weight for name, weight in llama_layer(config).items()}


WIDE = {"hidden_size": 2048, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128}
OLD = {k: v for k, v in MIXTRAL.items() if k != "max_position_embeddings"} | {"max_sequence_length": 2048}
LENGTH = "max_position_embeddings: the head has 2048, the target 256"
# name -> config, weights (of the shrunken config), what the warning says.
TAKEN: dict[str, tuple[dict, Any, str]] = {
    "speculators, as RedHatAI publishes it": (SPECULATORS, "layers.0", LENGTH),
    "no rope, 2048 positions": (LLAMA3, "midlayer", LENGTH),
    "an embedding before a fine-tune": (
        SPECULATORS,
        partial(with_changed_rows, eagle3),
        "% from the embed",
    ),
    "EAGLE-1's before a fine-tune": (
        MIXTRAL,
        partial(with_changed_rows, eagle1),
        "% from the embed_tokens",
    ),
    "another theta": (NAMED | {"rope_theta": 1e6}, "midlayer", "rope_parameters: the head has .*1000000"),
    "40 layers of the target": (
        LLAMA3 | {"num_hidden_layers": 40},
        "midlayer",
        "num_hidden_layers=40, but the weights",
    ),
    "tied with a pruned vocabulary": (NAMED | {"tie_word_embeddings": True}, "layers.0", LENGTH),
    "AngelSlim's name": (LLAMA3 | {"architectures": ["Eagle3LlamaForCausalLM"]}, "midlayer", LENGTH),
    "token ids outside": (NAMED | {"bos_token_id": 163584, "eos_token_id": 163585}, "midlayer", LENGTH),
    "model_type phi3": (NAMED | {"model_type": "phi3"}, "midlayer", LENGTH),
    "heads wider than hidden": (NAMED | {"num_attention_heads": 64, "head_dim": 128}, "midlayer", LENGTH),
    "more heads than fit": (NAMED | WIDE, "midlayer", LENGTH),
    "full vocabulary": (NAMED | {"draft_vocab_size": 128256}, "midlayer", LENGTH),
    "mrope": (NAMED | MROPE, "midlayer", "rope_parameters"),
    "yarn": (NAMED | {"rope_scaling": YARN, "rope_theta": 50000.0}, "midlayer", "yarn"),
    "latent attention": (MLA, "midlayer", "rope_parameters: the head has .*yarn"),
    "its target's latent attention, said along": (MLA, llama_layer, "rope_parameters: the head has .*yarn"),
    "dynamic rope": (
        NAMED | {"rope_scaling": DYNAMIC, "rope_theta": 1e6},
        "midlayer",
        "the default one up to .*1000000",
    ),
    "a theta of null": (NAMED | {"rope_parameters": PARTIAL, "rope_theta": None}, "midlayer", "0.25"),
    "partial rope": (NAMED | {"rope_parameters": PARTIAL, "partial_rotary_factor": 0.25}, "midlayer", "0.25"),
    "EAGLE-1 of model_type mixtral": (MIXTRAL, eagle1, LENGTH),
    "EAGLE-1 in vLLM's first layout": ({"model_type": "eagle", "model": MIXTRAL}, eagle1, LENGTH),
    "the same with the target's lm_head": ({"model_type": "eagle", "model": MIXTRAL}, with_lm_head, LENGTH),
    "EAGLE-1 of Qwen2": (MIXTRAL | {"model_type": "qwen2"}, with_biases, LENGTH),
    "EAGLE-1's max_sequence_length": (OLD, eagle1, LENGTH),
    "EAGLE-1 with a bias that its config denies": (
        MIXTRAL | {"bias": False},
        lambda config: eagle1(config | {"bias": True}),
        "bias=false, but fc.bias is stored",
    ),
    "EAGLE-1 without a bias": (MIXTRAL, without_bias, "fc.bias is not stored, and config.json does not say"),
    "names of SGLang's class": (NAMED, as_sglang_names, LENGTH),
    "names of a draft model": (MIXTRAL, partial(prefixed, "draft_model."), LENGTH),
    "names of a wrapper of processes": (MIXTRAL, partial(prefixed, "module."), LENGTH),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_the_heads_own_is_taken_with_one_warning(tmp_path, name):
    config, layout, message = TAKEN[name]
    config = shrink_head(config)
    weights = eagle3(config, layout) if isinstance(layout, str) else layout(config)
    head, said = load(golden.write(tmp_path, config, weights), tiny_target(8))
    assert len(said) == 1 and re.search(message, said[0]) and head.imported


def test_a_head_of_others_is_exported_and_loads_again_with_its_own_rope(tmp_path):
    config, target = shrink_head(NAMED | {"rope_parameters": PARTIAL}), tiny_target(8)
    head, _ = load(golden.write(tmp_path / "theirs", config, eagle3(config, "midlayer")), target)
    write_export("vllm", head, target, tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["partial_rotary_factor"] == 0.25 and saved["rope_theta"] == 10000000
    again, said = load(tmp_path / "ours", target)
    assert len(said) == 1 and again.config.rope_parameters == head.config.rope_parameters
    assert same(again, head)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind, width", [("default", 4), ("default", 8), ("dynamic", 8)])
def test_the_width_that_is_rotated_replaces_a_copied_share(tmp_path, place, kind, width):
    """Check that `rope_dim` counts: engines prefer it to the target's partial_rotary_factor next to it."""
    rope = {"rope_type": kind, "factor": 2.0, "rope_dim": width, "partial_rotary_factor": 0.25, "rope_theta": 5000.0}
    config = shrink_head(NAMED) | {"head_dim": 8, "partial_rotary_factor": 0.25, "rope_theta": 5000.0, place: rope}
    head, _ = load(golden.write(tmp_path, config, eagle3(config, "midlayer")), tiny_target(8))
    cos, _ = head.rotary(torch.arange(3)[None], 3, torch.float32)
    assert cos.shape[-1] == width and head.config.rope_parameters["rope_theta"] == 5000


def test_a_rope_for_each_kind_of_layer_must_be_one_for_those_of_the_head(tmp_path):
    """Read what trainers copy from Gemma 4 and Laguna. The speculators package trains all layers with the second."""
    ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ((FULL, 2e4), (SLIDING, 3e4))}
    named = shrink_head(NAMED)
    for number, (config, kinds, theta) in enumerate(
        [(named, [FULL], 2e4), (named, [SLIDING], 3e4), (shrink_head(SPECULATORS), None, 3e4), (named, None, None)]
    ):
        changed = {"rope_parameters": ropes, "layer_types": kinds, "sliding_window": 64}
        inner = config.get("transformer_layer_config")
        config = config | changed if inner is None else config | {"transformer_layer_config": inner | changed}
        written = golden.write(tmp_path / str(number), config, eagle3(config, "layers.0"))
        if theta is None:
            with pytest.raises(ValueError, match="write the one that the head has as rope_parameters"):
                load_head(written, tiny_target(8))
        else:
            assert load(written, tiny_target(8))[0].config.rope_parameters["rope_theta"] == theta
    config = named | {"rope_parameters": {FULL: ropes[FULL], SLIDING: ropes[FULL]}}
    assert load(golden.write(tmp_path, config, eagle3(config)), tiny_target(8))[0].config.rope_parameters == ropes[FULL]


def test_a_head_with_latent_attention_trains_and_is_exported_for_vllm_alone(tmp_path):
    config, target = shrink_head(MLA), tiny_target(8)
    head, _ = load(golden.write(tmp_path / "theirs", config, eagle3(config, "midlayer")), target)
    head.float().requires_grad_(True)
    learn("eagle3", head, target)
    write_export("vllm", head, target, tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and saved["kv_lora_rank"] == LATENT["kv_lora_rank"]
    again, _ = load(tmp_path / "ours", target)
    assert same(again, head)
    for name in ("sglang", "speculators", "eagle"):
        with pytest.raises(
            ValueError, match="heads with multi-head latent attention are only supported in format=vllm"
        ):
            engines.export_for(name, head, target)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"v_head_dim": 99}, "wider than its keys"),
        ({"kv_lora_rank": "x"}, "must be a whole number from 1"),
        ({"rope_interleave": False}, "rope_interleave=False; only True"),
    ],
)
def test_latent_attention_that_no_layer_has_is_refused(tmp_path, change, message):
    config = shrink_head(MLA)
    golden.write(tmp_path, config | change, eagle3(config, "midlayer"))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, tiny_target(8))


def test_a_head_that_is_saved_here_must_have_the_targets_rope(tmp_path):
    """Check that the gate is strict with a head that was just written: it copies rope and context from its target."""
    target, rope = tiny_target(8), {"rope_type": "default", "rope_theta": 10000.0}
    for change, message in (
        (lambda config: config.update(max_position_embeddings=2048), LENGTH),
        (
            lambda config: config.pop("rope_theta") and config.update(rope_parameters=rope),
            "rope_parameters: the head has",
        ),
        (lambda config: config.update(num_hidden_layers=40), "num_hidden_layers=40"),
    ):
        save_head(Eagle3Head.for_target(target, 3), tmp_path, target)
        edit(tmp_path, change)
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path, target, strict=True)


# -- which layers -----------------------------------------------------------------------------------------------------

# name -> layers of the target, is it a gpt-oss, what config.json says, the hidden states that are read, the warning
LAYERS: dict[str, tuple[int, bool, dict, list[int], str]] = {
    "SpecForge": (61, False, ids([1, 29, 57]), [2, 30, 58], "are read as outputs of layers"),
    "SpecForge, not the usual three": (24, False, ids([1, 11, 21]), [2, 12, 22], "outputs of layers .* as in SGLang"),
    "AQ-MedAI's Kimi-K2": (61, False, ids([2, 30, 58]), [2, 30, 58], ""),
    "nvidia's v3": (
        36,
        True,
        ids([24, 30, 36], norm_before_fc=True),
        [24, 30, 36],
        "since the last one is 36.* hidden state 36 is read after the target's last norm",
    ),
    "nvidia's long context": (36, True, ids([1, 17, 32]), [2, 18, 33], "are read as outputs of layers"),
    "none said": (
        36,
        False,
        {},
        [2, 18, 33],
        r"has no eagle_aux_hidden_state_layer_ids, so hidden states \[2, 18, 33\]",
    ),
    "null": (24, True, ids(None), [2, 12, 21], "so hidden states .* the usual three of 24 layers"),
    "four at the top level": (94, False, {IDS: [2, 46, 91, 93]}, [2, 46, 91, 93], ""),
    "SpecForge's at the top level": (48, False, {IDS: [1, 23, 44]}, [2, 24, 45], "are read as outputs of layers"),
    "said by hand": (45, False, ids([4, 20, 40]) | {"foredraft": {"layers": [5, 21, 41]}}, [5, 21, 41], ""),
}


@pytest.mark.parametrize("name", LAYERS)
def test_fused_layers_are_found_by_evidence(tmp_path, name):
    layers, gpt_oss, said, expected, message = LAYERS[name]
    config = shrink_head(NAMED | said)
    target = tiny_target(layers, gpt_oss)
    written = golden.write(tmp_path, config, eagle3(config, "midlayer", len(expected)))
    head, warned = load(written, target, drafts=layers < 40)
    assert head.layers == expected
    assert re.search(message, warned[0]) if message else "are read as" not in warned[0]


@pytest.mark.parametrize(
    ("layers", "gpt_oss", "given"),
    [
        (45, False, [4, 20, 40]),
        (60, False, [2, 29, 58]),  # SGLang adds 1, vLLM would not
        (36, True, [1, 17, 33]),
        (24, False, [1, 11, 24]),
        (24, False, [0, 11, 21]),
    ],
)
def test_ambiguous_layers_are_refused_with_the_remedy(tmp_path, layers, gpt_oss, given):
    config, target = shrink_head(NAMED | ids(given)), tiny_target(layers, gpt_oss)
    golden.write(tmp_path, config, eagle3(config, "midlayer"))
    with pytest.raises(ValueError, match=r'"foredraft": \{"layers": \[[\d, ]+\]\} to its config.json') as error:
        load_head(tmp_path, target)
    remedies = [json.loads(found) for found in re.findall(r'\{"layers": (\[[\d, ]+\])\}', str(error.value))]
    assert remedies == [[k + 1 for k in given], given]
    golden.write(tmp_path, config | {"foredraft": {"layers": given}}, eagle3(config, "midlayer"))
    assert load(tmp_path, target, drafts=False)[0].layers == given


def test_ids_that_start_with_2_are_hidden_states_of_a_deepseek(tmp_path):
    config = shrink_head(NAMED | ids([2, 29, 58]))
    written = golden.write(tmp_path, config, eagle3(config, "midlayer"))
    head, said = load(written, tiny_target(60, kind="deepseek_v3"), drafts=False)
    assert head.layers == [2, 29, 58] and "ids of hidden_states, as in SGLang" in said[0]


def captured(kind: str, given: list[int], n: int) -> list[int]:
    """Return the hidden states that SGLang 0.5.23 captures: a model's class decides whether it adds 1."""
    if kind == "deepseek_v3":
        return [k + 1 for k in given] if given[0] == 1 else given
    return given if kind == "gpt_oss" and max(given) == n else [k + 1 for k in given]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("layers", [[2, 12, 21], [4, 12, 23], [1, 12, 21], [3, 20], [4, 8, 12, 20, 23]])
def test_an_export_names_the_layers_that_both_engines_read(tmp_path, layers, kind):
    """vLLM reads the top level, as hidden states, and SGLang eagle_config."""
    target = tiny_target(24, kind == "gpt_oss", kind if kind == "deepseek_v3" else None)
    head = Eagle3Head.for_target(target, 3, layers)
    if kind == "deepseek_v3" and layers[0] == 1:
        with pytest.raises(ValueError, match="SGLang reads layer ids that start with 1"):
            write_export("sglang", head, target, tmp_path)
        return
    write_export("sglang", head, target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[IDS] == layers == captured(kind, config["eagle_config"][IDS], 24)
    assert load_head(tmp_path, target).layers == layers


# -- flags and weights ------------------------------------------------------------------------------------------------


def test_flags_in_eagle_config_are_ours(tmp_path):
    flags = {"return_hidden_post_norm": True, "norm_before_fc": True, "next_layer_regular": True}
    flags |= {"parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1}  # ModelOpt's defaults
    config = shrink_head(NAMED | ids([1, 3, 4], **flags))
    head, _ = load(golden.write(tmp_path, config, eagle3(config, "midlayer")), tiny_target(8))
    assert head.flags["norm_output"] and head.input_norm is not None
    golden.write(tmp_path, config | {"norm_output": False}, eagle3(config, "midlayer"))
    with pytest.raises(ValueError, match=r"norm_output=False and eagle_config\.return_hidden_post_norm=True"):
        load_head(tmp_path, tiny_target(8))


def test_settings_that_eagle_config_repeats_are_read_once(tmp_path):
    """Read a conversion of Gemma's drafter for vLLM, which reads either place."""
    both = {"norm_before_fc": True, "num_aux_hidden_states": 3, "target_hidden_size": HIDDEN}
    config = shrink_head(NAMED) | both | {IDS: [2, 4, 5]} | ids([1, 3, 4], **both)
    head, _ = load(golden.write(tmp_path, config, eagle3(config, "midlayer")), tiny_target(8))
    assert head.input_norm is not None and head.layers == [2, 4, 5]
    golden.write(tmp_path, config | {"num_aux_hidden_states": 4}, eagle3(config, "midlayer"))
    with pytest.raises(ValueError, match="eagle_config has num_aux_hidden_states=3, which is not supported"):
        load_head(tmp_path, tiny_target(8))


def test_norms_that_only_the_weights_show_are_used(tmp_path):
    config = shrink_head(NAMED)
    weights = eagle3(config | {"fc_norm": True, "norm_before_fc": True}, "midlayer")
    head, _ = load(golden.write(tmp_path, config, weights), tiny_target(8))
    assert len(head.fc_norm) == 3 and head.input_norm is not None


def write_own(directory: Path, config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Tensor]:
    """Write an EAGLE-3 head with its own embedding in SafeAILab's names, and return its weights by ours. changes: for its own
    class, which a published config has in another place, or lacks."""
    torch.manual_seed(1)
    theirs = Eagle3Head(config.get("transformer_layer_config", config) | changes).state_dict()
    first = "layers.0." if "transformer_layer_config" in config else "midlayer."
    golden.write(directory, config, {name.replace("layer.", first, 1): tensor for name, tensor in theirs.items()})
    return theirs


@pytest.mark.parametrize("width", [24, HIDDEN])
def test_a_head_may_have_its_own_embedding(tmp_path, width):
    """Load heads of another width than the target (SafeAILab's for Llama-3.3-70B) and what speculators trains with
    embed_requires_grad."""
    target, flag = tiny_target(8), {"embed_requires_grad": True, "target_hidden_size": HIDDEN}
    named = shrink_head(NAMED) | {"hidden_size": width, "target_hidden_size": HIDDEN, "head_dim": 8}
    config = named if width != HIDDEN else shrink_head(SPECULATORS) | flag
    theirs = write_own(
        tmp_path / "theirs", config, flag | {IDS: [2, 4, 5], "draft_vocab_size": config["draft_vocab_size"]}
    )
    head, _ = load(tmp_path / "theirs", target)
    tokens = torch.randint(1, VOCAB, (1, 12))
    assert torch.equal(head.embed(tokens, target), theirs["embed_tokens.weight"][tokens])
    text = PackedBatch(tokens, tokens > 0, tokens * 0, torch.arange(12)[None])
    states = torch.randn(1, 12, 3 * HIDDEN)
    outs = [head(states, embeddings, text)[0] for embeddings in torch.randn(2, 1, 12, HIDDEN)]
    assert torch.equal(*outs)  # which takes nothing of the target's embedding
    for layout in ("vllm", "speculators"):
        write_export(layout, head, target, tmp_path / layout)
        assert same(load(tmp_path / layout, target)[0], head)
    for engine in ("sglang", "eagle", "gguf"):
        with pytest.raises(ValueError, match=r"does not support .*embed_requires_grad"):
            engines.export_for(engine, head, target)
    learn("eagle3", head.requires_grad_(True), target)
    if width == HIDDEN:  # an embedding that did not change, or is not stored, is the target's
        state = {name.replace("layer.", "layers.0.", 1): tensor for name, tensor in theirs.items()}
        for stored in ({"embed_tokens.weight": target.embeddings.clone()}, {}):
            del state["embed_tokens.weight"]
            golden.write(tmp_path / f"equal{len(stored)}", config, state := state | stored)
            assert load_head(tmp_path / f"equal{len(stored)}", target).embed_tokens is None
        golden.write(tmp_path / "near", config, state | {"embed_tokens.weight": target.embeddings * 1.1})
        assert load_head(tmp_path / "near", target).embed_tokens is not None
    edit(tmp_path / "vllm", lambda config: config.update(target_hidden_size=2 * HIDDEN))
    with pytest.raises(ValueError, match=r"fc\.weight is"):
        load_head(tmp_path / "vllm", target)


@pytest.mark.parametrize("size", [None, VOCAB])
def test_a_head_without_an_lm_head_uses_the_targets(tmp_path, size):
    """Load nvidia's first head for gpt-oss, and thoughtworks', which have the size of the whole vocabulary."""
    config, target = shrink_head(NAMED) | {"draft_vocab_size": size}, tiny_target(8)
    weights = {name: tensor for name, tensor in eagle3(config, "midlayer").items() if name != "lm_head.weight"}
    head, said = load(golden.write(tmp_path, config, weights), target)
    assert "no lm_head is stored" in said[0]
    torch.testing.assert_close(head.lm_head.weight.float(), target.model.lm_head.weight)
    assert head.lm_head.weight.data_ptr() != target.model.lm_head.weight.data_ptr()


REFUSED: list[tuple[dict, str]] = [
    ({"architectures": ["QwenDFlareDraftModel"]}, "a DFlare block"),
    ({"architectures": ["QwenDFlareDraftModel"], "dflash_config": {}}, "a DFlare block"),  # in z-lab's layout
    ({"architectures": ["LiLiCorrDraftModel"], "dflash_config": {}}, "a LiLiCorr block drafter"),
    ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text"}, "a DSpark or DFlash drafter with Gemma's"),
    ({"architectures": ["Gemma4Eagle3Model"]}, "an EAGLE-3 drafter with Gemma's layers"),
    ({"speculators_model_type": "mtp"}, "a multi-token-prediction layer"),
    ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "a multi-token-prediction layer"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "an MLP speculator"),
    ({"architectures": ["LlamaEagleSpeculator"], "model_type": "llama_eagle"}, "EAGLE-1 in the first"),
    ({"auto_map": {"AutoModel": "modeling.Head"}}, "names its own code"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_drafters_of_other_kinds_are_refused_by_name(tmp_path, config, message):
    with pytest.raises(ValueError, match=message) as error:
        load_head(golden.write(tmp_path, config, {"fc.weight": torch.zeros(2, 2)}), tiny_target(8))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["medusa_num_layers", "medusa_num_heads"])
def test_counts_of_a_hostile_config_are_not_looped_over(tmp_path, key):
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1} | {key: 10**12}
    golden.write(tmp_path, config, {"0.0.linear.weight": random(HIDDEN, HIDDEN), "0.1.weight": random(VOCAB, HIDDEN)})
    with pytest.raises(ValueError, match=f"{key}={10**12}"):
        load_head(tmp_path, tiny_target(8))


def test_sizes_of_a_hostile_config_cost_no_memory(tmp_path):
    """Use a layer of 2**40 numbers, which would not fit in this machine; the shapes are compared without it."""
    config = shrink_head(NAMED) | {"intermediate_size": 2**29, "num_attention_heads": 2**30}
    golden.write(tmp_path, config, eagle3(shrink_head(NAMED), "midlayer"))
    sizes = r"midlayer.mlp.down_proj.weight is \(32, 64\) in the file, \(32, 536870912\)"
    with pytest.raises(ValueError, match=sizes):
        load_head(tmp_path, tiny_target(8))


# -- the target's digest ----------------------------------------------------------------------------------------------


def test_a_fine_tune_with_the_same_embedding_is_noticed(tmp_path):
    """Adapters of a LoRA usually leave the embedding unchanged."""
    model = LlamaForCausalLM(tiny_config(num_hidden_layers=8))
    targets = []
    for name in ("before", "after", "copy"):
        model.save_pretrained(tmp_path / name, max_shard_size="20KB" if name == "copy" else "50GB")
        targets.append(Target.from_pretrained(tmp_path / name, dtype="float32", device="cpu"))
        if name == "before":
            model.model.layers[5].self_attn.q_proj.weight.data += 0.1
    before, after, copy = map(fingerprint, targets)
    assert before["embedding_digest"] == after["embedding_digest"]
    assert not same_weights(before, after) and same_weights(after, copy)
    assert same_weights(before, {"embedding_digest": after["embedding_digest"]})  # of a head of an earlier version
    save_file({"lora_B": torch.ones(2, 2)}, tmp_path / "copy" / "adapter_model.safetensors")
    assert not same_weights(copy, fingerprint(targets[2]))
    save_head(Eagle3Head.for_target(targets[0], 3), tmp_path / "head", targets[0])
    with pytest.warns(UserWarning, match="trained for other weights than those of .*after"):
        load_head(tmp_path / "head", targets[1])


def test_the_digest_of_the_weights_depends_on_nothing_but_them(tmp_path):
    """Names and tied copies differ between versions of transformers, and a part of a checkpoint tells nothing."""
    target, rows = Target(LlamaForCausalLM(tiny_config())), torch.arange(12.0).view(4, 3)
    target.checkpoint = str(tmp_path)

    def digest(tensors: dict[str, Tensor]) -> str | None:
        save_file(tensors, tmp_path / "model.safetensors")
        return stored_digest(target)

    one = digest({"model.a.weight": rows, "model.b.weight": rows + 1})
    assert one == digest({"x.weight": rows + 1, "a.weight": rows, "lm_head.weight": rows.clone()}) is not None
    assert one == digest({"a.weight": rows, "b.weight": rows + 1, "mlp.experts.0.up.weight": rows + 2, "c": rows[:0]})
    assert one != digest({"a.weight": rows, "b.weight": rows + 2})
    index = {"weight_map": {"a.weight": "part.safetensors", "b.weight": "missing.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_digest(target) is not None  # the index of an earlier checkpoint
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    assert stored_digest(target) is None


@pytest.mark.parametrize(
    ("stored", "shard"), [("float32", "1MB"), ("bfloat16", "50GB"), ("float16", "1MB"), ("float32", "pickled")]
)
def test_a_head_fits_its_target_in_every_dtype(tmp_path, stored, shard):
    """Use rows with numbers below float16's range and between bfloat16's steps: a digest of the weights in memory would
    differ."""
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=8, vocab_size=20_000)
    model, path = LlamaForCausalLM(config), tmp_path / "target"
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(torch.logspace(-9, 0, HIDDEN))
    model.to(getattr(torch, stored)).save_pretrained(path, max_shard_size="50GB" if shard == "pickled" else shard)
    assert (path / "model.safetensors.index.json").is_file() == (shard == "1MB")
    if shard == "pickled":
        (path / "model.safetensors").unlink()
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    dtypes = ("float32", "bfloat16", "float16")
    loaded = {dtype: Target.from_pretrained(path, dtype=dtype, device="cpu") for dtype in dtypes}
    rows = {dtype: target.embeddings[0].to(torch.bfloat16) for dtype, target in loaded.items()}
    assert stored == "float16" or not torch.equal(rows["float32"], rows["float16"])
    assert len({fingerprint(target)["embedding_digest"] for target in loaded.values()}) == 1
    assert len({fingerprint(target).get("weights_digest") for target in loaded.values()}) == 1
    save_head(Eagle3Head.for_target(loaded["float32"], 3), tmp_path / "head", loaded["float32"])
    assert load_head(tmp_path / "head", loaded["float16"]).layers == [2, 4, 5]
    other = Target(LlamaForCausalLM(config), name="another")
    with pytest.warns(UserWarning, match="trained for other weights"):
        load_head(tmp_path / "head", other)
    with pytest.raises(ValueError, match="trained for other weights"):
        load_head(tmp_path / "head", other, strict=True)
