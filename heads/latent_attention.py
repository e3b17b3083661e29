"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) of EAGLE-3 heads for such targets.

Keys and values come from one small vector per token, and only a part of each query and key is rotated, in pairs of
neighbouring dimensions, the rotated part of the key being the same for all heads. Cached are the keys and values themselves,
so that trees and training steps treat this layer as any other.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from heads.layers import Attention, RMSNorm, rotate


class LatentAttention(Attention):
    """The interface of `Attention`, with projections of its own, named as DeepSeek names them."""

    def __init__(self, config: LlamaConfig, width: int):
        nn.Module.__init__(self)
        self.heads, self.rank = config.num_attention_heads, config.kv_lora_rank
        self.plain, self.rotated, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.dim = self.plain + self.rotated
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.low_rank = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rotated, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, config.hidden_size, bias=False)
        self.sharpness = sharpness(config.rope_parameters)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, heads, length, dim) each, positions applied; values are padded with zeros."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank else self.q_proj(x)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rotated], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q, kv = (states.unflatten(-1, (self.heads, -1)).transpose(1, 2) for states in (q, kv))
        q, turned = q.split([self.plain, self.rotated], dim=-1)
        k, v = kv.split([self.plain, self.value], dim=-1)
        turned, shared = rotate_pairs(turned, cos, sin), rotate_pairs(shared[:, None], cos, sin)
        q = torch.cat([q, turned], dim=-1) * self.sharpness
        k = torch.cat([k, shared.expand(-1, self.heads, -1, -1)], dim=-1)
        return q, k, F.pad(v, (0, self.dim - self.value))

    def project_out(self, out: Tensor) -> Tensor:
        return super().project_out(out[..., : self.value])


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate`, where dimensions 0 and 1 turn together, 2 and 3, and so on. They come out halves apart, which no product of
    a query and a key sees."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def sharpness(rope: dict) -> float:
    """What yarn's `mscale_all_dim` multiplies all scores by (DeepSeek-V3's code)."""
    factor, share = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0.0)
    return (0.1 * share * math.log(factor) + 1) ** 2 if rope["rope_type"] == "yarn" and factor > 1 and share else 1.0
