"""Tiny heads in the layouts that others publish, written key by key from their descriptions and not by our own savers.

Each function gives (config.json, weights, name of the weights' file) for a target of these sizes. Rope, context length and
what else is not a size are those of published files, named in each, and not the target's.
"""

from typing import Any

import torch
from torch import Tensor

H, MLP, V, VD = 32, 64, 320, 200  # hidden, MLP width, vocabulary, draft vocabulary
HEADS, KV, HD = 4, 2, 8  # query heads, key and value heads, head dim
N = 8  # layers of the target
Golden = tuple[dict[str, Any], dict[str, Tensor], str]
ROPE = 5000.0  # of the target, which Hydra++ heads take theirs from


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.randn(*shape) * 0.2).to(dtype)


def norm(width: int = H, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(width).uniform_(0.5, 2.0).to(dtype)


def llama(**more: Any) -> dict[str, Any]:
    """The one-layer Llama config of an EAGLE head, in the spelling of transformers 4."""
    facts = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "vocab_size": V,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    return facts | more


def layer(prefix: str, width: int) -> dict[str, Tensor]:
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


def vocabulary() -> dict[str, Tensor]:
    ids = torch.randperm(V)[:VD].sort().values
    return {"d2t": ids - torch.arange(VD), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)}


def eagle3(prefix: str, rows: int = VD) -> dict[str, Tensor]:
    norms = {f"{prefix}.hidden_norm.weight": norm(), f"{prefix}.input_layernorm.weight": norm()}
    whole = {"fc.weight": random(H, 3 * H), "norm.weight": norm(), "lm_head.weight": random(rows, H)}
    return layer(prefix, 2 * H) | norms | whole


def safeailab_eagle3() -> Golden:
    """The authors' own for Vicuna 13B: called LlamaForCausalLM, no rope, no layer ids, the target's 40 layers, a pickle."""
    config = llama(architectures=["LlamaForCausalLM"], draft_vocab_size=VD, num_hidden_layers=40)
    return config, eagle3("midlayer") | vocabulary(), "pytorch_model.bin"


