"""MTP layers: those that a target ships, against transformers' own; learned further; and stitched back into its files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

from foredraft.heads import Target, load_head, mtp
from foredraft.heads.checkpoint import save_head, write_head
from foredraft.heads.formats import engines
from foredraft.heads.mtp import MTPHead, without_weight
from foredraft.inference.drafters import drafter_for
from foredraft.train import parity_gate
from tests.support.architectures import HYBRIDS
from tests.support.batches import PROMPT
from tests.support.decoding import check_drafts
from tests.support.equations import attention, mlp, rms
from tests.support.head_factory import edit, make_head, write_export

CONFIG = HYBRIDS["qwen3_5"]
TEXT = [token % CONFIG.vocab_size for token in PROMPT[:18]]


def shipped() -> dict[str, Tensor]:
    """Make an MTP layer as in Qwen3.5's files: a full-attention layer, norms as differences from 1."""
    width = CONFIG.hidden_size
    layer = Qwen3_5DecoderLayer(CONFIG, layer_idx=1).state_dict()
    layer = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in layer.items()}
    own = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    own |= {f"mtp.{name}.weight": 0.2 * torch.randn(width) for name in norms}
    return own | {"mtp.fc.weight": 0.2 * torch.randn(width, 2 * width)}


@pytest.fixture(scope="module", params=["one file", "shards"])
def shipping(request, tmp_path_factory) -> Target:
    """Save a target whose files contain an MTP layer."""
    path = tmp_path_factory.mktemp("shipping")
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(CONFIG)
    model.save_pretrained(path, max_shard_size="5GB" if request.param == "one file" else "40KB")
    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 2) == (request.param == "shards")
    layer = shipped()
    save_file(load_file(files[-1]) | layer, files[-1], metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.exists():
        facts = json.loads(index.read_text())
        facts["weight_map"] |= dict.fromkeys(layer, files[-1].name)
        index.write_text(json.dumps(facts))
    return Target.from_pretrained(path, dtype="float32", device="cpu")


def from_one(x: Tensor, weight: Tensor) -> Tensor:
    return rms(x, 1 + weight)


@torch.no_grad()
def test_a_head_starts_from_the_layer_that_the_target_ships(shipping):
    head = MTPHead.for_target(shipping).eval()
    files = [load_file(file) for file in sorted(Path(shipping.name).glob("*.safetensors"))]
    w = {name: tensor for file in files for name, tensor in file.items() if name.startswith("mtp.")}
    tokens = torch.tensor([TEXT])
    last = shipping.forward(tokens[:, :-1], layers=[shipping.num_layers]).aux_hidden_states
    after = shipping.embed(tokens[:, 1:])
    both = from_one(after, w["mtp.pre_fc_norm_embedding.weight"]), from_one(last, w["mtp.pre_fc_norm_hidden.weight"])
    layer = Qwen3_5DecoderLayer(CONFIG, layer_idx=1).eval()
    layer.load_state_dict({name[13:]: tensor for name, tensor in w.items() if name.startswith("mtp.layers.0.")})
    places = torch.arange(len(TEXT) - 1)[None]
    rotary = Qwen3_5TextRotaryEmbedding(CONFIG)(last, places.expand(3, 1, -1))
    hidden = torch.cat(both, -1) @ w["mtp.fc.weight"].T
    mask = torch.full((len(TEXT) - 1,) * 2, -torch.inf).triu(1)[None, None]
    out = layer(hidden, position_embeddings=rotary, attention_mask=mask, position_ids=places)
    out = from_one(out[0] if isinstance(out, tuple) else out, w["mtp.norm.weight"])
    for cut in (5, len(TEXT) - 1):
        _, drafted = parity_gate.drafted_logits(head, shipping, TEXT[:cut], TEXT[cut])
        torch.testing.assert_close(drafted[0], shipping.logits(out)[0, cut - 1], atol=1e-4, rtol=1e-4)
    assert parity_gate.check(head, shipping, TEXT) < 1e-3
    as_it_is = load_head(shipping.name, shipping, dtype=torch.float32)  # the target's own directory is a head's too
    torch.testing.assert_close(as_it_is.state_dict(), head.state_dict())


@torch.no_grad()
@pytest.mark.parametrize(("normed", "window"), [(True, None), (False, None), (True, 4)])
def test_further_drafts_are_those_of_the_equations(target, normed, window):
    """Compute them without gate and norms, in loops: the text's entries, then the chain's, each on the output of the one
    before. normed: False for MiMo's layer, which reads the target's last hidden state, and its own, before their norms."""
    head = make_head("mtp", target)
    head.takes_unnormed, head.window = not normed, window
    assert parity_gate.check(head, target, PROMPT) < 1e-3
    w, a = head.state_dict(), 9
    chain, logits = parity_gate.drafted_logits(head, target, PROMPT[:a], PROMPT[a])
    unnormed: list[Tensor] = []
    hook = target.model.model.norm.register_forward_pre_hook(lambda _, args: unnormed.append(args[0][0]))
    normed_states = target.forward(torch.tensor([PROMPT[:a]]), layers=[target.num_layers]).aux_hidden_states[0]
    hook.remove()
    states = list(normed_states if normed else unnormed[0])
    fused: list[Tensor] = []
    for depth, tokens in enumerate([PROMPT[1 : a + 1], *([token] for token in chain[:-1])]):
        for number, token in enumerate(tokens):
            embedding = rms(target.embeddings[token], w["pre_fc_norm_embedding.weight"])
            state = rms(states[number if depth == 0 else -1], w["pre_fc_norm_hidden.weight"])
            fused.append(w["fc.weight"] @ torch.cat([embedding, state]))
        x = torch.stack(fused)
        inner = rms(x, w["layer.input_layernorm.weight"])
        q, k, v = ((inner @ w[f"layer.self_attn.{one}_proj.weight"].T).view(len(x), -1, 8) for one in "qkv")
        places = list(range(len(x)))
        seen = attention(q, k, v, places, places, lambda j, p: j - (window or j + 1) < p <= j)
        x = x + seen @ w["layer.self_attn.o_proj.weight"].T
        out = (x + mlp(x, w, "layer."))[-1]
        drafted = rms(out, w["norm.weight"])
        states.append(drafted if normed else out)
        torch.testing.assert_close(logits[depth], target.logits(drafted), atol=1e-3, rtol=1e-4)


def test_a_norm_with_a_weight_of_zero_is_undone_without_nan():
    assert without_weight(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 4.0])).tolist() == [0.0, 0.5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_of_a_target_with_its_own_layer_is_its_own(shipping, temperature):
    drafter = drafter_for(MTPHead.for_target(shipping), shipping)
    check_drafts(shipping, drafter, torch.tensor([TEXT]), max_new_tokens=20, temperature=temperature, seed=3)


def test_a_layer_is_stitched_back_into_its_targets_files(shipping, tmp_path):
    head = MTPHead.for_target(shipping).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_export("mtp", head, shipping, tmp_path)
    again = load_head(tmp_path, shipping, dtype=torch.float32)
    assert type(again) is MTPHead and again.depth == head.depth
    torch.testing.assert_close(again.state_dict(), head.state_dict())
    before, after = (
        {name: t for file in sorted(Path(path).glob("*.safetensors")) for name, t in load_file(file).items()}
        for path in (shipping.name, tmp_path)
    )
    assert before.keys() == after.keys()
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1  # others may read all or nothing
    inodes = {file.stat().st_ino for path in (shipping.name, tmp_path) for file in Path(path).glob("*.safetensors")}
    assert len(inodes) == 2 * len(list(tmp_path.glob("*.safetensors")))  # a change of the export is none of the target
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("mtp.") for name in changed)
    assert {f.name for f in Path(shipping.name).iterdir()} == {f.name for f in tmp_path.iterdir()}
    whole = Target.from_pretrained(tmp_path, dtype="float32", device="cpu")
    tokens = torch.tensor([TEXT])
    assert torch.equal(whole.forward(tokens).logits, shipping.forward(tokens).logits)
    torch.testing.assert_close(MTPHead.for_target(whole).state_dict(), head.state_dict())
    config, theirs = (json.loads((Path(path) / "config.json").read_text()) for path in (tmp_path, shipping.name))
    assert config["foredraft"]["depth"] == 3 and config["dtype"] == theirs.get("dtype", "float32")


