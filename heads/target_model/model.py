"""The frozen language model that a head drafts for. Any Hugging Face decoder works unchanged."""

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.heads.attention import masked as attention
from foredraft.heads.attention.masks import Masks
from foredraft.heads.attention.paths import note_paths
from foredraft.heads.caches import recurrent_ops
from foredraft.heads.caches.cpu_graphs import CpuGraphs
from foredraft.heads.caches.device import FEWEST_ROWS, host_by_default
from foredraft.heads.caches.kv_cache import KEY_BLOCK, KVCache, key_block, to_device
from foredraft.heads.caches.layers import Sliding
from foredraft.heads.caches.stacked_cache import StackedCache
from foredraft.heads.caches.state_cache import StateCache
from foredraft.heads.target_model import loading, packing
from foredraft.heads.target_model.capabilities import Capabilities, cache_name, check_supported
from foredraft.heads.target_model.config_names import max_positions, unwrapped
from foredraft.heads.target_model.ends import load_ends, refuse
from foredraft.heads.target_model.gguf import record_of
from foredraft.heads.target_model.images import MROPE, ImageReader, add_features, model_inputs, reads_images
from foredraft.heads.target_model.logits import LogitScaling, TargetOutput, has_numbers, merge_streams, only_logits_at
from foredraft.heads.target_model.resolve_path import full_name, resolve_path
from foredraft.heads.target_model.sharding import COLLECTIVE, arguments, device_of, weight_of

NODES = 64  # of a tree, if its size is not specified
TargetCache = KVCache | StateCache


