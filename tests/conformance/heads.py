"""A published head, its config.json shrunken, with random weights in its layout: is it recognized, and does it draft?"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.heads import Target, load_head
from foredraft.heads.base import DraftHead
from foredraft.inference import drafter_for, generate
from tests.conformance.checks import check_texts
from tests.conformance.shrink import CONTEXT, DROPPED, HIDDEN, VOCAB
from tests.support.golden import linear, random

MLP, DRAFT = 64, 100
IDS = "eagle_aux_hidden_state_layer_ids"
# Layers of targets, by a part of the head's name, where its ids do not tell.
DEPTHS = {"gpt-oss-120b": 36, "step-3.5-flash": 45}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LLAMA: dict[str, Any] = {  # what files that were not seen whole do not say
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
}


def check_head(published: dict[str, Any], new_tokens: int, name: str = "") -> DraftHead:
    """Raise ValueError if a user is refused. name: of the file, which may reveal what the file does not."""
    config = {name: value for name, value in published.items() if name not in DROPPED}
    config = shrink_head(filled(config, name.lower()) if published.get("_partial") else config)
    depth = next((layers for part, layers in DEPTHS.items() if part in name.lower()), None)
    target = a_target(layer_ids(config), depth)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        save_file(weights(config), Path(folder) / "model.safetensors")
        head = load_head(folder, target)
    prompt = torch.arange(3, 23)[None]
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": -1}
    drafted = generate(target, drafter_for(head, target), prompt, **settings)
    check_texts(drafted.new_tokens, generate(target, None, prompt, **settings).new_tokens, "drafted")
    if all(step.nodes == 1 for step in drafted.steps):
        raise RuntimeError("nothing was drafted")
    return head


def shrink_head(config: dict[str, Any]) -> dict[str, Any]:
    """Shrink a config for a target of width 32: sizes become small, unusual settings stay unusual."""
    for inner in ("transformer_layer_config", "model"):
        if isinstance(config.get(inner), dict):
            outer = {key: value for key, value in config.items() if key != inner}
            return shrink_head(outer | {"hidden_size": 1}) | {inner: shrink_head(config[inner])}
    attention = config.get("num_attention_heads") or 0
    wide = (config.get("head_dim") or 0) * attention not in (0, config.get("hidden_size"))
    uneven = attention > 0 and (config.get("hidden_size") or 0) % attention != 0
    few = (config.get("num_key_value_heads") or 1) < attention
    full = (config.get("draft_vocab_size") or 0) >= (config.get("vocab_size") or 100_000)  # of a file not seen whole
    small = {
        **LLAMA,
        **LATENT,
        "target_hidden_size": HIDDEN,
        "num_attention_heads": 7 if uneven else 4,
        "num_key_value_heads": (1 if uneven else 2) if few else 4,
        "head_dim": 16 if wide else 8,
        "draft_vocab_size": VOCAB if full else DRAFT,
    }
    shrunken = config | {key: value for key, value in small.items() if config.get(key) is not None}
    if "mask_token_id" in shrunken:
        shrunken["mask_token_id"] = VOCAB - 2
    own = shrunken.get("dflash_config")
    return shrunken | ({"dflash_config": shrink_head(own)} if own else {})


def filled(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Add the usual values in the place of what was not seen of a file. Kinds that one key identifies stay unchanged."""
    if "medusa_num_heads" in config:
        return config
    if is_block(config):
        config = config if "dflash_config" in config else {"mask_token_id": VOCAB - 2} | config
        inner = LLAMA | config.get("transformer_layer_config", {})
        return config | {"transformer_layer_config": inner} if "speculators_model_type" in config else LLAMA | config
    if "transformer_layer_config" in config or "speculators_config" in config:
        inner = LLAMA | (config.get("transformer_layer_config") or {})
        usual = {"speculators_model_type": "eagle3", "norm_before_residual": True, "draft_vocab_size": DRAFT}
        return usual | config | {"transformer_layer_config": inner}
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT} if "eagle3" in name else {}
    return LLAMA | eagle3 | config


