"""What is written for an engine is complete, the engine reads it as intended, and the gate lets nothing else pass."""

import json
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from foredraft.heads import Target, load_head, save_head
from foredraft.heads.base import DraftHead
from foredraft.heads.checkpoint import read_head
from foredraft.heads.formats import engine_checks as checks
from foredraft.heads.formats import engines
from foredraft.heads.formats.base import embeds_rows
from foredraft.heads.hub.card import model_card
from foredraft.heads.hydra import HydraHead
from foredraft.heads.latent_attention import LatentAttention
from foredraft.heads.target_model.logits import LogitScaling
from foredraft.train import publish
from tests.support import golden
from tests.support.head_factory import build_head, make_head, same, write_export
from tests.support.tiny import tiny_config

FORMATS = {  # that take a head of this kind
    "eagle3": "vllm speculators sglang eagle",
    "eagle3 full vocabulary": "vllm speculators sglang eagle",
    "eagle3 qk_norm": "vllm speculators",
    "eagle3 window": "vllm speculators sglang eagle",
    "eagle3 of two layers": "vllm speculators sglang",
    "eagle3 qk_norm window": "vllm speculators",
    "eagle3 yarn": "vllm speculators sglang",
    "eagle3_1": "vllm speculators sglang",
    "hass": "vllm eagle",
    "eagle": "sglang eagle",
    "medusa": "medusa",
    "hydra": "hydra",
    "hydra_pp": "hydra",
    "dflash": "vllm sglang speculators transformers",
    "dflash pruned": "vllm speculators",
    "jetspec": "vllm sglang speculators",
    "dflash2": "vllm sglang",
    "dspark": "vllm sglang speculators",
    "dspark pruned": "speculators",
    "dspark in place": "vllm speculators",
    "dspark gated": "sglang",
    "dspark rnn": "sglang",
    "domino": "sglang",
    "domino in place": "sglang",
    "p_eagle": "vllm speculators",
    "xpress": "vllm speculators",
    "xpress pruned, anchor first": "speculators",
}
WHOLE = {"draft_vocab_size": None}  # what some engines insist on
CHANGES = {
    "xpress uneven": {"kind": "xpress", "block_size": 4, "xpress_rank": 6, "xpress_mlp_hidden": 10},
    "medusa": WHOLE,
    "dflash2": WHOLE,
    "dflash2 pruned": {"kind": "dflash2", "draft_vocab_size": 200},
    "dspark in place": {"kind": "dspark", "sample_from_anchor": False},
    "hydra": WHOLE,
    "hydra_pp": WHOLE | {"mlp_layers": 2},
    "eagle3 qk_norm window": {"kind": "eagle3", "qk_norm": True, "window": 11},
    "eagle3 window": {"kind": "eagle3", "window": 11},
    "eagle3 yarn": {
        "rope": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        "kind": "eagle3",
    },
    "eagle3 attention_factor": {
        "rope": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.5,
            "truncate": False,
        },
        "kind": "eagle3",
    },
    "eagle3 of the last state": {"kind": "eagle3", "target_layer_ids": [2, 4, 8]},
    "p_eagle of the last state": {"kind": "p_eagle", "target_layer_ids": [2, 4, 8]},
    "eagle3 of other layers": {"kind": "eagle3", "target_layer_ids": [1, 3, 5]},
    "eagle3 of two layers": {"kind": "eagle3", "target_layer_ids": [1, 5]},
    "eagle3 of one layer": {"kind": "eagle3", "target_layer_ids": [5]},
    "eagle3 of the embedding": {"kind": "eagle3", "target_layer_ids": [0, 3, 5]},
    "medusa pruned": {"kind": "medusa", "draft_vocab_size": 250},
}
ROUND = [(kind, name) for kind, formats in FORMATS.items() for name in formats.split()]


def ours(kind: str, target: Target) -> DraftHead:
    return make_head(kind, target, **CHANGES.get(kind, {})).to(torch.bfloat16)  # a cast on the way would show


