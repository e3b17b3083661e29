"""Heads in every published layout draft as their authors intended, and are refused by name if they are incomplete."""

import json
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from foredraft import heads
from foredraft.heads import Target, load_head, save_head
from foredraft.heads.formats.base import HeadFiles
from foredraft.heads.formats.native import NativeFormat
from foredraft.train import parity_gate
from tests.support import golden
from tests.support.equations import HEAD_DIM, THETA, attention, mlp, rms
from tests.support.head_factory import same, write_export

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


EAGLE3 = (
    *("safeailab_eagle3", "specforge", "modelopt", "speculators", "vllm_qwen3", "speculators_qwen3"),
    "deepspec_eagle3",
)
MEDUSA = {"medusa_v1": 5, "medusa_v2": 3}
EAGLE = ("safeailab_eagle", "vllm_eagle")
HYDRA = ("hydra", "hydra_pp")
GOLDEN = (*EAGLE3, *EAGLE, *MEDUSA, *HYDRA)


# -- what these heads draft, computed without our classes -----------------------------------------------------------------


def llama_layer(weights: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor, config: dict) -> Tensor:
    """Compute one causal decoder layer of x (length, width) with positions from 0."""
    w = {name.removeprefix(f"{prefix}."): tensor for name, tensor in weights.items() if name.startswith(f"{prefix}.")}
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)

    def heads(name: str) -> Tensor:
        states = (x @ w[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM)
        normed = f"self_attn.{name}_norm.weight"
        return rms(states, w[normed]) if normed in w else states

    places, rotated = list(range(len(x))), int(HEAD_DIM * config.get("partial_rotary_factor", 1))
    attended = attention(*map(heads, "qkv"), places, places, lambda j, p: p <= j, theta, rotated)
    hidden = residual + attended @ w["self_attn.o_proj.weight"].T
    return hidden + mlp(hidden, w, "")


def eagle3_drafts(
    config: dict, weights: dict[str, Tensor], states: list[Tensor], embedded: Tensor, chain: Tensor
) -> list[Tensor]:
    """Return logits (draft vocabulary,) of each depth. states: the fused hidden states (length, H); embedded:
    (length, H), of the token after each position; chain: (depths - 1, H), of the tokens drafted so far."""
    w, prefix = {name: tensor.float() for name, tensor in weights.items()}, "midlayer"
    prefix = prefix if f"{prefix}.hidden_norm.weight" in w else "layers.0"
    layer = config.get("transformer_layer_config", config)
    if config.get("fc_norm"):
        states = [rms(state, w[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)]
    aux_hidden_states = torch.cat(states, -1)
    if config.get("norm_before_fc"):
        aux_hidden_states = rms(aux_hidden_states, w["input_norm.weight"])
    hidden, drafts = aux_hidden_states @ w["fc.weight"].T, []
    for token in [*chain, None]:
        normed = rms(hidden, w[f"{prefix}.hidden_norm.weight"])
        x = torch.cat([rms(embedded, w[f"{prefix}.input_layernorm.weight"]), normed], -1)
        out = llama_layer(w, prefix, x, normed if config.get("norm_before_residual") else hidden, layer)[-1:]
        last = rms(out, w["norm.weight"])
        drafts.append((last @ w["lm_head.weight"].T)[0])
        if token is not None:  # its hidden state stands in for features that the target has not made
            hidden = torch.cat([hidden, last if config.get("norm_output") else out])
            embedded = torch.cat([embedded, token[None]])
    return drafts


def eagle_drafts(
    config: dict, weights: dict[str, Tensor], last: Tensor, embedded: Tensor, chain: Tensor
) -> list[Tensor]:
    """Return hidden states (H,) of each depth of EAGLE-1. last: the target's last hidden states (length, H), after its
    final norm; embedded, chain: as above."""
    w, drafts = {name: tensor.float() for name, tensor in weights.items()}, []
    for token in [*chain, None]:
        fused = torch.cat([embedded, last], -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        drafts.append(llama_layer(w, "layers.0", fused, fused, config)[-1])
        if token is not None:
            last, embedded = torch.cat([last, drafts[-1][None]]), torch.cat([embedded, token[None]])
    return drafts


def medusa_drafts(config: dict, weights: dict[str, Tensor], last: Tensor, lm_head: Tensor) -> list[Tensor]:
    """Return logits (vocabulary,) of each depth. last: (H,), the newest hidden state."""
    w, blocks, found = {key: tensor.float() for key, tensor in weights.items()}, config.get("medusa_num_layers", 2), []
    while f"{len(found)}.0.linear.weight" in w:
        x, i = last, len(found)
        for j in range(blocks):
            x = x + F.silu(w[f"{i}.{j}.linear.weight"] @ x + w[f"{i}.{j}.linear.bias"])
        found.append(w.get(f"{i}.{blocks}.weight", lm_head) @ x)
    return found


def hydra_draft(config: dict, weights: dict[str, Tensor], last: Tensor, behind: list[Tensor]) -> Tensor:
    """Return logits of depth len(behind). last: the target's last hidden states (length, H); behind: the embeddings (H,) of
    the root and of the tokens drafted so far."""
    w = {name: tensor.float() for name, tensor in weights.items()}
    i = len(behind) - 1
    if config["hydra_head_arch"] == "prefix-mlp":
        inner = {name.removeprefix("prefix_embeding_layer."): t for name, t in w.items() if name.startswith("prefix")}
        normed = rms(last, inner["layers.0.input_layernorm.weight"])
        last = llama_layer(inner, "layers.0", normed, last, {"rope_theta": THETA})
        last, places, projection = rms(last, inner["norm.weight"]), (1, 3, 5, 7), f"hydra_lm_head.{i}.1"
    else:
        places, projection = (0, 1), f"hydra_lm_head.{i}"
    x = torch.cat([last[-1], *behind])
    for j in places:
        block = f"hydra_mlp.{i}.{j}"
        kept = x
        if j == places[0]:
            kept = w[f"{block}.res_connection.weight"] @ x + w[f"{block}.res_connection.bias"]
        x = kept + F.silu(w[f"{block}.linear.weight"] @ x + w[f"{block}.linear.bias"])
    return w[f"{projection}.weight"] @ x + w[f"{projection}.bias"]


# -- import ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def theirs(name: str, deep: Target, config: dict, weights: dict, root: int, chain: list[int]) -> list[Tensor]:
    """Return the logits of each depth as the layout's authors compute them."""
    last = states(deep, [golden.N])[0]
    if name in MEDUSA:
        return medusa_drafts(config, weights, last[-1], deep.model.get_output_embeddings().weight)
    if name in HYDRA:
        behind = list(deep.embed(torch.tensor([root, *chain[:-1]])))
        return [hydra_draft(config, weights, last, behind[:depth]) for depth in range(1, len(chain) + 1)]
    embedded, after = deep.embed(torch.tensor([*PROMPT[1:], root])), deep.embed(torch.tensor(chain[:-1]))
    if name in EAGLE:
        return [deep.logits(hidden) for hidden in eagle_drafts(config, weights, last, embedded, after)]
    outputs = config.get("target_layer_ids", [1, golden.N // 2 - 1, golden.N - 4])
    return eagle3_drafts(config, weights, states(deep, [k + 1 for k in outputs]), embedded, after)


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
    without = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": False}
    config |= {"fc_norm": False, "eagle_config": without}
    weights = {name: weight for name, weight in weights.items() if not name.startswith("fc")}
    chain, ours = drafted(golden.write(tmp_path / "a", config, weights, file), deep, 7, DEPTHS)
    config |= {"eagle_config": {}, "foredraft": {"layers": [golden.N]}}
    golden.write(tmp_path / "b", config, weights | {"fc.weight": torch.eye(golden.H)}, file)
    same_chain, same_logits = drafted(tmp_path / "b", deep, 7, DEPTHS)
    assert chain == same_chain
    torch.testing.assert_close(ours, same_logits)
    head = load_head(tmp_path / "a", deep)
    save_head(head, tmp_path / "c", deep)
    again = load_head(tmp_path / "c", deep)
    assert again.layers == [golden.N] and again.state_dict().keys() == head.state_dict().keys()
    head.on_train_begin(deep)
    assert parity_gate.check(head, deep, PROMPT) < 1e-3
    for engine in ("sglang", "speculators"):
        with pytest.raises(ValueError, match="use_aux_hidden_state=false"):
            write_export(engine, head, deep, tmp_path / "d")


def test_shards_are_read_as_one(deep, tmp_path):
    config, weights, _ = golden.make("specforge", deep)
    names = sorted(weights)
    golden.write(tmp_path / "whole", config, weights, "model.safetensors")
    golden.write(tmp_path, config, {name: weights[name] for name in names[:5]}, "part-1.safetensors")
    save_file({name: weights[name] for name in names[5:]}, tmp_path / "part-2.safetensors")
    parts = {name: f"part-{1 + (number >= 5)}.safetensors" for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert same(load_head(tmp_path, deep), load_head(tmp_path / "whole", deep))


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


@pytest.mark.parametrize("name", ["specforge", "safeailab_eagle3"])
def test_a_pointer_of_git_lfs_is_named(deep, tmp_path, name):
    config, weights, file = golden.make(name, deep)
    golden.write(tmp_path, config, weights, file)
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    with pytest.raises(ValueError, match=f"{file} is a pointer of Git LFS.*git lfs pull"):
        load_head(tmp_path, deep)


def test_a_zip_that_is_no_checkpoint_is_not_opened(deep, tmp_path, monkeypatch):
    golden.write(tmp_path, *golden.make("medusa_v1", deep))
    path = tmp_path / "medusa_lm_head.pt"
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name, content in [*members, ("archive/data/bomb", bytes(2**22))]:
            bomb.writestr(name, content)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match="has a compressed member"):
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


def test_a_head_that_was_added_is_imported_when_its_files_name_it(tmp_path, monkeypatch):
    (tmp_path / "added.py").write_text(
        "from foredraft.heads.base import DraftHead\n\nclass Added(DraftHead):\n    pass\n"
    )
    monkeypatch.setattr(heads, "__path__", [*heads.__path__, str(tmp_path)])
    files = HeadFiles({"foredraft": {"class": "foredraft.heads.added:Added"}}, {}, tmp_path, [])
    layout = NativeFormat.match(files)
    assert layout is not None and layout.kind.__name__ == "Added"


def test_a_head_in_a_module_of_the_user_is_imported_when_the_user_names_it(tmp_path, monkeypatch):
    (tmp_path / "users_head.py").write_text(
        "from foredraft.heads.base import DraftHead\n\nclass Users(DraftHead):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    files = HeadFiles({"foredraft": {"class": "users_head:Users"}}, {}, tmp_path, [])
    with pytest.raises(ValueError, match="import users_head first, or set FOREDRAFT_HEADS=users_head"):
        NativeFormat.match(files)
    monkeypatch.setenv("FOREDRAFT_HEADS", "user_head")
    with pytest.raises(ValueError, match=r"^FOREDRAFT_HEADS=user_head: No module named 'user_head'"):
        NativeFormat.match(files)
    monkeypatch.setenv("FOREDRAFT_HEADS", "json, users_head")
    layout = NativeFormat.match(files)
    assert layout is not None and layout.kind.__name__ == "Users"


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
