"""Masked attention without copies, folded, against its definition."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from foredraft.heads.attention import masked as attention
from foredraft.heads.attention import masks, paths
from foredraft.heads.attention.masked import attend
from foredraft.inference import generate
from tests.support.batches import prompt
from tests.support.decoding import Random


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("per_head", [False, True], ids=["one mask", "a mask per head"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows"), [(1, 3, 1, 16), (1, 6, 2, 24), (1, 3, 3, 17), (2, 4, 1, 12), (1, 4, 4, 36)]
)
def test_any_grouping_equals_the_definition(batch, heads, kv_heads, rows, per_head):
    torch.manual_seed(0)
    keys, dim = rows + 20, 8
    query = torch.randn(batch, rows, heads, dim, dtype=torch.float64).transpose(1, 2)  # as projections lay it out
    cache = torch.randn(2, batch, kv_heads, keys + 9, dim, dtype=torch.float64)
    key, value = cache[:, :, :, :keys]
    mask = torch.rand(batch, heads if per_head else 1, rows, keys) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(attend(query, key, value, mask), plain(query, key, value, mask))


@pytest.mark.parametrize("how", ["additive", "bool", "causal"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 6, 2), (2, 4, 4)])
def test_sinks_are_as_transformers_eager_attention_has_them(how, batch, heads, kv_heads):
    rows, keys, dim = 16, 16 if how == "causal" else 30, 8
    query, sinks = torch.randn(batch, heads, rows, dim, requires_grad=True), 2 * torch.randn(heads)
    key, value = torch.randn(2, batch, kv_heads, keys, dim)
    mask = torch.rand(batch, 1, rows, keys) < 0.5
    mask = torch.ones(rows, keys).tril().bool().expand(batch, 1, -1, -1) if how == "causal" else mask
    added = masks.additive_mask(mask, torch.float32)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, sinks=sinks, training=False)
    theirs = eager_attention_forward(module, query, key, value, added, scaling=0.3)[0]
    given = {"additive": added, "bool": mask, "causal": None}[how]
    ours = attention.grouped_sdpa(module, query, key, value, given, scaling=0.3, s_aux=sinks)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(out.square().sum(), query)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_mask_is_folded_once_for_all_layers(fresh, monkeypatch):
    folded: list[int] = []
    group_heads = attention.group_heads
    monkeypatch.setattr(
        attention, "group_heads", lambda mask, groups: folded.append(groups) or group_heads(mask, groups)
    )
    made: list[Tensor] = []
    added = masks.additive_mask
    for place in (masks, paths):
        monkeypatch.setattr(place, "additive_mask", lambda mask, dtype: made.append(mask) or added(mask, dtype))
    generate(fresh, Random(), prompt(9), max_new_tokens=8, eos_token_id=-1)
    assert len(folded) == len(made) >= 4


@pytest.mark.parametrize(("groups", "rows"), [(1, 4), (1, 3), (2, 4)])
def test_what_a_mask_keeps_for_the_layers_goes_with_it(groups, rows):
    """Check that no mask refers to itself: the masks of long prompts would stay until Python looks for cycles."""
    mask = torch.zeros(1, 1, rows, 8)
    gone = weakref.ref(mask)
    assert attention.grouped_mask(mask, groups, False) is attention.grouped_mask(mask, groups, False)
    del mask
    assert gone() is None
