"""Targets of two random layers, a head for them, and prompts."""

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from foredraft.heads import Target
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.target_model.ends import in_layer
from foredraft.heads.target_model.files import INDEX
from foredraft.inference.drafters import DynamicTree
from tests.support.tiny import tiny_config


def random_model(seed: int, layers: int = 2, device: torch.device | str = "cpu", **changes) -> Target:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(num_hidden_layers=layers, **changes)).to(device)
    return Target(model, None, f"random {seed}")


def eagle(target: Target) -> DynamicTree:
    torch.manual_seed(2)
    return DynamicTree(
        Eagle3Head.for_target(target, ttt_steps=4).eval(), target, nodes=10, depth=4, width=3, min_probability=0
    )


def without_layers(target: Target, path: Path) -> Path:
    """Save a directory with its checkpoint in several files, of which only those of its ends are left."""
    target.model.save_pretrained(path, max_shard_size="20KB")
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(path)
    parts = json.loads((path / INDEX).read_text())["weight_map"]
    ends = {part for name, part in parts.items() if not in_layer(name)}
    missing = {*parts.values()} - ends
    assert missing
    for part in missing:
        (path / part).unlink()
    return path


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens, repeated once, so that there is something to look up."""
    half = torch.randint(1, 300, (length // 2,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (half + half + [7])[:length]
