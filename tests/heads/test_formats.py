"""Heads in every published layout draft as their authors intended, and are refused by name if they are incomplete."""

import copy
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.heads import Target, load_head, save_head
from foredraft.train import parity_gate
from tests.support import golden
from tests.support.exports import write_export

PROMPT = torch.randint(1, 300, (20,), generator=torch.Generator().manual_seed(3)).tolist()


def states(target: Target, layers: list[int]) -> list[Tensor]:
    """Return hidden states (length, H) of PROMPT, numbered as transformers does."""
    out = target.model(torch.tensor([PROMPT]), output_hidden_states=True)
    return [out.hidden_states[layer][0] for layer in layers]


DEPTHS = 3  # compared of a chain: from depth 2 on a head reads its own output


def drafted(directory: Path, target: Target, root: int, depth: int | None = None) -> tuple[list[int], list[Tensor]]:
    """Return the chain that the drafter of this directory proposes after PROMPT and root, and the logits of each depth."""
    head = load_head(directory, target, dtype=torch.float32)
    head.depth = depth or head.depth
    return parity_gate.drafted_logits(head, target, PROMPT, root)


EAGLE3 = ("safeailab_eagle3", "specforge", "modelopt", "speculators", "vllm_qwen3", "speculators_qwen3")
MEDUSA = {"medusa_v1": 5, "medusa_v2": 3}
EAGLE = ("safeailab_eagle", "vllm_eagle")
HYDRA = ("hydra", "hydra_pp")
GOLDEN = (*EAGLE3, *EAGLE, *MEDUSA, *HYDRA)


