"""Define what all draft heads have in common, and the words of this project.

    target    the frozen language model that we accelerate
    head      what we train: extra decoding heads, an autoregressive layer, a block drafter
    drafter   whatever proposes a tree at inference: a head, a small draft model, an n-gram lookup
    forward   one pass of the target over prompts (prefill), over a draft tree (verification), or over training text
    bonus token         the newest token, chosen by the target, that has not passed through its layers yet; node 0 of a tree
    depth               distance from the bonus token, whose children have depth 1
    tree, chain         draft tokens with parent pointers; a tree with one branch
    aux hidden states   the target's hidden states that a head takes, (batch, length, layers * hidden)
    teacher logits      the target's logits that drafts are trained on
    label position      the position of the token that a draft names, in training (below)
    objective           what turns drafts and teacher logits into a loss
    sequence, slot      the text of a request; its place in the batch and in the cache
    computed tokens     those with final entries in the cache; other entries stay until `commit` accepts or rejects them
    acceptance length   tokens gained per target forward, bonus token included

**The one alignment rule: the depth-d draft at position t names token t + 1 + d.** (Token t + 1 is the bonus token, which
the target's logits at t gave.) Training lays all depths on one grid by what they name: *label position* p is that of token
p + 2, so its depth-d draft started at position t = p + 1 - d. Then teacher logits and loss mask are the same for all depths:

    label position       0    1    2    3    4         teacher logits: train/module.py
    names token          2    3    4    5    6
    depth 1 started at   0    1    2    3    4
    depth 2 started at   .    0    1    2    3         `shift_right` rolls a draft right by d - 1
    depth 3 started at   .    .    0    1    2         dots: no draft started there, `draft_loss_mask` is 0
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config, vocab
from foredraft.heads.attention.masks import text_mask
from foredraft.heads.attention.row_parts import RowParts
from foredraft.heads.caches.kv_cache import KVCache
from foredraft.heads.layers import ScaledLinear
from foredraft.heads.target_model import Target
from foredraft.heads.target_model.packing import first_weight


class PackedBatch(NamedTuple):
    """Hold a packed training batch. Each of its sequences may contain several documents, one after the other."""

    tokens: Tensor  # (batch, length) int64
    loss_mask: Tensor  # (batch, length) bool: is this token part of what the target wrote?
    documents: Tensor  # (batch, length) int64: which document a token belongs to, -1 for padding
    # (batch, length) int64, from 0 in every document. Tokens of images count, too, as in SGLang and vLLM's second runner.
    positions: Tensor
    # (batch, n) int64, ascending: positions at which drafts start, -1 for none. None: drafts start at every position. Block
    # drafters train on a sample of the positions.
    anchors: Tensor | None = None
    # Does a sequence contain several documents? None: computed from the tensors, which waits for their device.
    multiple_documents: bool | None = None
    # The outputs of the target's processor (`pixel_values`, `image_grid_thw`) for all images, in the order of their places;
    # `at` (images, 2) int64, the sequence of each image and the first column of its document; `position_ids`
    # (3, batch, length) int64 of the target's M-RoPE.
    images: dict[str, Tensor] | None = None
    # Set where several processes share each row; then a sequence is a part of one, and has no anchors or loss of others.
    parts: RowParts | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "PackedBatch":
        """Return the fields of a collated batch, which may have others."""
        return cls(**{name: batch[name] for name in cls._fields if name in batch})

    def mask(self) -> Tensor:
        """Return the attention mask (batch, length, length) bool: each token sees itself and earlier tokens of its
        document."""
        return text_mask(self.document_starts())[:, 0]

    def document_starts(self) -> Tensor:
        """Return (batch, length) int64, the first column of each token's document. This is `mask` in memory linear in
        the length: a token sees the columns from there to its own."""
        if self.parts is not None:
            return self.parts.starts
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        starts = self.documents != self.documents.roll(1, dims=1)
        return torch.where(starts, columns, 0).cummax(1).values

    def starts_of_drafts(self) -> Tensor:
        """Return `anchors`, or all columns (batch, length) of the sequences where drafts start at every position."""
        if self.anchors is not None:
            return self.anchors
        return torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)

    @property
    def row_length(self) -> int:
        """Return the number of columns of a whole row."""
        return self.tokens.shape[1] if self.parts is None else self.parts.length

    def whole_rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (batch, kv heads, row length, dim) of whole rows from those of this batch's sequences."""
        return (keys, values) if self.parts is None else self.parts.gather(keys, values)


