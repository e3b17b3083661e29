"""What every draft head has in common, and the words of this project.

    target    the frozen language model that we accelerate
    head      what we train: extra decoding heads, an autoregressive layer, a block drafter
    drafter   whatever proposes a tree while decoding: a head, a small draft model, an n-gram lookup
    forward   one pass of the target: over prompts (prefill), over a tree of drafts (verification), over training text
    bonus token         the newest token, chosen by the target, which has not run it through its layers yet; a tree's node 0
    depth               distance from the bonus token, whose children have depth 1
    tree, chain         draft tokens with parent pointers; a tree of one branch
    aux hidden states   the target's hidden states that a head takes, (batch, length, layers * hidden)
    teacher logits      the target's logits that drafts are trained on
    label position      where a draft's label stands in training (below)
    criterion           what turns drafts and teacher logits into a loss
    sequence, slot      a request's text; its place in the batch and in the cache
    computed tokens     in the cache for good; uncommitted ones are in it until `commit` keeps or drops them
    acceptance length   tokens gained per target forward, the bonus token counted

**The one alignment rule: the depth-d draft at position t names token t + 1 + d.** (Token t + 1 is the bonus token, which
the target's logits at t gave.) Training lays all depths on one grid by what they name: *label position* p is that of token
p + 2, so its depth-d draft began at position t = p + 1 - d. Then teacher logits and loss mask are the same for all depths:

    label position       0    1    2    3    4         teacher logits: train/module.py
    names token          2    3    4    5    6
    depth 1 began at     0    1    2    3    4
    depth 2 began at     .    0    1    2    3         `shift_right` rolls a draft right by d - 1
    depth 3 began at     .    .    0    1    2         dots: nothing began there, `draft_loss_mask` is 0
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from foredraft.heads import llama_config, vocab
from foredraft.heads.target import Target
from foredraft.heads.target.cache import KVCache


class PackedBatch(NamedTuple):
    """A packed training batch. Rows hold several documents, one after the other."""

    tokens: Tensor  # (batch, length) int64
    loss_mask: Tensor  # (batch, length) bool: is this token the target's to write?
    documents: Tensor  # (batch, length) int64: which document a token belongs to, -1 for padding
    positions: Tensor  # (batch, length) int64, from 0 in every document
    # (batch, n) int64: positions at which drafts begin, ascending, -1 for none; None where they begin everywhere. A head that
    # drafts in blocks is trained on some of them at a time.
    anchors: Tensor | None = None
    # Does a row hold several documents? None: asked of the tensors, which waits for their device.
    multiple_documents: bool | None = None
    # Of rows with images, in the order of their places: what the target's processor made of them (`pixel_values`,
    # `image_grid_thw`); `at` (images, 2) int64, the row and the first column of the document that each one is in;
    # `position_ids` (3, batch, length) int64, M-RoPE's, of which `positions` is the first; `blocks` (batch, length) int64, a
    # number that those tokens share which see each other in both directions, or -1.
    images: dict[str, Tensor] | None = None

    def mask(self) -> Tensor:
        """(batch, length, length) bool: the token itself and what stands before it in its own document."""
        length = self.tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()
        return (self.documents[:, :, None] == self.documents[:, None, :]) & causal

    def document_starts(self) -> Tensor:
        """(batch, length) int64: the column at which the document of each token begins. It says what `mask` does, in memory
        linear in the length: a token sees the columns from there to its own."""
        columns = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        begins = self.documents != self.documents.roll(1, dims=1)
        return torch.where(begins, columns, 0).cummax(1).values


def shift_right(x: Tensor, steps: int) -> Tensor:
    """`x` (batch, length, ...) moved right: place p holds what stood at p - steps. What wraps around is masked out."""
    return x.roll(steps, dims=1) if steps else x


def draft_loss_mask(text: PackedBatch, depth: int) -> Tensor:
    """(batch, length) bool: label positions whose depth-d draft counts. The token it names is in the loss mask, it exists,
    and the draft began in the same document. The one place where the loss mask meets the alignment rule."""
    length = text.tokens.shape[1]
    label_positions = torch.arange(length, device=text.tokens.device)
    named, start = text.documents.roll(-2, dims=1), shift_right(text.documents, depth - 1)
    inside = (label_positions + 2 < length) & (label_positions >= depth - 1)
    if text.anchors is not None:
        begun = torch.zeros(len(text.anchors), length + 1, dtype=torch.bool, device=text.anchors.device)
        inside = inside & shift_right(begun.scatter(1, text.anchors % (length + 1), True)[:, :length], depth - 1)
    return text.loss_mask.roll(-2, dims=1) & (named == start) & (named >= 0) & inside


class DraftHead(nn.Module, ABC):
    """A small network that guesses the target's next tokens from the target's hidden states."""

    kind: str
    cache_layers: int = 0  # layers of keys and values that it keeps of the text
    format: ClassVar[str] = "foredraft's own"  # of its files, for people
    disk_prefixes: ClassVar[dict[str, str]] = {}  # prefixes of weights' names, here -> on disk, where they differ
    layers: list[int]  # the aux hidden states that it takes, numbered as in heads/target/model.py
    depth: int  # deepest draft that it was trained for
    depth_key: ClassVar[str] = "ttt_steps"  # the parameter of `for_target` that sets it
    config: LlamaConfig | None = None  # of its decoder layers, where it has any
    limit: int | None = None  # deepest draft that it can make; None for no limit
    pruned: bool = False  # does it draft from a part of the vocabulary?
    imported: bool = False  # was it trained elsewhere?
    d2t: Tensor
    t2d: Tensor

    @classmethod
    @abstractmethod
    def for_target(cls, target: Target, *args: Any, **kwargs: Any) -> "DraftHead":
        """A new head for this target; the arguments are what conf/head/<kind>.yaml may say."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict) -> "DraftHead":
        """An empty head of the shape that a saved config.json describes."""

    @abstractmethod
    def to_config(self) -> dict:
        """What config.json needs so that `from_config`, and the engines that read this format, rebuild the head."""

    def attach(self, target: Target) -> None:
        """Keep a reference to what the head uses of the target and does not save. Call it before any use of the head."""

    def on_train_begin(self, target: Target) -> None:
        """Called once before training, of a new head and of one that was trained before: add what only training needs."""

    def on_train_end(self) -> None:
        """Called once after training: merge what only training needs."""

    def incompatibilities(self, target: Target) -> list[str]:
        """Why the head cannot draft for this target, in words; a weight of another shape is found without its help."""
        beyond = [k for k in self.layers if not 0 <= k <= target.num_layers]
        words = [f"the head takes hidden state {k}, the target has 0..{target.num_layers}" for k in beyond[-1:]]
        return words if self.config is None else llama_config.incompatibilities(self.config, target) + words

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """What the head takes for tokens (batch, n) while drafting: the target's embeddings (batch, n, hidden)."""
        return target.embed(tokens)

    def differences(self, target: Target) -> list[str]:
        """Settings that are the head's own and not this target's, in words."""
        return [] if self.config is None else llama_config.differences(self.config, target)

    @abstractmethod
    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        """Training: per depth the hidden states (batch, length, hidden) of a draft at every label position.

        embeddings: (batch, length, hidden), the target's, of text.tokens. `logits` turns a hidden state into a draft.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., draft vocab) for hidden states of drafts of this depth, counted from 1."""

    def prune_vocabulary(self, size: int | None, vocab_size: int) -> int:
        """Make room for a draft vocabulary of `size` tokens, if that is not all of them; how many it drafts from."""
        if size is None or size >= vocab_size:
            return vocab_size
        self.pruned = True
        for name, tensor in zip(("d2t", "t2d"), vocab.to_offsets(torch.arange(size), vocab_size), strict=True):
            self.register_buffer(name, tensor)
        return size

    def set_vocabulary(self, ids: Tensor) -> None:
        """Draft these target ids (ascending) only."""
        d2t, t2d = vocab.to_offsets(ids, len(self.t2d))
        self.d2t.copy_(d2t), self.t2d.copy_(t2d)

    @property
    def projections(self) -> list[nn.Linear]:
        """Its own projections to the draft vocabulary, if it has any."""
        return []

    @property
    def vocabulary_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that have a row for each token: those of embeddings and of projections to a vocabulary."""
        embeddings = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        return [parameter for module in (*embeddings, *self.projections) for parameter in module.parameters()]

    @torch.no_grad()
    def init_projections(self, target: Target, counts: Tensor | None) -> None:
        """Start its projections as the target's lm_head, pruned ones as its rows of the most frequent tokens by `counts`
        (vocab,). A quantised lm_head gives no rows."""
        rows = target.lm_head_rows
        if self.pruned:
            assert counts is not None, "pruning needs the tokens' counts"
            ids = vocab.most_frequent(counts, len(self.d2t))
            self.set_vocabulary(ids)
            rows = None if rows is None else rows[ids.to(rows.device)]
        for projection in self.projections:
            if rows is not None and rows.shape == projection.weight.shape:
                projection.weight.copy_(rows)

    @property
    def draft_ids(self) -> Tensor | None:
        """(draft vocab,) target ids of a pruned vocabulary, ascending; None where the head drafts from all of it."""
        return vocab.from_offsets(self.d2t) if self.pruned else None

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Target token ids of draft vocabulary ids."""
        draft_ids = self.draft_ids
        return ids if draft_ids is None else draft_ids[ids]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class ParallelHead(DraftHead):
    """Drafts all depths at once: a draft depends on the text alone, never on the drafts before it (Medusa)."""

    @abstractmethod
    def draft_all(self, aux_hidden_states: Tensor) -> Tensor:
        """Logits of all depths (batch, depth, draft vocab). aux_hidden_states: (batch, width), of the newest position."""


