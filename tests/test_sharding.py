"""A target spread over devices says what the whole one says; in several processes: tests/test_strategies.py."""

from pathlib import Path

import pytest
import torch

from heads import Target
from heads.target.sharding import COLLECTIVE, arguments


def test_layers_may_lie_on_several_devices(target: Target, tiny_path: Path, tmp_path: Path):
    """Here these are the host and its disk."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i > 2 else "cpu" for i in range(target.num_layers)}
    tokens = torch.arange(12)[None]
    for how in ({"device_map": places, "offload_folder": str(tmp_path)}, {"sharding": "layers"}):
        sharding = Target.from_pretrained(tiny_path, dtype="float32", **how)
        ours, theirs = (t.read(tokens, layers=[1, 5]) for t in (sharding, target))
        torch.testing.assert_close(ours.logits, theirs.logits)
        torch.testing.assert_close(ours.features, theirs.features)
    assert arguments(str(tiny_path), "layers", None) == {"device_map": "auto"}


@pytest.mark.parametrize(
    ("sharding", "quantization", "message"),
    [
        ("layer", None, "sharding=layer is not one of layers, fsdp, tensor"),
        *((name, None, f"sharding={name} works in processes that torchrun starts") for name in COLLECTIVE),
        ("fsdp", "8bit", "sharding=fsdp cuts weights that quantization=8bit has packed"),
    ],
)
def test_what_cannot_be_spread_says_why(sharding, quantization, message, tiny_path: Path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("heads.target.model.quantization_config", lambda *given: None)
    with pytest.raises(ValueError, match=message):
        Target.from_pretrained(tiny_path, sharding=sharding, quantization=quantization)
