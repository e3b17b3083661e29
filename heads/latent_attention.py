"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) of EAGLE-3 heads for such targets.

Keys and values are projected from one small vector per token. Only a part of each query and key is rotated, in pairs of
neighboring dimensions, and the rotated part of the key is the same for all heads. The cache contains keys and values
themselves, so trees and training steps treat this layer like any other.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads.layers import Attention, Projected, RMSNorm, rotate


class LatentAttention(Attention):
    """Implement the interface of `Attention` with DeepSeek's projections and names."""

    def __init__(self, config: LlamaConfig, width: int):
        nn.Module.__init__(self)
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.dim = self.nope_dim + self.rope_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.low_rank = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rope_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value_dim, config.hidden_size, bias=False)
        self.score_scale = score_scale(config.rope_parameters)

    @property
    def input_layers(self) -> list[nn.Linear]:
        return [self.q_a_proj if self.low_rank else self.q_proj, self.kv_a_proj_with_mqa]

    def split_heads(self, products: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """Return as many keys as queries. Values are padded with zeros to the width of the keys."""
        of_q = self.input_layers[0].out_features
        q, latent, k_rope = products.split([of_q, self.rank, self.rope_dim], dim=-1)
        if self.low_rank:
            q = self.q_b_proj(self.q_a_layernorm(q))
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q, kv = (states.unflatten(-1, (self.heads, -1)).transpose(1, 2) for states in (q, kv))
        q, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        k, v = kv.split([self.nope_dim, self.value_dim], dim=-1)
        q_rope, k_rope = rotate_pairs(q_rope, cos, sin), rotate_pairs(k_rope[:, None], cos, sin)
        q = torch.cat([q, q_rope], dim=-1) * self.score_scale
        k = torch.cat([k, k_rope.expand(-1, self.heads, -1, -1)], dim=-1)
        return Projected(q, k, F.pad(v, (0, self.dim - self.value_dim)))

    def project_out(self, out: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().project_out(out[..., : self.value_dim], gate)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply `rotate` to pairs of dimensions: 0 and 1, 2 and 3, and so on. The result is reordered in halves, which does not
    change products of queries and keys."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def score_scale(rope: dict) -> float:
    """Return the factor of all scores that yarn's `mscale_all_dim` requires (DeepSeek-V3's code)."""
    factor, share = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    return (0.1 * share * math.log(factor) + 1) ** 2 if rope["rope_type"] == "yarn" and factor > 1 and share else 1.0
