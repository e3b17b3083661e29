"""Layers that heads share. Names of submodules are the names of weights on disk, in every published format."""

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from foredraft.heads.attention.masked import attend
from foredraft.heads.attention.text_attention import attend_document
from foredraft.heads.caches.kv_cache import KVCache


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype != weight.dtype:  # in mixed precision, norms stay in float32
            return F.rms_norm(x.float(), weight.shape, weight.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class ScaledLinear(nn.Linear):
    """Multiply hidden states of several layers, whose sizes differ. In the middle of a model they are often 50 times as
    large as after a norm, so an optimizer's steps on their weights would be 50 times too long.

    `sizes` (in_features,) float32 divide the weights in training and are saved in a checkpoint; None for the weights of a
    head's file. They are powers of two, so multiplying and dividing by them is exact. takes_raw: are they needed, because
    no norm comes before?"""

    sizes: Tensor | None

    def __init__(self, inputs: int, outputs: int, takes_raw: bool = True):
        super().__init__(inputs, outputs, bias=False)
        self.takes_raw = takes_raw
        self.register_buffer("sizes", None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.sizes is None else self.weight / self.sizes
        return F.linear(x.to(self.weight.dtype), weight)

    @torch.no_grad()
    def scale_inputs(self, sizes: Tensor | None) -> None:
        """Divide the weights by these sizes from now on; the products stay equal."""
        if self.sizes is not None:
            self.weight.div_(self.sizes)
        if sizes is not None:
            self.weight.mul_(sizes)
        self.sizes = sizes


def split_fused_projection(layers: Sequence[nn.Linear], x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the first halves of the layers' inputs, x (batch, length, width / 2), which are the same in many steps. Return
    their products with biases (batch, length, outputs of all layers) and the weights (outputs, width / 2) of the second."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    first, second = torch.cat(weights).chunk(2, dim=1)
    products = F.linear(x, first, torch.cat(biases) if biases else None)
    return products, second.to(products.dtype)  # autocast would cast it in every step and keep all the copies


class ResidualBlock(nn.Module):
    """Compute x + SiLU(linear(x)), initially the identity (Medusa, arXiv:2401.10774, section 2.1.1)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Rotary:
    """Return cosines and sines of rotary positions from transformers' implementation (llama3, yarn, linear ...). They are
    computed once and kept in a table: in every drafting step they would cost as much as a small layer. This is not a module,
    so a cast of the head to bfloat16 does not reach the table (a well-known way to lose acceptance)."""

    def __init__(self, config: LlamaConfig):
        self.config, self.table = config, torch.empty(2, 0, 0, device="cpu")

    @cached_property
    def rope(self) -> LlamaRotaryEmbedding:
        """Build the embedding at first use: a head that is only built to compare shapes needs none."""
        config, rope = self.config, self.config.rope_parameters
        if rope["rope_type"] == "default" and "partial_rotary_factor" in rope:  # transformers' Llama would ignore it
            config = copy.copy(config)
            config.head_dim = int(config.head_dim * rope["partial_rotary_factor"])
        return LlamaRotaryEmbedding(config)

    def __call__(self, positions: Tensor, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (batch, 1, length, head_dim) for positions (batch, length), all below `longest`."""
        if self.table.shape[1] < longest or self.table.device != positions.device:
            size = max(256, 1 << (longest - 1).bit_length())
            every = torch.arange(size, device=positions.device)[None]
            rope = self.rope.to(positions.device)
            with torch.autocast(positions.device.type, enabled=False):
                # longrope uses other factors for a text beyond its boundary. Here each position keeps its factors at any
                # length of the table, because keys in a cache are not rotated again.
                boundary = self.config.rope_parameters.get("original_max_position_embeddings", size)
                parts = [every[:, :boundary], every[:, boundary:]]
                one = torch.empty(1, device=positions.device)
                self.table = torch.cat([torch.cat(rope(one, part)) for part in parts if part.numel()], 1)
        cos, sin = self.table[:, positions].to(dtype)
        return cos[:, None], sin[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x (..., dim), as many as cos has. Partial rotary positions leave the others
    unchanged."""
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Projected(NamedTuple):
    """Hold queries (batch, heads, length, dim), keys and values (batch, kv_heads, length, dim) with positions applied."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None = None  # (batch, heads, length, dim), for the output of attention


class Attention(nn.Module):
    """Apply grouped-query attention whose input may be wider than its output (EAGLE-3 concatenates two vectors)."""

    def __init__(self, config: LlamaConfig, width: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=bias)

    @property
    def input_layers(self) -> list[nn.Linear]:
        """Return the layers that take the input."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        return self.split_heads(torch.cat([layer(x) for layer in self.input_layers], dim=-1), cos, sin)

    def split_heads(self, products: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """Split the concatenated outputs of `input_layers` (batch, length, products) into heads, as `project` does."""
        heads = products.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        both, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(both, cos, sin).split([self.heads, self.kv_heads], dim=1)
        return Projected(q, k, v)

    def attend_cached(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        layer: int,
        window: int | None = None,
    ) -> Tensor:
        """Attend from x (batch, length, width) to the cache and x. mask: (batch, length, keys) bool, None stands for
        `KVCache.causal_mask`, at most `window` positions back."""
        q, k, v, gate = self.project(x, cos, sin)
        keys, values = cache.update(k, v, layer)
        if mask is None:
            return self.project_out(attend_document(q, keys, values, window), gate)
        return self.project_out(attend(q, keys, values, mask[:, None]), gate)

    def project_out(self, out: Tensor, gate: Tensor | None = None) -> Tensor:
        """Project (batch, heads, length, dim) to (batch, length, hidden)."""
        out = out if gate is None else out * gate.sigmoid()
        return self.o_proj(out.transpose(1, 2).flatten(2))


class NormedAttention(Attention):
    """Add norms on queries and keys (Qwen3) and a gate on the output of attention (Qwen3-Next)."""

    def __init__(self, config: LlamaConfig, width: int, normed: bool = True, gated: bool = False):
        super().__init__(config, width)
        if gated:  # each head has its query, then its gate
            self.q_proj = nn.Linear(width, 2 * self.heads * self.dim, bias=bool(config.attention_bias))
        if normed:
            self.q_norm, self.k_norm = (RMSNorm(self.dim, config.rms_norm_eps) for _ in range(2))
        self.normed, self.gated = normed, gated

    def split_heads(self, products: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        heads = products.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        q, k, v = heads.split([heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], dim=1)
        q, gate = (q[:, ::2], q[:, 1::2]) if self.gated else (q, None)
        q, k = (self.q_norm(q), self.k_norm(k)) if self.normed else (q, k)
        return Projected(rotate(q, cos, sin), rotate(k, cos, sin), v, gate)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, without queries, of a layer with norms."""
        k, v = (layer(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(k), cos, sin), v


class MLP(nn.Module):
    """Apply a gated MLP. In training it keeps the outputs of its first two products, half of what autograd would keep, and
    recomputes the rest."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # a compiler chooses what it keeps
            return self.project_down(gate, up)
        return checkpoint(self.project_down, gate, up, use_reentrant=False, preserve_rng_state=False)

    def project_down(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Build a Llama layer. attention: None for Llama's own. first_norm: False for EAGLE-1."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    input_layernorm: nn.Module
    post_attention_layernorm: RMSNorm

    def __init__(self, config: LlamaConfig, attention: Attention | None = None, first_norm: bool = True):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn: Any = Attention(config, width) if attention is None else attention
        self.mlp = MLP(width, config.intermediate_size)
        for name in self.norms:
            self.add_module(name, RMSNorm(width, eps))
        if not first_norm:
            self.input_layernorm = nn.Identity()

    def feed_forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
