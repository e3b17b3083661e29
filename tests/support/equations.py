"""Parts of a decoder layer in plain loops, as papers write them, to hold our layers against."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turn(x: Tensor, position: int, theta: float = 5000.0) -> Tensor:
    """Rotate one vector (dim,) by its position."""
    half = len(x) // 2
    angles = torch.tensor([position * theta ** (-2 * i / len(x)) for i in range(half)])
    left, right = x[:half], x[half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()])


def attention(q: Tensor, k: Tensor, v: Tensor, own: list[int], places: list[int], sees) -> Tensor:
    """Return attention (n, heads * dim) of queries (n, heads, dim) at positions `own` over keys and values (m, kv heads,
    dim) at `places`; sees(j, p): may query j see key p?"""
    groups, rows = q.shape[1] // k.shape[1], []
    for j, own_place in enumerate(own):
        out = []
        for h in range(q.shape[1]):
            seen = [p for p in range(len(places)) if sees(j, p)]
            turned = turn(q[j, h], own_place)
            scores = [turned @ turn(k[p, h // groups], places[p]) / q.shape[2] ** 0.5 for p in seen]
            out.append(torch.stack(scores).softmax(0) @ torch.stack([v[p, h // groups] for p in seen]))
        rows.append(torch.cat(out))
    return torch.stack(rows)


def mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return ffn(rms(x, w[name + "post_attention_layernorm.weight"]), w, name)


def ffn(inner: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gated = F.silu(inner @ w[name + "mlp.gate_proj.weight"].T) * (inner @ w[name + "mlp.up_proj.weight"].T)
    return gated @ w[name + "mlp.down_proj.weight"].T
