"""P-EAGLE: EAGLE-3 with several layers, which drafts all depths in one pass (arXiv:2602.01469).

The first layer is EAGLE-3's: it takes the target's fused hidden states of position p and the embedding of token p + 1. Its
output drafts token p + 2, after the further layers. A deeper draft has neither a token nor hidden states of the target. It
takes the embedding of a mask token and the learned `mask_hidden` instead, at the position of the missing ones.

    text 0 1 2 3 | draft that starts at 1 | at 3         x = visible
    depth 1 at 1   x x . . |              |              the text's own entry: EAGLE-3's first step
    depth 2 at 1   x x . . | x .          | . .
    depth 3 at 1   x x . . | x x          | . .

The head has its own trained embedding (section 5 of the paper: +5 % acceptance length).
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.attention.block_attention import Blocks, attend_blocks, intra_block_mask
from foredraft.heads.attention.step_attention import attend_steps
from foredraft.heads.base import BlockHead, PackedBatch
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.dflash import check_mask_token
from foredraft.heads.eagle3 import MidLayer, check_layers, default_aux_layer_ids
from foredraft.heads.layers import Attention, DecoderLayer, RMSNorm, Rotary, ScaledLinear
from foredraft.heads.target_model import Target


class PEagleHead(BlockHead):
    """Draft all depths in one pass with mask inputs. Weights have the names of vLLM and speculators: embed_tokens,
    mask_hidden, fc, layers.{i}.*, norm, lm_head, d2t, t2d."""

    kind, depth_key = "p_eagle", "num_depths"
    disk_prefixes: ClassVar[dict[str, str]] = {"blocks.": "layers."}
    config: LlamaConfig
    blocks: Any  # nn.ModuleList: MidLayer, then DecoderLayers

    def __init__(self, config: dict[str, Any]):
        """Build the modules of a config.json, in which norm_before_fc and norm_before_residual only occur in heads of other
        programs."""
        super().__init__()
        self.config, self.layers = llama_config.from_json(config), list(config["eagle_aux_hidden_state_layer_ids"])
        self.mask_token_id, self.depth = config["pard_token"], config["foredraft"]["depth"]
        self.norm_before_residual = bool(config.get("norm_before_residual", False))
        self.limit, self.block_entries = self.depth, self.depth - 1
        self.width, self.cache_layers = self.config.hidden_size, config["num_hidden_layers"]
        inputs, eps, vocab = len(self.layers) * self.width, self.config.rms_norm_eps, self.config.vocab_size
        normed = bool(config.get("norm_before_fc", False))
        self.embed_tokens = nn.Embedding(vocab, self.width)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, inputs))
        self.fc = ScaledLinear(inputs, self.width, takes_raw=not normed)
        self.input_norm = RMSNorm(inputs, eps) if normed else None
        further = (DecoderLayer(self.config) for _ in range(self.cache_layers - 1))
        self.blocks = nn.ModuleList([MidLayer(self.config), *further])
        self.norm = RMSNorm(self.width, eps)
        self.lm_head = nn.Linear(self.width, self.prune_vocabulary(config["draft_vocab_size"], vocab), bias=False)
        self.rotary = Rotary(self.config)

    @classmethod
    def for_target(
        cls,
        target: Target,
        num_depths: int = 8,
        num_hidden_layers: int = 4,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        draft_vocab_size: int | None = None,
        counts: Tensor | None = None,
        lm_head: str = "target",
    ) -> "PEagleHead":
        """Make a new head that is initialized from the target as EAGLE-3 is, with a copy of the target's embedding.
        num_depths: tokens drafted. num_hidden_layers: decoder layers of the head. target_layer_ids, draft_vocab_size,
        counts, lm_head: as in EAGLE-3. mask_token_id: None chooses a token that hardly occurs in text."""
        layers = check_layers(target_layer_ids, default_aux_layer_ids(target.num_layers), target.num_layers)
        if num_depths < 2 or num_hidden_layers < 1:
            raise ValueError(
                f"head.num_depths={num_depths} must be at least 2, head.num_hidden_layers={num_hidden_layers} at least 1"
            )
        mask = check_mask_token(target, mask_token_id)
        settings = llama_config.settings_like(target) | {
            "num_hidden_layers": num_hidden_layers,
            "eagle_aux_hidden_state_layer_ids": layers,
            "foredraft": {"depth": num_depths},
            "pard_token": mask,
            "draft_vocab_size": draft_vocab_size,
        }
        head = cls(settings)
        llama_config.init_like(head, target)
        with torch.no_grad():  # as large as the hidden states that it replaces
            head.mask_hidden.mul_(llama_config.aux_sizes(layers, target).to(head.device))
            head.embed_tokens.weight.copy_(target.embeddings)
        head.init_projections(target, counts, lm_head)
        return head.to(target.device)

    def to_config(self) -> dict:
        return llama_config.to_json(self.config) | {
            # vLLM's method eagle3 prepends Eagle3 to a name without it, and has no class for PeagleLlamaForCausalLM.
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": self.cache_layers,
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self.width,
            "pard_token": self.mask_token_id,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.input_norm is not None,
            "eagle_aux_hidden_state_layer_ids": self.layers,
        }

    def embed(self, tokens: Tensor, target: Target | None = None) -> Tensor:
        beyond = tokens >= self.embed_tokens.num_embeddings  # tokens that the target reads and never writes
        return self.embed_tokens(tokens.masked_fill(beyond, self.mask_token_id))

    def base_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        return self.fc(aux_hidden_states)

    def mask_inputs(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Return (*shape, hidden) twice: what replaces fused hidden states, and the embedding of the mask token."""
        mask = torch.full((), self.mask_token_id, device=self.device)
        return self.fuse(self.mask_hidden)[0, 0].expand(*shape, -1), self.embed_tokens(mask).expand(*shape, -1)

    def inputs(self, number: int, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention in layer `number`, and its residual."""
        layer = self.blocks[number]
        if not isinstance(layer, MidLayer):
            return layer.input_layernorm(hidden), hidden
        return layer.concat_inputs(embeddings, hidden), layer.residual(hidden, self.norm_before_residual)

    def draft_blocks(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        size = self.depth - 1
        blocks, firsts = Blocks.of(text, size), text.document_starts()
        starts = text.starts_of_drafts().clamp(min=0)
        hidden, after = self.fuse(aux_hidden_states), self.embed(text.tokens.roll(-1, dims=1))
        drafts, masks = self.mask_inputs(len(starts), starts.shape[1] * size)
        ahead = torch.arange(1, size + 1, device=starts.device)
        positions = (text.positions.gather(1, starts)[..., None] + ahead).flatten(1)
        of_text, of_drafts = (self.rotary(p, text.row_length + size, hidden.dtype) for p in (text.positions, positions))
        for number, layer in enumerate(self.blocks):
            attention: Attention = layer.self_attn
            (x, residual), (y, residual_y) = self.inputs(number, hidden, after), self.inputs(number, drafts, masks)
            q, k, v, _ = attention.project(x, *of_text)
            of_block = attention.project(y, *of_drafts)
            of_rows = text.whole_rows(k, v)
            attended = attend_blocks(of_block.q, of_rows, (of_block.k, of_block.v), blocks, causal=True)
            over_text = attend_steps(q, [of_rows], firsts, text.parts)
            hidden = layer.feed_forward(residual, attention.project_out(over_text))
            drafts = layer.feed_forward(residual_y, attention.project_out(attended))
        first = hidden.gather(1, starts[..., None].expand(-1, -1, self.width))
        return torch.cat([first[:, :, None], drafts.unflatten(1, (-1, size))], dim=2)

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        new = embeddings.shape[1]
        return self.attend_text(self.fuse(aux_hidden_states), embeddings, cache.causal_mask(new), cache)

    def draft_block(self, last: Tensor, cache: KVCache) -> Tensor:
        hidden, embeddings = self.mask_inputs(len(last), self.block_entries)
        mask = cache.mask(intra_block_mask(self.block_entries, True, None, hidden.device)[None])
        return torch.cat([last, self.attend_text(hidden, embeddings, mask, cache)], dim=1)

    def attend_text(self, hidden: Tensor, embeddings: Tensor, mask: Tensor | None, cache: KVCache) -> Tensor:
        """Return hidden states after all layers and write their keys and values into the cache."""
        cos_sin = self.rotary(cache.columns(hidden.shape[1]), cache.capacity, hidden.dtype)
        for number, layer in enumerate(self.blocks):
            x, residual = self.inputs(number, hidden, embeddings.to(hidden.dtype))
            hidden = layer.feed_forward(residual, layer.self_attn.attend_cached(x, *cos_sin, mask, cache, number))
        return hidden