def layer_ids(config: dict[str, Any]) -> list[int]:
    for place in (config.get("eagle_config") or {}, config.get("dflash_config") or {}, config):
        for name in (IDS, "target_layer_ids", "aux_hidden_state_layer_ids"):
            if place.get(name):
                return place[name]
    return []


def a_target(ids: list[int], depth: int | None) -> Target:
    """Make a Llama of this depth, or with the number of layers that the head's layer ids point to, in either of the two
    numberings of three ids."""
    sizes = range(max(ids, default=0) + 1, max(ids, default=0) + 8)
    usual = (n for n in sizes if ids in ([2, n // 2, n - 3], [1, n // 2 - 1, n - 4]))
    layers = depth or next(usual, max(8, max(ids, default=0) + 3))
    config = LlamaConfig(**LLAMA, num_hidden_layers=layers, max_position_embeddings=CONTEXT, initializer_range=0.1)
    return Target(LlamaForCausalLM(config), name=f"a Llama of {layers} layers")


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Make weights in the layout that the config's keys name; too few for a kind that is not supported."""
    kinds = f"{config.get('architectures')}{config.get('model_type')}{config.get('speculators_model_type')}".lower()
    if is_block(config):
        return block(config)
    if "medusa_num_heads" in config:
        return medusa(config)
    if "hydra_num_heads" in config:
        return hydra(config)
    if "eagle3" in kinds or "draft_vocab_size" in config or "transformer_layer_config" in config:
        return eagle3(config)
    return eagle1(config)


def layer(config: dict[str, Any], prefix: str, width: int) -> dict[str, Tensor]:
    heads = config.get("num_attention_heads") or LLAMA["num_attention_heads"]
    dim, kv = config.get("head_dim") or HIDDEN // heads, config.get("num_key_value_heads") or heads
    attention = {
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (kv * dim, width),
        "self_attn.v_proj": (kv * dim, width),
        "self_attn.o_proj": (HIDDEN, heads * dim),
    }
    shapes = latent_attention(config, width) if config.get("kv_lora_rank") else attention
    shapes |= {
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"{prefix}.{name}.weight": random(*shape) for name, shape in shapes.items()}


def latent_attention(config: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of DeepSeek's projections."""
    heads, (query, latent, plain, rotated, value) = config["num_attention_heads"], (config[name] for name in LATENT)
    return {
        "self_attn.q_a_proj": (query, width),
        "self_attn.q_a_layernorm": (query,),
        "self_attn.q_b_proj": (heads * (plain + rotated), query),
        "self_attn.kv_a_proj_with_mqa": (latent + rotated, width),
        "self_attn.kv_a_layernorm": (latent,),
        "self_attn.kv_b_proj": (heads * (plain + value), latent),
        "self_attn.o_proj": (HIDDEN, heads * value),
    }


def eagle3(config: dict[str, Any], prefix: str | None = None, fused: int | None = None) -> dict[str, Tensor]:
    """Make weights. prefix: of the decoder layer's names. fused: the number of hidden states that it takes; None: from the
    config."""
    prefix = prefix or ("layers.0" if "transformer_layer_config" in config else "midlayer")
    flags, rows = config | (config.get("eagle_config") or {}), config.get("draft_vocab_size") or VOCAB
    fused = fused or len(layer_ids(config)) or 3
    found = layer(config.get("transformer_layer_config", config), prefix, 2 * HIDDEN)
    found |= {f"{prefix}.{name}.weight": random(HIDDEN) for name in ("hidden_norm", "input_layernorm")}
    found |= {"fc.weight": random(HIDDEN, fused * HIDDEN), "norm.weight": random(HIDDEN)}
    if config.get("draft_vocab_size", rows) is not None:  # else the target's is used
        found["lm_head.weight"] = random(rows, HIDDEN)
    if rows < VOCAB:
        found["d2t"] = torch.arange(rows).div(20, rounding_mode="floor")
    if flags.get("norm_before_fc"):
        found["input_norm.weight"] = random(fused * HIDDEN)
    if flags.get("fc_norm"):
        found |= {f"fc_norm.{i}.weight": random(HIDDEN) for i in range(fused)}
    return found


def is_block(config: dict[str, Any]) -> bool:
    named = str(config.get("architectures")) + str(config.get("speculators_model_type"))
    return any(word in named.lower() for word in ("dflash", "dspark", "domino"))


def block(config: dict[str, Any]) -> dict[str, Tensor]:
    """Make DFlash's layers, and what DSpark and Domino add."""
    inner, own = config.get("transformer_layer_config", config), config | (config.get("dflash_config") or {})
    dim = inner.get("head_dim") or HIDDEN // inner["num_attention_heads"]
    found = {"fc.weight": random(HIDDEN, len(layer_ids(config)) * HIDDEN)}
    found |= {f"{name}.weight": random(HIDDEN) for name in ("hidden_norm", "norm")}
    for i in range(inner["num_hidden_layers"]):
        found |= layer(inner, f"layers.{i}", HIDDEN) | {f"layers.{i}.input_layernorm.weight": random(HIDDEN)}
        found |= {f"layers.{i}.self_attn.{name}.weight": random(dim) for name in ("q_norm", "k_norm")}
    rows = own.get("draft_vocab_size") or VOCAB
    if rows < VOCAB:
        found |= {"lm_head.weight": random(rows, HIDDEN), "d2t": torch.arange(rows).div(20, rounding_mode="floor")}
    rank = own.get("markov_rank") or 0
    if rank:
        found |= {f"markov_head.markov_w{i}.weight": random(VOCAB, rank) for i in (1, 2)}
    if own.get("enable_confidence_head"):
        found |= linear("confidence_head.proj", 1, HIDDEN + rank)
    if memory := own.get("gru_hidden_dim"):
        found |= {f"prefix_gru.weight_{name}_l0": random(3 * memory, n) for name, n in (("ih", HIDDEN), ("hh", memory))}
        found["embed_proj.0.weight"] = random(own["emb_dim"], HIDDEN + memory)
        found["embed_proj.2.weight"] = random(VOCAB, own["emb_dim"])
    return found


def eagle1(config: dict[str, Any]) -> dict[str, Tensor]:
    inner = config.get("model", config)
    found = layer(inner, "layers.0", HIDDEN) | {"fc.weight": random(HIDDEN, 2 * HIDDEN)}
    return found | ({"fc.bias": random(HIDDEN)} if inner.get("bias", True) else {})


def medusa(config: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    blocks = config["medusa_num_layers"]
    for i in range(config["medusa_num_heads"]):
        for j in range(blocks):
            found |= linear(f"{i}.{j}.linear", HIDDEN, HIDDEN)
        found[f"{i}.{blocks}.weight"] = random(VOCAB, HIDDEN)
    return found


def hydra(config: dict[str, Any]) -> dict[str, Tensor]:
    """Make Hydra++: dropouts take the even places of a stack, and its later layers are one."""
    found: dict[str, Tensor] = {}
    for i in range(config["hydra_num_heads"]):
        for name in ("linear", "res_connection"):
            found |= linear(f"hydra_mlp.{i}.1.{name}", HIDDEN, (i + 2) * HIDDEN)
        tied = linear("linear", HIDDEN, HIDDEN)
        for j in range(3, 2 * config["hydra_num_layers"], 2):
            found |= {f"hydra_mlp.{i}.{j}.{name}": tensor.clone() for name, tensor in tied.items()}
        found |= linear(f"hydra_lm_head.{i}.1", VOCAB, HIDDEN)
    if "prefix" in config.get("hydra_head_arch", ""):
        prefix = layer(LLAMA, "layers.0", HIDDEN) | {"layers.0.input_layernorm.weight": random(HIDDEN)}
        prefix |= {"norm.weight": random(HIDDEN), "embed_tokens.weight": random(VOCAB, HIDDEN)}
        found |= {f"prefix_embeding_layer.{name}": tensor for name, tensor in prefix.items()}
    return found