def test_a_layer_with_a_window_keeps_it(shipping, monkeypatch, tmp_path):
    """Read EXAONE's, of whose layers vLLM and SGLang take the first one's type, and Mellum's, which has another rope."""
    facts = CONFIG.to_dict() | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    monkeypatch.setattr(shipping.config, "to_dict", lambda: facts)
    monkeypatch.setattr(shipping.config, "model_type", "exaone_moe")
    head = MTPHead.for_target(shipping)
    save_head(head, tmp_path, shipping)
    for read in (head, load_head(shipping.name, shipping), load_head(tmp_path, shipping)):
        assert read.window == 4
    monkeypatch.setattr(shipping.config, "model_type", "mellum")
    assert MTPHead.for_target(shipping).window is None
    facts |= {"mtp_layer_types": ["sliding_attention"], "rope_parameters": {"sliding_attention": {}}}
    for made in (MTPHead.for_target, lambda target: load_head(target.name, target)):
        with pytest.raises(ValueError, match=r"rope of its layers with a window.*head=eagle"):
            made(shipping)


def test_a_layer_of_another_kind_is_named(shipping, tmp_path, monkeypatch):
    experts = {name.removeprefix("mtp."): tensor for name, tensor in shipped().items()}
    experts["layers.0.mlp.experts.gate_up_proj"] = experts.pop("layers.0.mlp.gate_proj.weight")
    monkeypatch.setattr("foredraft.heads.mtp.stored_tensors", lambda target, prefix: experts)
    with pytest.raises(ValueError, match=r"the MTP layer of .*mtp\.layers\.0\.mlp\.experts.*head=eagle"):
        MTPHead.for_target(shipping)
    fp8 = {name.removeprefix("mtp."): tensor for name, tensor in shipped().items()}
    fp8["layers.0.mlp.gate_proj.weight_scale_inv"] = torch.ones(1, 1)
    monkeypatch.setattr("foredraft.heads.mtp.stored_tensors", lambda target, prefix: fp8)
    with pytest.raises(ValueError, match=r"gate_proj\.weight_scale_inv\): it is quantized, or has experts"):
        MTPHead.for_target(shipping)


