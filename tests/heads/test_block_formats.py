"""Block drafters in the layouts that others publish: what loads, as what, and what is refused; and back again."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, MuseGlimmerAssistantConfig
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from foredraft.heads import Target, load_head
from foredraft.heads.checkpoint import read_head
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.formats import engines
from foredraft.heads.formats.layer_ids import IDS
from foredraft.heads.p_eagle import PEagleHead
from foredraft.heads.target_model.logits import LogitScaling
from foredraft.inference import Engine, Request, drafter_for
from foredraft.train import parity_gate
from tests.support import golden
from tests.support.batches import PROMPT
from tests.support.decoding import check_drafts, prompt
from tests.support.head_factory import make_head, same, write_export

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
    "speculators_dflash2": ("dflash2", [2, 4], 4, False, False),
    "speculators_dspark": ("dspark", [2, 4], 4, False, False),
}


@pytest.fixture
def load(deep, tmp_path):
    """Return load(name), which gives the head of a layout's files, in float32, and their weights by the head's names."""

    def load(name: str, change: Callable[[dict], object] = lambda config: None) -> tuple[Any, dict[str, torch.Tensor]]:
        config, weights, file = golden.make(name, deep)
        change(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            head = load_head(golden.write(tmp_path, config, weights, file), deep, dtype=torch.float32)
        if name == "speculators_xpress":
            weights = {key.replace("refiner_head.", "xpress_head."): tensor for key, tensor in weights.items()}
            for ours, theirs in golden.SPECULATORS_REFINER.items():
                weights = {key.replace(f".{theirs}", f".{ours}"): tensor for key, tensor in weights.items()}
        return head, {key.replace("layers.", "blocks.", 1): tensor for key, tensor in weights.items()}

    return load


def check_files(head: Any, theirs: dict[str, torch.Tensor], target: Target) -> None:
    ours = head.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], tensor.to(ours[key].dtype)) for key, tensor in theirs.items())
    assert parity_gate.check(head, target, PROMPT) < 1e-3


@pytest.mark.parametrize("name", GOLDEN)
def test_published_files_are_what_they_say(deep, load, name):
    head, theirs = load(name)
    assert isinstance(head, DFlashHead)
    found = head.kind, head.layers, head.block_size, head.sample_from_anchor, bool(head.causal)
    assert found == GOLDEN[name] and head.mask_token_id == 7
    if head.kind == "dflash2":
        assert [head.masking(i) for i in range(3)] == [(False, 5)] * 3
    frozen = ("embed_tokens.weight", "lm_head.weight")
    check_files(head, {key: tensor for key, tensor in theirs.items() if key not in frozen}, deep)
    if name == "zlab":
        assert head.window == 5 and [head.masking(i) for i in range(3)] == [(True, 5), (True, 5), (False, None)]


@pytest.mark.parametrize(("name", "before", "depth"), [("p_eagle", False, 8), ("speculators_p_eagle", True, 3)])
def test_p_eagle_files_are_what_they_say(deep, load, name, before, depth):
    head, theirs = load(name)
    assert isinstance(head, PEagleHead)
    assert (head.layers, head.depth, head.mask_token_id, head.cache_layers) == ([2, 4, 5], depth, 7, 2)
    assert head.norm_before_residual == before
    check_files(head, theirs, deep)


def test_p_eagle_files_that_ask_for_one_draft_are_used(deep, load):
    one = {"speculative_tokens": 1}
    head, theirs = load("speculators_p_eagle", lambda c: c["speculators_config"]["proposal_methods"][0].update(one))
    check_files(head, theirs, deep)
    check_drafts(deep, drafter_for(head, deep), torch.tensor([PROMPT]), max_new_tokens=8)


def test_p_eagle_without_an_embedding_takes_the_targets(deep, tmp_path):
    config, weights, _ = golden.make("p_eagle", deep)
    del weights["embed_tokens.weight"]
    weights = {key.replace("layers.0", "midlayer"): value for key, value in weights.items()}  # as EAGLE-3 calls it
    with pytest.warns(UserWarning, match="no embedding is stored"):
        head = load_head(golden.write(tmp_path, config, weights), deep, dtype=torch.float32)
    torch.testing.assert_close(head.embed_tokens.weight, deep.embeddings, atol=1e-3, rtol=1e-2)


# -- which position drafts what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [None, False, True])
def test_a_layout_is_what_the_files_say_or_else_what_their_architecture_is(deep, tmp_path, flag):
    config, weights, _ = golden.make("zlab", deep)
    head = load_head(golden.write(tmp_path, config | {"sample_from_anchor": flag}, weights), deep)
    assert head.sample_from_anchor == bool(flag) and head.depth == (4 if flag else 3)


def test_settings_of_dspark_may_have_their_own_place(load):
    """Read config.json as SGLang and TensorRT do: settings in dspark_config, repeated at the top level or not."""

    def move(config: dict) -> None:
        config["dspark_config"] = config.pop("dflash_config")

    moved, _ = load("specforge_dspark", move)
    usual, _ = load("specforge_dspark")
    assert moved.to_config() == usual.to_config() and same(moved, usual)


# -- export -----------------------------------------------------------------------------------------------------------


def vllm_causal(config: dict, layer: int) -> bool:
    """Return whether a layer is causal inside a block for vLLM 0.32, whose rule for a config.json of DFlash is written down
    anew."""
    inner = config.get("transformer_layer_config", config)
    said = inner.get("is_causal")
    if said is None and config.get("speculators_model_type") == "dflash":
        said = not config.get("sliding_window_non_causal", True)
    elif said is None:
        said = inner.get("dflash_config", {}).get("causal")  # none in DSpark of the speculators package
    return inner["layer_types"][layer] == "sliding_attention" if said is None else said


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "vllm") for kind in ("dflash", "jetspec", "dflash2", "dflash pruned", "dspark")),
        *((kind, "speculators") for kind in ("dflash", "jetspec", "dflash pruned", "dspark")),
    ],
)
@pytest.mark.parametrize("changes", [{}, {"window": 6}, {"causal": True}])
def test_vllm_masks_a_block_as_it_was_trained(deep, tmp_path, kind, name, changes):
    if name == "speculators" and "window" in changes:
        changes = changes | {"causal": True}  # else its sliding layers, and no others, would be causal: refused
    head = make_head(kind, deep, **changes | ({"draft_vocab_size": None} if kind == "dflash2" else {}))
    write_export(name, head, deep, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for layer in range(head.cache_layers):
        assert vllm_causal(config, layer) == head.masking(layer)[0]


def sglang_causal(config: dict, layer: int) -> bool:
    """Return whether a layer is causal inside a block for SGLang 0.5.23, whose rule is written down anew."""
    return config.get("is_causal", config["layer_types"][layer] == "sliding_attention")


SGLANG_CLASSES = {"DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"}  # of 0.5.23, for block heads


@pytest.mark.parametrize("kind", ["dflash", "jetspec", "dflash2", "dspark", "domino"])
@pytest.mark.parametrize("changes", [{}, {"window": 6}, {"window": 6, "causal": True}])
def test_sglang_masks_a_block_as_it_was_trained(deep, tmp_path, kind, changes):
    changes = changes | {"draft_vocab_size": None} | ({"sample_from_anchor": True} if kind == "dspark" else {})
    head = make_head(kind, deep, **changes)
    write_export("sglang", head, deep, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert SGLANG_CLASSES.issuperset(config["architectures"])
    for layer in range(head.cache_layers):
        assert sglang_causal(config, layer) == head.masking(layer)[0]
    assert read_head(tmp_path, deep).to_config() == head.to_config()


def test_a_window_that_vllm_would_take_for_another_is_refused(deep):
    with pytest.raises(ValueError, match=r"causal in all layers or in none, .* \(head.window=\d+\): use format=vllm"):
        engines.export_for("speculators", make_head("dflash", deep, window=6), deep)


SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4, "use_sliding_window": True}
WINDOWS = [  # layout, what its config says of windows in words of several engines, and whether sliding layers are causal
    ("zlab", SLIDING, {}, True),
    ("zlab", SLIDING, {"causal": False}, False),
    ("zlab", SLIDING, {"causal": True}, True),
    ("zlab", {"layer_types": None}, {"use_swa": True, "swa_window_size": 4}, False),
    ("zlab", {"layer_types": ["full_attention"] * 3, "sliding_window": 4}, {"use_swa": True}, False),
    ("zlab", SLIDING | {"sliding_window": 9}, {"swa_window_size": 4}, True),
    ("zlab", SLIDING, {"use_swa": False, "swa_window_size": None}, True),
    ("speculators_dflash", SLIDING, {"sliding_window_non_causal": False}, True),
    ("speculators_dflash", SLIDING | {"is_causal": True}, {"sliding_window_non_causal": True}, True),
    ("speculators_dspark", SLIDING | {"is_causal": False}, {}, False),
    ("speculators_dflash", SLIDING, {"sliding_window_non_causal": True}, False),
]


@pytest.mark.parametrize(("name", "layer", "block", "causal"), WINDOWS)
def test_windows_are_causal_where_vllm_says_so(deep, tmp_path, name, layer, block, causal):
    config, weights, file = golden.make(name, deep)
    config.get("transformer_layer_config", config).update(layer)
    config.get("dflash_config", config).update(block)
    head = read_head(golden.write(tmp_path / "given", config, weights, file), deep)
    assert [head.masking(number) for number in range(3)] == [(causal, 4)] * 3
    write_export("vllm", head, deep, tmp_path / "again")
    again = read_head(tmp_path / "again", deep)
    assert again.to_config() == head.to_config()
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert [vllm_causal(written, number) for number in range(3)] == [causal] * 3
    if head.kind == "dflash":  # whose files SGLang reads, too
        assert [sglang_causal(written, number) for number in range(3)] == [causal] * 3


def test_a_head_of_others_has_a_note_on_scaled_embeddings(deep, tmp_path, monkeypatch):
    golden.write(tmp_path, *golden.make("speculators_dflash", deep))
    monkeypatch.setattr(Target, "embed", lambda self, tokens: 8 * self.model.get_input_embeddings()(tokens))
    with pytest.warns(UserWarning, match="rows of an embedding that"):
        read_head(tmp_path, deep)


def test_dflash2_is_told_what_a_target_scales_and_caps(deep, tmp_path, monkeypatch):
    """Compare the selector's scores with vLLM's rule: rows and logits are scaled by settings, and otherwise not at all."""
    monkeypatch.setattr(Target, "embed", lambda self, tokens: 8 * self.model.get_input_embeddings()(tokens))
    monkeypatch.setattr(deep, "scaled", LogitScaling(divisor=None, factor=None, cap=2.0))
    head = make_head("dflash2", deep, draft_vocab_size=None)
    write_export("vllm", head, deep, tmp_path)
    block = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    tokens, hidden = torch.tensor([[5, head.mask_token_id]]), torch.randn(1, 3, golden.H)
    rows = deep.embeddings[tokens] * block["input_embedding_scale"]
    torch.testing.assert_close(head.inputs(deep.embed(tokens[:, 0]))[:, :2], rows)
    raw = deep.model.get_output_embeddings()(hidden) * block.get("output_multiplier", 1.0)
    cap = block["final_logit_softcapping"]
    torch.testing.assert_close(head.base_logits(hidden), cap * torch.tanh(raw / cap))
    config = read_head(tmp_path, deep).to_config()
    assert config == head.to_config() and block["input_embedding_scale"] == pytest.approx(8.0)
    monkeypatch.setattr(deep, "scaled", LogitScaling(divisor=None, factor=None, cap=None))
    with pytest.raises(ValueError, match=r"final_logit_softcapping=2.0, and .* has 0.0"):
        read_head(tmp_path, deep)


def test_a_window_whose_masking_engines_take_by_their_own_defaults_is_refused(deep, tmp_path):
    config, weights, file = golden.make("speculators_dflash", deep)
    del config["sliding_window_non_causal"]
    read_head(golden.write(tmp_path, config, weights, file), deep)  # all of its layers see everything
    config["transformer_layer_config"].update(SLIDING)
    with pytest.raises(ValueError, match="no sliding_window_non_causal, whose default is true in vLLM and false"):
        read_head(golden.write(tmp_path, config, weights, file), deep)


def test_layers_named_in_vllms_place_too_are_compared(load):
    """Check files as nvidia's, which name them in both places: a contradiction is refused (test_refused_files.py)."""
    head, _ = load("zlab", lambda config: config.update({IDS: [2, 4, 6]}))
    assert head.layers == [2, 4, 6]


