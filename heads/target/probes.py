"""Measure what a target without trees supports, by a few forwards at first use: names of models do not tell."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache

from foredraft.heads.target.stacked_cache import StackedCache, stacks
from foredraft.heads.target.state_cache import StateCache

if TYPE_CHECKING:
    from foredraft.heads.target.model import Target

# Number of tokens, and the largest difference of logits relative to the largest logit. In half precision only large errors
# can be distinguished from rounding.
PROBE, TOLERANCE = 12, {torch.float32: 1e-4}


@torch.no_grad()
def supports_caching(target: "Target") -> bool:
    """Return whether the target can process a single token after those in its cache."""
    tokens = torch.arange(3, device=target.device)[None]
    _, state = target.forward_from(tokens[:, :2], 0, None)
    try:
        target.forward_from(tokens[:, 2:] if state is not None else tokens, 0 if state is None else 2, state)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # each model has its own message (CPM-Ant needs all of the text again)
        return False
    return True


@torch.inference_mode()
def is_batch_invariant(target: "Target") -> bool:
    """Return whether a token's logits have the same bits regardless of other tokens of its sequence, or other sequences, in
    the forward. Products of few and of many rows are different kernels, which need not sum in the same order."""
    tokens = torch.randint(target.vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(2)).to(target.device)
    length, rows = PROBE // 2, []
    for batch, new in ((1, 2), (1, 5), (4, 1), (4, 6)):
        cache, text = target.new_cache(batch, PROBE), tokens.expand(batch, -1)
        target.prefill(text[:, :length], [length] * batch, cache)
        cache.set_lengths([length] * batch)
        nodes = torch.arange(new)[None]
        mask = cache.mask(nodes[..., None] >= nodes[:, None])
        drafts = text[:, length : length + new]
        rows.append(target.forward_tree(drafts, cache.seq_lens + nodes, mask, cache).logits[0, 0])
    return all(torch.equal(row, rows[0]) for row in rows)


@torch.no_grad()
def supports_chains(target: "Target") -> bool:
    """Measure `Target.supports_chains` on a few random tokens."""
    tokens = torch.randint(target.vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(0)).to(target.device)
    text, nodes = tokens[:, : PROBE // 2], PROBE // 2
    together, one_by_one = (StateCache(1, target.device) for _ in range(2))
    for cache in (together, one_by_one):
        cache.prefill(target, text, [text.shape[1]])
    try:
        at_once, single = together.forward_chains(target, tokens[:, nodes:]).logits, []
    except torch.OutOfMemoryError:
        raise
    except Exception:  # some only process one token at a time with a cache, each with its own message (ProphetNet)
        return False
    for number in range(nodes, PROBE):
        single.append(one_by_one.forward_chains(target, tokens[:, number : number + 1]).logits)
        one_by_one.commit([[0]])
    return allclose(at_once, torch.cat(single, 1))


@torch.no_grad()
def ragged_state(target: "Target") -> Cache | None:
    """Return a cache of the model, if texts may lie in a StackedCache of the same kind."""
    try:
        _, state = target.forward_from(torch.zeros(1, 1, dtype=torch.int64, device=target.device), 0, None)
        return (
            state
            if stacks(state, target) and supports_ragged(target, StackedCache(state, 3, PROBE, target.device))
            else None
        )
    except torch.OutOfMemoryError:
        raise
    except Exception:  # states of unsupported shapes, or a model that fails on a text of one token (RecurrentGemma)
        return None


def supports_ragged(target: "Target", cache: StackedCache) -> bool:
    """Measure `Target.supports_ragged` in an empty cache of three texts."""
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
