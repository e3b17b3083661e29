"""DFlash: a small transformer that drafts a whole block in one pass (arXiv:2602.06036), and its causal form, JetSpec
(arXiv:2606.18394).

The target's hidden states of several layers, fused by `fc` and `hidden_norm`, are the keys and values of the text in every
layer: the text itself passes through no layer. A block of positions follows it. The first, its *anchor*, takes the embedding
of the bonus token, all others that of a mask token. Queries come only from the block. Embedding and lm_head are the target's
and frozen.

    in place          position j of a block drafts its own token: depth j, so the anchor drafts nothing (z-lab, JetSpec)
    anchor first      position j drafts the next position's token: depth j + 1 (DeepSpec's files, DSpark)

With the wrong one of the two every draft is off by one. Inside a block attention is bidirectional, or causal (`causal`,
JetSpec; also in sliding layers, as in SpecForge, SGLang and vLLM).
"""

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config
from foredraft.heads.attention.block_attention import Blocks, attend_blocks, intra_block_mask
from foredraft.heads.attention.masks import within_window
from foredraft.heads.base import BlockHead, PackedBatch
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.eagle3 import SLIDING, check_layers
from foredraft.heads.layers import DecoderLayer, NormedAttention, RMSNorm, Rotary, ScaledLinear
from foredraft.heads.target_model import Target

FULL = "full_attention"  # as SLIDING
# Special tokens that a chat may have, also one without a template or whose template builds them.
MARKS = re.compile(r"im_|image|audio|video|vision|think|system|user|assistant|tool|turn|start|end|eot", re.IGNORECASE)


class BlockLayer(DecoderLayer):
    """Build a Qwen3 layer."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config, NormedAttention(config, config.hidden_size))

    def inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of attention and the convolution kernel for `feed_forward` (DFlash-2)."""
        return self.input_layernorm(hidden), None

    def feed_forward(self, hidden: Tensor, attended: Tensor, kernel: Tensor | None = None) -> Tensor:
        return super().feed_forward(hidden, attended)