def shift_right(x: Tensor, steps: int) -> Tensor:
    """Move `x` (batch, length, ...) right: place p gets the value of p - steps. The caller masks what wraps around."""
    return x.roll(steps, dims=1) if steps else x


def draft_loss_mask(text: PackedBatch, depth: int) -> Tensor:
    """Return (batch, length) bool: label positions whose depth-d draft counts. The token that it names is in the loss
    mask and exists, and the draft started in the same document. Only this function applies the alignment rule to the
    loss mask."""
    length = text.tokens.shape[1]
    label_positions = torch.arange(length, device=text.tokens.device)
    named, start = text.documents.roll(-2, dims=1), shift_right(text.documents, depth - 1)
    inside = (label_positions + 2 < length) & (label_positions >= depth - 1)
    if text.anchors is not None:
        anchor_mask = torch.zeros(len(text.anchors), length + 1, dtype=torch.bool, device=text.anchors.device)
        inside = inside & shift_right(anchor_mask.scatter(1, text.anchors % (length + 1), True)[:, :length], depth - 1)
    return text.loss_mask.roll(-2, dims=1) & (named == start) & (named >= 0) & inside


class DraftHead(nn.Module, ABC):
    """Predict the target's next tokens from the target's hidden states."""

    kind: str
    cache_layers: int = 0  # decoder layers whose keys and values of the text are cached
    format: ClassVar[str] = "foredraft's own"  # title of its files if nobody publishes their layout
    disk_prefixes: ClassVar[dict[str, str]] = {}  # prefixes of weight names here -> on disk, if they differ
    vocabulary_names: ClassVar[tuple[str, ...]] = ()  # of other weights with a row for each token
    layers: list[int]  # ids of the aux hidden states, numbered as in heads/target_model/model.py
    depth: int  # deepest draft that it was trained for
    depth_key: ClassVar[str] = "ttt_steps"  # the parameter of `for_target` that sets it
    config: LlamaConfig | None = None  # of its decoder layers, if it has any
    limit: int | None = None  # deepest draft that it can make; None for no limit
    pruned: bool = False  # does it draft from a subset of the vocabulary?
    imported: bool = False  # was it trained by another program?
    own_rope: bool = False  # was a rope chosen for it, instead of the target's?
    lm_head_is_targets: bool = False  # are its projections the target's rows, which do not train?
    d2t: Tensor
    t2d: Tensor

    @classmethod
    @abstractmethod
    def for_target(cls, target: Target, *args: Any, **kwargs: Any) -> "DraftHead":
        """Make a new head for this target. The arguments are the keys of conf/head/<kind>.yaml."""

    @classmethod
    def from_config(cls, config: dict) -> "DraftHead":
        """Make a head of the shape that a saved config.json describes, without its weights."""
        return cls(config)

    @abstractmethod
    def to_config(self) -> dict:
        """Return the config.json from which `from_config`, and other engines that read this format, rebuild the head."""

    def attach(self, target: Target) -> None:
        """Keep references to the target's modules that the head uses and does not save. Call this before any other use."""

    @property
    def scaled_layers(self) -> list[ScaledLinear]:
        """Return the layers that take the aux hidden states without a norm."""
        return [module for module in self.modules() if isinstance(module, ScaledLinear) and module.takes_raw]

    def on_train_begin(self, target: Target) -> None:
        """Add what only training needs. Called once before training, for new and for trained heads."""
        for layer in self.scaled_layers:
            layer.scale_inputs(llama_config.aux_sizes(self.layers, target).to(self.device))

    def on_train_end(self) -> None:
        """Merge what only training needs. Called once after training."""
        for layer in self.scaled_layers:
            layer.scale_inputs(None)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Return the embeddings (batch, n, hidden) of tokens (batch, n) that the head takes while drafting."""
        return target.embed(tokens)

    @abstractmethod
    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        """Return, in training, the hidden states (batch, length, hidden) of a draft at every label position for each depth.
        embeddings: (batch, length, hidden), the target's, of text.tokens. `logits` turns a hidden state into a draft."""

    @abstractmethod
    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Return (..., draft vocab) for hidden states (..., hidden) of drafts of this depth, which starts at 1."""

    def prune_vocabulary(self, size: int | None, vocab_size: int) -> int:
        """Make room for a draft vocabulary of `size` tokens, if it is smaller than the target's. Return the number of
        tokens that the head drafts from."""
        if size is None or size >= vocab_size:
            return vocab_size
        self.pruned = True
        for name, tensor in zip(("d2t", "t2d"), vocab.to_offsets(torch.arange(size), vocab_size), strict=True):
            self.register_buffer(name, tensor)
        return size

    @property
    def projections(self) -> list[nn.Linear]:
        """Return the head's projections to the draft vocabulary: its `lm_head`, unless it has others or uses the target's."""
        return [part for name, part in self.named_children() if name == "lm_head" and isinstance(part, nn.Linear)]

    @property
    def vocabulary_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with a row for each token: those of embeddings and of projections to a vocabulary."""
        embeddings = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        parameters = [parameter for module in (*embeddings, *self.projections) for parameter in module.parameters()]
        return parameters + [
            weight for name, weight in self.named_parameters() if name.startswith(self.vocabulary_names)
        ]

    @torch.no_grad()
    def init_projections(self, target: Target, counts: Tensor | None, lm_head: str = "trained") -> None:
        """Initialize the projections with the target's lm_head. Pruned ones get its rows of the most frequent tokens by
        `counts` (vocab,). A quantized lm_head has no rows to copy. lm_head: "target" freezes the rows, so that rare tokens
        are not overfitted and only the layers have gradients and optimizer states; "trained" lets them learn."""
        if lm_head not in ("target", "trained"):
            raise ValueError(f"head.lm_head={lm_head} is not one of target, trained")
        rows = target.lm_head_rows
        if self.pruned:
            assert counts is not None, "pruning needs the tokens' counts"
            ids = vocab.most_frequent(counts, len(self.d2t))
            d2t, t2d = vocab.to_offsets(ids, len(self.t2d))
            self.d2t.copy_(d2t), self.t2d.copy_(t2d)
            rows = None if rows is None else rows[ids.to(rows.device)]
        for projection in self.projections:
            if rows is not None and rows.shape == projection.weight.shape:
                projection.weight.copy_(rows)
        if lm_head == "target" and rows is not None:
            self.lm_head_is_targets = bool(self.projections)
            self.freeze_projections()

    def freeze_projections(self) -> None:
        """Keep projections that are the target's rows from training."""
        for projection in self.projections if self.lm_head_is_targets else ():
            projection.requires_grad_(False)

    @property
    def draft_ids(self) -> Tensor | None:
        """Return the target ids (draft vocab,) of a pruned vocabulary, ascending; None if the vocabulary is not pruned."""
        return vocab.from_offsets(self.d2t) if self.pruned else None

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Convert draft vocabulary ids to target token ids."""
        draft_ids = self.draft_ids
        return ids if draft_ids is None else draft_ids[ids]

    @property
    def device(self) -> torch.device:
        return first_weight(self).device

    @property
    def dtype(self) -> torch.dtype:
        return first_weight(self).dtype


class ParallelHead(DraftHead):
    """Draft all depths at once: a draft depends only on the text, never on the drafts before it (Medusa)."""

    @abstractmethod
    def draft_all(self, aux_hidden_states: Tensor) -> Tensor:
        """Return logits (batch, depth, draft vocab) for aux_hidden_states (batch, width) of the newest position."""


class RecurrentHead(DraftHead):
    """Draft depth by depth: a draft depends on the drafts before it (EAGLE, Hydra, a draft model)."""

    @abstractmethod
    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        """Process accepted text and return the hidden states (batch, new, hidden) of its depth-1 drafts. aux_hidden_states:
        (batch, new, width) of the newly accepted positions. embeddings: (batch, new, hidden) of the token *after* each of
        them, the bonus token last."""

    @abstractmethod
    def draft_step(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Return hidden states (batch, nodes, hidden) one level below these nodes. hidden: (batch, nodes, hidden) of the
        drafts that named the nodes. embeddings: (batch, nodes, hidden) of the nodes. positions: (batch, nodes) int64, their
        columns. mask: (batch, nodes, keys) bool, their text and ancestors; None stands for `KVCache.causal_mask`."""