# -- import ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def theirs(name: str, deep: Target, config: dict, weights: dict, root: int, chain: list[int]) -> list[Tensor]:
    """Return the logits of each depth as the layout's authors compute them."""
    last = states(deep, [golden.N])[0]
    if name in MEDUSA:
        return golden.medusa_drafts(config, weights, last[-1], deep.model.get_output_embeddings().weight)
    if name in HYDRA:
        behind = list(deep.embed(torch.tensor([root, *chain[:-1]])))
        return [golden.hydra_draft(config, weights, last, behind[:depth]) for depth in range(1, len(chain) + 1)]
    embedded, after = deep.embed(torch.tensor([*PROMPT[1:], root])), deep.embed(torch.tensor(chain[:-1]))
    if name in EAGLE:
        return [deep.logits(hidden) for hidden in golden.eagle_drafts(config, weights, last, embedded, after)]
    return golden.eagle3_drafts(config, weights, states(deep, [2, golden.N // 2, golden.N - 3]), embedded, after)


@pytest.mark.parametrize("name", GOLDEN)
def test_heads_of_others_draft_as_their_layout_says(deep, tmp_path, name):
    config, weights, file = golden.make(name, deep)
    depth = MEDUSA.get(name, DEPTHS)  # the first of Medusa's says two in its config and stores five
    chain, ours = drafted(golden.write(tmp_path, config, weights, file), deep, 7, None if name in MEDUSA else DEPTHS)
    assert len(ours) == depth
    torch.testing.assert_close(ours, theirs(name, deep, config, weights, 7, chain[:depth]), atol=1e-4, rtol=1e-4)


def test_a_head_without_aux_hidden_states_takes_the_last_one_as_it_is(deep, tmp_path):
    """Check that drafts equal those with an fc that changes nothing, as in nvidia/gpt-oss-120b-Eagle3-v2."""
    config, weights, file = golden.make("specforge", deep)
    config |= {
        "fc_norm": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": False},
    }
    weights = {name: weight for name, weight in weights.items() if not name.startswith("fc")}
    chain, ours = drafted(golden.write(tmp_path / "a", config, weights, file), deep, 7, DEPTHS)
    fused = config | {"eagle_config": {}, "foredraft": {"layers": [golden.N]}}
    same = drafted(
        golden.write(tmp_path / "b", fused, weights | {"fc.weight": torch.eye(golden.H)}, file), deep, 7, DEPTHS
    )
    assert chain == same[0]
    torch.testing.assert_close(ours, same[1])
    head = load_head(tmp_path / "a", deep)
    save_head(head, tmp_path / "c", deep)
    again = load_head(tmp_path / "c", deep)
    assert again.layers == [golden.N] and again.state_dict().keys() == head.state_dict().keys()
    head.on_train_begin(deep)
    assert parity_gate.check(head, deep, PROMPT) < 1e-3
    for engine in ("sglang", "speculators"):
        with pytest.raises(ValueError, match=r"use_aux_hidden_state=false|SGLang fuses three layers"):
            write_export(engine, head, deep, tmp_path / "d")


def test_shards_are_read_as_one(deep, tmp_path):
    config, weights, _ = golden.make("specforge", deep)
    names = sorted(weights)
    golden.write(tmp_path / "whole", config, weights, "model.safetensors")
    golden.write(tmp_path, config, {name: weights[name] for name in names[:5]}, "part-1.safetensors")
    save_file({name: weights[name] for name in names[5:]}, tmp_path / "part-2.safetensors")
    parts = {name: f"part-{1 + (number >= 5)}.safetensors" for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    ours, whole = load_head(tmp_path, deep).state_dict(), load_head(tmp_path / "whole", deep).state_dict()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


# -- mutations: every one is refused, and its name is said ----------------------------------------------------------------

# What follows from other weights, or repeats some of the target's.
REPEATED = ("t2d", "embed_tokens.weight", "rotary_emb.inv_freq")


@pytest.mark.parametrize("name", GOLDEN)
def test_no_weight_may_be_missing_or_narrow_or_of_whole_numbers(deep, tmp_path, name):
    config, weights, file = golden.make(name, deep)
    for key, tensor in weights.items():
        if key.endswith(REPEATED):
            continue
        rest = {other: value for other, value in weights.items() if other != key}
        for changed, message in (
            (rest, rf"\b{re.escape(key)} is missing"),
            (rest | {key: tensor[:-1].clone()}, re.escape(key)),
            (rest | {key: tensor.to(torch.int8)}, f"{re.escape(key)} is torch.int8"),
        ):
            with pytest.raises(ValueError, match=message):
                load_head(golden.write(tmp_path, config, changed, file), deep)


Change = Callable[[dict, dict], Any]
Mutation = tuple[str, Change, str]


def extra(name: str) -> Mutation:
    return f"with {name}", lambda config, weights: weights.update({name: torch.ones(2)}), f"{name}"


def say(key: str, value: Any, message: str, inside: str | None = None, without: str = "") -> Mutation:
    """Set a config key to another value (None removes it)."""

    def change(config: dict, weights: dict) -> None:
        settings = config[inside] if inside else config
        settings.pop(without, None)
        if value is None:
            del settings[key]
        else:
            settings[key] = value

    return f"{inside or ''} {key}={value}", change, message


def store(name: str, tensor: Callable[[Tensor], Tensor], message: str) -> Mutation:
    return f"other {name}", lambda config, weights: weights.update({name: tensor(weights[name]).contiguous()}), message


def swapped(d2t: Tensor) -> Tensor:
    ids = d2t + torch.arange(len(d2t))
    ids[[3, 9]] = ids[[9, 3]]
    return ids - torch.arange(len(d2t))


def eagle3_mutations(layer: str, inside: str | None, pruned: bool = True) -> list[Mutation]:
    """Return mutations of any EAGLE-3 layout. inside: the section of the layer's settings."""
    return [
        extra(f"{layer}.self_attn.q_proj.bias"),
        extra("another.weight"),
        store("d2t", lambda d2t: d2t + golden.V, "d2t names target ids"),
        store("d2t", swapped, "d2t names target ids"),
        store("d2t", lambda d2t: d2t.int(), "d2t is torch.int32"),
        say("draft_vocab_size", golden.VD - 1, "lm_head.weight|d2t"),
        say("vocab_size", 2 * golden.V, "vocab_size: the head has 640, the target|t2d", inside),
        say(
            "rope_scaling",
            {"type": "proportional", "factor": 2.0},
            "a rope of type proportional",
            inside,
            without="rope_parameters",
        ),
        say("mlp_bias", True, "mlp_bias=True", inside),
        extra(f"{layer.replace('midlayer', 'layers.0').replace('.0', '.1')}.mlp.up_proj.weight"),
        say("hidden_act", "gelu", "hidden_act=gelu", inside),
        say("num_key_value_heads", 4, "self_attn.k_proj.weight", inside),
    ]


IDS = "eagle_aux_hidden_state_layer_ids"
T2D = store("t2d", lambda t2d: ~t2d, "t2d .* does not mark the tokens that d2t names")
EAGLE1 = [
    extra("layers.0.input_layernorm.weight"),
    extra("norm.weight"),
    extra("layers.1.mlp.up_proj.weight"),
    extra("another.weight"),
    say("hidden_size", 64, "fc.weight"),
    say("vocab_size", 640, "vocab_size: the head has 640, the target 320"),
    say("rope_scaling", {"type": "proportional", "alpha": 1000.0}, "a rope of type proportional"),
    say("rope_parameters", {"rope_type": "proportional", "factor": 2.0}, "a rope of type proportional"),
    say("mlp_bias", True, "mlp_bias=True"),
    say("quantization_config", {"bits": 4}, "quantization_config=.*is supported"),
    say("hidden_act", "gelu", "hidden_act=gelu"),
    say("num_key_value_heads", 4, "self_attn.k_proj.weight"),
]
HYDRAS = [
    extra("another.weight"),
    extra("hydra_mlp.3.0.linear.weight"),
    say("hydra_num_heads", 4, "hydra_mlp.3.*is missing"),
    say("hydra_num_heads", 2, "hydra_lm_head.2.*belongs to no layer"),
    say("hydra_num_layers", None, "has no 'hydra_num_layers'"),
    say("hydra_head_arch", "eagle-attn", "hydra_head_arch=eagle-attn"),
    say("hydra_head_arch", None, "has no 'hydra_head_arch'"),
    say("grounded_heads", False, "grounded_heads=False"),
    say("hidden_state_offset", 1, "hidden_state_offset=1"),
]
MUTATIONS: dict[str, list[Mutation]] = {
    "safeailab_eagle3": [
        *eagle3_mutations("midlayer", None),
        T2D,
        say(IDS, [2, 4, 9], r"takes hidden states \[2, 4, 9\]"),
        say(IDS, [4, 2, 5], "must ascend"),
        say(IDS, [2, 4], r"fc.weight is \(32, 96\) in the file, \(32, 64\)"),
    ],
    "specforge": [
        *eagle3_mutations("midlayer", None),
        T2D,
        say(IDS, [1, 3, 8], r"\[1, 3, 8\] may count outputs of layers from 0 or hidden_states", "eagle_config"),
        say(IDS, [3, 5, 9], r"\[3, 5, 9\] may count", "eagle_config"),
        say("return_normed", True, "return_normed=True, which is not supported", "eagle_config"),
        say(IDS, [1, 1, 4], "must ascend", "eagle_config"),
        say(IDS, [1, 3, 4], "do not name the same layers"),
        say("use_aux_hidden_state", False, "fc.weight belongs to no layer", "eagle_config"),
        say("fc_norm", False, "fc_norm.0.weight belongs to no layer"),
        say("norm_before_fc", True, "input_norm.weight is missing"),
    ],
    "modelopt": [
        *eagle3_mutations("layers.0", None),
        say("use_last_layernorm", False, "use_last_layernorm=False", "eagle_config"),
        say("use_mtp_layernorm", True, "use_mtp_layernorm=True", "eagle_config"),
        say("parallel_draft_step", 4, "parallel_draft_step=4", "eagle_config"),
    ],
    "speculators": [
        *eagle3_mutations("layers.0", "transformer_layer_config"),
        T2D,
        say("norm_before_residual", None, "norm_before_residual, whose default is true in vLLM"),
        say(
            "speculators_model_type",
            "peagle",
            "has no pard_token, the token at positions without text",
        ),
        say("speculators_model_type", "eagle9", "speculators_model_type=eagle9"),
        say(IDS, [2, 4, 9], r"takes hidden states \[2, 4, 9\]"),
        say("norm_before_fc", False, "input_norm.weight belongs to no layer"),
        say("model_type", "qwen3", "model_type=qwen3", "transformer_layer_config"),
        say("transformer_layer_config", None, "has no 'transformer_layer_config'"),
        store("embed_tokens.weight", lambda rows: rows + 1, "embed_tokens.weight differs from the embed_tokens of"),
    ],
    "vllm_qwen3": [*eagle3_mutations("midlayer", None), say("qk_norm", False, "q_norm.weight belongs to no layer")],
    "speculators_qwen3": [
        *eagle3_mutations("layers.0", "transformer_layer_config"),
        say("model_type", "llama", "model_type=llama; only qwen3", "transformer_layer_config"),
    ],
    "safeailab_eagle": [
        *EAGLE1,
        say("bias", False, "fc.bias belongs to no layer"),
        store("embed_tokens.weight", lambda rows: rows + 1, "embed_tokens.weight differs from the embed_tokens of"),
    ],
    "vllm_eagle": [*EAGLE1, extra("fc.bias"), say("bias", None, "fc.bias is missing")],
    "medusa_v1": [
        extra("5.0.linear.weight"),
        extra("0.2.weight"),
        extra("another.weight"),
        extra("medusa_head.0.1.weight"),
        say("medusa_num_heads", 6, "medusa_num_heads=6, but the weights are of 5"),
        say("medusa_num_layers", 2, "0.2.weight is missing"),
        say("medusa_num_layers", None, "has no 'medusa_num_layers'"),
        say("version", "2", "version 2, .* but 0.1.weight is stored"),
        say("version", "3", "version=3"),
        store("0.1.weight", lambda rows: rows[:, :16], r"0.1.weight is \(320, 16\)"),
    ],
    "medusa_v2": [
        extra("0.2.weight"),
        extra("another.weight"),
        say("medusa_num_heads", 4, "medusa_num_heads=4, but the weights are of 3"),
        say("medusa_num_layers", 1, "version 2|belongs to no layer|0.1"),
        say("version", None, "0.2.weight is missing"),
    ],
}
MUTATIONS["hydra"] = [
    *HYDRAS,
    extra("hydra_mlp.0.2.linear.weight"),
    say("hydra_num_layers", 3, "hydra_mlp.0.2.linear.bias is missing"),
]
MUTATIONS["hydra_pp"] = [
    *HYDRAS,
    extra("prefix_embedding_layer.norm.weight"),
    say("hydra_num_layers", 5, "hydra_mlp.0.9.linear.bias is missing"),
    store(
        "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq", lambda f: f / 2, "belongs to another rope than"
    ),
]
CASES = [(name, *mutation) for name in GOLDEN for mutation in MUTATIONS[name]]


@pytest.mark.parametrize(("name", "case", "change", "message"), CASES, ids=[f"{n}: {c}" for n, c, *_ in CASES])
def test_what_is_not_whole_is_refused_by_name(deep, tmp_path, name, case, change, message):
    config, weights, file = golden.make(name, deep)
    config, weights = copy.deepcopy(config), dict(weights)
    change(config, weights)
    with pytest.raises(ValueError, match=message):
        load_head(golden.write(tmp_path, config, weights, file), deep)


def test_a_shallow_target_needs_the_layers_said(target, tmp_path):
    with pytest.raises(ValueError, match="a target of 6 layers is too shallow for the paper's three"):
        load_head(golden.write(tmp_path, *golden.make("safeailab_eagle3", target)), target)


def test_what_is_no_head_is_refused(deep, tmp_path):
    with pytest.raises(ValueError, match="no head in a supported layout"):
        load_head(
            golden.write(tmp_path, {"architectures": ["BertModel"]}, {"x": torch.ones(2)}, "model.safetensors"), deep
        )


# -- files are data ---------------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.mark,))


def test_a_pickle_with_code_in_it_is_not_executed(deep, tmp_path):
    mark = tmp_path / "executed"
    config, weights, _ = golden.make("medusa_v1", deep)
    golden.write(tmp_path, config, weights | {"0.0.linear.weight": Evil(mark)}, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="contains more than tensors, and was not executed"):
        load_head(tmp_path, deep)
    assert not mark.exists()
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"x": Evil(mark)}))  # and as a bare pickle
    with pytest.raises(ValueError, match="is not a zip file"):
        load_head(tmp_path, deep)
    assert not mark.exists()


def repack(path: Path, change: Callable[[zipfile.ZipFile], None], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in members:
            new.writestr(name, content)
        change(new)


@pytest.mark.parametrize(
    ("change", "compression", "message"),
    [
        (lambda z: z.writestr("archive/data/bomb", bytes(2**22)), zipfile.ZIP_DEFLATED, "has a compressed member"),
        (lambda z: z.writestr("../../escaped", b"x"), zipfile.ZIP_STORED, "points outside"),
        (lambda z: z.writestr("/etc/escaped", b"x"), zipfile.ZIP_STORED, "points outside"),
    ],
    ids=["zip bomb", "..", "absolute"],
)
def test_a_zip_that_is_no_checkpoint_is_not_opened(deep, tmp_path, monkeypatch, change, compression, message):
    golden.write(tmp_path, *golden.make("medusa_v1", deep))
    repack(tmp_path / "medusa_lm_head.pt", change, compression)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, deep)


def test_members_that_overlap_are_a_bomb_too(deep, tmp_path, monkeypatch):
    """Use an uncompressed zip that is still larger than the file: the central directory names one member many times."""
    golden.write(tmp_path, *golden.make("medusa_v1", deep))
    whole = zipfile.ZipFile.infolist
    monkeypatch.setattr(zipfile.ZipFile, "infolist", lambda self: whole(self) * 1000)
    with pytest.raises(ValueError, match="would unpack"):
        load_head(tmp_path, deep)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/part.safetensors", "part.py"])
def test_an_index_cannot_point_out_of_its_directory(deep, tmp_path, name):
    config, weights, _ = golden.make("specforge", deep)
    golden.write(tmp_path / "head", config, {}, "other.safetensors")
    save_file(weights, tmp_path / "outside.safetensors")
    (tmp_path / "head" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(ValueError, match=r"must be a \.safetensors file in the same directory"):
        load_head(tmp_path / "head", deep)


@pytest.mark.parametrize("place", ["models--org--head/snapshots/abc", "cloned"])
def test_files_of_a_head_cannot_make_python_import_a_module(deep, tmp_path, place, monkeypatch):
    pulled = tmp_path / place
    golden.write(pulled, {"foredraft": {"class": "antigravity:geohash"}}, {"x": torch.ones(2)}, "model.safetensors")
    with pytest.raises(ValueError, match="antigravity:geohash, which is not imported"):
        load_head(pulled, deep)
    assert "antigravity" not in sys.modules
    mark = tmp_path / "executed"
    (pulled / "code_beside_a_head.py").write_text(f"open({str(mark)!r}, 'w')")
    monkeypatch.chdir(pulled)
    monkeypatch.syspath_prepend("")  # as Python has it that is started there
    golden.write(pulled, {"foredraft": {"class": "code_beside_a_head:Head"}}, {"x": torch.ones(2)}, "model.safetensors")
    with pytest.raises(ValueError, match="code_beside_a_head:Head, which is not imported"):
        load_head(pulled, deep)
    assert not mark.exists()
    golden.write(pulled, {"foredraft": {"class": "os:system"}}, {"x": torch.ones(2)}, "model.safetensors")
    with pytest.raises(ValueError, match="os:system, which is not imported, or not a DraftHead"):
        load_head(pulled, deep)


def test_configs_that_are_none_are_refused(deep, tmp_path):
    golden.write(tmp_path, *golden.make("specforge", deep))
    for text, message in (("[1, 2]", "contains no settings"), ("{", "is not JSON"), ("[" * 100_000, "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path, deep)
