"""Hydra: head i takes the hidden state and the tokens drafted so far (arXiv:2402.05109, section 4); Hydra++ adds a layer.

A draft of depth d that started at position t is computed from

    cat(h[t], embedding of t + 1, ..., embedding of t + d)          (d + 1) * hidden wide

by a small MLP and a projection of that depth. These concatenated vectors are handed down a path of the tree, and a deeper
node appends its own embedding. Hydra++ (section 5) sends the text's hidden states through a decoder layer first.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.attention.step_attention import attend_steps
from foredraft.heads.base import PackedBatch, RecurrentHead, shift_right
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.layers import DecoderLayer, ResidualBlock, RMSNorm, Rotary
from foredraft.heads.target_model import Target

GROUNDED = {"grounded_heads": True, "hidden_state_offset": 0}  # the only kind that is supported


class WideBlock(nn.Module):
    """Compute res_connection(x) + SiLU(linear(x)), a ResidualBlock with a wider input. Initially it passes the hidden
    state, the first part of x, through."""

    def __init__(self, wide: int, width: int):
        super().__init__()
        self.linear, self.res_connection = nn.Linear(wide, width), nn.Linear(wide, width)
        for layer in (self.linear, self.res_connection):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.res_connection.weight.data[:, :width] = torch.eye(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """Apply a Llama model of one layer, with its names, to hidden states."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    @property
    def layer(self) -> DecoderLayer:
        return self.layers[0]  # type: ignore[return-value]

    def forward(self, hidden: Tensor, text: PackedBatch) -> Tensor:
        cos, sin = self.rotary(text.positions, text.row_length, hidden.dtype)
        attention = self.layer.self_attn
        q, k, v, _ = attention.project(self.layer.input_layernorm(hidden), cos, sin)
        attended = attend_steps(q, [text.whole_rows(k, v)], text.document_starts(), text.parts)
        return self.feed_forward(hidden, attention.project_out(attended))

    def extend(self, hidden: Tensor, cache: KVCache) -> Tensor:
        """Process new text after the text in the cache."""
        new, x = hidden.shape[1], self.layer.input_layernorm(hidden)
        cos, sin = self.rotary(cache.columns(new), cache.capacity, hidden.dtype)
        return self.feed_forward(
            hidden, self.layer.self_attn.attend_cached(x, cos, sin, cache.causal_mask(new), cache, layer=0)
        )

    def feed_forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return self.norm(self.layer.feed_forward(hidden, attended))