class BlockHead(DraftHead):
    """Draft all depths in one pass over a block of positions after the text (DFlash, P-EAGLE). The logits are the same for
    all drafts of a depth, unless a correction makes them depend on the drafts before (DSpark, Domino). `condition` returns
    what a path contributes, and `correct` changes the logits. A *state* is a hidden state followed by the correction."""

    width: int  # size of a hidden state
    block_entries: int  # cache entries that a block writes
    correction: int = 0  # size of what a draft takes from those before it; 0 if it depends only on the text
    memory: int = 0  # size of what is remembered along a path
    candidates: int = 0  # drafts per position that `correct` leaves; 0 if the whole vocabulary remains
    confident: bool = False  # is the last number of a correction the logit of the draft's acceptance?

    @abstractmethod
    def draft_blocks(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        """Return, in training, states (batch, n, depth, width + correction) of the drafts that start at text.anchors
        (batch, n) or at every position. Tokens before a draft are those of the text."""

    @abstractmethod
    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        """Process accepted text like a recurrent head. Return what `draft_block` needs of each position (batch, new,
        hidden)."""

    @abstractmethod
    def draft_block(self, last: Tensor, cache: KVCache) -> Tensor:
        """Return hidden states (batch, depth, width) of the drafts after the text in the cache. last: (batch, 1,
        hidden) of the newest position. Cache entries that this writes serve only this block."""

    @abstractmethod
    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., draft vocab) before any correction."""

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the correction (..., correction) of drafts of this depth, and the new memory of their paths. hidden: (...,
        width) of this depth. tokens: (...) int64, the token before each draft. memory: (..., memory), zeros at depth 1."""
        return hidden[..., :0], memory

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        """Return the logits of a draft, given those of `base_logits`."""
        return base

    def select(self, base: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """Return corrected logits and draft ids (..., candidates) of the drafts that `correct` leaves, if `candidates`
        is set."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        state, correction = hidden.split([self.width, hidden.shape[-1] - self.width], dim=-1)
        return self.correct(self.base_logits(state), state, correction, depth)

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        states = self.draft_blocks(aux_hidden_states, embeddings, text._replace(anchors=None))
        return [shift_right(state, steps) for steps, state in enumerate(states.unbind(2))]

    def condition_on_text(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return states (..., depth, width + correction) of hidden states (..., depth, width) after tokens (..., depth)."""
        assert self.config is not None
        # Tokens that the target reads and never writes have no row in the tables of `condition`.
        tokens = tokens.clamp(max=self.config.vocab_size - 1)
        memory, states = hidden.new_zeros(*tokens.shape[:-1], self.memory), []
        for depth in range(1, hidden.shape[-2] + 1):
            correction, memory = self.condition(depth, hidden[..., depth - 1, :], tokens[..., depth - 1], memory)
            states.append(torch.cat([hidden[..., depth - 1, :], correction], dim=-1))
        return torch.stack(states, dim=-2)
