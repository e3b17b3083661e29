"""Decide what the forwards of a target can do: from its config and classes, or measured by a few forwards at first use. Names
of models do not tell."""

import inspect
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
import transformers
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel

import foredraft
from foredraft.heads.attention import masked as attention
from foredraft.heads.caches import cuda_graphs
from foredraft.heads.caches.device import device_name
from foredraft.heads.caches.stacked_cache import StackedCache, stacks
from foredraft.heads.target_model.cache_directory import measured_once
from foredraft.heads.target_model.config_names import keys_kept, uses_sparse_indexer
from foredraft.heads.target_model.key_widths import short_widths
from foredraft.heads.target_model.packing import fastest_rows, fewest_rows, is_packed

if TYPE_CHECKING:
    from foredraft.heads.target_model.model import Target

# The layer types, as transformers names them, that only keep keys and values and whose masks we can make.
BRANCHING = {"full_attention", "sliding_attention"}
# Names of the cache argument. transformers 5.24 renamed the next two to the first; models with their own code keep them.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
# Number of tokens, and the largest difference of logits relative to the largest logit. In half precision only large errors
# can be distinguished from rounding.
PROBE, TOLERANCE = 12, {torch.float32: 1e-4}
LONG_PROBE = 40  # tokens where bits are compared


class Capabilities:
    """Record what the forwards of a target can do. What must be measured is measured at first use.

    why: the reason why one forward cannot verify the branches of a tree; None if it can.
    depends_on_batch: does a sequence's output depend on the other sequences of a forward?
    rope_boundary: longer texts are rotated by other angles from the start (longrope); None without such a length.
    sparse_indexer: does attention only use the keys that an indexer scores highest?"""

    def __init__(self, target: "Target"):
        self.target = target
        self.why: str | None = why_no_trees(target.model, target.context)
        self.depends_on_batch = False
        self.rope_boundary: int | None = longrope_boundary(target.config, target.context)
        self.sparse_indexer: bool = uses_sparse_indexer(target.config)

    def measure_batches(self) -> None:
        """Note whether a forward quantizes the activations of all its tokens together."""
        if is_batch_variant(self.target.model):
            self.depends_on_batch = True
            self.why = (
                f"{self.target.name} quantizes the activations of a forward together, so drafts would change its text"
            )

    @property
    def trees(self) -> bool:
        """Return whether one forward verifies a tree with our mask."""
        return self.why is None

    @property
    def caching(self) -> bool:
        """Return whether the target can continue from a cache. Otherwise it writes as transformers' own generate does."""
        return self.trees or self._continues in ("chain", "step")

    @property
    def chains(self) -> bool:
        """Return whether one forward of several tokens after a text equals one forward of each."""
        return self.trees or (self._continues == "chain" and not self.depends_on_batch)

    @cached_property
    def _continues(self) -> Literal["chain", "step"] | None:
        if why_no_drafts(self.target.model) is not None:
            return None
        return "step" if keys_kept(self.target.config, self.target.context) else measure_chains(self.target)

    def check_draftable(self) -> None:
        """Raise ValueError if no drafts are possible, so that no head can be trained."""
        if not self.target.embeddings_only and not self.caching:
            raise ValueError(
                f"model_type {self.target.config.model_type} cannot continue from a cache, so it is decoded without drafts "
                "and cannot have a head; choose another target"
            )

    @cached_property
    def state(self) -> Cache | None:
        """Return a cache of the model, if chains after texts of several lengths can be verified in a `StackedCache` of the
        same kind, whose states can be rolled back to any token of a chain; None otherwise, and for trees."""
        return None if self.trees or not self.chains else stackable_state(self.target)

    @property
    def batched(self) -> bool:
        """Return whether one forward decodes texts of several lengths."""
        return self.trees or self.state is not None

    @property
    def chunks(self) -> bool:
        """Return whether a prompt may be prefilled in parts."""
        return self.trees or (self.rope_boundary is None and self.chains)

    @cached_property
    def one_device(self) -> bool:
        return {parameter.device for parameter in self.target.model.parameters()} == {self.target.device}

    @property
    def cuda_graphs(self) -> bool:
        """Return whether forwards may be captured (cuda_graphs.py). A graph covers one process and one device."""
        return self.target.sharding is None and self.one_device

    @property
    def captures(self) -> bool:
        """Return whether decoding steps are captured."""
        return self.trees and self.cuda_graphs and self.target.device.type in cuda_graphs.CAPTURES

    @property
    def packed_rows(self) -> bool:
        """Return whether a forward may take sequences of several documents (`masks.PackedMask`). Another attention
        implementation, soft caps, and layers on several devices would need masks of length x length."""
        return (
            self.trees and self.one_device and self._attends_by_ours and not attention.has_soft_caps(self.target.model)
        )

    @property
    def _attends_by_ours(self) -> bool:
        return self.target.model.config._attn_implementation == attention.NAME

    @property
    def pads_for_bits(self) -> bool:
        """Return whether forwards on a CPU have the shapes that may keep bits: with our attention, masks over whole blocks
        of keys, and paths that attend again (paths.py), which a captured forward could not read."""
        return self.trees and self._attends_by_ours and self.target.device.type == "cpu" and not self.captures

    @property
    def keeps_bits(self) -> bool:
        """Return whether no bit of a token's logits depends on how its prompt is cut, padded, or continued from the entries
        of another text, nor on other texts, nor on the branches next to it."""
        return self.pads_for_bits and self._is_batch_invariant

    # How many rows a decoding step on a CPU has at least.
    fastest_rows = cached_property(lambda able: fastest_rows(able.target.model))

    @cached_property
    def short_widths(self) -> list[int]:
        """Return the numbers of columns below a block that forwards on a CPU may see."""
        return short_widths(self.target.model)

    @cached_property
    def prefers_chains(self) -> bool:
        """Return whether drafts are chains by default: on a CPU where the logits of a chain equal the baseline's in every
        bit. Those of a tree do if the target `keeps_bits`, but then each branch attends once more."""
        return self.trees and self.target.device.type == "cpu" and self._is_batch_invariant

    @cached_property
    def _is_batch_invariant(self) -> bool:
        """Return what `is_batch_invariant` measures, or measured before for the same config, packages and machine. A target
        without its layers decodes nothing. If it `is_collective`, its processes might have measured different things. Of
        products in float32 that are not packed, a few rows say nothing about more."""
        model, target = self.target.model, self.target
        if target.embeddings_only or target.is_collective or (target.dtype == torch.float32 and not is_packed(model)):
            return False
        about = {
            "device": device_name(self.target.device),
            "packages": [foredraft.__version__, torch.__version__, transformers.__version__],
            "modules": sorted({type(module).__name__ for module in model.modules()}),
            "dtypes": sorted({str(each.dtype) for each in model.parameters()}),
            "config": model.config.to_json_string(),
            "forwards": [model.config._attn_implementation, self.pads_for_bits, fewest_rows(model)],
        }
        return bool(measured_once("bits", about, partial(is_batch_invariant, self.target)))


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError for models that do not write text, or whose text would change with the tokens that follow it."""
    config = model.config.get_text_config()
    # `is_decoder` is not sufficient (GPT-NeoX's is False too), and a decoder may come with an image encoder.
    causal = {getattr(part, "is_causal", None) for part in model.modules()} - {None}
    if getattr(config, "is_decoder", None) is False and causal == {False}:
        raise ValueError(
            f"model_type {config.model_type} is an encoder, whose tokens attend to later ones: a draft would "
            "change the text before it; choose a decoder (or set is_decoder=True in its config, if it was trained as one)"
        )
    # Gemma 4 has "vision": only among the tokens of an image, and here there are none.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ValueError(
            f"model_type {config.model_type} has use_bidirectional_attention: a draft would change the text before it; "
            "choose a target without it"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"model_type {config.model_type} does not write tokens: choose a text model")


def why_no_drafts(model: PreTrainedModel) -> str | None:
    """Return the reason why each token is found by the steps of transformers' own generate; None if the model can continue
    from a cache."""
    config, parameters = model.config.get_text_config(), inspect.signature(model.forward).parameters
    if getattr(config, "causal", None) is False or "target_mapping" in parameters:
        return f"model_type {config.model_type} writes a token in the place of a mask, so drafts are not possible"
    if getattr(config, "num_hidden_layers", None) is None:
        return f"model_type {config.model_type} has no num_hidden_layers, so transformers cannot make a cache for it"
    past_names = [name for name in parameters if name.startswith("past_") and name not in CACHE_NAMES]
    if past_names:  # Reformer's buckets
        return f"model_type {config.model_type} keeps {past_names[0]}, from which only transformers' own steps can continue"
    return None


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the name of the cache argument of the model's forward, or None without one (OpenAI's first GPT)."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def why_no_trees(model: PreTrainedModel, context: int | None) -> str | None:
    """Return the reason why one forward cannot verify the branches of a tree; None if it can. Without this check such a
    model would run and give wrong logits. context: largest number of tokens of a text."""
    config = model.config.get_text_config()
    if why := why_no_drafts(model):
        return why
    # GPT-Neo calls them attention_layers, and cuts its local ones by column instead of position.
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    kinds, boundary = sorted(set(types) - BRANCHING), longrope_boundary(config, context)
    takes = {"position_ids": "position_ids" in inspect.signature(model.forward).parameters, "cache": cache_name(model)}
    missing, unless = [name for name, present in takes.items() if not present], ""
    if kinds or model._is_stateful:  # some recurrent models (RWKV, xLSTM) have no layer types
        reason = f"has {', '.join(kinds) or 'recurrent'} layers"
    elif (getattr(config, "n_recurrent_loops", None) or 1) > 1:  # Dory
        reason = "runs its layers several times and keeps the keys of each time"
    elif getattr(config, "alibi", None):
        reason = "has alibi, which uses the columns of keys"
    elif kept := keys_kept(config, context):
        reason = f"attends only to the {kept} keys with the highest scores, and ties fall differently with drafts"
        unless = f" unless texts stay shorter (target.context={kept})"
    elif boundary is not None:
        reason = f"has longrope, which rotates a text longer than {boundary} differently from its start on"
        unless = f" unless texts stay shorter (target.context={boundary})"
    elif missing:
        reason = f"does not take {' and '.join(missing)}"
    else:
        return None
    return f"model_type {config.model_type} {reason}, so drafts cannot branch{unless}"


def longrope_boundary(config: PreTrainedConfig, context: int | None) -> int | None:
    """Return the length beyond which longrope uses its other factors; None for other ropes and for shorter contexts."""
    rope = getattr(config, "rope_parameters", None) or {}
    boundary = rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
    return None if boundary is None or (context is not None and context <= boundary) else boundary


@torch.no_grad()
def is_batch_variant(model: PreTrainedModel) -> bool:
    """Return whether the output for a text of a quantized model depends on other texts in the forward, because one scale
    covers the activations of the whole forward. Measured on a few random tokens, in forwards of one shape and so with the
    same kernels."""
    if getattr(model.config, "quantization_config", None) is None:
        return False
    embedding, generator = model.get_input_embeddings(), torch.Generator().manual_seed(0)
    tokens = torch.randint(embedding.num_embeddings, (4, 8), generator=generator).to(embedding.weight.device)
    alone, mixed = (model(input_ids=rows).logits[0].float() for rows in (tokens[:1].expand(4, -1), tokens))
    # Experts process their part of all rows in one product, whose kernel depends on its size.
    rounding = 0.02 if any("experts" in name for name, _ in model.named_modules()) else 1e-5
    return bool((alone - mixed).abs().max() > rounding * alone.abs().max())


@torch.inference_mode()
def is_batch_invariant(target: "Target") -> bool:
    """Return whether a token's logits have the same bits regardless of other tokens of its sequence, or other sequences, in
    the forward, and of how its prompt was prefilled. Products of few and of many rows are different kernels, which need not
    sum in the same order."""
    count, fewest = min(LONG_PROBE, target.context or LONG_PROBE), fewest_rows(target.model)
    tokens = torch.randint(target.vocab_size, (1, count), generator=torch.Generator().manual_seed(2)).to(target.device)
    length, rows, pads = PROBE // 2, list[Tensor](), target.capabilities.pads_for_bits
    for batch, new, start in ((1, fewest, 0), (1, 5, 1), (4, 1, 0), (4, 6, length - 1), (1, count - length, 0)):
        cache, text = target.new_cache(batch, count, keeps_bits=pads), tokens.expand(batch, -1)
        ends = [start, length] if start and pads else [length]
        for first, end in pairwise([0, *ends]):
            target.prefill(text[:, first:end], [end - first] * batch, cache)
            cache.set_lengths([end] * batch)
        nodes = torch.arange(new, device=target.device)[None]
        mask = cache.mask(nodes[..., None] >= nodes[:, None])
        drafts = text[:, length : length + new]
        rows.extend(target.forward_tree(drafts, cache.seq_lens + nodes, mask, cache).logits)
    return all(torch.equal(row, rows[-1][: len(row)]) for row in rows)


@torch.no_grad()
def measure_chains(target: "Target") -> Literal["chain", "step"] | None:
    """Return what the target processes after the tokens in its cache: several at once, with the logits that it gets one by
    one, or single tokens, or none. Measured on a few random tokens."""
    tokens = torch.randint(target.vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(0)).to(target.device)

    def logits(*ends: int) -> Tensor | None:
        """Return the logits after the text, of tokens up to each of these ends at a time; None if the model fails."""
        state, start, found = None, 0, []
        try:
            for end in (PROBE // 2, *ends):
                first = 0 if state is None else start
                output, state = target.forward_from(tokens[:, first:end], first, state)
                found.append(output.logits[:, start - end :])
                start = end
        except torch.OutOfMemoryError:
            raise
        except Exception:  # each model has its own message (CPM-Ant needs all of the text, ProphetNet single tokens)
            return None
        return torch.cat(found[1:], dim=1)

    one_by_one = logits(*range(PROBE // 2 + 1, PROBE + 1))
    if one_by_one is None:
        return None
    at_once = logits(PROBE)
    return "chain" if at_once is not None and allclose(at_once, one_by_one) else "step"


@torch.no_grad()
def stackable_state(target: "Target") -> Cache | None:
    """Return a cache of the model, if texts may lie in a StackedCache of the same kind."""
    try:
        _, state = target.forward_from(torch.zeros(1, 1, dtype=torch.int64, device=target.device), 0, None)
        fits = stacks(state, target) and measure_stacked(target, StackedCache(state, 3, PROBE, target.device))
        return state if fits else None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # states of unsupported shapes, or a model that fails on a text of one token (RecurrentGemma)
        return None


def measure_stacked(target: "Target", cache: StackedCache) -> bool:
    """Measure `Capabilities.state` in an empty cache of three texts."""
    tokens = torch.randint(target.vocab_size, (3, PROBE), generator=torch.Generator().manual_seed(1)).to(target.device)
    nodes = torch.arange(3, device=target.device)[None]
    target.prefill(tokens[:, :6], [6, 3, 5], cache)
    cache.set_lengths([6, 3, 5])
    for counts in ([1, 3, 2], [2, 3, 1], [1, 1, 1]):
        rows = [(row[None], length) for row, length in zip(tokens, cache.lengths, strict=True)]
        drafts = torch.cat([row[:, length : length + 3] for row, length in rows])
        mask = cache.mask(nodes[..., None] >= nodes[:, None])
        logits = target.forward_tree(drafts, cache.seq_lens + nodes, mask, cache).logits
        expected = [target.forward_from(row[:, : length + 3], 0, None)[0].logits[:, -3:] for row, length in rows]
        if not cache.can_roll_back or not allclose(logits, torch.cat(expected)):
            return False
        cache.commit([list(range(count)) for count in counts])
    return True


def allclose(ours: Tensor, theirs: Tensor) -> bool:
    difference = (ours - theirs).abs().max() / theirs.abs().max()
    return bool(difference < TOLERANCE.get(theirs.dtype, 0.1))
