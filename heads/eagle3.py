"""EAGLE-3: one decoder layer that drafts on from its own output (arXiv:2503.01840), and the normed variant of EAGLE 3.1.

At label position p it takes the target's hidden states of position p, fused from three layers, and the embedding of token
p + 1, and drafts token p + 2. Deeper drafts use its own output instead of hidden states that the target has not computed yet.

Training repeats that ("training-time test", section 3.2): step i takes the output of step i - 1. Instead of shifting tokens,
teacher logits and masks left in every step, the hidden states move one place right, so embeddings, positions and teacher
logits stay in place. At step i a label position sees the text up to where its draft started, and the drafts since, each of
which lies one place further back:

    step 2, label position 4:   keys of step 0   1 1 1 . .     0 to 4 - 2, the text
                                keys of step 1   . . . 1 .     its draft's first step
                                keys of step 2   . . . . 1     itself
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.attention.step_attention import at_start, attend_steps
from foredraft.heads.base import PackedBatch, shift_right
from foredraft.heads.eagle import LayerHead
from foredraft.heads.latent_attention import LatentAttention
from foredraft.heads.layers import (
    Attention,
    DecoderLayer,
    NormedAttention,
    RMSNorm,
    Rotary,
    ScaledLinear,
    split_fused_projection,
)
from foredraft.heads.target_model import Target

SLIDING = "sliding_attention"  # the name of a layer with a window in config.json
WINDOWED = {"layer_types": [SLIDING], "use_sliding_window": True}  # Qwen3's config forgets a window without the flag
# Settings, here and on disk. The last one is whether it has its own embedding.
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "embed_requires_grad")


class MidLayer(DecoderLayer):
    """Attend over the concatenation of embedding and hidden state. The residual is only the hidden state."""

    norms: ClassVar[tuple[str, ...]] = ("hidden_norm", *DecoderLayer.norms)
    hidden_norm: RMSNorm

    def __init__(self, config: LlamaConfig, qk_norm: bool = False):
        kind = LatentAttention if config.kv_lora_rank else NormedAttention if qk_norm else Attention
        attention = kind(config, 2 * config.hidden_size)
        super().__init__(config, attention)

    def concat_inputs(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)

    def residual(self, hidden: Tensor, normed: bool) -> Tensor:
        """Return the tensor that the layer adds to."""
        return self.hidden_norm(hidden) if normed else hidden


class Eagle3Head(LayerHead):
    """Draft with one decoder layer over fused hidden states and the next token's embedding. Weights have the names of
    SafeAILab, vLLM and SGLang: fc, midlayer.*, norm, lm_head, d2t, t2d."""

    kind = "eagle3"
    disk_prefixes: ClassVar[dict[str, str]] = {"layer.": "midlayer."}
    layer: MidLayer

    def __init__(self, config: dict[str, Any]):
        """Build the modules of a config.json. qk_norm: norms on queries and keys, as in Qwen3's layers. sliding_window:
        positions that the layer looks back. Other settings only occur in heads of other programs: norm_before_fc (one norm
        over all fused hidden states), norm_before_residual, use_aux_hidden_state=False, with which the layer takes the
        target's last hidden state (nvidia/gpt-oss-120b-Eagle3-v2), and embed_requires_grad, its own embedding, which a head
        of another width than its target needs (target_hidden_size; yuhuili/EAGLE3-LLaMA3.3-Instruct-70B)."""
        super().__init__()
        self.config, self.layers = llama_config.from_json(config), list(config["eagle_aux_hidden_state_layer_ids"])
        self.depth = config.get("foredraft", {}).get("depth", 7)
        window = config["sliding_window"] if config.get("layer_types") == [SLIDING] else None
        self.window = check_window(window, self.depth)
        flags = self.flags = {name: bool(config.get(name, False)) for name in FLAGS}
        width, eps, count = self.config.hidden_size, self.config.rms_norm_eps, len(self.layers)
        size = self.target_hidden_size = config.get("target_hidden_size") or width
        flags["embed_requires_grad"] |= size != width
        takes_raw = not (flags["fc_norm"] or flags["norm_before_fc"])
        self.embed_tokens = nn.Embedding(self.config.vocab_size, width) if flags["embed_requires_grad"] else None
        self.fc = ScaledLinear(count * size, width, takes_raw) if config.get("use_aux_hidden_state", True) else None
        self.input_norm = RMSNorm(count * size, eps) if flags["norm_before_fc"] else None
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(count if flags["fc_norm"] else 0))
        self.layer = MidLayer(self.config, flags["qk_norm"])
        self.norm = RMSNorm(width, eps)
        drafts_from = self.prune_vocabulary(config.get("draft_vocab_size"), self.config.vocab_size)
        self.lm_head = nn.Linear(width, drafts_from, bias=False)
        self.rotary = Rotary(self.config)

    @classmethod
    def for_target(
        cls,
        target: Target,
        ttt_steps: int = 7,
        target_layer_ids: list[int] | None = None,
        draft_vocab_size: int | None = None,
        counts: Tensor | None = None,
        lm_head: str = "target",
        fc_norm: bool = False,
        norm_output: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
        rope: dict[str, Any] | None = None,
    ) -> "Eagle3Head":
        """Make a new head. target_layer_ids: None uses the three of the paper, the outputs of decoder layers 1, n // 2 - 1
        and n - 4, counted from 0. draft_vocab_size: needs `counts` (vocab,), how often each token occurs in the training
        text; None, or a size that is not below the target's, drafts from the whole vocabulary. lm_head: see
        `DraftHead.init_projections`. rope: see `llama_config.settings_like`.

        Initial weights come from the target: the rows of its lm_head, a last norm that gives them inputs of the usual size,
        and an fc whose columns undo the different sizes of the three layers' hidden states, for which the published layer
        has no norm."""
        layers = check_layers(target_layer_ids, default_aux_layer_ids(target.num_layers), target.num_layers)
        settings = llama_config.settings_like(target, rope) | {
            "eagle_aux_hidden_state_layer_ids": layers,
            "foredraft": {"depth": ttt_steps},
            "draft_vocab_size": draft_vocab_size,
            "fc_norm": fc_norm,
            "norm_output": norm_output,
            "qk_norm": qk_norm,
        }
        head = cls(settings if window is None else settings | WINDOWED | {"sliding_window": window})
        head.own_rope = rope is not None
        llama_config.init_like(head, target)
        head.init_projections(target, counts, lm_head)
        return head.to(target.device)

    @property
    def latent(self) -> bool:
        """Return whether the layer has multi-head latent attention."""
        return isinstance(self.layer.self_attn, LatentAttention)

    def to_config(self) -> dict:
        # vLLM supports other kinds of attention only in these two classes.
        qwen3 = self.flags["qk_norm"]
        other = "Eagle3DeepseekV2ForCausalLM" if self.latent else "Eagle3Qwen3ForCausalLM" if qwen3 else None
        return llama_config.to_json(self.config) | {
            "architectures": [other or "LlamaForCausalLMEagle3"],
            **({"model_type": "qwen3"} if qwen3 else {}),
            **({} if self.window is None else WINDOWED | {"sliding_window": self.window}),
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self.target_hidden_size,
            **self.flags,
            "use_aux_hidden_state": self.fc is not None,
            "eagle_aux_hidden_state_layer_ids": self.layers,
            "num_aux_hidden_states": len(self.layers),
        }

    def embed(self, tokens: Tensor, target: Target | None = None) -> Tensor:
        if self.embed_tokens is None:
            assert target is not None
            return super().embed(tokens, target)
        return self.embed_tokens(tokens.clamp(max=self.config.vocab_size - 1))  # the target may read more tokens

    def first_hidden(self, aux_hidden_states: Tensor) -> Tensor:
        if self.fc is None:
            return aux_hidden_states.to(self.dtype)
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if len(self.fc_norm):
            chunks = aux_hidden_states.chunk(len(self.layers), dim=-1)
            aux_hidden_states = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1
            )
        return self.fc(aux_hidden_states)

    def feed_back(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.flags["norm_output"] else out

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer.concat_inputs(embeddings.to(hidden.dtype), hidden)
        return x, self.layer.residual(hidden, self.flags["norm_before_residual"])

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        """Compute the products of attention with the embeddings, which stay in place, once for all steps."""
        hidden = self.first_hidden(aux_hidden_states)
        embeddings = embeddings if self.embed_tokens is None else self.embed(text.tokens)
        next_embeddings = embeddings.to(hidden.dtype).roll(-1, dims=1)
        cos, sin = self.rotary(text.positions, text.row_length, hidden.dtype)
        layer, attention = self.layer, self.layer.self_attn
        embed_qkv, weight = split_fused_projection(attention.input_layers, layer.input_layernorm(next_embeddings))
        document_starts, outs, window = text.document_starts(), [], self.training_window(text)
        steps: list[tuple[Tensor, Tensor]] = []
        for _ in range(self.depth):
            q, k, v, _ = attention.split_heads(embed_qkv + F.linear(layer.hidden_norm(hidden), weight), cos, sin)
            steps.append(at_start(k, v, len(steps), text))
            attended = attention.project_out(attend_steps(q, steps, document_starts, text.parts, window))
            outs.append(layer.feed_forward(layer.residual(hidden, self.flags["norm_before_residual"]), attended))
            hidden = shift_right(self.feed_back(outs[-1]), 1)
        return outs


def check_window(window: int | None, depth: int, key: str = "head.window") -> int | None:
    """Return the window of a head that drafts this deep. Raises ValueError, with the key, if it does not contain all steps
    of a draft and a token of the text."""
    if window is not None and (type(window) is not int or window <= depth):
        raise ValueError(f"{key}={window} must be a number of positions above {depth}, the depth of the drafts")
    return window


def default_aux_layer_ids(n: int) -> list[int]:
    """Return the three hidden states that EAGLE-3 takes of a target with n layers, low, middle and high, as distinct ids. If
    the target is too shallow for the paper's rule, they are spread evenly. Id n is avoided: engines differ on its norm."""
    rule = [2, n // 2, n - 3]
    return rule if 0 < rule[0] < rule[1] < rule[2] else sorted({max(1, n * quarter // 4) for quarter in (1, 2, 3)})


def check_layers(layers: list[int] | None, usual: list[int], last: int) -> list[int]:
    """Return hidden state ids for a new head, `usual` for None. Raises ValueError unless they ascend within 0 .. last."""
    layers = usual if layers is None else layers
    if sorted(set(layers)) != list(layers) or not layers or not all(0 <= k <= last for k in layers):
        raise ValueError(
            f"head.target_layer_ids={layers} must ascend within 0..{last}, the hidden states of this target"
        )
    return list(layers)