class RecurrentHead(DraftHead):
    """Drafts depth by depth: a draft depends on the drafts before it (EAGLE, Hydra, a draft model)."""

    @abstractmethod
    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        """Take in accepted text; the hidden states (batch, new, hidden) of its depth-1 drafts.

        aux_hidden_states: (batch, new, width) of the newly accepted positions. embeddings: (batch, new, hidden) of the token
        *after* each of them, the bonus token last.
        """

    @abstractmethod
    def draft_step(
        self, hidden: Tensor, embeddings: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Hidden states (batch, nodes, hidden) one level below these nodes.

        hidden: of the draft that named each node. embeddings: of the node. positions: (batch, nodes), its column. mask:
        (batch, nodes, keys) bool, its text and its ancestors; None as by `KVCache.causal_mask`.
        """


class BlockHead(DraftHead):
    """Drafts all depths in one pass over a block of positions after the text (DFlash, P-EAGLE). The logits are the same for
    all drafts of a depth, unless a correction makes them depend on the drafts before (DSpark, Domino): `condition` gives what
    a path changes, `correct` changes the logits. A *state* is a hidden state with the correction behind it.
    """

    width: int  # of a hidden state
    block_entries: int  # that a block writes into the cache
    correction: int = 0  # numbers that a draft takes from those before it; 0 where it depends on the text alone
    memory: int = 0  # numbers that are remembered along a path
    candidates: int = 0  # drafts of a position that `select` leaves to choose from; 0 where all of the vocabulary stays
    confident: bool = False  # is the last number of a correction the logit of the draft's acceptance?

    @abstractmethod
    def draft_blocks(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> Tensor:
        """Training: states (batch, n, depth, width + correction) of the drafts that begin at text.anchors (batch, n), or at
        every position; what comes before a draft is the text's."""

    @abstractmethod
    def draft_extend(self, aux_hidden_states: Tensor, embeddings: Tensor, cache: KVCache) -> Tensor:
        """Take in accepted text, as a recurrent head does; what `draft_block` needs of each position (batch, new, hidden)."""

    @abstractmethod
    def draft_block(self, last: Tensor, cache: KVCache) -> Tensor:
        """Hidden states (batch, depth, width) of the drafts after the text in the cache; last: (batch, 1, hidden), of its
        newest position. What it writes into the cache is for this block alone."""

    @abstractmethod
    def base_logits(self, hidden: Tensor) -> Tensor:
        """(..., draft vocab) before any correction."""

    def condition(self, depth: int, hidden: Tensor, tokens: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """The correction (..., correction) of drafts of this depth, and the new memory of their paths.

        hidden: (..., width) of their depth. tokens: (...), before each of them. memory: (..., memory), zeros at depth 1."""
        return hidden[..., :0], memory

    def correct(self, base: Tensor, hidden: Tensor, correction: Tensor, depth: int) -> Tensor:
        """Logits from those of `base_logits`."""
        return base

    def select(self, base: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        """Corrected logits and draft ids (..., candidates) of all that `correct` leaves in, of a head with `candidates`."""
        best = base.topk(self.candidates)
        return best.values, best.indices

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        state, correction = hidden.split([self.width, hidden.shape[-1] - self.width], dim=-1)
        return self.correct(self.base_logits(state), state, correction, depth)

    def forward(self, aux_hidden_states: Tensor, embeddings: Tensor, text: PackedBatch) -> list[Tensor]:
        states = self.draft_blocks(aux_hidden_states, embeddings, text._replace(anchors=None))
        return [shift_right(state, steps) for steps, state in enumerate(states.unbind(2))]

    def condition_on_text(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States (..., depth, width + correction) of hidden states (..., depth, width); tokens (..., depth) precede them."""
        assert self.config is not None
        # Tokens that the target takes and never writes have no row in the tables of `condition`.
        tokens = tokens.clamp(max=self.config.vocab_size - 1)
        memory, states = hidden.new_zeros(*tokens.shape[:-1], self.memory), []
        for depth in range(1, hidden.shape[-2] + 1):
            correction, memory = self.condition(depth, hidden[..., depth - 1, :], tokens[..., depth - 1], memory)
            states.append(torch.cat([hidden[..., depth - 1, :], correction], dim=-1))
        return torch.stack(states, dim=-2)