def test_an_embedding_of_the_mask_token_in_a_file_is_not_ignored(deep, tmp_path):
    golden.write(tmp_path, *golden.make("zlab", deep))
    (tmp_path / "mask_embedding.pt").write_bytes(b"never opened")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt next to it replaces the mask token's embedding"):
        read_head(tmp_path, deep)


# -- transformers, which drafts with the heads itself ------------------------------------------------------------------

FULL, WINDOW = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("types", "window"), [([FULL, FULL], 4), ([WINDOW, WINDOW], 5), ([WINDOW, FULL], 14), (None, 5)]
)
def test_transformers_proposes_the_same_drafts(deep, tmp_path, monkeypatch, types, window):
    config = MuseGlimmerAssistantConfig(
        hidden_size=golden.H,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=golden.HD,
        sliding_window=window,
        layer_types=types,
        block_size=4,
        mask_token_id=7,
        target_layer_ids=[1, 4],
    )
    torch.manual_seed(0)
    made = AutoModel.from_config(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    made.save_pretrained(tmp_path / "made")
    head = load_head(tmp_path / "made", deep)
    write_export("transformers", head, deep, tmp_path / "ours")
    file = tmp_path / "made" / "config.json"
    if types is None:  # transformers' default
        file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": None}))
        assert load_head(tmp_path / "made", deep).layer_types == head.layer_types

    proposed, usual = [], DFlashTokenCandidateGenerator.get_candidates

    def watched(generator, input_ids, *given, **named):
        candidates, logits = usual(generator, input_ids, *given, **named)
        if logits is not None:
            proposed.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", watched)
    model = AutoModelForCausalLM.from_pretrained(deep.checkpoint)
    ids = torch.tensor([prompt(9, 1)])
    for folder in ("made", "ours"):
        settings = {"assistant_model": AutoModel.from_pretrained(tmp_path / folder), "speculation_type": "dflash"}
        theirs = model.generate(ids, **settings, max_new_tokens=24, do_sample=False, eos_token_id=-1)
    assert proposed[: len(proposed) // 2] == proposed[len(proposed) // 2 :]

    engine = Engine(deep, drafter_for(head, deep, tree="fixed", width=1))
    engine.add(Request(ids[0].tolist(), max_new_tokens=24, trace=1))
    text, drafts = [], []
    while engine.has_work:
        for output in engine.step():
            text += output.tokens
            drafts += [output.trace.tokens[1:]] if text[1:] else []  # the prompt's own step drafts nothing
    assert theirs[0, ids.shape[1] :].tolist() == text
    count = len(proposed) // 2  # transformers drafts nothing for the last token
    assert count > 10 and drafts[:count] == proposed[:count] and len({tuple(step) for step in drafts}) > 5