class Target:
    """Wrap a frozen causal language model for training heads and for drafting. Layers are numbered like transformers'
    `hidden_states`: 0 is the embedding, k the output of decoder layer k counted from one. The last is taken *after* the
    final norm, as the lm_head takes it."""

    revision: str | None = None  # of the checkpoint on the Hub
    trust_remote_code = False  # may code of the checkpoint run?
    quantization: str | None = None  # how `from_pretrained` quantized its weights
    no_tokenizer: str | None = "it was made without one"  # the reason if it has no tokenizer
    sharding: str | None = None  # over devices (heads/target_model/sharding.py)
    gguf: dict[str, Any] | None = None  # of a target from a GGUF file: file, sha256, weights (their quantization)
    embeddings_only = False  # are its decoder layers not loaded (heads/target_model/ends.py)?
    # Where `forward` then gets hidden states: tokens (batch, length) and layers -> (batch, length, layers * hidden).
    remote_hidden_states: Callable[[Tensor, Sequence[int]], Tensor] = staticmethod(refuse)

    @host_by_default()
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        context: int | None = None,
    ):
        """Wrap a model. context: largest number of tokens, if it is to be less than the model supports: with longrope, texts
        below its boundary have trees. Raises ValueError if the model supports less."""
        self.model = model = unwrapped(model).eval().requires_grad_(False)
        self.tokenizer, self.name = tokenizer, name
        self.checkpoint = name  # what transformers loads: a directory or Hub id, of a GGUF file the converted directory
        self.config = model.config.get_text_config()
        self.hidden_size: int = getattr(self.config, "hidden_size", 0)  # BLT nests several transformers
        check_supported(model)
        self.max_positions = max_positions(self.config)
        self.context = self.max_positions if context is None else context  # largest number of tokens, None: no limit
        most = self.max_positions or context
        if context is not None and not (isinstance(context, Integral) and 0 < context <= most):
            raise ValueError(f"context={context!r} is not a whole number from 1 to {most}, the limit of {name}")
        self.capabilities, self.graphs = Capabilities(self), CpuGraphs(model)
        if self.capabilities.trees:
            attention.take_masks(model)
        recurrent_ops.patch_recurrent_ops(model)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._cache_name = cache_name(model)
        # Not from `to_dict`, which omits computed values and second names (GPT-2's n_positions).
        self.layer_types: list[str] | None = getattr(self.config, "layer_types", None)
        self.masks, self.scaled = Masks.of(self.config, model), LogitScaling.of(self.config)

    @classmethod
    @host_by_default()
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        quantization: str | None = None,
        sharding: str | None = None,
        revision: str | None = None,
        context: int | None = None,
        pack: bool = True,
        gguf_file: str | None = None,
        embeddings_only: bool = False,
        **kwargs: Any,
    ) -> "Target":
        """Load a target from a directory, the Hub, a GGUF file (heads/target_model/gguf.py) or a package (resolve_path.py).
        dtype: "float32", "bfloat16" ..., or "auto": the saved one, but float32 if the device has no bfloat16 products;
        quantization: "4bit" or "8bit" (bitsandbytes);
        sharding: "layers", "fsdp" or "tensor" (sharding.py), for a target that does not fit on one device;
        revision: branch, tag or commit on the Hub;
        pack: on a CPU, pack linear weights if that speeds up decoding (packing.py);
        gguf_file: which GGUF file of a Hub repository;
        embeddings_only: do not load the decoder layers (ends.py): the target cannot write text.
        Further keywords are those of transformers' from_pretrained. Raises ValueError with the path if there is no model, or
        its tokenizer does not fit its vocabulary."""
        loading.check_keywords(kwargs)
        device = loading.resolve_device(device, check=sharding is None)
        name, path = full_name(path, gguf_file), resolve_path(path, dtype, device, gguf_file, revision)
        trusted = kwargs.setdefault("trust_remote_code", False)  # transformers would ask otherwise
        if embeddings_only:
            pack, sharding, quantization = False, None, None  # these concern layers
            model = load_ends(path, dtype, device, revision, trusted)
        else:
            if sharding is not None:
                kwargs |= arguments(path, sharding, quantization)
            model = loading.load_model(path, dtype, device, quantization, revision, **kwargs)
        tokenizer, reason = loading.load_tokenizer(path, model, revision, trusted)
        if tokenizer is not None:
            tokenizer.name_or_path = name  # for messages: the file that the user typed
        target = cls(model, tokenizer, name, context)
        if pack and sharding not in COLLECTIVE:  # sharded weights cannot be packed
            packing.pack(model)  # which is frozen by now
        target.checkpoint, target.gguf, target.revision = path, record_of(path), revision
        target.quantization, target.sharding, target.no_tokenizer = quantization, sharding, reason
        target.embeddings_only, target.trust_remote_code = embeddings_only, trusted
        if not embeddings_only:
            target.capabilities.measure_batches()
        return target

    @cached_property
    def images(self) -> ImageReader | None:
        """Return the reader of its images; None if it supports none, or is not one of the supported kinds."""
        if self.gguf is not None or not reads_images(self.model.config):
            return None
        return ImageReader(self.model.config, self.checkpoint, self.revision)

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer, for text. Raises ValueError without one."""
        if self.tokenizer is None:
            raise ValueError(
                f"target {self.name} has no tokenizer ({self.no_tokenizer}), which text needs: save one next to it"
            )
        return self.tokenizer

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens that it both reads and writes. Some read more (the image tokens of Llama-3.2-Vision),
        and an lm_head may be padded beyond the embedding: `logits` and all forwards omit what it cannot continue from."""
        head, rows = self.model.get_output_embeddings(), self.model.get_input_embeddings().num_embeddings
        if isinstance(head, packing.PackedLinear):
            return min(rows, head.out_features)
        # Of a quantized weight the shape is not the height.
        return min(rows, head.weight.shape[0]) if has_numbers(head.weight) else rows

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def device(self) -> torch.device:
        return device_of(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def is_collective(self) -> bool:
        """Return whether every process of the run must take part in every forward."""
        return self.sharding in COLLECTIVE

    @property
    def embeddings(self) -> Tensor:
        """Return the rows (vocab_size, hidden) of its input embedding. If it `is_collective`, all processes call this."""
        return weight_of(self.model.get_input_embeddings())[: self.vocab_size]

    @property
    def lm_head_rows(self) -> Tensor | None:
        """Return the rows (vocab_size, hidden) of its lm_head, or None for a quantized one; as for `embeddings`."""
        rows = weight_of(self.model.get_output_embeddings())
        return rows[: self.vocab_size] if has_numbers(rows) else None

    @property
    def eos_token_ids(self) -> list[int]:
        """Return the tokens that end a text: its generation config's, and the tokenizer's, which chat templates write."""
        extra = None if self.tokenizer is None else self.tokenizer.eos_token_id
        ends = [*loading.end_tokens(self.model, self.name), *([] if extra is None else [extra])]
        return [token for token in dict.fromkeys(ends) if 0 <= token < self.vocab_size]

    def new_cache(
        self, num_slots: int, capacity: int, nodes: int = NODES, capture: bool = False, keeps_bits: bool | None = None
    ) -> TargetCache:
        """Make an empty cache. nodes: largest tree. capture: its forwards, if possible. keeps_bits: None where possible."""
        able = self.capabilities
        if able.trees:
            keeps_bits = able.keeps_bits if keeps_bits is None else keeps_bits
            nodes = max(nodes, KEY_BLOCK) if keeps_bits else nodes  # chunks of prompts are written as trees are
            sliding = Sliding.of(self.masks.window, self.layer_types, self.num_layers, nodes, key_block(self.device))
            sizes = self.num_layers, num_slots, capacity
            return KVCache(*sizes, self.device, capture, keeps_bits, sliding, able.short_widths)
        if able.state is None:
            return StateCache(num_slots, self.device)
        return StackedCache(able.state, num_slots, capacity, self.device)

    def acquire_cache(self, num_slots: int, capacity: int, nodes: int = NODES) -> TargetCache:
        """Return an empty cache with at least these sizes: the one that was released last, if it suits."""
        cache: KVCache | None = vars(self).pop("_idle_cache", None)  # in one step: other threads may want it, too
        new = self.new_cache(num_slots, capacity, nodes, self.capabilities.cuda_graphs)  # has no memory yet
        if cache is None or not isinstance(new, KVCache) or cache.sliding != new.sliding:
            return new
        if cache.num_slots < num_slots or cache.capacity < capacity:
            return new
        cache.clear()
        return cache

    def release(self, cache: TargetCache) -> None:
        """Keep a cache with captured forwards for the next `acquire_cache`."""
        if isinstance(cache, KVCache) and cache.graphs.active:
            self._idle_cache = cache

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Any = None,
        cache: KVCache | None = None,
        layers: Sequence[int] = (),
        keep_logits: int = 0,
        images: dict[str, Tensor] | None = None,
    ) -> TargetOutput:
        """Run a forward. tokens, positions: (batch, length) int64. mask: in the model's form (masks.py); None is causal.
        keep_logits: 0 for all positions, n for the last n. images: as in heads.base.PackedBatch."""
        assert mask is None or self.capabilities.trees or isinstance(cache, StackedCache), self.capabilities.why
        if self.embeddings_only:
            states = self.remote_hidden_states(tokens, layers)
            return TargetOutput(states.new_empty(*tokens.shape, 0), states)
        self.capabilities.check_draftable()
        if cache is None:
            loading.check_tokens(self, tokens)
        kwargs: dict[str, Any] = {"use_cache": cache is not None}
        if mask is not None:
            kwargs["attention_mask"] = mask
        if images is not None:
            positions = images["position_ids"] if self.model.config.model_type in MROPE else positions
            kwargs |= model_inputs(images, tokens, self.model)
        with add_features(self.model, layers, images) as complete:
            return complete(self._forward(tokens, positions, cache, layers, keep_logits, **kwargs)[0])

    def forward_from(
        self, tokens: Tensor, start: int, state: Any, layers: Sequence[int] = (), keep_logits: int = 0
    ) -> tuple[TargetOutput, Any]:
        """Run a forward of text (batch, length) after the `start` tokens in the cache `state` (None: from the first token),
        with the model's own masks. Also return the cache, which is written into; None if the model has none."""
        kwargs: dict[str, Any] = {} if self._cache_name is None else {"use_cache": True}
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None] + start
        output, out = self._forward(tokens.clamp(min=0), positions, state, layers, keep_logits, **kwargs)
        return output, None if self._cache_name is None else out.get(self._cache_name)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor | None,
        cache: Any,
        layers: Sequence[int],
        keep_logits: int,
        **kwargs: Any,
    ) -> tuple[TargetOutput, Any]:
        """Return the result of `forward`, and the model's own output. kwargs: more arguments of its forward."""
        if cache is not None:
            assert self._cache_name is not None
            kwargs[self._cache_name] = cache
        if positions is not None and "position_ids" in self._parameters:
            kwargs["position_ids"] = positions
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = keep_logits
        if layers:
            # Before 5.23, transformers numbers the states of a list, tuple or set from the first layer's output on. A
            # frozenset is none of these: older versions return all states, newer ones the listed ones.
            kwargs["output_hidden_states"] = frozenset(layers)
        with cache.watched(tokens.shape[1]) if isinstance(cache, StackedCache) else recurrent_ops.watched():
            out = self.model(input_ids=tokens, **kwargs)
        logits = out.logits[..., : self.vocab_size]
        if "logits_to_keep" not in self._parameters and keep_logits:
            logits = logits[:, -keep_logits:]
        if not layers:
            return TargetOutput(logits, logits.new_empty(*tokens.shape, 0)), out
        states = [merge_streams(out.hidden_states[i], tokens, self.config) for i in layers]
        aux_hidden_states = states[0] if len(states) == 1 else torch.cat([s.to(logits.device) for s in states], -1)
        return TargetOutput(logits, aux_hidden_states), out

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], cache: TargetCache, layers: Sequence[int] = ()
    ) -> TargetOutput:
        """Run a forward of prompts (batch, longest), padded on the right, or of parts of them after the cached text if its
        capabilities have `chunks`. Return logits (batch, 1, vocab) of each prompt's last token and aux_hidden_states (batch,
        at least longest, width), undefined for padding."""
        loading.check_tokens(self, tokens)
        if isinstance(cache, StateCache):
            return cache.prefill(self, tokens, lengths, layers)
        copies = -(-FEWEST_ROWS // len(tokens)) if cache.keeps_bits else 1  # few rows round differently
        if (more := max(copies, 2 if min(lengths) == 0 else 1) - tokens.shape[1]) > 0:  # 1 would advance all states
            tokens = torch.nn.functional.pad(tokens, (0, more))
        positions = cache.seq_lens + torch.arange(tokens.shape[1], device=tokens.device)
        cache.new_counts = to_device(lengths, tokens.device)[:, None]
        last = (cache.new_counts[:, None] - 1).clamp(min=0)
        mask = cache.causal_mask(tokens.shape[1])
        with only_logits_at(self.model.get_output_embeddings(), last.expand(-1, copies, -1), tokens.shape) as selected:
            logits, states = self.forward_tree(tokens, positions, mask, cache, layers)
        logits = logits[:, :1] if selected else logits.gather(1, last.expand(-1, -1, logits.shape[-1]))
        return TargetOutput(logits, states)

    def forward_tree(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TargetCache,
        layers: Sequence[int] = (),
        keep_logits: int = 0,
    ) -> TargetOutput:
        """Run a forward of draft tokens (batch, nodes) after the cached text. mask: (batch, nodes, keys) bool, or None as in
        `KVCache.causal_mask`. A target without trees treats the tokens as a chain. Nodes without a possible continuation
        (token -1, or beyond the context) are replaced by harmless ones."""
        if isinstance(cache, StateCache):
            return cache.forward_chains(self, tokens, layers)
        if self.context is not None:
            positions = positions.clamp(max=self.context - 1)  # a learned table of positions ends there
        if mask is not None:
            seen, mask = mask, cache.attention_mask(self.masks, mask, self.dtype, positions)
            if cache.keeps_bits and cache.new_counts is None and cache.num_uncommitted == 0:  # it is not drafting
                note_paths(mask, seen, cache.lengths, tokens >= 0, self.masks.window)
        return self.graphs(self.forward, tokens.clamp(min=0), positions, mask, cache, layers, keep_logits)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings (..., hidden) that the target's first layer gets."""
        with torch.no_grad():
            return self.model.get_input_embeddings()(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's logits from its last hidden state (after the final norm). Gradients flow to `hidden`."""
        head = self.model.get_output_embeddings()
        if not isinstance(head, packing.PackedLinear) and has_numbers(head.weight):
            hidden = hidden.to(head.weight.dtype)
        logits = head(hidden).to(hidden.device)  # with sharding=layers it may be on the last device
        return self.scaled(logits[..., : self.vocab_size])
