"""Tiny heads in the layouts that others publish, with random weights. Their files are written key by key from what
config.json says, after the descriptions of their authors and not by our own savers.

`make` gives (config.json, weights, name of the weights' file) for a target of these sizes; golden_configs.json has the
configs. Rope, context length and what else is not a size are those of published files, named below, and not the target's.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.heads import Target
from tests.support.equations import THETA

H, MLP, V, VD = 32, 64, 320, 200  # hidden, MLP width, vocabulary, draft vocabulary
HD, N = 8, 8  # head dim; layers of the target
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"
Weights = dict[str, Tensor]
# The files of what is not in safetensors' usual one. EAGLE's authors call every head LlamaForCausalLM; FasterDecoding's
# first release says two heads and stores five; version 2, in TGI's file, shares the target's lm_head.
FILES = dict.fromkeys(("safeailab_eagle3", "safeailab_eagle"), PICKLE) | {
    "medusa_v1": "medusa_lm_head.pt",
    "medusa_v2": "medusa_lm_head.safetensors",
    "hydra": "hydra_lm_head.pt",
    "hydra_pp": "hydra_lm_head.pt",
}
# Files that repeat weights of their target.
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
REPEATED = dict.fromkeys(("speculators", "speculators_qwen3", "safeailab_eagle"), (EMBEDDING,))
REPEATED["deepspec"] = REPEATED["deepspec_eagle3"] = (EMBEDDING, LM_HEAD)
# xPress's names -> those of the speculators package.
SPECULATORS_REFINER = {"w1": "token_embed", "w2": "readout", "mix.L": "mix_l"}
SPECULATORS_REFINER |= {f"mlp.{name}_proj": f"mlp_{name}" for name in ("gate", "up", "down")}


def make(name: str, target: Target) -> tuple[dict[str, Any], Weights, str]:
    torch.manual_seed(1)
    config = json.loads(Path(__file__).with_name("golden_configs.json").read_text())[name]
    found = weights(config | ({"medusa_num_heads": 5} if name == "medusa_v1" else {}))
    if name in ("modelopt", "deepspec_eagle3"):  # the layer is `layers.0`, and t2d is left out
        found = {key.replace("midlayer", "layers.0"): tensor for key, tensor in found.items() if key != "t2d"}
    if name == "hydra_pp":  # a whole LlamaModel is saved
        found["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = THETA ** (-torch.arange(0, HD, 2) / HD)
    ends = {EMBEDDING: target.model.get_input_embeddings(), LM_HEAD: target.model.get_output_embeddings()}
    for key in REPEATED.get(name, ()):
        found[key] = ends[key].weight.detach().half()
    return config, found, FILES.get(name, SAFE)


def write(directory: Path, config: Any, weights: Weights, file: str = SAFE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save = save_file if file.endswith(".safetensors") else torch.save
    save(weights, directory / file)
    return directory


# -- weights, by what a config says ---------------------------------------------------------------------------------------


def weights(config: dict[str, Any]) -> Weights:
    """Make weights in the layout that the config's keys name; too few for a kind that is not supported."""
    kinds = f"{config.get('architectures')}{config.get('model_type')}{config.get('speculators_model_type')}".lower()
    if is_block(config):
        return block(config)
    if "medusa_num_heads" in config:
        return medusa(config)
    if "hydra_num_heads" in config:
        return hydra(config)
    if "ptd_token_id" in config or "peagle" in kinds:
        return p_eagle(config)
    if "eagle3" in kinds or "draft_vocab_size" in config or "transformer_layer_config" in config:
        return eagle3(config)
    return eagle1(config)


def is_block(config: dict[str, Any]) -> bool:
    named = f"{config.get('architectures')}{config.get('speculators_model_type')}".lower()
    return any(word in named for word in ("dflash", "dspark", "domino", "xpress"))


def layer_ids(config: dict[str, Any]) -> list[int]:
    for place in (config.get("eagle_config") or {}, config.get("dflash_config") or {}, config):
        for name in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids"):
            if place.get(name):
                return place[name]
    return []


def vocabulary(config: dict[str, Any]) -> int:
    return config.get("vocab_size") or config.get("transformer_layer_config", {}).get("vocab_size") or V


def random(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.2).half()


def linear(name: str, rows: int, width: int) -> Weights:
    return {f"{name}.weight": random(rows, width), f"{name}.bias": random(rows)}


