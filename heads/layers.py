"""The few layers that heads share. Names of submodules are the names of the weights on disk, in every published format."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.attention import attend
from heads.cache import KVCache


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # mixed precision: norms keep float32
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x)), the identity at first (Medusa, arXiv:2401.10774, section 2.1.1)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Rotary:
    """Cosines and sines of rotary positions, by transformers' own rule for the config (llama3, yarn, linear ...).

    They are tabulated once: computing them anew costs as much as a small layer in every step of drafting. It is no
    module, so that no cast of a head to bfloat16 can reach the table (a well-known way to lose acceptance).
    """

    def __init__(self, config: LlamaConfig):
        self.rule, self.table = LlamaRotaryEmbedding(config), torch.empty(2, 0, 0)

    def __call__(self, positions: Tensor, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(batch, 1, length, head_dim) each, for positions (batch, length) all below `longest`."""
        if self.table.shape[1] < longest or self.table.device != positions.device:
            size = max(256, 1 << (longest - 1).bit_length())
            every = torch.arange(size, device=positions.device)[None]
            rule = self.rule.to(positions.device)
            with torch.autocast(positions.device.type, enabled=False):
                self.table = torch.cat(rule(torch.empty(1, device=positions.device), every))
        cos, sin = self.table[:, positions].to(dtype)
        return cos[:, None], sin[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 reads two vectors side by side)."""

    def __init__(self, config: LlamaConfig, width: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (batch, heads, length, dim), keys and values (batch, kv_heads, length, dim), positions applied."""
        batch, length, _ = x.shape
        both = torch.cat([self.q_proj(x), self.k_proj(x)], dim=-1).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k = rotate(both, cos, sin).split([self.heads, self.kv_heads], dim=1)
        return q, k, self.v_proj(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)

    def cached(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KVCache, layer: int) -> Tensor:
        """Attend over the cache and x (batch, length, width); mask (batch, length, keys) bool."""
        q, k, v = self.project(x, cos, sin)
        keys, values = cache.update(k, v, layer)
        return self.merge(attend(q, keys, values, mask[:, None]))

    def merge(self, out: Tensor) -> Tensor:
        """(batch, heads, length, dim) -> (batch, length, hidden)."""
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama layer. first_norm: EAGLE-1's has none."""

    def __init__(self, config: LlamaConfig, first_norm: bool = True):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm: nn.Module = RMSNorm(width, eps) if first_norm else nn.Identity()
        self.self_attn, self.mlp = Attention(config, width), MLP(config)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