def specforge() -> Golden:
    """For Qwen3-30B-A3B. Ids are outputs of decoder layers counted from 0; fc_norm and norm_output are 3.1's."""
    ids = {"eagle_aux_hidden_state_layer_ids": [1, N // 2 - 1, N - 4], "use_aux_hidden_state": True}
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VD, eagle_config=ids)
    config |= {"rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "max_window_layers": 48}
    config |= {"fc_norm": True, "norm_output": True}
    norms = {f"fc_norm.{i}.weight": norm() for i in range(3)}
    return config, eagle3("midlayer") | vocabulary() | norms, "model.safetensors"


def modelopt() -> Golden:
    """The layer is `layers.0`, and t2d is left out. Rope on a quarter of the dimensions, as in a head for Qwen3.5-9B."""
    options = {
        "eagle_aux_hidden_state_layer_ids": [1, N // 2 - 1, N - 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VD, eagle_config=options)
    rope = {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}
    config |= {"rope_parameters": rope, "partial_rotary_factor": 0.25, "max_position_embeddings": 262144}
    weights = eagle3("layers.0") | vocabulary()
    del weights["t2d"]
    return config, weights, "model.safetensors"


def speculators(embeddings: Tensor) -> Golden:
    """vLLM's, for GPT-OSS 20B: the layer's config apart, ids of hidden_states, embeddings along, one norm before fc."""
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": VD,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [2, N // 2, N - 3],
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": llama(
            architectures=["LlamaForCausalLM"], rope_theta=500000.0, max_position_embeddings=131072
        ),
    }
    more = {"embed_tokens.weight": embeddings.to(torch.float16), "input_norm.weight": norm(3 * H)}
    return config, eagle3("layers.0") | vocabulary() | more, "model.safetensors"


def safeailab_eagle(embeddings: Tensor) -> Golden:
    """`bias` is absent, which means true; no first norm, no last one, no lm_head; the target's embeddings; a pickle.
    That for Mixtral says model_type mixtral."""
    weights = {"embed_tokens.weight": embeddings.to(torch.float16), "fc.weight": random(H, 2 * H), "fc.bias": random(H)}
    config = llama(architectures=["LlamaForCausalLM"], model_type="mixtral", max_position_embeddings=4096)
    return config, weights | layer("layers.0", H), "pytorch_model.bin"


def vllm_eagle() -> Golden:
    config = llama(
        architectures=["EagleLlamaForCausalLM"], bias=False, rope_theta=10000.0, max_position_embeddings=4096
    )
    return config, {"fc.weight": random(H, 2 * H)} | layer("layers.0", H), "model.safetensors"


def medusa_weights(heads: int, blocks: int, projections: bool) -> dict[str, Tensor]:
    weights = {}
    for i in range(heads):
        for j in range(blocks):
            weights |= {f"{i}.{j}.linear.weight": random(H, H), f"{i}.{j}.linear.bias": random(H)}
        if projections:
            weights[f"{i}.{blocks}.weight"] = random(V, H)
    return weights


def medusa_v1() -> Golden:
    """FasterDecoding's first release says two heads and stores five."""
    config = {"base_model_name_or_path": "org/target", "medusa_num_heads": 2, "medusa_num_layers": 1}
    return config, medusa_weights(5, 1, projections=True), "medusa_lm_head.pt"


def medusa_v2() -> Golden:
    """Version 2 shares the target's lm_head; in TGI's file."""
    config = {"base_model_name_or_path": "t", "medusa_num_heads": 3, "medusa_num_layers": 2, "version": "2"}
    return config, medusa_weights(3, 2, projections=False), "medusa_lm_head.safetensors"


def wide_block(name: str, inputs: int) -> dict[str, Tensor]:
    """The first block of a Hydra MLP: it reads hidden states and embeddings side by side."""
    parts = {f"{name}.{part}": (random(H, inputs * H), random(H)) for part in ("linear", "res_connection")}
    return {f"{part}.{sort}": tensors[sort == "bias"] for part, tensors in parts.items() for sort in ("weight", "bias")}


def hydra() -> Golden:
    config = {
        "base_model_name_or_path": "org/target",
        "hydra_num_heads": 3,
        "hydra_num_layers": 2,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
    }
    weights = {}
    for i in range(3):
        weights |= wide_block(f"hydra_mlp.{i}.0", i + 2)
        weights |= {f"hydra_mlp.{i}.1.linear.weight": random(H, H), f"hydra_mlp.{i}.1.linear.bias": random(H)}
        weights |= {f"hydra_lm_head.{i}.weight": random(V, H), f"hydra_lm_head.{i}.bias": random(V)}
    return config, weights, "hydra_lm_head.pt"


def hydra_pp() -> Golden:
    """Dropouts take the even places; layers 3, 5 and 7 are one; a whole LlamaModel is saved, under its misspelt name."""
    config = hydra()[0] | {"hydra_head_arch": "prefix-mlp", "hydra_num_layers": 4}
    weights = {}
    for i in range(3):
        weights |= wide_block(f"hydra_mlp.{i}.1", i + 2)
        tied = random(H, H), random(H)
        for j in (3, 5, 7):
            weights |= {f"hydra_mlp.{i}.{j}.linear.weight": tied[0], f"hydra_mlp.{i}.{j}.linear.bias": tied[1]}
        weights |= {f"hydra_lm_head.{i}.1.weight": random(V, H), f"hydra_lm_head.{i}.1.bias": random(V)}
    prefix = layer("layers.0", H) | {"layers.0.input_layernorm.weight": norm(), "norm.weight": norm()}
    prefix |= {"embed_tokens.weight": random(V, H)}
    prefix["layers.0.self_attn.rotary_emb.inv_freq"] = ROPE ** (-torch.arange(0, HD, 2).float() / HD)
    return config, weights | {f"prefix_embeding_layer.{name}": t for name, t in prefix.items()}, "hydra_lm_head.pt"


# -- what these heads draft, computed without our head classes ------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def llama_layer(weights: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor, config: dict) -> Tensor:
    """One decoder layer, causally, of x (length, width) with positions from 0."""
    w = {name.removeprefix(f"{prefix}."): tensor for name, tensor in weights.items() if name.startswith(f"{prefix}.")}
    length, width = len(x), int(HD * config.get("partial_rotary_factor", 1))
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    angles = torch.outer(torch.arange(length).float(), theta ** (-torch.arange(0, width, 2).float() / width))
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def heads(name: str, count: int, turned: bool) -> Tensor:
        states = (x @ w[f"self_attn.{name}_proj.weight"].T).view(length, count, HD).transpose(0, 1)
        if turned:
            left, right = states[..., :width].chunk(2, dim=-1)
            rotated = states[..., :width] * cos + torch.cat([-right, left], -1) * sin
            states = torch.cat([rotated, states[..., width:]], -1)
        return states.repeat_interleave(HEADS // count, 0)

    q, k, v = heads("q", HEADS, True), heads("k", KV, True), heads("v", KV, False)
    scores = (q @ k.transpose(1, 2) / HD**0.5).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, HEADS * HD)
    hidden = residual + attended @ w["self_attn.o_proj.weight"].T
    inner = rms(hidden, w["post_attention_layernorm.weight"])
    gated = torch.nn.functional.silu(inner @ w["mlp.gate_proj.weight"].T) * (inner @ w["mlp.up_proj.weight"].T)
    return hidden + gated @ w["mlp.down_proj.weight"].T


def eagle3_drafts(
    config: dict, weights: dict[str, Tensor], states: list[Tensor], embedded: Tensor, chain: Tensor
) -> list[Tensor]:
    """Logits (draft vocabulary,) of each depth. states: the three fused hidden states (length, H); embedded: (length, H), of
    the token after each position; chain: (depths - 1, H), of the tokens drafted so far."""
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
    """The hidden states (H,) of each depth of EAGLE-1. last: the target's last hidden states (length, H), after its final
    norm; embedded, chain: as above."""
    w, drafts = {name: tensor.float() for name, tensor in weights.items()}, []
    for token in [*chain, None]:
        fused = torch.cat([embedded, last], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(H))
        drafts.append(llama_layer(w, "layers.0", fused, fused, config)[-1])
        if token is not None:
            last, embedded = torch.cat([last, drafts[-1][None]]), torch.cat([embedded, token[None]])
    return drafts


def hydra_draft(config: dict, weights: dict[str, Tensor], last: Tensor, behind: list[Tensor]) -> Tensor:
    """Logits of depth len(behind). last: the target's last hidden states (length, H); behind: the embeddings (H,) of the root
    and of the tokens drafted so far."""
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