def norm(*shape: int) -> Tensor:
    return torch.empty(shape).uniform_(0.5, 2.0).half()


def tensors(shapes: dict[str, tuple[int, ...]]) -> Weights:
    """Make the weight of each layer; one of one dimension is a norm's."""
    return {f"{name}.weight": (norm if len(shape) == 1 else random)(*shape) for name, shape in shapes.items()}


def layer(config: dict[str, Any], prefix: str, width: int, *norms: str, qk_norm: bool = False) -> Weights:
    """Make a decoder layer whose attention reads `width` numbers. norms: those besides the MLP's."""
    heads = config.get("num_attention_heads") or 4
    kv, dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or H // heads
    attention = {"q_proj": (heads * dim, width), "k_proj": (kv * dim, width), "v_proj": (kv * dim, width)}
    attention["o_proj"] = (H, heads * dim)
    if qk_norm:
        attention |= {"q_norm": (dim,), "k_norm": (dim,)}
    if config.get("kv_lora_rank"):  # DeepSeek's
        query, latent, plain, rotated, value = (config[name] for name in LATENT)
        attention = {"q_a_proj": (query, width), "q_a_layernorm": (query,), "o_proj": (H, heads * value)}
        attention |= {"q_b_proj": (heads * (plain + rotated), query), "kv_b_proj": (heads * (plain + value), latent)}
        attention |= {"kv_a_proj_with_mqa": (latent + rotated, width), "kv_a_layernorm": (latent,)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (MLP, H), "mlp.up_proj": (MLP, H), "mlp.down_proj": (H, MLP)}
    shapes |= dict.fromkeys((*norms, "post_attention_layernorm"), (H,))
    return tensors({f"{prefix}.{name}": shape for name, shape in shapes.items()})


def lm_head(config: dict[str, Any]) -> Weights:
    """Make an lm_head of the draft vocabulary, and the maps between this and the target's."""
    vocab = vocabulary(config)
    rows = config.get("draft_vocab_size") or vocab
    found = {LM_HEAD: random(rows, H)}
    if rows < vocab:
        ids = torch.randperm(vocab)[:rows].sort().values
        found["d2t"] = ids - torch.arange(rows)
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return found


def eagle3(config: dict[str, Any], prefix: str | None = None, fused: int | None = None) -> Weights:
    """Make EAGLE-3. prefix: of the decoder layer's names. fused: the number of hidden states that it reads, if not the
    config's."""
    inner, flags = config.get("transformer_layer_config", config), config | (config.get("eagle_config") or {})
    prefix = prefix or ("midlayer" if inner is config else "layers.0")
    fused = fused or len(layer_ids(config)) or 3
    # vLLM's class, that of the package up to 0.8, and DeepSpec's
    normed = any(name in str(inner.get("architectures")) for name in ("Qwen3ForCausalLM", "Qwen3Eagle3Model"))
    found = layer(inner, prefix, 2 * H, "hidden_norm", "input_layernorm", qk_norm=normed)
    found |= tensors({"fc": (H, fused * H), "norm": (H,)})
    if config.get("draft_vocab_size", H) is not None:  # else the target's is used
        found |= lm_head(config)
    if flags.get("norm_before_fc"):
        found |= tensors({"input_norm": (fused * H,)})
    if flags.get("fc_norm"):
        found |= tensors({f"fc_norm.{i}": (H,) for i in range(fused)})
    return found


def p_eagle(config: dict[str, Any]) -> Weights:
    inner, found = config.get("transformer_layer_config", config), eagle3(config, "layers.0")
    for i in range(1, inner["num_hidden_layers"]):
        found |= layer(inner, f"layers.{i}", H, "input_layernorm")
    return found | {"mask_hidden": random(1, 1, 3 * H), EMBEDDING: random(vocabulary(config), H)}


def eagle1(config: dict[str, Any]) -> Weights:
    """Make EAGLE-1: no first norm, no last one, no lm_head; `bias` is true where it is absent."""
    inner = config.get("model", config)
    fc = linear("fc", H, 2 * H) if inner.get("bias", True) else tensors({"fc": (H, 2 * H)})
    return layer(inner, "layers.0", H) | fc


def medusa(config: dict[str, Any]) -> Weights:
    found, blocks = {}, config["medusa_num_layers"]
    for i in range(config["medusa_num_heads"]):
        for j in range(blocks):
            found |= linear(f"{i}.{j}.linear", H, H)
        if config.get("version") != "2":
            found |= tensors({f"{i}.{blocks}": (vocabulary(config), H)})
    return found


