"""Parts of a decoder layer in plain loops, as papers write them, and whole heads, to hold ours against."""

import torch
import torch.nn.functional as F
from torch import Tensor

THETA, HEAD_DIM = 5000.0, 8  # of the tiny targets and their heads


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x: Tensor, position: int, theta: float = THETA) -> Tensor:
    """Rotate vectors (..., dim) by their position."""
    half = x.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)])
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: list[int],
    places: list[int],
    sees,
    theta: float = THETA,
    rotated: int | None = None,
) -> Tensor:
    """Return attention (n, heads * dim) of queries (n, heads, dim) at positions `own` over keys and values (m, kv heads,
    dim) at `places`; sees(j, p): may query j see key p? rotated: dimensions that positions rotate, None: all."""
    rotated = rotated or q.shape[2]

    def turned(x: Tensor, positions: list[int]) -> list[Tensor]:
        pairs = zip(x, positions, strict=True)
        return [torch.cat([turn(one[:, :rotated], place, theta), one[:, rotated:]], -1) for one, place in pairs]

    groups, rows = q.shape[1] // k.shape[1], []
    queries, keys = turned(q, own), turned(k, places)
    for j, query in enumerate(queries):
        out, seen = [], [p for p in range(len(places)) if sees(j, p)]
        for h in range(q.shape[1]):
            scores = [query[h] @ keys[p][h // groups] / q.shape[2] ** 0.5 for p in seen]
            out.append(torch.stack(scores).softmax(0) @ torch.stack([v[p, h // groups] for p in seen]))
        rows.append(torch.cat(out))
    return torch.stack(rows)


def mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return ffn(rms(x, w[name + "post_attention_layernorm.weight"]), w, name)


def ffn(inner: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gated = F.silu(inner @ w[name + "mlp.gate_proj.weight"].T) * (inner @ w[name + "mlp.up_proj.weight"].T)
    return gated @ w[name + "mlp.down_proj.weight"].T


# -- what heads in the layouts of golden.py draft, computed without our head classes ------------------------------


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