@pytest.mark.parametrize(("kind", "name"), ROUND)
def test_round_trips_are_equal_to_the_bit(deep, tmp_path, kind, name):
    head = ours(kind, deep)
    export = write_export(name, head, deep, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", *export.layout.weight_files}
    again = read_head(tmp_path, deep)
    assert same(again, head) and again.dtype == head.dtype and again.to_config() == head.to_config()
    for file in export.layout.weight_files:  # each of them alone too
        other = tmp_path / file.replace(".", "-")
        other.mkdir()
        (tmp_path / file).rename(other / file)
        shutil.copy(tmp_path / "config.json", other)
        assert same(read_head(other, deep), head)


def test_an_engine_gets_the_window_or_is_named(deep):
    """SGLang counts the positions before a query's own, in a flag of its command."""
    head, flag = ours("eagle3 window", deep), " --speculative-draft-window-size 10"
    assert engines.export_for("sglang", head, deep).command(head, "T", "H").endswith(flag)
    for name in ("eagle", "gguf"):
        assert (
            "does not support head.window=11: in longer texts the head sees all"
            in engines.export_for(name, head, deep).note
        )
    assert not any(
        "head.window" in engines.export_for(name, head, deep).note for name in ("vllm", "speculators", "sglang")
    )
    head.window = deep.context
    assert "window" not in engines.export_for("sglang", head, deep).command(head, "T", "H")
    assert "head.window" not in engines.export_for("gguf", head, deep).note


def test_the_class_of_a_config_keeps_the_window(deep):
    """vLLM reads the config by transformers' class, and that of Qwen3 forgets a window unless a flag is set."""
    for kind in ("eagle3 window", "eagle3 qk_norm window"):
        config = engines.export_for("vllm", head := ours(kind, deep), deep).layout.export_config(head, deep)
        read = CONFIG_MAPPING[config["model_type"]](**config)
        assert (read.sliding_window, read.layer_types) == (11, ["sliding_attention"])


def test_a_layer_of_qwen3s_form_is_named_for_the_one_class_that_reads_it(deep, tmp_path):
    save_head(ours("eagle3 qk_norm", deep), tmp_path, deep)
    config, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert (config["architectures"], config["model_type"]) == (["Eagle3Qwen3ForCausalLM"], "qwen3")
    assert {
        name: tensor.shape for name, tensor in weights.items() if name.endswith(("q_norm.weight", "k_norm.weight"))
    } == {f"midlayer.self_attn.{one}_norm.weight": torch.Size([golden.HD]) for one in "qk"}
    head = read_head(tmp_path, deep)
    layer = engines.export_for("speculators", head, deep).layout.export_config(head, deep)["transformer_layer_config"]
    assert (layer["architectures"], layer["model_type"]) == (["Qwen3ForCausalLM"], "qwen3")


def test_no_vocabulary_map_is_written_where_nothing_is_pruned(deep, tmp_path):
    save_head(ours("eagle3 full vocabulary", deep), tmp_path, deep)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()


REFUSED = [
    ("medusa", "vllm", "vLLM does not support medusa heads"),
    ("medusa", "speculators", "vLLM does not support medusa heads"),
    ("eagle3", "medusa", "does not support eagle3"),
    ("hydra", "vllm", "vLLM does not support hydra"),
    ("mtp", "vllm", "vLLM does not read mtp heads in format=vllm: use format=mtp"),
    ("medusa pruned", "medusa", "does not support a pruned vocabulary"),
    ("eagle", "vllm", "vLLM's EAGLE-1 has no fc.bias"),
    ("hass", "speculators", "vLLM does not read eagle heads in format=speculators: use format=vllm"),
    ("eagle3_1", "eagle", "does not support fc_norm, norm_output"),
    ("eagle3 qk_norm", "eagle", "does not support qk_norm"),
    ("eagle3 qk_norm", "sglang", "SGLang does not support qk_norm"),
    ("eagle3 qk_norm", "gguf", "llama.cpp does not support qk_norm"),
    ("eagle3 yarn", "eagle", "supports the default rope, and this head has yarn"),
    ("dspark gated", "vllm", "only with head.markov_head_type=vanilla"),
    ("dspark rnn", "speculators", "only with head.markov_head_type=vanilla"),
    ("dspark pruned", "sglang", "SGLang does not support a pruned vocabulary of dspark heads"),
    ("xpress pruned, anchor first", "vllm", "vLLM does not support a pruned vocabulary of xpress heads"),
    ("xpress uneven", "speculators", "head.xpress_mlp_hidden=10 to be a multiple of head.xpress_rank=6"),
    ("jetspec", "transformers", "shows each position its whole block"),
    ("dflash anchor first", "transformers", "drafts dflash in place"),
    ("dflash pruned", "transformers", "does not support a pruned vocabulary"),
    ("dflash anchor first", "vllm", "vLLM drafts dflash in place, and this head anchor first"),
    ("dflash anchor first", "sglang", "SGLang drafts dflash in place, and this head anchor first"),
    ("dspark in place", "sglang", "SGLang drafts dspark anchor first, and this head in place"),
    ("dflash2 pruned", "vllm", "vLLM does not support a pruned vocabulary of dflash2 heads"),
    ("eagle3 of the last state", "vllm", r"vLLM returns the last hidden state \(8\) before its norm"),
    ("eagle3 of the last state", "speculators", r"vLLM returns the last hidden state \(8\) before its norm"),
    ("eagle3 of the last state", "sglang", r"SGLang returns the last hidden state \(8\) before its norm"),
    ("p_eagle of the last state", "vllm", r"vLLM returns the last hidden state \(8\) before its norm"),
    ("eagle3 attention_factor", "sglang", "SGLang does not read attention_factor=1.5 of this head's yarn rope"),
    (
        "eagle3 attention_factor",
        "gguf",
        "llama.cpp does not read attention_factor=1.5, truncate=False of this head's yarn",
    ),
    ("eagle3 of other layers", "eagle", r"takes hidden states \[2, 4, 5\] .* this head takes \[1, 3, 5\]"),
    ("eagle3 of two layers", "gguf", "fuses three layers"),
    (
        "eagle3 of one layer",
        "sglang",
        r"leaves out the fc of a head that reads one hidden state, as this one does \[5\]",
    ),
    ("eagle3 of the embedding", "sglang", "hidden state 0"),
]


@pytest.mark.parametrize(("kind", "name", "message"), REFUSED)
def test_what_an_engine_cannot_draft_with_is_not_written(deep, kind, name, message):
    with pytest.raises(ValueError, match=message):
        engines.export_for(name, ours(kind, deep), deep)


def test_a_target_that_scales_its_embedding_gets_no_head_that_engines_feed_with_rows(deep, monkeypatch):
    monkeypatch.setattr(Target, "embed", lambda self, tokens: 8 * self.model.get_input_embeddings()(tokens))
    for kind, name in (("dflash", "vllm"), ("dspark", "speculators"), ("hass", "vllm"), ("eagle", "sglang")):
        with pytest.raises(ValueError, match=r"gives the head rows of the target's embedding, .* train head=eagle3"):
            engines.export_for(name, ours(kind, deep), deep)
    for kind, name in (("eagle3", "vllm"), ("dflash", "transformers"), ("p_eagle", "vllm")):
        engines.export_for(name, ours(kind, deep), deep)
    monkeypatch.setattr(deep.model.get_input_embeddings(), "embed_norm", torch.nn.Identity(), raising=False)
    for kind, name in (("dflash", "transformers"), ("dflash", "SGLang"), ("domino", "SGLang")):
        with pytest.raises(ValueError, match=f"{name} leaves out the norm of"):
            engines.export_for(name.lower(), ours(kind, deep), deep)


def test_one_process_of_a_sharded_target_can_write_the_card(deep, monkeypatch):
    """Let a forward of the embedding fail, as it would wait for the other processes."""
    shared = Target(deep.model, None, "shared")
    shared.sharding = "fsdp"
    monkeypatch.delattr(Target, "embed")
    assert embeds_rows(shared)
    monkeypatch.setattr(
        shared.model, "get_input_embeddings", lambda: Gemma3TextScaledWordEmbedding(9, 4, 0, embed_scale=2.0)
    )
    assert not embeds_rows(shared)


def test_corrections_are_not_added_to_logits_that_the_target_scales(deep, monkeypatch):
    """Engines add a head's corrections to raw outputs of the lm_head, here they follow the target's scale and cap."""
    monkeypatch.setattr(deep, "scaled", LogitScaling(divisor=8.0, factor=None, cap=None))
    for kind, names in (("dspark", "vllm speculators sglang gguf"), ("domino", "sglang"), ("xpress", "vllm")):
        for name in names.split():
            with pytest.raises(
                ValueError, match=r"corrections to outputs of the target's lm_head, .* train head=dflash"
            ):
                engines.export_for(name, ours(kind, deep), deep)
    for kind, name in (("dspark pruned", "vllm"), ("dflash", "vllm"), ("eagle3", "sglang")):
        engines.export_for(name, ours(kind, deep), deep)


def test_targets_whose_last_state_has_no_norm_in_an_engine_are_named(deep, monkeypatch):
    """Check heads that read only this state: EAGLE-1, and EAGLE-3 without aux hidden states."""
    alone = ours("eagle3", deep)
    alone.fc, alone.layers = None, [deep.num_layers]
    for kind, names in (("step3p5", "vllm sglang"), ("mimo", "vllm")):
        monkeypatch.setattr(deep.config, "model_type", kind)
        for name in names.split():
            for head in [ours("hass", deep), *([alone] if name == "vllm" else [])]:
                with pytest.raises(ValueError, match=r"last hidden state of .* before its norm, .* use another engine"):
                    engines.export_for(name, head, deep)
            engines.export_for(name, ours("dflash", deep), deep)
    engines.export_for("sglang", ours("hass", deep), deep)


def test_drafts_of_engines_lack_the_bias_of_an_lm_head(deep, monkeypatch):
    """Engines multiply by the rows of the target's lm_head, and add its bias only to the target's own logits."""
    lm_head = torch.nn.Linear(deep.hidden_size, deep.vocab_size)
    monkeypatch.setattr(deep.model, "get_output_embeddings", lambda: lm_head)
    refused = ("hass vllm", "eagle sglang", "dflash vllm", "dspark speculators", "dspark gguf", "domino sglang")
    for kind, name in (words.split() for words in refused):
        with pytest.raises(ValueError, match=r"leaves out the bias of .*'s lm_head .* train head=eagle3"):
            engines.export_for(name, ours(kind, deep), deep)
    for kind, name in (("dflash pruned", "vllm"), ("dflash", "transformers"), ("eagle3", "sglang")):
        engines.export_for(name, ours(kind, deep), deep)


def test_texts_end_where_vllm_would_change_a_longrope(deep, monkeypatch):
    """vLLM 0.32 takes the long factors for every position if its longest text is longer than the boundary."""
    for kind, name in (("eagle3", "vllm"), ("dflash", "speculators")):
        head = ours(kind, deep)
        assert "--max-model-len" not in engines.export_for(name, head, deep).use
        monkeypatch.setattr(
            head.config, "rope_parameters", {"rope_type": "longrope", "original_max_position_embeddings": 64}
        )
        export = engines.export_for(name, head, deep)
        assert (
            export.command(head, "T", "H").endswith(" --max-model-len 64") and "unless texts end at 64" in export.note
        )
    assert "--max-model-len" not in engines.export_for("sglang", head, deep).use


def test_latent_attention_in_vllm_has_no_norm_before_fc(deep):
    head = ours("eagle3", deep)
    checks.VLLM_LATENT("vLLM", head, deep)
    head.layer.self_attn = LatentAttention.__new__(LatentAttention)  # all that is looked at
    checks.VLLM_LATENT("vLLM", head, deep)
    head.input_norm = torch.nn.Identity()
    with pytest.raises(ValueError, match="latent attention supports neither norm_before_fc nor use_aux_hidden_state"):
        checks.VLLM_LATENT("vLLM", head, deep)


def test_a_part_of_a_head_that_rotates_is_not_written_where_all_of_it_would(deep, monkeypatch):
    head = ours("dflash", deep)
    monkeypatch.setitem(head.config.rope_parameters, "partial_rotary_factor", 0.5)
    engines.export_for("vllm", head, deep)
    with pytest.raises(ValueError, match="SGLang rotates whole queries and keys"):
        engines.export_for("sglang", head, deep)


def test_layers_that_zankners_code_would_tie_are_not_written(deep):
    head = HydraHead.for_target(deep, num_heads=2, mlp_layers=4, prefix=True)
    engines.export_for("hydra", head, deep)  # still alike, all of them
    with torch.no_grad():
        head.hydra_mlp[1][5].linear.bias.add_(1)
    with pytest.raises(ValueError, match=r"one block in place of layers 3, 5, 7 of hydra_mlp\.1"):
        engines.export_for("hydra", head, deep)


def test_sglang_gets_the_bias_it_insists_on(deep, tmp_path):
    """Write a bias of zeros if the head has none: it drafts the same."""
    head = ours("hass", deep)
    write_export("sglang", head, deep, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is True
    again = read_head(tmp_path, deep)
    assert not again.fc.bias.any()
    again.fc.bias = None
    assert same(again, head)


EAGLE3, DFLASH = '"method": "eagle3", "model": "H", "num_speculative_tokens": 4', '"method": "dflash", "model": "H", '
SGLANG = "--speculative-algorithm {} --speculative-draft-model-path H"


@pytest.mark.parametrize(
    ("engine", "kind", "words"),
    [
        ("vllm", "eagle3", EAGLE3),
        ("vllm", "dflash", DFLASH + '"num_speculative_tokens": 7'),
        ("vllm", "dflash2", DFLASH + '"num_speculative_tokens": 7'),
        ("vllm", "xpress", DFLASH + '"num_speculative_tokens": 7'),
        ("sglang", "eagle3", SGLANG.format("EAGLE3") + " --speculative-num-steps 4 "),
        ("sglang", "dflash", SGLANG.format("DFLASH")),
        ("sglang", "dflash2", SGLANG.format("DFLASH")),
        ("sglang", "domino", SGLANG.format("DFLASH")),
    ],
)
def test_an_engine_is_started_in_its_own_words(deep, engine, kind, words):
    """Check SGLang, which counts the anchor among a block's draft tokens: without a number it reads the size from
    config.json."""
    head = build_head(kind, deep)
    command = engines.export_for(engine, head, deep).command(head, "T", "H")
    counted = (engine, kind) == ("sglang", "eagle3")
    assert words in command and ("--speculative-num-draft-tokens" in command) == counted


QUOTED = [
    ("vllm", "eagle3"),
    ("sglang", "eagle3"),
    ("speculators", "eagle3"),
    ("speculators", "p_eagle"),
    ("gguf", "eagle3"),
]
QUOTED += [("medusa", "medusa"), ("vllm", "dflash2"), ("sglang", "domino")]


@pytest.mark.parametrize(("layout", "kind"), QUOTED)
def test_a_shell_reads_the_paths_of_a_command_as_they_are(layout, kind, deep, monkeypatch):
    path, target = '/Anna\'s "best" heads\\new {x}', "/my models/T"
    monkeypatch.setattr(deep, "name", target)
    export = engines.export_for(layout, build_head(kind, deep), deep)
    words = shlex.split(export.command(build_head(kind, deep), target, path))
    if "--speculative-config" in words:
        assert json.loads(words[words.index("--speculative-config") + 1])["model"] == path
    else:
        assert path in words or f"{path}/head.gguf" in words
    assert layout in ("speculators", "medusa", "gguf") or target in words
    assert layout != "gguf" or f"target='{target}' head=eagle3" in export.note


def test_what_an_engine_has_learnt_is_said(deep):
    assert (
        "fc_norm, norm_output: supported by SGLang since"
        in engines.export_for("sglang", ours("eagle3_1", deep), deep).note
    )
    head = ours("eagle3", deep)
    head.flags["norm_before_residual"] = True
    with pytest.raises(ValueError, match="SGLang does not support norm_before_residual"):
        engines.export_for("sglang", head, deep)


def test_the_gate_stops_files_that_gain_less(deep, tmp_path, monkeypatch):
    save_head(ours("eagle3", deep), tmp_path / "head", deep)
    lengths = iter([2.0, 1.9])
    monkeypatch.setattr(publish, "tokens_per_forward", lambda generations: next(lengths))
    with pytest.raises(ValueError, match=r"gains 2\.0000 tokens per forward and the files .* 1\.9000"):
        publish.gate(tmp_path / "head", deep, tmp_path / "head")


@pytest.mark.parametrize(("layout", "kind"), [("speculators", "eagle3"), ("medusa", "medusa"), ("hydra", "hydra")])
def test_the_files_name_what_an_engine_loads_of_a_target_in_gguf(layout, kind, deep, monkeypatch):
    monkeypatch.setattr(deep, "name", "FILE.gguf")
    head = ours(kind, deep)
    config = engines.export_for(layout, head, deep).layout.export_config(head, deep)
    named = config["speculators_config"]["verifier"]["name_or_path"] if layout == "speculators" else None
    assert (named or config["base_model_name_or_path"]) == deep.checkpoint


LOADED = {  # engine: format of export, None for the files as training writes them
    "eagle3": {"vLLM": None, "SGLang": None, "llama.cpp": "gguf"},
    "eagle3 qk_norm": {"vLLM": None},
    "medusa": {"Text Generation Inference": "medusa"},
    "domino": {"SGLang": None},
    "dspark pruned": {"vLLM": "vllm", "llama.cpp": "gguf"},
    "p_eagle": {"vLLM": None},
    "hydra": {},
}


@pytest.mark.parametrize("kind", LOADED)
def test_a_card_names_the_engines_that_load_the_head(kind, deep):
    found = engines.engines(ours(kind, deep), deep, "org/target")
    assert {one["engine"]: one["format"] for one in found} == LOADED[kind]
    card = model_card({}, {"kind": kind, "target": "org/target", "repo": "org/head", "engines": found}, None)
    for one in found:
        assert one["command"].replace("{head}", "org/head" if one["format"] is None else "exported") in card
    assert card.count("loads these files unchanged") == list(LOADED[kind].values()).count(None)
    assert all(f"format={layout}" in card for layout in LOADED[kind].values() if layout)


@pytest.mark.parametrize(("steps", "drafts", "named"), [(1, None, 3), (5, None, 5), (1, 2, 2)])
def test_eagle_1_drafts_more_than_it_learned(deep, steps, drafts, named):
    head = build_head("eagle", deep, ttt_steps=steps)
    said = engines.export_for("vllm", head, deep).command(head, "T", "H", drafts)
    assert f'"num_speculative_tokens": {named}' in said


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "hydra_pp", "mtp"])
@pytest.mark.parametrize("ids", [{}, {"bos_token_id": None, "eos_token_id": None}, {"eos_token_id": [5, 6]}])
def test_a_config_has_the_start_and_end_tokens_of_its_target(kind, ids, tmp_path):
    """Check that a head of a target without them does not get Llama's 1 and 2, which an engine would read from silence."""
    config = tiny_config()
    wanted = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id} | ids
    for name, value in ids.items():
        setattr(config, name, value)
    target = Target(LlamaForCausalLM(config))
    save_head(make_head(kind, target), tmp_path, target)
    save_head(load_head(tmp_path, target), tmp_path, target)
    saved = json.loads((tmp_path / "config.json").read_text())
    layer = saved if "eos_token_id" in saved else saved["foredraft"]["prefix"]
    assert {name: layer[name] for name in wanted} == wanted
