"""Tiny heads in the layouts that others publish, written key by key from their descriptions and not by our own savers.

`make` gives (config.json, weights, name of the weights' file) for a target of these sizes; golden_configs.json has the
configs. Rope, context length and what else is not a size are those of published files, named below, and not the target's.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.heads import Target
from tests.support.equations import mlp, rms

H, MLP, V, VD = 32, 64, 320, 200  # hidden, MLP width, vocabulary, draft vocabulary
HEADS, KV, HD = 4, 2, 8  # query heads, key and value heads, head dim
N = 8  # layers of the target
LAYERS, RANK, GRU, EMB = 3, 6, 10, 5  # of block drafters
Weights = dict[str, Tensor]
Golden = tuple[dict[str, Any], Weights, str]
ROPE = 5000.0  # of the target, which Hydra++ heads take theirs from
SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.randn(*shape) * 0.2).to(dtype)


def norm(width: int = H, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(width).uniform_(0.5, 2.0).to(dtype)


def linear(name: str, rows: int, width: int) -> Weights:
    return {f"{name}.weight": random(rows, width), f"{name}.bias": random(rows)}


def layer(prefix: str, width: int) -> Weights:
    return {
        f"{prefix}.self_attn.q_proj.weight": random(HEADS * HD, width),
        f"{prefix}.self_attn.k_proj.weight": random(KV * HD, width),
        f"{prefix}.self_attn.v_proj.weight": random(KV * HD, width),
        f"{prefix}.self_attn.o_proj.weight": random(H, HEADS * HD),
        f"{prefix}.mlp.gate_proj.weight": random(MLP, H),
        f"{prefix}.mlp.up_proj.weight": random(MLP, H),
        f"{prefix}.mlp.down_proj.weight": random(H, MLP),
        f"{prefix}.post_attention_layernorm.weight": norm(),
    }


def eagle3(prefix: str) -> Weights:
    ids = torch.randperm(V)[:VD].sort().values
    pruned = {"d2t": ids - torch.arange(VD), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}
    norms = {f"{prefix}.hidden_norm.weight": norm(), f"{prefix}.input_layernorm.weight": norm()}
    whole = {"fc.weight": random(H, 3 * H), "norm.weight": norm(), "lm_head.weight": random(VD, H)}
    return layer(prefix, 2 * H) | norms | whole | pruned


def qk_norms(prefix: str) -> Weights:
    return {f"{prefix}.self_attn.{one}_norm.weight": norm(HD) for one in "qk"}


def embedding(target: Target) -> Weights:
    return {"embed_tokens.weight": target.model.get_input_embeddings().weight.detach().to(torch.float16)}


def lm_head(target: Target) -> Weights:
    return {"lm_head.weight": target.model.get_output_embeddings().weight.detach().to(torch.float16)}


def medusa(heads: int, blocks: int, projections: bool) -> Weights:
    weights: Weights = {}
    for i in range(heads):
        for j in range(blocks):
            weights |= linear(f"{i}.{j}.linear", H, H)
        if projections:
            weights[f"{i}.{blocks}.weight"] = random(V, H)
    return weights


def hydra(target: Target) -> Weights:
    """Make Hydra's weights: the first block of an MLP reads hidden states and embeddings, concatenated."""
    weights: Weights = {}
    for i in range(3):
        for part in ("linear", "res_connection"):
            weights |= linear(f"hydra_mlp.{i}.0.{part}", H, (i + 2) * H)
        weights |= linear(f"hydra_mlp.{i}.1.linear", H, H) | linear(f"hydra_lm_head.{i}", V, H)
    return weights


def hydra_pp(target: Target) -> Weights:
    """Make Hydra++'s weights: dropouts take the even places; layers 3, 5 and 7 are one; a whole LlamaModel is saved, under
    its misspelled name."""
    weights: Weights = {}
    for i in range(3):
        for part in ("linear", "res_connection"):
            weights |= linear(f"hydra_mlp.{i}.1.{part}", H, (i + 2) * H)
        tied = linear("linear", H, H)
        weights |= {f"hydra_mlp.{i}.{j}.{name}": tensor for j in (3, 5, 7) for name, tensor in tied.items()}
        weights |= linear(f"hydra_lm_head.{i}.1", V, H)
    prefix = layer("layers.0", H) | {"layers.0.input_layernorm.weight": norm(), "norm.weight": norm()}
    prefix |= {"embed_tokens.weight": random(V, H)}
    prefix["layers.0.self_attn.rotary_emb.inv_freq"] = ROPE ** (-torch.arange(0, HD, 2).float() / HD)
    return weights | {f"prefix_embeding_layer.{name}": t for name, t in prefix.items()}