class DFlashHead(BlockHead):
    """Draft a block of tokens in one pass over mask tokens. Weights have the names of z-lab, SpecForge and DeepSpec: fc,
    hidden_norm, layers.{i}.*, norm."""

    kind, depth_key = "dflash", "block_size"
    architecture: ClassVar[str] = "DFlashDraftModel"
    own_defaults: ClassVar[dict[str, Any]] = {}  # settings of a kind in addition to DFlash's, saved in `dflash_config`
    own_least: ClassVar[dict[str, int]] = {}  # the least values of those that may be below 1
    config: LlamaConfig
    target: Target
    blocks: Any  # nn.ModuleList of BlockLayer

    def __init__(self, config: dict[str, Any]):
        """Build the modules of a config.json. Its `layer_types` have the window `sliding_window` or none."""
        super().__init__()
        block, self.config = config["dflash_config"], llama_config.from_json(config)
        self.own = {name: block[name] for name in self.own_defaults}
        for name, value in self.own.items():
            least = self.own_least.get(name, 1)
            if type(self.own_defaults[name]) is int and not (type(value) is int and value >= least):
                raise ValueError(f"head.{name}={value!r} must be a whole number of at least {least}")
        self.layers = [layer + 1 for layer in block["target_layer_ids"]]
        self.block_size = self.block_entries = config["block_size"]
        self.mask_token_id, self.sample_from_anchor = block["mask_token_id"], block["sample_from_anchor"]
        self.causal, self.window = block["causal"], config["sliding_window"]
        self.depth = self.limit = self.block_size if self.sample_from_anchor else self.block_size - 1
        self.width, self.cache_layers = self.config.hidden_size, config["num_hidden_layers"]
        self.layer_types = config["layer_types"]
        self.fc = ScaledLinear(len(self.layers) * self.width, self.width)
        self.hidden_norm, self.norm = (RMSNorm(self.width, self.config.rms_norm_eps) for _ in range(2))
        self.blocks = nn.ModuleList(self.new_layer() for _ in range(self.cache_layers))
        self.draft_vocab = self.prune_vocabulary(config["draft_vocab_size"], self.config.vocab_size)
        self.lm_head = nn.Linear(self.width, self.draft_vocab, bias=False) if self.pruned else None
        self.rotary = Rotary(self.config)

    disk_prefixes = {"blocks.": "layers."}  # noqa: RUF012 -- `layers` are the hidden states that any head takes

    @classmethod
    def for_target(
        cls,
        target: Target,
        block_size: int = 8,
        num_hidden_layers: int = 5,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        sample_from_anchor: bool = False,
        causal: bool = False,
        window: int | None = None,
        draft_vocab_size: int | None = None,
        counts: Tensor | None = None,
        lm_head: str = "target",
        rope: dict[str, Any] | None = None,
        **own: Any,
    ) -> "DFlashHead":
        """Make a new head.

        block_size: positions of a block. num_hidden_layers: decoder layers of the head. target_layer_ids: hidden states
        that it takes; None uses as many as it has layers, spread as in the paper. mask_token_id: None chooses a token that
        hardly occurs in text. window: of all its layers but the last; None for full attention. draft_vocab_size, counts,
        lm_head, rope: as in EAGLE-3. own: as in `own_defaults`."""
        usual = spread_layers(target.num_layers, num_hidden_layers)
        layers = check_layers(target_layer_ids, usual, target.num_layers - 1)  # below its last norm
        if block_size < 2 or num_hidden_layers < 1:
            raise ValueError(
                f"head.block_size={block_size} must be at least 2, head.num_hidden_layers={num_hidden_layers} at least 1"
            )
        mask = check_mask_token(target, mask_token_id)
        if unknown := sorted(own.keys() - cls.own_defaults.keys()):
            raise TypeError(f"head={cls.kind} has no setting {unknown[0]}")
        sliding = 0 if window is None else num_hidden_layers - 1
        settings = llama_config.settings_like(target, rope) | {
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "layer_types": [SLIDING] * sliding + [FULL] * (num_hidden_layers - sliding),
            "sliding_window": window,
            "draft_vocab_size": draft_vocab_size,
        }
        block = {"target_layer_ids": [layer - 1 for layer in layers], "mask_token_id": mask, "causal": causal or None}
        block |= {"sample_from_anchor": sample_from_anchor, **cls.own_defaults, **own}
        head = cls(settings | {"dflash_config": block})
        head.own_rope = rope is not None
        llama_config.init_like(head, target)
        head.init_projections(target, counts, lm_head)
        head.attach(target)
        return head.to(target.device)

    def new_layer(self) -> BlockLayer:
        return BlockLayer(self.config)

    def attach(self, target: Target) -> None:
        self.target = target

    @property
    def own_settings(self) -> dict[str, Any]:
        """Return what this kind adds to `dflash_config`."""
        return self.own

    def to_config(self) -> dict:
        """Return z-lab's config.json, in which layers are numbered by their outputs, from 0."""
        sliding = self.window is not None
        block = {
            "projector_type": self.kind,
            "target_layer_ids": [layer - 1 for layer in self.layers],
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": self.sample_from_anchor,
            **({} if self.causal is None else {"causal": self.causal}),  # vLLM's name
            **({"causal_head": True} if self.causal else {}),  # JetSpec's
            **self.own_settings,
        }
        return llama_config.to_json(self.config) | {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "num_hidden_layers": self.cache_layers,
            "block_size": self.block_size,
            "layer_types": self.layer_types,
            "sliding_window": self.window,
            "use_sliding_window": sliding,
            "num_target_layers": self.target.num_layers,
            "draft_vocab_size": self.draft_vocab,
            "dflash_config": block,
            **({"is_causal": block["causal"]} if "causal" in block else {}),  # SGLang's, and in z-lab's files
        }

    def base_logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden) if self.lm_head is None else self.lm_head(hidden)

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(aux_hidden_states))

    def inputs(self, anchors: Tensor) -> Tensor:
        """Return the inputs (..., block_size, hidden) of blocks from the embeddings (..., hidden) of their bonus tokens."""
        mask = self.target.embed(torch.full((), self.mask_token_id, device=anchors.device)).to(self.fc.weight.dtype)
        masks = mask.expand(*anchors.shape[:-1], self.block_size - 1, -1)
        return torch.cat([anchors[..., None, :].to(mask.dtype), masks], dim=-2)

    def drafts(self, hidden: Tensor) -> Tensor:
        """Return hidden states (..., depth, width) of the drafts from those of all positions."""
        hidden = self.norm(hidden)
        return hidden if self.sample_from_anchor else hidden[..., 1:, :]

    def masking(self, layer: int) -> tuple[bool, int | None]:
        """Return whether this layer is causal inside a block, and its window. Without a setting only sliding layers are
        causal, as in vLLM."""
        sliding = self.layer_types[layer] == SLIDING
        return sliding if self.causal is None else self.causal, self.window if sliding else None

    def draft_blocks(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        length, size = text.tokens.shape[1], self.block_size
        context, blocks = self.fuse(aux_hidden_states), Blocks.of(text, size)
        starts = text.starts_of_drafts().clamp(min=0)
        anchors = (starts + 1).clamp(max=length - 1)
        wide = anchors[..., None].expand(-1, -1, self.config.hidden_size)
        hidden = self.inputs(embeddings.gather(1, wide)).flatten(1, 2)
        ahead = torch.arange(1, size + 1, device=starts.device)
        positions = (text.positions.gather(1, starts)[..., None] + ahead).flatten(1)
        of_text, of_blocks = (self.rotary(p, text.row_length + size, hidden.dtype) for p in (text.positions, positions))
        for number, layer in enumerate(self.blocks):
            attention, (x, kernel) = layer.self_attn, layer.inputs(hidden)
            q, *block_kv, _ = attention.project(x, *of_blocks)
            of_context = text.whole_rows(*attention.keys_values(context, *of_text))
            attended = attend_blocks(q, of_context, (block_kv[0], block_kv[1]), blocks, *self.masking(number))
            hidden = layer.feed_forward(hidden, attention.project_out(attended), kernel)
        hidden = self.drafts(hidden.unflatten(1, (-1, size)))
        before = (starts[..., None] + ahead[: self.depth]).clamp(max=length - 1)
        return self.condition_on_text(hidden, text.tokens.gather(1, before.flatten(1)).view_as(before))

    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        context = self.fuse(aux_hidden_states)
        cos_sin = self.rotary(cache.columns(aux_hidden_states.shape[1]), cache.capacity, context.dtype)
        for number, layer in enumerate(self.blocks):
            cache.update(*layer.self_attn.keys_values(context, *cos_sin), number)
        return embeddings

    def draft_block(self, last: Tensor, cache: KVCache) -> Tensor:
        hidden, columns = self.inputs(last[:, 0]), cache.columns(self.block_size)
        cos, sin = self.rotary(columns, cache.capacity, hidden.dtype)
        for number, layer in enumerate(self.blocks):
            causal, window = self.masking(number)
            mask = cache.mask(intra_block_mask(self.block_size, causal, window, hidden.device)[None])
            mask = within_window(mask, columns, window)
            x, kernel = layer.inputs(hidden)
            attended = layer.self_attn.attend_cached(x, cos, sin, mask, cache, number)
            hidden = layer.feed_forward(hidden, attended, kernel)
        return self.drafts(hidden)


def spread_layers(n: int, count: int) -> list[int]:
    """Return the hidden states that a head of `count` layers takes of a target of n: outputs of layers 1 to n - 3,
    evenly."""
    last = max(1, n - 3)
    outputs = [n // 2] if count == 1 else [round(1 + i * (last - 1) / (count - 1)) for i in range(count)]
    # Not the last one, which is taken after the target's final norm.
    return sorted({min(output, n - 2) + 1 for output in outputs})


def mask_token(target: Target) -> int:
    """Return an id that hardly occurs in text: the tokenizer's mask, an id beyond its tokens, or a special token, best one
    that no chat has (<|reserved_special_token_9|>)."""
    tokenizer, last = target.tokenizer, target.vocab_size - 1
    if tokenizer is None:
        return last
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id <= last:
        return tokenizer.mask_token_id
    used = set(tokenizer.get_vocab().values())
    special = max((token for token in tokenizer.all_special_ids if token <= last), default=last)
    common = {tokenizer.bos_token_id, *target.eos_token_ids}
    added = tokenizer.added_tokens_decoder.items()
    rare = [token for token, form in added if form.special and form.content not in str(tokenizer.chat_template)]
    marks = {token for token, form in added if MARKS.search(form.content)}
    special = max((token for token in rare if token <= last and token not in common | marks), default=special)
    return next((token for token in range(last, -1, -1) if token not in used), special)


def check_mask_token(target: Target, token: int | None) -> int:
    """Return the mask token of a new head, or that of `mask_token` for None. Raises ValueError if it has no embedding."""
    token = mask_token(target) if token is None else token
    if not 0 <= token < target.vocab_size:
        raise ValueError(
            f"head.mask_token_id={token} must lie between 0 and {target.vocab_size - 1}, the target's tokens"
        )
    return token