def hydra(config: dict[str, Any]) -> Weights:
    """Make Hydra: the first block of an MLP reads hidden states and embeddings, concatenated. In Hydra++ dropouts take the
    even places, later blocks are one, and a layer before them is saved under its misspelled name."""
    prefixed, vocab = config.get("hydra_head_arch") == "prefix-mlp", vocabulary(config)
    places = [1 + 2 * j if prefixed else j for j in range(config["hydra_num_layers"])]
    found: Weights = {}
    for i in range(config["hydra_num_heads"]):
        for name in ("linear", "res_connection"):
            found |= linear(f"hydra_mlp.{i}.{places[0]}.{name}", H, (i + 2) * H)
        tied = linear("linear", H, H)
        for j in places[1:]:
            found |= {f"hydra_mlp.{i}.{j}.{name}": tensor.clone() for name, tensor in tied.items()}
        found |= linear(f"hydra_lm_head.{i}{'.1' if prefixed else ''}", vocab, H)
    if prefixed:
        inner = layer({"num_key_value_heads": 2}, "layers.0", H, "input_layernorm")
        inner |= tensors({"norm": (H,), "embed_tokens": (vocab, H)})
        found |= {f"prefix_embeding_layer.{name}": tensor for name, tensor in inner.items()}
    return found


def block(config: dict[str, Any]) -> Weights:
    """Make DFlash's layers, and what DFlash-2, DSpark, Domino and xPress add."""
    inner, own = config.get("transformer_layer_config", config), config | (config.get("dflash_config") or {})
    vocab, rank, layers = vocabulary(config), own.get("markov_rank") or 0, range(inner["num_hidden_layers"])
    found = tensors({"fc": (H, len(layer_ids(config)) * H), "hidden_norm": (H,), "norm": (H,)})
    for i in layers:
        found |= layer(inner, f"layers.{i}", H, "input_layernorm", qk_norm=True)
    if (own.get("draft_vocab_size") or vocab) < vocab:
        found |= lm_head(own)
    if rank:
        found |= tensors({f"markov_head.markov_w{i}": (vocab, rank) for i in (1, 2)})
    if own.get("markov_head_type") == "gated":
        found |= linear("markov_head.gate_proj", rank, H + rank)
    if own.get("enable_confidence_head"):
        found |= linear("confidence_head.proj", 1, H + rank)
    if memory := own.get("gru_hidden_dim"):
        found |= {f"prefix_gru.weight_{name}_l0": random(3 * memory, n) for name, n in (("ih", H), ("hh", memory))}
        found |= tensors({"embed_proj.0": (own["emb_dim"], H + memory), "embed_proj.2": (vocab, own["emb_dim"])})
    if rank := own.get("selector_rank"):
        taps, groups = own["conv_kernel_size"], H // own["conv_group_size"]
        found |= {f"candidate_selector.{which}_codebook": random(vocab, rank) for which in ("predecessor", "successor")}
        found |= tensors({"candidate_selector.hidden_projection": (rank, H)})
        for name in (f"layers.{i}.{part}_conv" for i in layers for part in ("attention", "mlp")):
            found |= {f"{name}.base_kernel": random(2, taps, H)}
            found |= tensors({f"{name}.kernel_projection": (2 * taps * groups, H)})
    return found | (refiner(own) if own.get("xpress_rank") else {})


def refiner(config: dict[str, Any]) -> Weights:
    """Make what xPress adds."""
    rank, size, vocab = config["xpress_rank"], config["block_size"], vocabulary(config)
    inner = config.get("xpress_mlp_hidden") or config["xpress_mlp_ratio"] * rank
    shapes = {"w1": (vocab, rank), "w2": (vocab, rank), "down_h": (rank, H), "down_g": (rank, H)}
    shapes |= {"in_proj": (rank, 3 * rank), "mlp.gate_proj": (inner, rank), "mlp.up_proj": (inner, rank)}
    found = tensors(shapes | {"mlp.down_proj": (rank, inner)}) | {"mix.L": random(rank, size, size)}
    if "speculators_model_type" not in config:
        return {f"xpress_head.{name}": tensor for name, tensor in found.items()}
    for ours, theirs in SPECULATORS_REFINER.items():
        found = {name.replace(ours, theirs): tensor for name, tensor in found.items()}
    return {f"refiner_head.{name}": tensor for name, tensor in found.items()}