def backbone(taps: int) -> Weights:
    """Make the backbone of a block drafter."""
    weights = {"fc.weight": random(H, taps * H), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for name in (f"layers.{i}" for i in range(LAYERS)):
        weights |= layer(name, H) | qk_norms(name) | {f"{name}.input_layernorm.weight": norm()}
    return weights


def markov() -> Weights:
    tables = {f"markov_head.markov_w{i}.weight": random(V, RANK) for i in (1, 2)}
    return tables | linear("confidence_head.proj", 1, H + RANK)


def domino() -> Weights:
    return {
        "prefix_gru.weight_ih_l0": random(3 * GRU, H),
        "prefix_gru.weight_hh_l0": random(3 * GRU, GRU),
        "embed_proj.0.weight": random(EMB, H + GRU),
        "embed_proj.2.weight": random(V, EMB),
    }


def dflash2() -> Weights:
    selector = "candidate_selector."
    weights = {f"{selector}{which}_codebook": random(V, RANK) for which in ("predecessor", "successor")}
    weights |= {f"{selector}hidden_projection.weight": random(RANK, H)}
    return weights | convolutions()


def convolutions() -> Weights:
    weights: Weights = {}
    for i, part in itertools.product(range(LAYERS), ("attention", "mlp")):
        name = f"layers.{i}.{part}_conv."
        weights |= {f"{name}base_kernel": random(2, 2, H), f"{name}kernel_projection.weight": random(4 * H // 8, H)}
    return weights


def refiner(prefix: str, names: dict[str, str]) -> Weights:
    """Make xPress's weights. names: the authors' names -> those of these files, if they differ."""
    shapes = {"w1": (V, RANK), "w2": (V, RANK), "down_h": (RANK, H), "down_g": (RANK, H), "in_proj": (RANK, 3 * RANK)}
    shapes |= {"mlp.gate_proj": (2 * RANK, RANK), "mlp.up_proj": (2 * RANK, RANK), "mlp.down_proj": (RANK, 2 * RANK)}
    weights = {f"{prefix}.{names.get(name, name)}.weight": random(*shape) for name, shape in shapes.items()}
    return weights | {f"{prefix}.{names.get('mix.L', 'mix.L')}": random(RANK, 4, 4)}


SPECULATORS_REFINER = {
    "w1": "token_embed",
    "w2": "readout",
    "mix.L": "mix_l",
    "mlp.gate_proj": "mlp_gate",
    "mlp.up_proj": "mlp_up",
    "mlp.down_proj": "mlp_down",
}


def p_eagle(target: Target) -> Weights:
    further = layer("layers.1", H) | {"layers.1.input_layernorm.weight": norm()}
    return eagle3("layers.0") | further | {"mask_hidden": random(1, 1, 3 * H), "embed_tokens.weight": random(V, H)}


def modelopt(target: Target) -> Weights:
    weights = eagle3("layers.0")
    del weights["t2d"]
    return weights


LAYOUTS: dict[str, tuple[Callable[[Target], Weights], str]] = {
    # The authors' own for Vicuna 13B: called LlamaForCausalLM, no rope, no layer ids, the target's 40 layers, a pickle.
    "safeailab_eagle3": (lambda target: eagle3("midlayer"), PICKLE),
    # For Qwen3-30B-A3B. Ids are outputs of decoder layers counted from 0; fc_norm and norm_output are 3.1's.
    "specforge": (lambda target: eagle3("midlayer") | {f"fc_norm.{i}.weight": norm() for i in range(3)}, SAFE),
    # The layer is `layers.0`, and t2d is left out. Rope on a quarter of the dimensions, as in a head for Qwen3.5-9B.
    "modelopt": (modelopt, SAFE),
    # vLLM's, for GPT-OSS 20B: the layer's config apart, ids of hidden_states, embeddings along, one norm before fc.
    "speculators": (lambda t: eagle3("layers.0") | embedding(t) | {"input_norm.weight": norm(3 * H)}, SAFE),
    # Layers of Qwen3's form: of vLLM's class for them, and of the speculators package up to 0.8.
    "vllm_qwen3": (lambda target: eagle3("midlayer") | qk_norms("midlayer"), SAFE),
    "speculators_qwen3": (lambda t: eagle3("layers.0") | qk_norms("layers.0") | embedding(t), SAFE),
    # `bias` is absent, which means true; no first norm, no last one, no lm_head; the target's embeddings; a pickle. That for
    # Mixtral says model_type mixtral.
    "safeailab_eagle": (lambda target: embedding(target) | linear("fc", H, 2 * H) | layer("layers.0", H), PICKLE),
    "vllm_eagle": (lambda target: {"fc.weight": random(H, 2 * H)} | layer("layers.0", H), SAFE),
    # FasterDecoding's first release says two heads and stores five.
    "medusa_v1": (lambda target: medusa(5, 1, projections=True), "medusa_lm_head.pt"),
    # Version 2 shares the target's lm_head; in TGI's file.
    "medusa_v2": (lambda target: medusa(3, 2, projections=False), "medusa_lm_head.safetensors"),
    "hydra": (hydra, "hydra_lm_head.pt"),
    "hydra_pp": (hydra_pp, "hydra_lm_head.pt"),
    # The newest: the block's size inside, sliding layers, its own class.
    "zlab": (lambda target: backbone(3), SAFE),
    "jetspec": (lambda target: backbone(1), SAFE),
    # The kind stands in the architecture and the settings alone.
    "zlab_dflash2": (lambda target: backbone(2) | dflash2(), SAFE),
    # Flat settings next to z-lab's.
    "vllm_xpress": (lambda target: backbone(2) | refiner("xpress_head", {}), SAFE),
    "speculators_xpress": (lambda target: backbone(2) | refiner("refiner_head", SPECULATORS_REFINER), SAFE),
    # Flat settings, and the target's embedding and lm_head along.
    "deepspec": (lambda target: backbone(2) | markov() | embedding(target) | lm_head(target), SAFE),
    # Its DFlash files: the architecture of DSpark with rank 0, anchor first.
    "deepspec_dflash": (lambda target: backbone(2), SAFE),
    "specforge_dspark": (lambda t: backbone(2) | markov() | linear("markov_head.gate_proj", RANK, H + RANK), SAFE),
    "specforge_domino": (lambda target: backbone(2) | domino(), SAFE),
    # Layer ids of hidden states; no flag.
    "speculators_dflash": (lambda target: backbone(2), SAFE),
    "speculators_dspark": (lambda target: backbone(2) | markov(), SAFE),
    # For vLLM; the mask token under the older of its names.
    "p_eagle": (p_eagle, SAFE),
    "speculators_p_eagle": (p_eagle, SAFE),
}


def make(name: str, target: Target) -> Golden:
    torch.manual_seed(1)
    weights, file = LAYOUTS[name]
    return json.loads(Path(__file__).with_name("golden_configs.json").read_text())[name], weights(target), file


def write(directory: Path, config: Any, weights: Weights, file: str = SAFE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save = save_file if file.endswith(".safetensors") else torch.save
    save(weights, directory / file)
    return directory


# -- what these heads draft, computed without our head classes ------------------------------------------------------------


def llama_layer(weights: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor, config: dict) -> Tensor:
    """Compute one causal decoder layer of x (length, width) with positions from 0."""
    w = {name.removeprefix(f"{prefix}."): tensor for name, tensor in weights.items() if name.startswith(f"{prefix}.")}
    length, width = len(x), int(HD * config.get("partial_rotary_factor", 1))
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    angles = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, width, 2).float() / width))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def heads(name: str, count: int, turned: bool) -> Tensor:
        states = (x @ w[f"self_attn.{name}_proj.weight"].T).view(length, count, HD).transpose(0, 1)
        if f"self_attn.{name}_norm.weight" in w:
            states = rms(states, w[f"self_attn.{name}_norm.weight"])
        if turned:
            left, right = states[..., :width].chunk(2, dim=-1)
            rotated = states[..., :width] * cos + torch.cat([-right, left], -1) * sin
            states = torch.cat([rotated, states[..., width:]], -1)
        return states.repeat_interleave(HEADS // count, 0)

    q, k, v = heads("q", HEADS, True), heads("k", KV, True), heads("v", KV, False)
    scores = (q @ k.transpose(1, 2) / HD**0.5).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, HEADS * HD)
    hidden = residual + attended @ w["self_attn.o_proj.weight"].T
    return hidden + mlp(hidden, w, "")


def eagle3_drafts(
    config: dict, weights: dict[str, Tensor], states: list[Tensor], embedded: Tensor, chain: Tensor
) -> list[Tensor]:
    """Return logits (draft vocabulary,) of each depth. states: the three fused hidden states (length, H); embedded:
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
        fused = torch.cat([embedded, last], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(H))
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
            x = x + torch.nn.functional.silu(w[f"{i}.{j}.linear.weight"] @ x + w[f"{i}.{j}.linear.bias"])
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
        last = llama_layer(inner, "layers.0", normed, last, {"rope_theta": ROPE})
        last, places, projection = rms(last, inner["norm.weight"]), (1, 3, 5, 7), f"hydra_lm_head.{i}.1"
    else:
        places, projection = (0, 1), f"hydra_lm_head.{i}"
    x = torch.cat([last[-1], *behind])
    for j in places:
        block = f"hydra_mlp.{i}.{j}"
        kept = x
        if j == places[0]:
            kept = w[f"{block}.res_connection.weight"] @ x + w[f"{block}.res_connection.bias"]
        x = kept + torch.nn.functional.silu(w[f"{block}.linear.weight"] @ x + w[f"{block}.linear.bias"])
    return w[f"{projection}.weight"] @ x + w[f"{projection}.bias"]