@pytest.mark.parametrize("layout", ["mimo", "deepseek"])
def test_the_layer_of_other_targets_is_found_by_its_names(tiny_path, target, tmp_path, layout):
    torch.manual_seed(1)
    same = MTPHead.for_target(target)
    with torch.no_grad():
        for parameter in same.parameters():
            parameter.add_(torch.randn_like(parameter))
    names = mtp.MIMO if layout == "mimo" else mtp.DEEPSEEK
    theirs = {ours: their for their, ours in names.items()}
    prefix = "model.mtp_layers.0." if layout == "mimo" else f"model.layers.{target.num_layers}."
    layer = {}
    for name, tensor in same.state_dict().items():
        part = name.removesuffix(".weight")
        if part == "fc" and layout == "mimo":  # it takes the hidden state first
            tensor = torch.cat([tensor[:, target.hidden_size :], tensor[:, : target.hidden_size]], dim=1)
        layer[f"{prefix}{theirs[part]}.weight" if part in theirs else prefix + name.removeprefix("layer.")] = tensor
    if layout == "deepseek":
        layer[f"{prefix}embed_tokens.weight"] = target.embeddings.clone()
    else:  # biases as in Qwen2
        sizes = {name: len(layer[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkv"}
        layer |= {f"{prefix}self_attn.{name}_proj.bias": torch.randn(size) for name, size in sizes.items()}
    path = tmp_path / "target"
    shutil.copytree(tiny_path, path)
    save_file(load_file(path / "model.safetensors") | layer, path / "model.safetensors", metadata={"format": "pt"})
    shipping = Target.from_pretrained(path, dtype="float32", device="cpu")
    found = MTPHead.for_target(shipping)
    state = found.state_dict()
    biases = {name: state.pop(name) for name in [*state] if name.endswith(".bias")}
    torch.testing.assert_close(state, same.state_dict())
    assert found.takes_unnormed == bool(biases) == (layout == "mimo")
    assert {name for name, bias in biases.items() if bias.any()} == {
        name.replace(prefix, "layer.") for name in layer if name.endswith(".bias")
    }
    save_head(found, tmp_path / "saved", shipping)
    assert load_head(tmp_path / "saved", shipping).takes_unnormed == found.takes_unnormed
    with pytest.raises(ValueError, match=f"names its MTP layer {prefix[:14]}.*no engine would read"):
        write_head(
            same, tmp_path / "export", shipping, engines.export_for("mtp", same, shipping).layout, ("mtp.safetensors",)
        )


def test_a_layer_that_is_promised_and_missing_is_no_new_one(tiny_path, tmp_path):
    path = tmp_path / "target"
    shutil.copytree(tiny_path, path)
    edit(path, lambda config: config.update(num_nextn_predict_layers=1))
    missing = r"has num_nextn_predict_layers=1, but its files contain no MTP layer of a supported name \(mtp\., model"
    with pytest.raises(ValueError, match=missing):
        MTPHead.for_target(Target.from_pretrained(path, dtype="float32", device="cpu"))


def test_targets_without_files_take_no_layer_in(target, shipping):
    with pytest.raises(ValueError, match="vLLM does not read eagle3 heads in format=mtp: use format=vllm"):
        engines.export_for("mtp", make_head("eagle3", target), target)
