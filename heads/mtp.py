"""FastMTP: one multi-token-prediction layer, applied again and again to its own output (arXiv:2509.18362).

Some targets ship such a layer (`mtp.*` in their files, which transformers does not read), trained for the first draft alone.
At slot p it reads the target's last hidden state of position p, after the final norm, beside the embedding of token p + 1,
both normed. Its output, normed again, goes through the target's lm_head, and is the hidden state for the next draft.

A new head starts from the target's layer, or, where it ships none, as EAGLE-1 does: it hands the hidden state on. Training
repeats the step on its own output, over the keys that drafting has (heads/eagle3.py); the paper lets every step look at keys
of its own step instead, which drafting lacks.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.base import PackedBatch, RecurrentHead, shift_right
from foredraft.heads.layers import MLP, Attention, RMSNorm, Rotary, rotate
from foredraft.heads.step_attention import at_start, attend_steps
from foredraft.heads.target import Target
from foredraft.heads.target.attention import attend
from foredraft.heads.target.cache import KVCache
from foredraft.heads.target.files import stored_tensors

PREFIX = "mtp."  # of its weights in a target's files
# Qwen3-Next and its successors store a norm's weight as its difference to 1.
FROM_ONE = ("qwen3_next", "qwen3_5")


class MTPAttention(Attention):
    """With norms on queries and keys, and with a gate on what was attended, where the target's layers have them."""

    def __init__(self, config: LlamaConfig, gated: bool, normed: bool):
        super().__init__(config, config.hidden_size)
        if gated:  # per head its query, then its gate
            self.q_proj = nn.Linear(config.hidden_size, 2 * self.heads * self.dim, bias=bool(config.attention_bias))
        if normed:
            self.q_norm, self.k_norm = (RMSNorm(self.dim, config.rms_norm_eps) for _ in range(2))
        self.gated, self.normed = gated, normed

    def read(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values as `project` gives them, and the gate (batch, heads, length, dim)."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for linear in self.inputs)
        q, gate = (q[:, ::2], q[:, 1::2]) if self.gated else (q, None)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v, gate

    @property
    def inputs(self) -> tuple[nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj

    def gate_out(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        return self.project_out(attended if gate is None else attended * gate.sigmoid())


class MTPLayer(nn.Module):
    def __init__(self, config: LlamaConfig, gated: bool, normed: bool):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = MTPAttention(config, gated, normed), MLP(config)

    def feed_forward(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MTPHead(RecurrentHead):
    """Weights are named as in the files of targets that ship such a layer: mtp.{fc, norm, pre_fc_norm_hidden,
    pre_fc_norm_embedding, layers.0.*}. The embedding and the lm_head are the target's and not saved."""

    kind, cache_layers = "mtp", 1
    disk_prefixes: ClassVar[dict[str, str]] = {
        "layer.": f"{PREFIX}layers.0.",
        **{name: PREFIX + name for name in ("fc.", "norm.", "pre_fc_norm_")},
    }
    target: Target

    def __init__(self, config: LlamaConfig, depth: int = 3, gated: bool = False, normed: bool = False):
        super().__init__()
        self.config, self.depth = config, depth
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(width, eps), RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = MTPLayer(config, gated, normed)
        self.norm = RMSNorm(width, eps)
        self.rotary = Rotary(config)

    @classmethod
    def for_target(cls, target: Target, depth: int = 3) -> "MTPHead":
        """A new head. depth: steps of training, each on the output of the one before. It starts from the layer that the
        target ships, and raises ValueError where that is none that is known here."""
        config = llama_config.config_like(target, "MTP")
        shipped = stored_tensors(target, PREFIX)
        if not shipped:
            head = cls(config, depth)
            head.init_like(target)
        else:
            config.attention_bias = "layers.0.self_attn.q_proj.bias" in shipped
            rows = shipped.get("layers.0.self_attn.q_proj.weight", torch.empty(0)).shape[0]
            gated = rows == 2 * config.num_attention_heads * config.head_dim
            head = cls(config, depth, gated, "layers.0.self_attn.q_norm.weight" in shipped)
            head.load_shipped(shipped, target)
        head.attach(target)
        return head.to(target.device)

    @torch.no_grad()
    def init_like(self, target: Target) -> None:
        """Hand the hidden state on as it is: the target's own guess of the token before is where it starts."""
        width = self.config.hidden_size
        probe = torch.arange(min(256, target.vocab_size), device=target.device)[None]
        last = target.forward(probe, layers=[target.num_layers], keep_logits=1).aux_hidden_states.float()
        llama_config.init_near_identity(self.layer.self_attn.o_proj, self.layer.mlp.down_proj)
        self.fc.weight[:, width:].copy_(torch.eye(width))
        for norm in (self.pre_fc_norm_hidden, self.norm):
            norm.weight.fill_(last.pow(2).mean().sqrt())

    def load_shipped(self, shipped: dict[str, Tensor], target: Target) -> None:
        """Start from the target's own layer, its tensors named without `mtp.`."""
        ours = self.state_dict()
        named = {name: shipped.get(name.replace("layer.", "layers.0.", 1)) for name in ours}
        known = {name.replace("layer.", "layers.0.", 1) for name in ours}
        wrong = [name for name, tensor in named.items() if tensor is None or tensor.shape != ours[name].shape]
        if wrong or shipped.keys() - known:
            other = sorted({name.replace("layer.", "layers.0.", 1) for name in wrong} | (shipped.keys() - known))
            raise ValueError(
                f"the MTP layer of {target.name} is none that is known here ({PREFIX}{other[0]}): a mixture of experts or "
                "another attention; head=eagle makes a layer of its own"
            )
        offset = norm_offset(target)
        self.load_state_dict(
            {name: t.float() + offset * ("norm" in name) for name, t in named.items() if t is not None}
        )

    def attach(self, target: Target) -> None:
        self.target, self.layers = target, [target.num_layers]

    @classmethod
    def from_config(cls, config: dict) -> "MTPHead":
        shape = llama_config.from_json(config)
        own = config["foredraft"]
        return cls(shape, own["depth"], gated=config["attn_output_gate"], normed=config["qk_norm"])

    def to_config(self) -> dict[str, Any]:
        attention = self.layer.self_attn
        facts = {"attn_output_gate": attention.gated, "qk_norm": attention.normed}
        return llama_config.to_json(self.config) | {"attention_bias": self.config.attention_bias} | facts

    def incompatibilities(self, target: Target) -> list[str]:
        return llama_config.incompatibilities(self.config, target)

    def differences(self, target: Target) -> list[str]:
        return llama_config.differences(self.config, target)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.target.logits(hidden)

    def fuse(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        both = self.pre_fc_norm_embedding(embeddings.to(self.dtype)), self.pre_fc_norm_hidden(hidden.to(self.dtype))
        return self.fc(torch.cat(both, dim=-1))

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        hidden, after = aux_hidden_states, embeddings.roll(-1, dims=1)
        cos, sin = self.rotary(text.positions, text.tokens.shape[1], self.dtype)
        attention, document_starts = self.layer.self_attn, text.document_starts()
        steps: list[tuple[Tensor, Tensor]] = []
        outs: list[Tensor] = []
        for _ in range(self.depth):
            fused = self.fuse(hidden, after)
            q, k, v, gate = attention.read(self.layer.input_layernorm(fused), cos, sin)
            steps.append(at_start(k, v, len(steps)))
            attended = attention.gate_out(attend_steps(q, steps, document_starts), gate)
            outs.append(self.norm(self.layer.feed_forward(fused, attended)))
            hidden = shift_right(outs[-1], 1)
        return outs

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        new = embeddings.shape[1]
        return self.draft_step(aux_hidden_states, embeddings, cache.columns(new), cache.causal_mask(new), cache)

    def draft_step(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        fused, attention = self.fuse(hidden, embeddings), self.layer.self_attn
        cos, sin = self.rotary(positions, cache.capacity, fused.dtype)
        q, k, v, gate = attention.read(self.layer.input_layernorm(fused), cos, sin)
        keys, values = cache.update(k, v, 0)
        attended = attend(q, keys, values, None if mask is None else mask[:, None])
        return self.norm(self.layer.feed_forward(fused, attention.gate_out(attended, gate)))


def norm_offset(target: Target) -> float:
    """What the target's files leave out of the weights of norms."""
    return 1.0 if target.config.model_type.startswith(FROM_ONE) else 0.0