class HydraHead(RecurrentHead):
    """Draft from the hidden state and the embeddings of all tokens drafted so far. Weights have the names of zankner/Hydra:
    hydra_mlp, hydra_lm_head, prefix_embeding_layer (spelled so). Its code ties the deeper MLP layers of a Hydra++ head by
    accident and saves them once each; here they are separate layers."""

    kind, depth_key = "hydra", "num_heads"

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        arch, record = config["hydra_head_arch"], config["foredraft"]
        if arch not in ("mlp", "prefix-mlp") or not config["grounded_heads"] or config["hidden_state_offset"]:
            raise ValueError(
                f"a Hydra head with hydra_head_arch={arch}, grounded_heads={config['grounded_heads']} and "
                f"hidden_state_offset={config['hidden_state_offset']} is not supported, only grounded mlp and prefix-mlp "
                "heads on the last hidden state"
            )
        prefix = self.config = llama_config.from_json(record["prefix"]) if arch == "prefix-mlp" else None
        self.hidden, self.vocab_size, dropout = record["hidden_size"], record["vocab_size"], record.get("dropout", 0.0)
        self.depth = self.limit = depth = config["hydra_num_heads"]
        self.mlp_layers, self.dropout = config["hydra_num_layers"], dropout
        self.kind = "hydra" if prefix is None else "hydra_pp"
        self.cache_layers = 0 if prefix is None else 1
        hidden, drafts_from = self.hidden, self.prune_vocabulary(record.get("draft_vocab_size"), self.vocab_size)
        stacks: list[nn.Module] = []
        projections: list[nn.Module] = []
        for i in range(depth):
            blocks = [WideBlock((i + 2) * hidden, hidden), *(ResidualBlock(hidden) for _ in range(self.mlp_layers - 1))]
            projection = nn.Linear(hidden, drafts_from)
            nn.init.zeros_(projection.bias)
            if prefix is None:
                stacks.append(nn.Sequential(*blocks))
                projections.append(projection)
            else:  # the authors' code has a dropout before every layer, which counts in the names
                stacks.append(nn.Sequential(*(part for block in blocks for part in (nn.Dropout(dropout), block))))
                projections.append(nn.Sequential(nn.Dropout(dropout), projection))
        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(stacks), nn.ModuleList(projections)
        if prefix is not None:
            self.prefix_embeding_layer = PrefixLayer(prefix)

    @classmethod
    def for_target(
        cls,
        target: Target,
        num_heads: int = 4,
        mlp_layers: int = 1,
        prefix: bool = False,
        dropout: float = 0.0,
        draft_vocab_size: int | None = None,
        counts: Tensor | None = None,
        lm_head: str = "target",
    ) -> "HydraHead":
        """Make a new head whose first drafts are the target's own prediction: every MLP passes the hidden state through,
        and every projection is the target's lm_head. prefix: add Hydra++'s layer. dropout: only with prefix.
        draft_vocab_size, counts, lm_head: as in EAGLE-3."""
        record: dict[str, Any] = {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "dropout": dropout,
        }
        if prefix:
            record["prefix"] = llama_config.settings_like(target)
        settings = {
            "hydra_num_heads": num_heads,
            "hydra_num_layers": mlp_layers,
            "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
            "foredraft": record | {"draft_vocab_size": draft_vocab_size},
        }
        head = cls(settings | GROUNDED)
        head.attach(target)
        head.init_projections(target, counts, lm_head)
        for block in (part for part in head.hydra_mlp.modules() if isinstance(part, WideBlock)):
            block.res_connection.weight.data.mul_(target.scaled.multiplier)
        if prefix:
            llama_config.init_near_identity(head.prefix_embeding_layer.layer)
            with torch.no_grad():  # nearly the identity
                head.prefix_embeding_layer.norm.weight.copy_(
                    llama_config.probe(target, head.layers).pow(2).mean().sqrt()
                )
        return head.to(target.device)

    def set_dropout(self, chance: float) -> None:
        self.dropout = chance
        for module in (part for part in self.modules() if isinstance(part, nn.Dropout)):
            module.p = chance

    def attach(self, target: Target) -> None:
        self.layers = [target.num_layers]

    @property
    def projections(self) -> list[nn.Linear]:
        return [module for module in self.hydra_lm_head.modules() if isinstance(module, nn.Linear)]

    def to_config(self) -> dict:
        record: dict = {"hidden_size": self.hidden, "vocab_size": self.vocab_size, "dropout": self.dropout}
        if self.config is not None:
            record["prefix"] = llama_config.to_json(self.config)
        if self.draft_ids is not None:
            record["draft_vocab_size"] = len(self.draft_ids)
        return {
            "hydra_num_heads": self.depth,
            "hydra_num_layers": self.mlp_layers,
            "hydra_head_arch": "prefix-mlp" if self.cache_layers else "mlp",
            **GROUNDED,
            "foredraft": record,
        }

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.hydra_lm_head[depth - 1](self.hydra_mlp[depth - 1](hidden))

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        hidden, next_embeddings = aux_hidden_states.to(self.dtype), embeddings.to(self.dtype).roll(-1, dims=1)
        if self.cache_layers:
            hidden = self.prefix_embeding_layer(hidden, text)
        # Label position p of depth d: the hidden state of p + 1 - d, then the embeddings of p + 2 - d .. p + 1.
        return [
            torch.cat(
                [shift_right(hidden, i), *(shift_right(next_embeddings, back) for back in range(i, -1, -1))], dim=-1
            )
            for i in range(self.depth)
        ]

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        hidden = aux_hidden_states.to(self.dtype)
        if self.cache_layers:
            hidden = self.prefix_embeding_layer.extend(hidden, cache)
        return torch.cat([hidden, embeddings.to(self.dtype)], dim=-1)

    def draft_step(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        return torch.cat([hidden, embeddings.to(self.dtype)], dim=-1)
