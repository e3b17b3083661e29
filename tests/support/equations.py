"""Parts of a decoder layer in plain loops, as papers write them, to compare ours with."""

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
    q: Tensor, k: Tensor, v: Tensor, own: list[int], places: list[int], sees, theta=THETA, rotated: int | None = None
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
